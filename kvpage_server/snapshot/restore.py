"""The restore of a dump into a running server.

A file is restored in parts. A thread reads and hashes a part and plans its writes, while the part before is sent. A
value that does not match its checksum is not sent. Damaged files, damaged values and refused values are omitted and
reported; all others are restored. Complete blocks are sent with KVBLOCKSET, other values with SET. Strings are last, so
that the pages exist when a string that refers to them (a seal, a manifest) is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvpage_server.client.errors import Refused
from kvpage_server.client.wire.exchange import Piece
from kvpage_server.page import HEADER_SIZE, MAX_BLOCK_PAGES, MAX_TTL, BlockShape, PageError, Plane, checksum
from kvpage_server.snapshot import format
from kvpage_server.snapshot.format import (
    FOREVER,
    NOT_WRITTEN,
    BadFile,
    Entry,
    EntrySpan,
    Failures,
    FileContents,
    PageTensor,
    Summary,
    opened,
    read_data,
    text_of,
)
from kvpage_server.snapshot.store import BATCH_BYTES, Amount, RunningStore, Writes, Written, read_ahead
from kvpage_server.system.text import monotonic_ms

# -- Parts of a file, which fit into memory: the planes of a block together, unless they are too large -----------------

PART_BYTES = 32 << 20  # most bytes of a part, unless it is a single block or body
PART_PAGES = 20_000  # most pages of a part, unless it is a single block


class Slice(NamedTuple):
    """Consecutive pages of a tensor, from number `first` to before `stop`; a whole string is 0 to 1."""

    span: EntrySpan
    first: int
    stop: int

    @property
    def is_coded(self) -> bool:
        """Whether the file has a code of the pages, which is decoded as a whole."""
        return isinstance(self.span.entry, PageTensor) and self.span.entry.code_size > 0

    @property
    def start(self) -> int:
        """Offset of its bytes in the file's data."""
        return self.span.start + (0 if self.is_coded else self.first * self.span.entry.body_size)

    @property
    def end(self) -> int:
        return self.span.stop if self.is_coded else self.span.start + self.stop * self.span.entry.body_size

    @property
    def nbytes(self) -> int:
        """Bytes of the pages or the string."""
        return (self.stop - self.first) * self.span.entry.body_size

    @property
    def is_whole(self) -> bool:
        """Whether the slice has all pages of the tensor."""
        return self.stop - self.first == len(self.span.entry.checksums)


def parts(spans: Iterable[EntrySpan], most_bytes: int) -> Iterator[list[Slice]]:
    """Group tensors of a file into parts that fit into memory. Each part is a list of slices.

    The planes of a block are in the same part unless they have more than `most_bytes`, or more pages than a block may
    have. So a part has at most PART_BYTES, or one block, or one coded tensor, or one body.
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
    """Yield lists of slices that must be in the same part: the planes of a block, or a single slice.

    Strings are last.
    """
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
    if plane.is_coded:
        yield plane
        return
    step = max(min(PART_PAGES, PART_BYTES // max(plane.span.entry.body_size, 1)), 1)
    for first in range(0, plane.stop, step):
        yield Slice(plane.span, first, min(first + step, plane.stop))


def read_part(file: BufferedReader, contents: FileContents, part: list[Slice]) -> list[memoryview | None]:
    """Return the bodies of each slice of a part, or None for a damaged code.

    Adjacent slices are read with one call. Raises BadFile.
    """
    bodies: list[memoryview | None] = [None] * len(part)
    order = sorted(range(len(part)), key=lambda number: part[number].start)
    at = 0
    while at < len(order):
        stop = at + 1
        while stop < len(order) and part[order[stop]].start == part[order[stop - 1]].end:
            stop += 1
        run, begin = order[at:stop], part[order[at]].start
        data = read_data(file, contents, begin, part[run[-1]].end)
        for number in run:
            read, entry = data[part[number].start - begin : part[number].end - begin], part[number].span.entry
            coded = entry if isinstance(entry, PageTensor) and entry.code_size else None
            bodies[number] = read if coded is None else coded.decoded(read)
        at = stop
    return bodies


# -- The plan for a part: complete and intact blocks are sent whole, other pages and strings one by one ----------------

MAX_LEFT_MS = MAX_TTL * 1000  # four million years: a server may refuse a longer TTL


class Item(NamedTuple):
    """A page or string to send with SET. The pieces of a page's value are its header and its body."""

    key: bytes
    value: list[Piece]
    ttl_left_ms: int  # -1 for no expiry
    is_page: bool


