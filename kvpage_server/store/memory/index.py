"""Which pages there are: requests, their blocks, and in each block the pages of every layer and plane.

A block of single pages that nobody has asked for since the start is *resting*: only the rows of its pages on disk are
kept (see `sheet`). When somebody asks for it, it is woken, that is, made a `Block`.

A block's pages are bits, in rows (see `core.rows`). For a block stored whole its extent says which pages it has. Costs:
add and discard O(1); listing O(pages listed).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from types import MappingProxyType

from kvpage_server.core import PageSet
from kvpage_server.core.rows import GROUPS, ROW_HEADS, TYPES, row_of
from kvpage_server.page import BlockShape
from kvpage_server.store.memory.extent import Extent
from kvpage_server.store.memory.scan import ScanOrder
from kvpage_server.store.records.sheet import ROW


def rows_in(shape: BlockShape) -> Iterator[tuple[int, int]]:
    """The rows of a block that has every page of a shape, in order, and the heads in each."""
    for layer in range(shape.layers):
        for plane in shape.planes:
            for first in range(0, shape.heads, ROW_HEADS):
                heads = min(shape.heads - first, ROW_HEADS)
                yield row_of(layer, first, plane.kv_type), (1 << heads) - 1


@lru_cache(maxsize=64)
def rows_of(shape: BlockShape) -> Mapping[int, int]:
    """The same as a dictionary."""
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
        """The keys of its pages in the order of a block's body: layer, plane, head."""
        return (key for key, *_ in self.page_names())

    def page_names(self) -> Iterator[tuple[bytes, int, int, int]]:
        """The same, each with its layer, head and plane."""
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
        """The block with that name. It is made if there is none."""
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
        """Every block that does not rest."""
        return (block for request in self.requests.values() for block in request.values() if type(block) is Block)

    def note_resting(self, req_id: bytes, page: int, rows: bytes) -> None:
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
        """The rows of a resting block; None if it does not rest or does not exist."""
        found = self.requests.get(req_id, {}).get(page)
        return found if isinstance(found, bytes) else None

    def resting_blocks(self) -> list[tuple[bytes, int]]:
        if not self.resting:
            return []
        every = self.requests.items()
        return [(req_id, page) for req_id, request in every for page, rows in request.items() if type(rows) is bytes]

    def remove(self, block: Block) -> None:
        """Forget a block. The block itself keeps what it knows of its pages."""
        request = self.requests[block.req_id]
        del request[block.page]
        self.blocks -= 1
        if not request:
            del self.requests[block.req_id]

    def scan(self, cursor: int, count: int, now: int) -> tuple[int, list[bytes]]:
        """The next cursor, 0 at the end, and the requests in the next `count` places of the order of scans."""
        cursor, req_ids = self._scans.visit(cursor, count, now)
        return cursor, [req_id for req_id in req_ids if req_id in self.requests]

    def rest(self, now: int) -> None:
        """Drop the order of scans if nobody has scanned for a while; `now` is in monotonic milliseconds."""
        self._scans.rest(now)

    def page_ids(self, req_id: bytes) -> list[int]:
        """The page ids of a request's blocks, in no particular order."""
        return list(self.requests.get(req_id, ()))

    def count(self, req_id: bytes) -> int:
        return len(self.requests.get(req_id, ()))

    def pages_from(self, req_id: bytes, first: int) -> Iterator[int]:
        """The page ids of a request's blocks in order, beginning with `first`."""
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
        """The blocks of a request, by page id."""
        pages = sorted(self.requests.get(req_id, ()))
        return [block for page in pages if (block := self.block(req_id, page))]

    def block(self, req_id: bytes, page: int) -> Block | None:
        request = self.requests.get(req_id)
        block = request.get(page) if request is not None else None
        return block if block is None or type(block) is Block else self._wake(req_id, page)

    def has(self, req_id: bytes, page: int) -> bool:
        """Whether a request has a block. Wakes no block."""
        return page in self.requests.get(req_id, ())

    def still_has(self, block: Block) -> bool:
        """Whether a block that was found in an earlier step is still there."""
        return self.requests.get(block.req_id, {}).get(block.page) is block

    def around(self, block: Block) -> list[Block]:
        """A block between its neighbours, as far as these exist."""
        request, req_id, page = self.requests[block.req_id], block.req_id, block.page
        found = [block]
        if page - 1 in request and (before := self.block(req_id, page - 1)):
            found.insert(0, before)
        if page + 1 in request and (behind := self.block(req_id, page + 1)):
            found.append(behind)
        return found

    def clear(self) -> dict[bytes, dict[int, Block | bytes]]:
        """Forget everything. Returns what there was."""
        old, self.requests = self.requests, {}
        self._scans.clear()
        self._order = None
        self.blocks = self.resting = 0
        return old
