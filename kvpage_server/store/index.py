"""Which pages a request has: requests, their blocks, and in each block the pages of every layer and plane.

A block's pages are kept as one bit a head in a row for each (layer, plane): about a byte a page where models have eight
heads, and enough to spell every page's key. Costs: add and discard O(1); listing O(pages listed).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage_server.page import MAX_KV_TYPE, PageKey

_TYPES = MAX_KV_TYPE + 1


class Block:
    """The pages of one (req_id, page_id): what lives and is evicted as one."""

    __slots__ = ("page", "pages", "req_id", "rows")

    def __init__(self, req_id: bytes, page: int) -> None:
        self.req_id = req_id
        self.page = page
        self.pages = 0  # how many it has
        self.rows: dict[int, int] = {}  # layer * 6 + kv_type -> one bit a head

    def names(self) -> Iterator[PageKey]:
        """Its pages, by layer, plane and head."""
        for row in sorted(self.rows):
            heads, layer, kv_type = self.rows[row], row // _TYPES, row % _TYPES
            while heads:
                lowest = heads & -heads
                yield PageKey(self.req_id, layer, lowest.bit_length() - 1, self.page, kv_type)
                heads ^= lowest


class PageIndex:
    """The blocks of every request, in the order of their page ids when listed."""

    def __init__(self) -> None:
        self._requests: dict[bytes, dict[int, Block]] = {}
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, req_id: bytes, layer: int, head: int, page: int, kv_type: int) -> Block:
        """Note that a page exists; the block it belongs to."""
        request = self._requests.get(req_id)
        if request is None:
            request = self._requests[req_id] = {}
        block = request.get(page)
        if block is None:
            block = request[page] = Block(req_id, page)
            self.blocks += 1
        row, bit = layer * _TYPES + kv_type, 1 << head
        heads = block.rows.get(row, 0)
        if not heads & bit:
            block.rows[row] = heads | bit
            block.pages += 1
        return block

    def discard(self, block: Block, layer: int, head: int, kv_type: int) -> bool:
        """Forget a page; whether its block is gone with it."""
        row = layer * _TYPES + kv_type
        heads = block.rows.get(row, 0) & ~(1 << head)
        if heads:
            block.rows[row] = heads
        else:
            block.rows.pop(row, None)
        block.pages -= 1
        if block.pages:
            return False
        request = self._requests[block.req_id]
        del request[block.page]
        self.blocks -= 1
        if not request:
            del self._requests[block.req_id]
        return True

    def requests(self) -> Iterator[bytes]:
        """Every request that has a page."""
        return iter(self._requests)

    def of(self, req_id: bytes) -> list[Block]:
        """The blocks of a request, by page id; empty when it has none."""
        request = self._requests.get(req_id, {})
        return [request[page] for page in sorted(request)]

    def block(self, req_id: bytes, page: int) -> Block | None:
        """One block of a request."""
        return self._requests.get(req_id, {}).get(page)

    def clear(self) -> None:
        """Forget everything."""
        self._requests.clear()
        self.blocks = 0
