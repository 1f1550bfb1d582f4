"""Records of removed pages: reason, time, and the policy or quota.

There is a ghost for each block and reason, with the rows of its pages. A page is in one of them: that of its last
removal. `MOST_ROWS` limits all ghosts together. Blocks that lost pages longest ago are forgotten first. Then `since`
moves on: removals before it may be forgotten. Costs: O(rows) for a block, O(1) for a page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from kvpage_server.core.pieces import bit_of, row_of
from kvpage_server.page import unix_ms
from kvpage_server.store.memory.index import Block

MOST_ROWS = 1 << 18  # some 100 bytes each
_GHOST = 8  # rows: the fixed cost of a ghost


@dataclass(slots=True)
class Ghost:
    """The removal of pages of a block: reason and times (unix milliseconds), the last one at `at`; and the policy or
    quota.
    """

    reason: str  # expired, evicted, over quota, deleted, overwritten or corrupt
    rows: dict[int, int]
    at: int = 0
    by: str = ""  # a policy, or the pattern of a quota; empty for other reasons
    limit: str = ""  # maxmemory or maxdisk, whichever was reached; empty for other reasons than eviction


class Ghosts:
    """The removed pages. `since`: unix milliseconds from which on every removed page is recorded."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.since = unix_ms()
        self._most_rows = most_rows
        self._rows = 0
        self._blocks: OrderedDict[tuple[bytes, int], dict[str, Ghost]] = OrderedDict()  # the latest last, as within
        self._requests: dict[bytes, set[int]] = {}  # page ids of a request's blocks among them

    def __len__(self) -> int:
        return len(self._blocks)

    def remember(self, block: Block, rows: Mapping[int, int], reason: str, by: str = "", limit: str = "") -> None:
        """Record the removal of pages of a block, given as rows."""
        name = (block.req_id, block.page)
        ghosts = self._blocks.pop(name, None)
        if ghosts is None:
            ghosts = {}
            self._requests.setdefault(block.req_id, set()).add(block.page)
        self._blocks[name] = ghosts
        ghost = ghosts.pop(reason, None)
        for other in list(ghosts.values()):
            self._take(other, rows)
            if not other.rows:
                del ghosts[other.reason]
                self._rows -= _GHOST
        if ghost is None:
            ghost = Ghost(reason, {})
            self._rows += _GHOST
        ghosts[reason] = ghost
        ghost.at, ghost.by, ghost.limit = unix_ms(), by, limit
        self._rows -= len(ghost.rows)
        if not ghost.rows:
            ghost.rows = dict(rows)
        else:
            for row, heads in rows.items():
                ghost.rows[row] = ghost.rows.get(row, 0) | heads
        self._rows += len(ghost.rows)
        while self._rows > self._most_rows and len(self._blocks) > 1:
            self._forget_oldest()

    def _take(self, ghost: Ghost, rows: Mapping[int, int]) -> None:
        """Some pages were removed again since, for another reason."""
        for row in ghost.rows.keys() & rows.keys():
            if left := ghost.rows[row] & ~rows[row]:
                ghost.rows[row] = left
            else:
                del ghost.rows[row]
                self._rows -= 1

    def _forget_oldest(self) -> None:
        (req_id, page), forgotten = self._blocks.popitem(last=False)
        for ghost in forgotten.values():
            self._rows -= len(ghost.rows) + _GHOST
            self.since = max(self.since, ghost.at)
        pages = self._requests[req_id]
        pages.remove(page)
        if not pages:
            del self._requests[req_id]

    def has_block(self, req_id: bytes, page: int) -> bool:
        """Return whether removals of pages of a block are remembered."""
        return (req_id, page) in self._blocks

    def of_page(self, req_id: bytes, layer: int, head: int, page: int, kv_type: int) -> Ghost | None:
        """Return how a page was last removed."""
        row, bit = row_of(layer, head, kv_type), bit_of(head)
        ghosts = self._blocks.get((req_id, page), {})
        return next((ghost for ghost in ghosts.values() if ghost.rows.get(row, 0) & bit), None)

    def of_block(self, req_id: bytes, page: int, block: Block | None = None) -> Ghost | None:
        """Return how a block lost a page that is still missing. `block` is the remaining part of it."""
        ghosts = self._blocks.get((req_id, page))
        if ghosts is None:
            return None
        present = block.rows if block is not None else {}
        for ghost in reversed(ghosts.values()):
            if any(heads & ~present.get(row, 0) for row, heads in ghost.rows.items()):
                return ghost
        return None

    def of_request(self, req_id: bytes) -> Ghost | None:
        """Return how a request lost its last page."""
        ghosts = (self.of_block(req_id, page) for page in self._requests.get(req_id, ()))
        return max((ghost for ghost in ghosts if ghost), key=lambda ghost: ghost.at, default=None)

    def clear(self) -> None:
        """Forget everything, and know nothing of the time before now."""
        self._blocks.clear()
        self._requests.clear()
        self._rows = 0
        self.since = unix_ms()
