"""The links between blocks: a block is useless to a reader without the one that it extends.

Page 7 of a request extends page 6. Clients that name blocks by their content say which block extends which, with
KVPAGEPREFIX and KVBLOCKMGET. Costs: O(1) a block, except for a new link to a block that has extensions already: that
one is checked for a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvpage_server.store.memory.index import Block, PageIndex

_MOST_STEPS = 4096  # up a chain, in the search for a circle

BlockName = tuple[bytes, int]


class Chains:
    """The links between blocks, whether these are in memory or on disk only."""

    def __init__(self, index: PageIndex) -> None:
        self._index = index
        self._before: dict[Block, Block] = {}  # the block that it extends
        self._extensions: dict[Block, int] = {}  # how many blocks extend it

    def follow(self, blocks: Sequence[Block]) -> None:
        """Note that each of these blocks extends the one before it."""
        for before, block in pairwise(blocks):
            known = self._before.get(block)
            if known is before or (block.req_id == before.req_id and block.page == before.page + 1):
                continue
            if (known is None or not self._index.still_has(known)) and not self._descends(before, block):
                self._before[block] = before
                self._extensions[before] = self._extensions.get(before, 0) + 1

    def _descends(self, block: Block, ancestor: Block) -> bool:
        """Whether a block extends another, directly or not. Assumed if there are too many steps."""
        if ancestor not in self._extensions:
            return block is ancestor
        at: Block | None = block
        for _ in range(_MOST_STEPS):
            if at is None or at is ancestor:
                return at is ancestor
            at = self._before.get(at)
        return True

    def is_extended(self, req_id: bytes, page: int) -> bool:
        """Whether any block extends this one."""
        request = self._index.requests.get(req_id, {})
        return page + 1 in request or request.get(page) in self._extensions

    def removed(self, block: Block) -> Iterator[BlockName]:
        """Forget a block. Returns the names of the blocks that it extended."""
        self._extensions.pop(block, None)
        before = self._before.pop(block, None)
        if before is not None and before in self._extensions:
            self._extensions[before] -= 1
            if not self._extensions[before]:
                del self._extensions[before]
            yield before.req_id, before.page
        if block.page:
            yield block.req_id, block.page - 1

    def clear(self) -> None:
        """Forget all links."""
        self._before.clear()
        self._extensions.clear()
