"""The page index: requests, their blocks, and in each block the pages of every layer and plane.

A block of single pages that nobody has asked for since the start is *resting*: only the rows of its pages on disk are
kept (see `sheet`). When somebody asks for it, it is woken, that is, made a `Block`.

A block's pages are bits, in rows (see `core.rows`). For a block stored whole its extent says which pages it has. Costs:
add and discard O(1); listing O(pages listed).
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Generic, TypeVar

from kvpage_server.core import PageSet, Part, Slot
from kvpage_server.core.pieces import GROUPS, ROW_HEADS, TYPES, row_of
from kvpage_server.page import BlockShape, PageError, Plane, checksum, pack_header
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.records import ROW

# -- scan --------------------------------------------------------------------------------------------------------------
#
# The order in which keys are scanned. SCAN's cursors name places in it, and random keys are drawn from it.
#
# It is kept only while somebody scans. A list has the keys that existed when it was created, then newer ones. A scan
# starts at the end of the list and moves towards its beginning. So it ends however many keys are added, and finds every
# key that exists from its start to its end, since places do not change. It also finds deleted keys, which the caller
# leaves out. A key that was deleted and set again is in the list twice, and so is a page whose block was stored whole
# after that.
#
# A list with more dead keys than living ones gets no more keys, and the next scan begins a new one. Cursors into the
# last few lists stay valid. Any other cursor starts again, which repeats keys but skips none.
#
# Costs: O(keys) to begin a list, paid for by as many deletions or by minutes; O(1) a key added or returned.

_PLACE_BITS = 40
_OLD_LISTS = 2
_SLACK = 1024
REST_AFTER = 300_000  # milliseconds without a scan after which the lists are dropped


T = TypeVar("T")


class ScanOrder(Generic[T]):
    """Lists of scanned keys, by generation. A cursor has a generation and the number of places that are left.

    `everything()` lists all items, and `count()` returns their number.
    """

    def __init__(self, everything: Callable[[], list[T]], count: Callable[[], int]) -> None:
        self._everything = everything
        self._count = count
        self._lists: dict[int, list[T]] = {}
        self._generation = random.randrange(1, 1 << 22)  # so that cursors of an earlier process do not fit
        self.current: list[T] | None = None  # the owner adds new items with `add`
        self._last_used = 0  # monotonic milliseconds

    def add(self, name: T) -> None:
        assert self.current is not None
        self.current.append(name)
        if len(self.current) > 2 * self._count() + _SLACK:
            self.current = None

    def visit(self, cursor: int, count: int, now: int) -> tuple[int, list[T]]:
        """Return the next cursor, 0 at the end, and up to `count` names, some of which may be dead."""
        self._last_used = now
        generation, left = cursor >> _PLACE_BITS, cursor & ((1 << _PLACE_BITS) - 1)
        if generation not in self._lists:
            generation, left = self._begin()
        order = self._lists[generation]
        left = min(left, len(order))
        names = order[max(left - count, 0) : left]
        left -= len(names)
        return (generation << _PLACE_BITS | left if left else 0), names[::-1]

    def draw(self, now: int) -> T | None:
        """Return a random name, about half of which exist; None if there is none."""
        self._last_used = now
        generation, places = self._begin()
        return random.choice(self._lists[generation]) if places else None

    def _begin(self) -> tuple[int, int]:
        """Return the generation and number of places for a new scan."""
        if self.current is None or len(self.current) > 2 * self._count() + _SLACK:
            self.current = self._everything()
            self._generation += 1
            self._lists[self._generation] = self.current
            for old in list(self._lists)[: -1 - _OLD_LISTS]:
                del self._lists[old]
        return self._generation, len(self.current)

    def rest(self, now: int) -> None:
        """Drop the lists if nobody has scanned for a while."""
        if self._lists and now - self._last_used > REST_AFTER:
            self.clear()

    def clear(self) -> None:
        self.current = None
        self._lists.clear()


# -- extent ------------------------------------------------------------------------------------------------------------
#
# A block's body in one piece of memory, from which its pages are computed.
#
# It has one slot, one digest and one entry in the index, however many pages it has. A page is made when somebody asks
# for it. Its header needs a checksum; those of all pages are computed together, when the first one is needed, from a
# body that was checked.

_WRONG = 0xFFFF_FFFF_FFFF_FFFF


class Extent:
    """The body of a block, in `slot`, which may be on disk only. `digest` is its XXH3-64, 0 if not known.

    `created` and `expires` are in unix milliseconds, `ttl`, as it was given, in seconds; 0 for never.
    """

    __slots__ = ("_checksums", "created", "digest", "expires", "shape", "slot", "ttl")

    def __init__(self, shape: BlockShape, slot: Slot | Cold, digest: int, created: int, ttl: int) -> None:
        self.shape = shape
        self.slot = slot
        self.digest = digest
        self.created = created
        self.ttl = ttl
        self.expires = created + ttl * 1000 if ttl else 0
        self._checksums: array[int] | None = None  # of its pages, in the body's order

    def page(self, unit: object, page: int, layer: int, head: int, kv_type: int) -> ExtentPage | None:
        """Return one of its pages; None if it has no such page. `unit` is its block, and `page` the block's page id."""
        try:
            span = self.shape.page_span(layer, head, kv_type)
        except PageError:
            return None
        return ExtentPage(self, span, unit, page, (layer, head, kv_type))

    @property
    def is_intact(self) -> bool:
        """Return whether the body is intact, as far as a digest is known."""
        return not self.digest or checksum(self.slot.body) == self.digest

    @property
    def has_checksums(self) -> bool:
        """Whether `checksum_of` can answer now."""
        return self._checksums is not None or not self.digest or type(self.slot) is not Cold

    def checksum_of(self, layer: int, head: int, plane: Plane) -> int:
        """Return the XXH3-64 of a page. It is wrong if the body is damaged, so that no reader accepts the page."""
        if not self.digest:
            return 0
        if self._checksums is None:
            mask = 0 if self.is_intact else _WRONG
            body = self.slot.body
            self._checksums = array("Q", [checksum(body[span]) ^ mask for span in self.shape.page_spans()])
        planes = self.shape.planes
        return self._checksums[(layer * len(planes) + planes.index(plane)) * self.shape.heads + head]


