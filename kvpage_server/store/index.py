"""Which pages a request has: requests, their blocks, and in each block the pages of every layer and plane.

A block's pages are kept as one bit a head in rows of up to 64 heads of a (layer, plane): a few bytes a page where
models have eight heads, and enough to spell every page's key. Costs: add and discard O(1); listing O(pages listed).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage_server.page import MAX_HEAD, MAX_KV_TYPE, BlockShape
from kvpage_server.store.scan import ScanOrder

_TYPES = MAX_KV_TYPE + 1
_ROW_HEADS = 64
_GROUPS = (MAX_HEAD + 1) // _ROW_HEADS  # rows that the heads of one (layer, plane) may take


def row_of(layer: int, head: int, kv_type: int) -> int:
    """The row of a page. Rows are numbered by layer, plane and head: the order of a block's body."""
    return (layer * _TYPES + kv_type) * _GROUPS + head // _ROW_HEADS


def bit_of(head: int) -> int:
    """The bit of a page in its row."""
    return 1 << head % _ROW_HEADS


class Block:
    """The pages of one (req_id, page_id): what lives and is evicted as one."""

    __slots__ = ("footprint", "page", "pages", "req_id", "rows", "shape", "shape_known", "soonest")

    def __init__(self, req_id: bytes, page: int) -> None:
        self.req_id = req_id
        self.page = page
        self.pages = 0  # how many it has
        self.rows: dict[int, int] = {}  # see `row_of` and `bit_of`
        self.footprint = 0  # bytes of memory its pages occupy
        self.soonest = 0  # no page of it expires before: unix milliseconds, 0 when none expires at all
        self.shape: BlockShape | None = None  # when it is complete and `shape_known`
        self.shape_known = False  # until the next page comes or goes

    def page_keys(self) -> Iterator[bytes]:
        """The keys of its pages by layer, plane and head: the order of a block's body."""
        for row in sorted(self.rows):
            plane, group = divmod(row, _GROUPS)
            prefix = b"kv:%b:%d:" % (self.req_id, plane // _TYPES)
            suffix = b":%d:%d" % (self.page, plane % _TYPES)
            heads = self.rows[row]
            while heads:
                lowest = heads & -heads
                yield b"%b%d%b" % (prefix, group * _ROW_HEADS + lowest.bit_length() - 1, suffix)
                heads ^= lowest

    def expires_at(self, expires: int) -> None:
        """One of its pages expires then (unix milliseconds, 0 for never)."""
        if expires and (not self.soonest or expires < self.soonest):
            self.soonest = expires

    @property
    def layers(self) -> int:
        """One more than its last layer."""
        return max(self.rows) // (_TYPES * _GROUPS) + 1

    @property
    def heads(self) -> int:
        """One more than its last head."""
        return max(row % _GROUPS * _ROW_HEADS + heads.bit_length() for row, heads in self.rows.items())

    @property
    def planes(self) -> list[int]:
        """The kv_types it has pages of."""
        return sorted({row // _GROUPS % _TYPES for row in self.rows})

    @property
    def is_full(self) -> bool:
        """Whether every layer up to the last has every plane and head up to the last."""
        return self.pages == self.layers * self.heads * len(self.planes)


class PageIndex:
    """The blocks of every request, in the order of their page ids when listed."""

    def __init__(self) -> None:
        self._requests: dict[bytes, dict[int, Block]] = {}
        self._scans = ScanOrder()
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, req_id: bytes, layer: int, head: int, page: int, kv_type: int) -> Block:
        """Note that a page is written; the block it belongs to."""
        request = self._requests.get(req_id)
        if request is None:
            request = self._requests[req_id] = {}
            if self._scans.current is not None:
                self._scans.add(req_id, len(self._requests))
        block = request.get(page)
        if block is None:
            block = request[page] = Block(req_id, page)
            self.blocks += 1
        block.shape_known = False
        row, bit = row_of(layer, head, kv_type), bit_of(head)
        heads = block.rows.get(row, 0)
        if not heads & bit:
            block.rows[row] = heads | bit
            block.pages += 1
        return block

    def discard(self, block: Block, layer: int, head: int, kv_type: int) -> bool:
        """Forget a page; whether its block is gone with it."""
        block.shape_known = False
        row = row_of(layer, head, kv_type)
        heads = block.rows.get(row, 0) & ~bit_of(head)
        if heads:
            block.rows[row] = heads
        else:
            block.rows.pop(row, None)
        block.pages -= 1
        if block.pages:
            return False
        self.remove(block)
        return True

    def remove(self, block: Block) -> None:
        """Forget a block with all its pages; what it knows of them stays with it."""
        request = self._requests[block.req_id]
        del request[block.page]
        self.blocks -= 1
        if not request:
            del self._requests[block.req_id]

    def scan(self, cursor: int, count: int, now: int) -> tuple[int, list[bytes]]:
        """The next cursor, 0 at the end, and the requests in the next `count` places of the order of scans."""
        cursor, req_ids = self._scans.visit(cursor, count, self._requests, now)
        return cursor, [req_id for req_id in req_ids if req_id in self._requests]

    def rest(self, now: int) -> None:
        """Forget the order of scans when nobody has scanned for a while; `now` in unix milliseconds."""
        self._scans.rest(now)

    def of(self, req_id: bytes) -> list[Block]:
        """The blocks of a request, by page id; empty when it has none."""
        request = self._requests.get(req_id, {})
        return [request[page] for page in sorted(request)]

    def block(self, req_id: bytes, page: int) -> Block | None:
        """One block of a request."""
        request = self._requests.get(req_id)
        return request.get(page) if request is not None else None

    def clear(self) -> dict[bytes, dict[int, Block]]:
        """Forget everything; what there was."""
        old, self._requests = self._requests, {}
        self._scans.clear()
        self.blocks = 0
        return old
