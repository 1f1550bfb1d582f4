"""What to send of a file: a block as a whole if it is complete and intact, else its pages; and strings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpage_server.client.wire.exchange import Piece
from kvpage_server.page import MAX_TTL, BlockShape, PageError, Plane, checksum
from kvpage_server.snapshot.format.entries import FOREVER, Entry, PageTensor
from kvpage_server.snapshot.format.names import text_of
from kvpage_server.snapshot.parts import Slice

MAX_LEFT_MS = MAX_TTL * 1000  # four million years: a longer time to live, added to now, may be more than a server takes


class Item(NamedTuple):
    """A page or a string, to be set under its key."""

    key: bytes
    value: list[Piece]
    ttl_left_ms: int  # -1: for ever
    is_page: bool


class PlannedBlock(NamedTuple):
    """A block, to be set whole, or else page by page."""

    req_id: bytes
    page: int
    shape: BlockShape
    body: list[memoryview]
    pages: list[Item]

    @property
    def ttl_left_ms(self) -> int:
        """The time that all of its pages have to live."""
        return self.pages[0].ttl_left_ms


@dataclass(slots=True)
class Plan:
    """What to send, and what not."""

    blocks: list[PlannedBlock] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)  # keys of bodies that do not match their checksum
    expired: int = 0  # keys whose time is over


def plan(part: Sequence[Slice], bodies: Sequence[memoryview], age_ms: int) -> Plan:
    """The commands for some pieces of tensors and their bytes, `age_ms` after their times to live were counted."""
    made = Plan()
    blocks: dict[tuple[bytes, int], list[tuple[PageTensor, memoryview, list[Item]]]] = defaultdict(list)
    for piece, body in zip(part, bodies, strict=True):
        entry = piece.span.entry
        items = list(_alive(made, _sound(made, piece, body), age_ms))
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
            pieces = list(_by_layer([body for _, body, _ in planes], shape.layers))
            made.blocks.append(PlannedBlock(first.req_id, first.page, shape, pieces, pages))
        else:
            made.items += pages
    return made


def _sound(made: Plan, piece: Slice, body: memoryview) -> Iterator[Item]:
    """The pages of a piece, or the string, that match their checksums."""
    entry, size = piece.span.entry, piece.span.entry.body_size
    for number in range(piece.first, piece.stop):
        start = (number - piece.first) * size
        item = _item(entry, number, body[start : start + size])
        if checksum(item.value[-1]) == entry.checksums[number]:
            yield item
        else:
            made.corrupt.append(text_of(item.key))


def _item(entry: Entry, number: int, body: memoryview) -> Item:
    """A page of a tensor, or the string."""
    left = min(entry.ttl_left_ms[number], MAX_LEFT_MS)
    if isinstance(entry, PageTensor):
        return Item(bytes(entry.key(number)), [bytes(entry.header(number)), body], left, True)
    return Item(entry.key, [body], left, False)


def _alive(made: Plan, items: Iterable[Item], age_ms: int) -> Iterator[Item]:
    """The items that have not expired, with the time that they have left."""
    for item in items:
        left = item.ttl_left_ms
        if left == FOREVER:
            yield item
        elif left > age_ms:
            yield item._replace(ttl_left_ms=left - age_ms)
        else:
            made.expired += 1


def _shape(planes: list[PageTensor]) -> BlockShape | None:
    """The shape of the block that these planes make; None if they do not make one."""
    first = planes[0]
    page_size = first.geometry.page_size
    if any((plane.is_plane, plane.grid, plane.geometry.page_size) != (True, first.grid, page_size) for plane in planes):
        return None
    kinds = tuple(Plane(plane.first.kv_type, plane.geometry.dtype, plane.geometry.head_dim) for plane in planes)
    try:
        return BlockShape(*first.grid, page_size, kinds)
    except PageError:  # more pages than a block may have
        return None


def _by_layer(planes: list[memoryview], layers: int) -> Iterator[memoryview]:
    """A block's body, by layer and plane, from its planes by layer."""
    for layer in range(layers):
        for plane in planes:
            nbytes = len(plane) // layers
            yield plane[layer * nbytes : (layer + 1) * nbytes]