class ExtentPage:
    """A page within a block's body. `expires` is a unix time in milliseconds, 0 for never."""

    __slots__ = ("expires", "extent", "head", "kv_type", "layer", "page", "size", "start", "unit")

    def __init__(self, extent: Extent, span: slice, unit: object, page: int, spot: Sequence[int]) -> None:
        self.extent = extent
        self.start: int = span.start
        self.size: int = span.stop - span.start
        self.expires = extent.expires
        self.unit = unit
        self.page = page
        self.layer, self.head, self.kv_type = spot

    @property
    def body(self) -> memoryview:
        return self.extent.slot.body[self.start : self.start + self.size]

    def part(self, start: int, stop: int) -> Part:
        """Return the bytes of the body from `start` to before `stop`."""
        return self.extent.slot.part(self.start + start, self.start + stop)

    @property
    def footprint(self) -> int:
        """The page's share of the block's memory, in bytes."""
        return self.size

    @property
    def header(self) -> bytes:
        extent = self.extent
        return self.header_with(extent.checksum_of(self.layer, self.head, extent.shape.plane(self.kv_type)))

    def header_with(self, checksum: int) -> bytes:
        """Return the header with a given checksum."""
        extent = self.extent
        plane = extent.shape.plane(self.kv_type)
        return pack_header(
            plane.dtype,
            self.kv_type,
            extent.shape.page_size,
            plane.head_dim,
            self.layer,
            self.head,
            self.page,
            extent.created,
            extent.ttl,
            self.size,
            checksum,
        )


def rows_in(shape: BlockShape) -> Iterator[tuple[int, int]]:
    """Yield the rows of a block that has every page of a shape, in order, and the heads in each."""
    for layer in range(shape.layers):
        for plane in shape.planes:
            for first in range(0, shape.heads, ROW_HEADS):
                heads = min(shape.heads - first, ROW_HEADS)
                yield row_of(layer, first, plane.kv_type), (1 << heads) - 1