class PlannedBlock(NamedTuple):
    """A complete block to send with KVBLOCKSET. If that is not possible, its `pages` are sent with SET."""

    req_id: bytes
    page: int
    shape: BlockShape
    body: list[memoryview]
    pages: list[Item]

    @property
    def ttl_left_ms(self) -> int:
        """The TTL of each page."""
        return self.pages[0].ttl_left_ms


@dataclass(slots=True)
class Plan:
    """The values of a part that are sent, and the values that are omitted."""

    blocks: list[PlannedBlock] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)  # keys of bodies that do not match their checksum
    expired: int = 0  # number of expired keys


def plan(part: Sequence[Slice], bodies: Sequence[memoryview | None], age_ms: int) -> Plan:
    """Return the plan for the slices of a part. `bodies` is the result of `read_part`.

    All TTLs are reduced by `age_ms` milliseconds: they count from the start of the file's dump, which may be an earlier
    dump than the last update of the directory.
    """
    made = Plan()
    blocks: dict[tuple[bytes, int], list[tuple[PageTensor, memoryview, list[Item]]]] = defaultdict(list)
    for piece, body in zip(part, bodies, strict=True):
        entry = piece.span.entry
        if body is None:
            made.corrupt += (text_of(_item(entry, number, memoryview(b"")).key) for number in range(piece.stop))
            continue
        items = list(_unexpired(made, _intact_items(made, piece, body), age_ms))
        if isinstance(entry, PageTensor) and piece.is_whole:
            blocks[entry.first.req_id, entry.first.page].append((entry, body, items))
        else:
            made.items += items
    for planes in blocks.values():
        planes.sort(key=lambda plane: plane[0].first.kv_type)
        pages = [item for _, _, items in planes for item in items]
        shape = _shape([entry for entry, _, _ in planes])
        if shape is not None and len(pages) == shape.pages and len({page.ttl_left_ms for page in pages}) == 1:
            first = planes[0][0].first
            pieces = list(_pieces_in_body_order([body for _, body, _ in planes], shape.layers))
            made.blocks.append(PlannedBlock(first.req_id, first.page, shape, pieces, pages))
        else:
            made.items += pages
    return made


def _intact_items(made: Plan, piece: Slice, body: memoryview) -> Iterator[Item]:
    """Yield the pages of a slice, or the string, whose bytes match their checksums.

    Add the others to `made.corrupt`.
    """
    entry, size = piece.span.entry, piece.span.entry.body_size
    for number in range(piece.first, piece.stop):
        start = (number - piece.first) * size
        item = _item(entry, number, body[start : start + size])
        if checksum(item.value[-1]) == entry.checksums[number]:
            yield item
        else:
            made.corrupt.append(text_of(item.key))


def _item(entry: Entry, number: int, body: memoryview) -> Item:
    """Return the item of page `number` of a tensor, or of a string, with its body."""
    left = min(entry.ttl_left_ms[number], MAX_LEFT_MS)
    if isinstance(entry, PageTensor):
        return Item(bytes(entry.key(number)), [bytes(entry.header(number)), body], left, True)
    return Item(entry.key, [body], left, False)


