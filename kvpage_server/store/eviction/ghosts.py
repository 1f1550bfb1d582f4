"""Ghosts: records of removed pages, with the reason, the time, and the policy or quota.

A block has one ghost for each reason, with a bit for each page that was removed for this reason, in rows of 64 heads. A
page is in at most one ghost: the one with the reason for its last removal. `MOST_ROWS` limits the rows of all ghosts
together. Ghosts of the blocks that lost pages longest ago are dropped first, and `since` becomes the time of the newest
dropped ghost. Costs: O(rows) to record the pages of a block, O(1) to find the ghost of a page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from kvpage_server.core.pieces import bit_of, row_of
from kvpage_server.page import unix_ms
from kvpage_server.store.memory.index import Block

MOST_ROWS = 1 << 18  # rows of all ghosts together
_ROW = 100  # approximate bytes of a row
_BLOCKS_PER_STEP = 256  # blocks whose ghosts are compared in one step
_ROWS_PER_GHOST = 8  # rows that each ghost counts in addition to its own, for its object


@dataclass(slots=True)
class Ghost:
    """The removed pages of a block with one reason."""

    reason: str  # expired, evicted, over quota, deleted, overwritten or corrupt
    rows: dict[int, int]  # bits of the removed pages, by row; see `core.pieces`
    at: int = 0  # the last removal, in unix milliseconds
    by: str = ""  # the policy, or the pattern of the quota, that evicted the last pages; empty for other reasons
    limit: str = ""  # "maxmemory", "maxdisk" or "filesystem" if that was used up; empty for other reasons


class Ghosts:
    """The ghosts of all blocks. Every removal after `since`, in unix milliseconds, is recorded."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.since = unix_ms()
        self._most_rows = most_rows
        self._rows = 0  # rows of all ghosts, plus _ROWS_PER_GHOST for each ghost
        # By request and page id of a block: its ghosts by reason. The blocks, and the ghosts of each, are in the order
        # of their last removal, the oldest first.
        self._blocks: OrderedDict[tuple[bytes, int], dict[str, Ghost]] = OrderedDict()
        self._requests: dict[bytes, set[int]] = {}  # page ids of the blocks with ghosts, by request
        self._names = 0  # bytes of the request ids

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory of all ghosts."""
        return self._rows * _ROW + self._names

    def remember(self, block: Block, rows: Mapping[int, int], reason: str, by: str = "", limit: str = "") -> None:
        """Record the removal of pages of a block, given as bits by row. O(rows), amortised."""
        # Make the block the newest.
        name = (block.req_id, block.page)
        ghosts = self._blocks.pop(name, None)
        if ghosts is None:
            ghosts = {}
            if block.req_id not in self._requests:
                self._requests[block.req_id] = set()
                self._names += len(block.req_id)
            self._requests[block.req_id].add(block.page)
        self._blocks[name] = ghosts
        # Take the pages out of the ghosts with other reasons.
        ghost = ghosts.pop(reason, None)
        for other in list(ghosts.values()):
            self._remove_pages(other, rows)
            if not other.rows:
                del ghosts[other.reason]
                self._rows -= _ROWS_PER_GHOST
        # Add them to the ghost with this reason, which becomes the newest of the block.
        if ghost is None:
            ghost = Ghost(reason, {})
            self._rows += _ROWS_PER_GHOST
        ghosts[reason] = ghost
        ghost.at, ghost.by, ghost.limit = unix_ms(), by, limit
        self._rows -= len(ghost.rows)
        if not ghost.rows:
            ghost.rows = dict(rows)
        else:
            for row, heads in rows.items():
                ghost.rows[row] = ghost.rows.get(row, 0) | heads
        self._rows += len(ghost.rows)
        # Drop the oldest ghosts above the limit, but never those of the newest block.
        while self._rows > self._most_rows and len(self._blocks) > 1:
            self._forget_oldest()

    def _remove_pages(self, ghost: Ghost, rows: Mapping[int, int]) -> None:
        """Remove pages from a ghost, because they were removed again for another reason."""
        for row in ghost.rows.keys() & rows.keys():
            if left := ghost.rows[row] & ~rows[row]:
                ghost.rows[row] = left
            else:
                del ghost.rows[row]
                self._rows -= 1

    def _forget_oldest(self) -> None:
        (req_id, page), forgotten = self._blocks.popitem(last=False)
        for ghost in forgotten.values():
            self._rows -= len(ghost.rows) + _ROWS_PER_GHOST
            self.since = max(self.since, ghost.at)
        pages = self._requests[req_id]
        pages.remove(page)
        if not pages:
            del self._requests[req_id]
            self._names -= len(req_id)

    def has_block(self, req_id: bytes, page: int) -> bool:
        """Return whether pages of a block were removed, and their ghost exists."""
        return (req_id, page) in self._blocks

    def of_page(self, req_id: bytes, layer: int, head: int, page: int, kv_type: int) -> Ghost | None:
        """Return the ghost of a page's last removal, or None."""
        row, bit = row_of(layer, head, kv_type), bit_of(head)
        ghosts = self._blocks.get((req_id, page), {})
        return next((ghost for ghost in ghosts.values() if ghost.rows.get(row, 0) & bit), None)

    def of_block(self, req_id: bytes, page: int, block: Block | None = None) -> Ghost | None:
        """Return the newest ghost of a block with a page that is still missing, or None.

        `block` is the block with its remaining pages, None if it has none.
        """
        ghosts = self._blocks.get((req_id, page))
        if ghosts is None:
            return None
        present = block.rows if block is not None else {}
        for ghost in reversed(ghosts.values()):
            if any(heads & ~present.get(row, 0) for row, heads in ghost.rows.items()):
                return ghost
        return None

    def count(self, req_id: bytes) -> int:
        """Return the number of blocks of a request that have ghosts."""
        return len(self._requests.get(req_id, ()))

    def of_request(self, req_id: bytes) -> Generator[tuple[()], None, Ghost | None]:
        """Return the newest ghost of a request, or None, in steps."""
        newest = None
        for number, page in enumerate([*self._requests.get(req_id, ())], start=1):
            ghost = self.of_block(req_id, page)
            if ghost is not None and (newest is None or ghost.at > newest.at):
                newest = ghost
            if not number % _BLOCKS_PER_STEP:
                yield ()
        return newest

    def clear(self) -> None:
        """Drop all ghosts, and set `since` to now."""
        self._blocks.clear()
        self._requests.clear()
        self._rows = self._names = 0
        self.since = unix_ms()
