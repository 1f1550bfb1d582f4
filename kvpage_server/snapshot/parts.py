"""A file's bodies in parts that fit into memory: the planes of a block together, unless they are too large for that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from io import BufferedReader
from typing import NamedTuple

from kvpage_server.page import MAX_BLOCK_PAGES
from kvpage_server.snapshot.format.entries import PageTensor
from kvpage_server.snapshot.format.files import EntrySpan, FileContents, read_data

PART_BYTES = 32 << 20
PART_PAGES = 20_000


class Slice(NamedTuple):
    """The pages `first` to before `stop` of a tensor; of a string, 0 to before 1."""

    span: EntrySpan
    first: int
    stop: int

    @property
    def start(self) -> int:
        """Where its bytes begin in the file's data."""
        return self.span.start + self.first * self.span.entry.body_size

    @property
    def end(self) -> int:
        return self.span.start + self.stop * self.span.entry.body_size

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it has all pages of the tensor."""
        return self.stop - self.first == len(self.span.entry.checksums)


def parts(spans: Iterable[EntrySpan], most_bytes: int) -> Iterator[list[Slice]]:
    """The pieces of some tensors, a part at a time.

    The planes of a block are in the same part unless they have more than `most_bytes`, or more pages than a block may
    have. So a part has at most PART_BYTES, one block, or one body.
    """
    part: list[Slice] = []
    nbytes = pages = 0
    for pieces in _together(spans, most_bytes):
        more_bytes, more = sum(piece.nbytes for piece in pieces), sum(piece.stop - piece.first for piece in pieces)
        if part and (nbytes + more_bytes > PART_BYTES or pages + more > PART_PAGES):
            yield part
            part, nbytes, pages = [], 0, 0
        part += pieces
        nbytes += more_bytes
        pages += more
    if part:
        yield part


def _together(spans: Iterable[EntrySpan], most_bytes: int) -> Iterator[list[Slice]]:
    """The pieces of each block that belong into the same part, or a single piece; strings last."""
    blocks: dict[tuple[bytes, int], list[Slice]] = defaultdict(list)
    strings: list[Slice] = []
    for span in spans:
        first = span.entry.first if isinstance(span.entry, PageTensor) else None
        pieces = strings if first is None else blocks[first.req_id, first.page]
        pieces.append(Slice(span, 0, len(span.entry.checksums)))
    for planes in blocks.values():
        pages = sum(plane.stop for plane in planes)
        if pages <= MAX_BLOCK_PAGES and sum(plane.nbytes for plane in planes) <= most_bytes:
            yield planes
        else:
            yield from ([piece] for plane in planes for piece in _cut(plane))
    yield from ([string] for string in strings)


def _cut(plane: Slice) -> Iterator[Slice]:
    step = max(min(PART_PAGES, PART_BYTES // max(plane.span.entry.body_size, 1)), 1)
    for first in range(0, plane.stop, step):
        yield Slice(plane.span, first, min(first + step, plane.stop))


def read_part(file: BufferedReader, contents: FileContents, part: list[Slice]) -> list[memoryview]:
    """The bytes of each piece. Pieces that lie side by side in the file are read at once. Raises BadFile."""
    bodies = [memoryview(b"")] * len(part)
    order = sorted(range(len(part)), key=lambda number: part[number].start)
    at = 0
    while at < len(order):
        stop = at + 1
        while stop < len(order) and part[order[stop]].start == part[order[stop - 1]].end:
            stop += 1
        run, begin = order[at:stop], part[order[at]].start
        data = read_data(file, contents, begin, part[run[-1]].end)
        for number in run:
            bodies[number] = data[part[number].start - begin : part[number].end - begin]
        at = stop
    return bodies