def _unexpired(made: Plan, items: Iterable[Item], age_ms: int) -> Iterator[Item]:
    """Yield the items that have not expired, with their TTL reduced by `age_ms`. Count the others in `made.expired`."""
    for item in items:
        left = item.ttl_left_ms
        if left == FOREVER:
            yield item
        elif left > age_ms:
            yield item._replace(ttl_left_ms=left - age_ms)
        else:
            made.expired += 1


def _shape(planes: list[PageTensor]) -> BlockShape | None:
    """Return the shape of the block that consists of these planes; None if they are not all planes of the same size."""
    first = planes[0]
    page_size = first.geometry.page_size
    if any((plane.is_plane, plane.grid, plane.geometry.page_size) != (True, first.grid, page_size) for plane in planes):
        return None
    kinds = tuple(Plane(plane.first.kv_type, plane.geometry.dtype, plane.geometry.head_dim) for plane in planes)
    try:
        return BlockShape(*first.grid, page_size, kinds)
    except PageError:  # more pages than a block may have
        return None


def _pieces_in_body_order(planes: list[memoryview], layers: int) -> Iterator[memoryview]:
    """Yield the pieces of a block's body in its order (layer, then plane). `planes` has the bytes of each plane."""
    for layer in range(layers):
        for plane in planes:
            nbytes = len(plane) // layers
            yield plane[layer * nbytes : (layer + 1) * nbytes]


_SHARE = 2  # a block of more than 1/2 of the largest command is sent page by page
_AROUND_BYTES = 1 << 10  # bytes of a SET in addition to its value
_KEYS_PER_QUERY = 1000  # keys that are written or queried in one round trip
_BLOCKS_PER_QUERY = 100  # blocks that are queried in one round trip

Done = Callable[[int], None]  # called with the number of newly processed bytes


@dataclass(slots=True)
class Restored:
    """Result of a restore."""

    amount: Amount = field(default_factory=Amount)
    there: int = 0  # keys that existed on the server, and were not replaced
    expired: int = 0  # keys that had expired at the end of the dump
    corrupt: Failures = field(default_factory=Failures)  # damaged files, pages and strings
    no_room: Failures = field(default_factory=Failures)  # pages and strings for which the server has no space
    refused: Failures = field(default_factory=Failures)  # pages and strings that the server refuses
    finished: bool = True  # whether the dump is finished
    lost: int = 0  # keys of the dump that existed during the restore, and were evicted before its end
    absent: set[bytes] = field(default_factory=set)  # selected requests of which no page was found in the dump


def restore(
    store: RunningStore,
    path: Path,
    requests: Collection[bytes] = (),
    *,
    replace: bool = False,
    done: Done = lambda count: None,
    evicted: Callable[[], int] = lambda: 0,
) -> Restored:
    """Send the values of a dump, or only the pages of some request ids, to a server. Return the counts.

    Existing keys are kept, or with `replace` overwritten. `done` is called with numbers of processed bytes. `evicted`
    is called at the end, and returns how many keys the server has evicted since the start: with 0, no key is lost.
    Raises DumpError for a directory without a dump, OSError, and the errors of `kvpage_server.client.errors`.
    """
    with format.locked(path, to_write=False):
        return _Restore(store, path, frozenset(requests), replace).run(done, evicted)


class _Write(NamedTuple):
    """A queued write of a block, a page or a string, whose reply has not been received yet."""

    keys: list[bytes]
    are_pages: bool
    nbytes: int  # of bodies and strings, without the headers of pages


def _age_ms(summary: Summary | None, contents: FileContents) -> int:
    """Return the milliseconds from the start of the dump that wrote a file to the last update of the directory."""
    return max(summary.dumped_ms - contents.of.dumped_ms, 0) if summary else 0