@lru_cache(maxsize=64)
def rows_of(shape: BlockShape) -> Mapping[int, int]:
    """Return the same as a dictionary."""
    return MappingProxyType(dict(rows_in(shape)))


class Block(PageSet):
    """The pages of one (req_id, page_id), which are evicted together."""

    __slots__ = ()

    extent: Extent | None
    shape: BlockShape | None

    @property
    def rows(self) -> Mapping[int, int]:
        """The pages it has; see `core.rows`."""
        return self.bits if self.extent is None else rows_of(self.extent.shape)

    def fill(self, extent: Extent) -> None:
        """Have exactly the pages of an extent."""
        self.bits = {}
        self.extent = extent
        self.pages = extent.shape.pages
        self.soonest = extent.expires
        self.shape, self.shape_known = extent.shape, True

    def split(self) -> None:
        """Have the same pages, as single ones."""
        self.bits = self.rows
        self.extent = None

    def page_keys(self) -> Iterator[bytes]:
        """Yield the keys of its pages in the order of a block's body: layer, plane, head."""
        return (key for key, *_ in self.page_names())

    def page_names(self) -> Iterator[tuple[bytes, int, int, int]]:
        """Yield the same, each with its layer, head and plane."""
        for row, heads in self.each_row() if self.extent is None else rows_in(self.extent.shape):
            plane, group = divmod(row, GROUPS)
            layer, kv_type = divmod(plane, TYPES)
            prefix = b"kv:%b:%d:" % (self.req_id, layer)
            suffix = b":%d:%d" % (self.page, kv_type)
            while heads:
                lowest = heads & -heads
                head = group * ROW_HEADS + lowest.bit_length() - 1
                yield b"%b%d%b" % (prefix, head, suffix), layer, head, kv_type
                heads ^= lowest

    def expires_at(self, expires: int) -> None:
        """Note that one of its pages expires then (unix milliseconds, 0 for never)."""
        if expires and (not self.soonest or expires < self.soonest):
            self.soonest = expires

    def measure(self) -> tuple[int, int, list[int]]:
        """Its last layer plus one, its last head plus one, and its kv_types."""
        if self.extent is not None:
            shape = self.extent.shape
            return shape.layers, shape.heads, [plane.kv_type for plane in shape.planes]
        layers, heads, planes = self.outline()
        return layers, heads, [kind for kind in range(TYPES) if planes >> kind & 1]

    @property
    def is_full(self) -> bool:
        """Whether every layer up to the last has every plane and head up to the last."""
        layers, heads, planes = self.measure()
        return self.pages == layers * heads * len(planes)


