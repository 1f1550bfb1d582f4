"""What to send of a file: a block as a whole if it is complete and intact, else its pages; and strings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpage_server.client.wire.exchange import Piece
from kvpage_server.page import BlockShape, PageError, Plane
from kvpage_server.snapshot.format.entries import FOREVER, PageTensor, String
from kvpage_server.snapshot.format.files import EntrySpan, intact
from kvpage_server.snapshot.format.names import text_of


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
    corrupt: list[str] = field(default_factory=list)  # keys of what does not hash to its checksum
    expired: int = 0  # keys whose time is over


def plan(spans: Iterable[EntrySpan], data: memoryview, age_ms: int) -> Plan:
    """What to send of some tensors of a file, `age_ms` after their times to live were counted."""
    made = Plan()
    blocks: dict[tuple[bytes, int], list[tuple[PageTensor, memoryview, list[Item]]]] = defaultdict(list)
    for span in spans:
        entry, body = span.entry, data[span.start : span.stop]
        items = list(_alive(made, _sound(made, span, data), age_ms))
        if isinstance(entry, PageTensor):
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


def _sound(made: Plan, span: EntrySpan, data: memoryview) -> Iterator[Item]:
    """The pages of a tensor, or the string, that match their checksums."""
    for item, is_intact in zip(_items(span, data), intact(span, data), strict=True):
        if is_intact:
            yield item
        else:
            made.corrupt.append(text_of(item.key))


def _items(span: EntrySpan, data: memoryview) -> Iterator[Item]:
    entry, start = span.entry, span.start
    if isinstance(entry, String):
        yield Item(entry.key, [data[start : span.stop]], entry.left_ms, False)
        return
    for key, header, left in zip(entry.keys(), entry.headers(), entry.ttl_left_ms, strict=True):
        yield Item(bytes(key), [bytes(header), data[start : start + entry.geometry.body_size]], left, True)
        start += entry.geometry.body_size


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