class _Restore:
    def __init__(self, store: RunningStore, path: Path, requests: frozenset[bytes], replace: bool) -> None:
        self._store = store
        self._path = path
        self._requests = requests
        self._replace = replace
        self._restored = Restored(absent={*requests})
        self._largest = store.largest_command()
        self._maxmemory = store.maxmemory()
        self._writes = Writes()
        self._waiting: list[_Write] = []
        self._began_ms = monotonic_ms()
        self._summary: Summary | None = None

    def run(self, done: Done, evicted: Callable[[], int]) -> Restored:
        for nbytes, part in read_ahead(self._plans()):
            for start in range(0, len(part.blocks), _BLOCKS_PER_QUERY):
                self._send_blocks(part.blocks[start : start + _BLOCKS_PER_QUERY])
            self._send_items(part.items)
            self._flush()
            done(nbytes)
        if count := evicted():
            self._restored.lost = min(self._count_missing(), count)
        return self._restored

    def _count_missing(self) -> int:
        """Return how many keys of the dump were written or existed, and do not exist now.

        Keys whose TTL has ended meanwhile do not count. Keys that exist although they were left out lower the result.
        """
        missing = self._restored.amount.pages + self._restored.amount.strings + self._restored.there
        keys = self._unexpired_keys()
        while some := [*islice(keys, _KEYS_PER_QUERY)]:
            took_ms = monotonic_ms() - self._began_ms
            for (_, left_ms), exists in zip(some, self._store.exist([key for key, _ in some]), strict=True):
                missing -= exists is not False or FOREVER < left_ms <= took_ms
        return max(missing, 0)

    def _unexpired_keys(self) -> Iterator[tuple[bytes, int]]:
        """Yield the selected keys of all readable files that had not expired by the end of the dump, and the TTLs."""
        for _, contents in format.read_all(format.files_of(self._path, self._summary), self._summary):
            if isinstance(contents, BadFile):
                continue
            age_ms = _age_ms(self._summary, contents)
            for entry, _, _ in filter(self._is_selected, contents.spans):
                keys = map(bytes, entry.keys()) if isinstance(entry, PageTensor) else iter([entry.key])
                for key, left_ms in zip(keys, entry.ttl_left_ms, strict=True):
                    if left_ms == FOREVER or left_ms > age_ms:
                        yield key, left_ms if left_ms == FOREVER else left_ms - age_ms

    def _plans(self) -> Iterator[tuple[int, Plan]]:
        """Yield the bytes and the plan of each part of each file. Report damaged files and values."""
        self._summary = summary = self._read_summary()
        corrupt = self._restored.corrupt
        for file, contents in format.read_all(format.files_of(self._path, summary), summary):
            if isinstance(contents, BadFile):
                corrupt.add(f"{file.name}: {contents}")
                continue
            for bad in contents.bad:
                corrupt.add(f"{bad}, in {file.name}")
            age_ms = _age_ms(summary, contents)
            chosen = [*filter(self._is_selected, contents.spans)]
            self._restored.absent -= {span.entry.first.req_id for span in chosen if isinstance(span.entry, PageTensor)}
            selected = filter(self._fits, chosen)
            try:
                with opened(contents) as data:
                    for part in parts(selected, self._largest // _SHARE):
                        made = plan(part, read_part(data, contents, part), age_ms)
                        self._restored.expired += made.expired
                        for key in made.corrupt:
                            corrupt.add(f"{key:.300} in {file.name}: {NOT_WRITTEN}")
                        yield sum(piece.end - piece.start for piece in part), made
            except BadFile as error:
                corrupt.add(f"{file.name}: {error}")

    def _read_summary(self) -> Summary | None:
        """Return the contents of dump.json.

        If it is missing or unusable, return None: the dump counts as unfinished.
        """
        try:
            summary = format.read_summary(self._path)
        except BadFile as error:
            self._restored.corrupt.add(str(error))
            summary = None
        self._restored.finished = summary is not None
        return summary

    def _is_selected(self, span: EntrySpan) -> bool:
        return not self._requests or (isinstance(span.entry, PageTensor) and span.entry.first.req_id in self._requests)

    def _fits(self, span: EntrySpan) -> bool:
        """Return whether the server accepts each page of a tensor, or the string, in one command.

        Otherwise report it.
        """
        entry = span.entry
        nbytes = entry.body_size + (HEADER_SIZE if isinstance(entry, PageTensor) else len(entry.key))
        if nbytes <= self._largest - _AROUND_BYTES:
            return True
        size = entry.body_size
        self._restored.no_room.add(
            f"{entry.name:.300}, {size} bytes: the server takes {self._largest} at once (maxmemory-clients, "
            "client-query-buffer-limit, proto-max-bulk-len)"
        )
        return False

    def _send_blocks(self, blocks: list[PlannedBlock]) -> None:
        there: list[set[bytes] | Refused] = [set() for _ in blocks]
        has_strings: list[bool | Refused] = [False for _ in blocks]  # under keys of the block's pages
        if not self._replace:
            there = self._store.keys_of_blocks([(block.req_id, block.page) for block in blocks])
            has_strings = self._store.any_exist(
                [() if had else [page.key for page in block.pages] for block, had in zip(blocks, there, strict=True)]
            )
        pages: list[Item] = []
        for block, had, has_string in zip(blocks, there, has_strings, strict=True):
            if isinstance(had, Refused) or isinstance(has_string, Refused):
                self._send_items(block.pages)  # the user may have access to some of them
                continue
            if had:  # KVBLOCKSET would delete pages on the server that are not in the dump
                pages += [page for page in block.pages if page.key not in had]
                self._restored.there += sum(page.key in had for page in block.pages)
                continue
            if has_string or block.shape.nbytes > self._largest // _SHARE:  # KVBLOCKSET would replace strings
                pages += block.pages
                continue
            ttl = 0 if block.ttl_left_ms == FOREVER else -(-block.ttl_left_ms // 1000)
            self._writes.set_block(block.req_id, block.page, block.shape, ttl, block.body)
            self._note_write(_Write([page.key for page in block.pages], True, block.shape.nbytes))
        self._set(pages)

    def _send_items(self, items: list[Item]) -> None:
        for start in range(0, len(items), _KEYS_PER_QUERY):
            some = items[start : start + _KEYS_PER_QUERY]
            if not self._replace:
                there = self._store.exist([item.key for item in some])
                self._restored.there += there.count(True)
                for item, is_there in zip(some, there, strict=True):
                    if isinstance(is_there, Refused):
                        self._report_refused([item.key], is_there)
                some = [item for item, is_there in zip(some, there, strict=True) if is_there is False]
            self._set(some)

    def _set(self, items: list[Item]) -> None:
        for key, value, left, is_page in items:
            self._writes.set(key, value, left, only_new=not self._replace)
            self._note_write(_Write([key], is_page, len(value[-1])))

    def _report_refused(self, keys: Iterable[bytes], error: Refused, nbytes: int = 0) -> None:
        """Report the keys of a refused write of `nbytes`, and that it is larger than maxmemory, if it is."""
        failures = self._restored.no_room if error.code == "OOM" else self._restored.refused
        alone = f" It has {nbytes} bytes, and maxmemory is {self._maxmemory}." if nbytes > self._maxmemory > 0 else ""
        for key in keys:
            failures.add(f"{text_of(key):.300}: {error}{alone}")

    def _note_write(self, write: _Write) -> None:
        self._waiting.append(write)
        if self._writes.nbytes >= BATCH_BYTES or self._writes.count >= _KEYS_PER_QUERY:
            self._flush()

    def _flush(self) -> None:
        for written, write in zip(self._store.write(self._writes), self._waiting, strict=True):
            if written is Written.THERE:
                self._restored.there += 1
            elif isinstance(written, Refused):
                self._report_refused(write.keys, written, write.nbytes)
            else:
                self._restored.amount.add(write.nbytes, len(write.keys), are_pages=write.are_pages)
        self._writes, self._waiting = Writes(), []