class PageIndex:
    """The blocks of every request. They are listed by page id."""

    def __init__(self) -> None:
        self.requests: dict[bytes, dict[int, Block | bytes]] = {}  # the rows of one that is resting; see `note_made`
        self._scans = ScanOrder(lambda: list(self.requests), lambda: len(self.requests))
        self._order: tuple[bytes, list[int]] | None = None  # the request that was listed last, and its page ids
        self.blocks = 0
        self.resting = 0  # pages of resting blocks
        self.on_waking: Callable[[Block, bytes], None] | None = None  # gives a block the pages in those rows

    def __len__(self) -> int:
        return len(self.requests)

    def open(self, req_id: bytes, page: int) -> Block:
        """Return the block with that name. It is made if there is none."""
        request = self.requests.get(req_id)
        if request is None:
            request = self.requests[req_id] = {}
            if self._scans.current is not None:
                self._scans.add(req_id)
        block = request.get(page)
        if block is None:
            if self._order is not None and self._order[0] == req_id:
                self._order = None
            block = request[page] = Block(req_id, page)
            self.blocks += 1
        elif type(block) is not Block:
            block = self._wake(req_id, page)
        return block

    def __iter__(self) -> Iterator[Block]:
        """Yield every block that does not rest."""
        return (block for request in self.requests.values() for block in request.values() if type(block) is Block)

    def note_on_disk(self, req_id: bytes, page: int, rows: bytes) -> None:
        """Add a resting block, or pages of one, by their rows."""
        request = self.requests.get(req_id)
        if request is None:
            request = self.requests[req_id] = {}
        self.resting += len(rows) // ROW
        known = request.get(page)
        if known is None:
            self.blocks += 1
            request[page] = rows
        else:
            assert isinstance(known, bytes)
            request[page] = known + rows

    def _wake(self, req_id: bytes, page: int) -> Block:
        request = self.requests[req_id]
        rows, block = request[page], Block(req_id, page)
        assert isinstance(rows, bytes)
        assert self.on_waking is not None
        request[page] = block
        self.resting -= len(rows) // ROW
        self.on_waking(block, rows)
        return block

    def rows(self, req_id: bytes, page: int) -> bytes | None:
        """Return the rows of a resting block; None if it does not rest or does not exist."""
        found = self.requests.get(req_id, {}).get(page)
        return found if isinstance(found, bytes) else None

    def blocks_on_disk(self) -> list[tuple[bytes, int]]:
        if not self.resting:
            return []
        every = self.requests.items()
        return [(req_id, page) for req_id, request in every for page, rows in request.items() if type(rows) is bytes]

    def remove(self, block: Block) -> None:
        """Forget a block. The block itself keeps its pages."""
        request = self.requests[block.req_id]
        del request[block.page]
        self.blocks -= 1
        if not request:
            del self.requests[block.req_id]

    def scan(self, cursor: int, count: int, now: int) -> tuple[int, list[bytes]]:
        """Return the next cursor, 0 at the end, and the requests in the next `count` places of the order of scans."""
        cursor, req_ids = self._scans.visit(cursor, count, now)
        return cursor, [req_id for req_id in req_ids if req_id in self.requests]

    def rest(self, now: int) -> None:
        """Drop the order of scans if nobody has scanned for a while; `now` is in monotonic milliseconds."""
        self._scans.rest(now)

    def page_ids(self, req_id: bytes) -> list[int]:
        """Return the page ids of a request's blocks, in no particular order."""
        return list(self.requests.get(req_id, ()))

    def count(self, req_id: bytes) -> int:
        return len(self.requests.get(req_id, ()))

    def pages_from(self, req_id: bytes, first: int) -> Iterator[int]:
        """Yield the page ids of a request's blocks in order, beginning with `first`."""
        order = self._order
        if order is None or order[0] != req_id:
            order = self._order = req_id, sorted(self.requests.get(req_id, ()))
        return islice(order[1], bisect_left(order[1], first), None)

    @property
    def is_scanned(self) -> bool:
        """Whether somebody scans requests: then blocks must be made by `open`."""
        return self._scans.current is not None

    def note_made(self, count: int) -> None:
        """Count blocks that were entered into `requests` by others."""
        self.blocks += count
        self._order = None

    def of(self, req_id: bytes) -> list[Block]:
        """Return the blocks of a request, by page id."""
        pages = sorted(self.requests.get(req_id, ()))
        return [block for page in pages if (block := self.block(req_id, page))]

    def block(self, req_id: bytes, page: int) -> Block | None:
        request = self.requests.get(req_id)
        block = request.get(page) if request is not None else None
        return block if block is None or type(block) is Block else self._wake(req_id, page)

    def has(self, req_id: bytes, page: int) -> bool:
        """Return whether a request has a block. Wakes no block."""
        return page in self.requests.get(req_id, ())

    def still_has(self, block: Block) -> bool:
        """Return whether a block that was found in an earlier step is still there."""
        return self.requests.get(block.req_id, {}).get(block.page) is block

    def around(self, block: Block) -> list[Block]:
        """Return a block between its neighbours, as far as these exist."""
        request, req_id, page = self.requests[block.req_id], block.req_id, block.page
        found = [block]
        if page - 1 in request and (before := self.block(req_id, page - 1)):
            found.insert(0, before)
        if page + 1 in request and (behind := self.block(req_id, page + 1)):
            found.append(behind)
        return found

    def clear(self) -> dict[bytes, dict[int, Block | bytes]]:
        """Forget everything. Return the former contents."""
        old, self.requests = self.requests, {}
        self._scans.clear()
        self._order = None
        self.blocks = self.resting = 0
        return old
