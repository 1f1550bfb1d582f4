"""The hot tier: agents' contexts in memory. The least recently used is evicted first, and dropped once it is
written."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..memory.blocks import AgentBlocks
from ..memory.lifetimes import NOT_WRITTEN, Lifetimes
from ..pool import BlockPool

log = logging.getLogger(__name__)

LowerTier = Literal["page", "cold"]  # a tier to which contexts are written


@dataclass(slots=True, eq=False)
class CacheEntry:
    """An agent's context in memory. Its blocks are held under the agent's name."""

    context: AgentBlocks
    unwritten_tiers: set[LowerTier]  # tiers to which it must still be written; empty if it is clean
    whole: bool  # whether it is the agent's last context; False for a loaded one, which may be a part
    pinned: bool = False
    leaving: bool = False  # True for an evicted context that is not written yet
    kept: bool = False  # True once a tier below has stored it, even if that tier has evicted it since
    lifetimes: Lifetimes | None = None  # for which the page server keeps it
    on_the_way: bool = False  # whether it is being written to the page server
    failure: str = ""  # the reason for which its last save to the page server failed or was incomplete
    retry_at: float = 0.0  # time.monotonic() of the next save, after one that was incomplete; 0 otherwise
    used: float = field(default_factory=time.monotonic)
    dirty_since: float = field(default_factory=time.monotonic)
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of its blocks, by id

    def is_unwritable(self, failing: Collection[LowerTier]) -> bool:
        """Return whether all tiers that lack it are `failing`, or the page server takes only a part of it."""
        return self.unwritten_tiers <= {*failing, *(["page"] if self.retry_at else [])}


class HotTier:
    """Contexts by agent, in order of use: at most `max_agents`, with blocks of at most `max_bytes` bytes. A shared
    block counts once. Pinned contexts count, and are not evicted.

    A dirty context that is evicted becomes *leaving*: it stays in memory until it is written, but does not count
    against the limits. At most `max_leaving` bytes are leaving, or one larger context. Beyond that, no dirty context is
    evicted, and the tier exceeds its limits until a context is written. A context is dropped unwritten only if all its
    tiers fail; `lost` counts these.

    Callers of all methods must hold `lock`.
    """

    def __init__(self, pool: BlockPool, max_agents: int, max_bytes: int, max_leaving: int) -> None:
        self.lock = threading.RLock()
        self.evictions = 0
        self.lost = 0  # dropped contexts that no tier had
        self.pool = pool
        self._max_agents = max_agents
        self._max_bytes = max_bytes
        self._max_leaving = max_leaving
        self._entries: OrderedDict[str, CacheEntry] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CacheEntry]:
        """Iterate over the entries, the least recently used first. The tier may change during the iteration."""
        return iter(list(self._entries.values()))

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks, including the blocks of leaving contexts."""
        return sum(_sizes(self._entries.values()).values())

    @property
    def failure(self) -> str | None:
        """The reason for which a context could not be saved to the page server; None if all could."""
        return next((entry.failure for entry in self if entry.failure), None)

    @property
    def idle(self) -> float | None:
        """Seconds since the last use of the context that is evicted next; None if none may be evicted."""
        oldest = next((entry for entry in self if not entry.pinned and not entry.leaving), None)
        return time.monotonic() - oldest.used if oldest else None

    def look(self, agent_id: str) -> CacheEntry | None:
        """Return the agent's entry. This does not count as a use."""
        return self._entries.get(agent_id)

    def use(self, agent_id: str) -> CacheEntry | None:
        """Return the agent's entry, and make it the most recently used. A leaving entry stays."""
        entry = self._entries.get(agent_id)
        if entry:
            self._entries.move_to_end(agent_id)
            entry.used = time.monotonic()
            entry.leaving = False
        return entry

    def put(
        self,
        context: AgentBlocks,
        unwritten_tiers: Collection[LowerTier],
        *,
        whole: bool,
        kept: bool = False,
        lifetimes: Lifetimes | None = None,
    ) -> None:
        """Keep a context in place of the agent's last one, and take over the caller's references.

        `kept` is True for a context that was loaded from a tier below.
        """
        before = self._entries.get(context.agent_id)
        entry = CacheEntry(context, set(unwritten_tiers), whole, kept=kept, lifetimes=lifetimes)
        entry.sizes = {block.block_id: block.nbytes for block in context.blocks}
        if before:
            entry.pinned = before.pinned
            if before.unwritten_tiers:
                entry.dirty_since = before.dirty_since
                entry.failure = before.failure if unwritten_tiers else ""
            self.drop(context.agent_id)
        self._entries[context.agent_id] = entry

    def drop(self, agent_id: str) -> bool:
        """Drop the agent's context, written or not. Return whether there was one."""
        entry = self._entries.pop(agent_id, None)
        if entry:
            self.pool.free(entry.context.block_ids, agent_id)
            if entry.lifetimes and not entry.on_the_way:  # without effect if it was written
                entry.lifetimes.report(NOT_WRITTEN)
        return entry is not None

    def trim(self, failing: Collection[LowerTier]) -> None:
        """Evict until the tier is within its limits. `failing` are the tiers whose last write failed."""
        while self._too_large() and self.evict(failing):
            pass

    def evict(self, failing: Collection[LowerTier]) -> bool:
        """Evict the least recently used context that may be evicted. Return whether there was one."""
        for entry in self:
            if not entry.pinned and not entry.leaving and self._drop_or_mark(entry, failing):
                self.evictions += 1
                return True
        return False

    def unpin_oldest(self) -> bool:
        """Unpin the least recently used pinned context, because a prompt needs its memory. Return whether there was
        one.
        """
        oldest = next((entry for entry in self if entry.pinned), None)
        if oldest:
            oldest.pinned = False
            log.warning("the context of %s is not pinned any more: a prompt needs its memory", oldest.context.agent_id)
        return oldest is not None

    def abandon(self, failing: Collection[LowerTier]) -> bool:
        """Drop one leaving context whose tiers are all `failing`. Return whether there was one."""
        unwritable = next((entry for entry in self if entry.leaving and entry.is_unwritable(failing)), None)
        if unwritable is None:
            return False
        if not unwritable.kept:
            self.lost += 1
            log.warning("the context of %s is lost: memory is full, and no tier takes it", unwritable.context.agent_id)
        return self.drop(unwritable.context.agent_id)

    def bytes_being_freed(self, failing: Collection[LowerTier]) -> dict[int, int]:
        """Return the bytes, by block id, of leaving contexts that a tier can store. They become free when the contexts
        are written, unless the blocks have other references.
        """
        return _sizes([entry for entry in self if entry.leaving and not entry.is_unwritable(failing)])

    def drop_clean(self) -> None:
        """Drop all clean contexts that are not pinned."""
        for entry in self:
            if not entry.unwritten_tiers and not entry.pinned:
                self.drop(entry.context.agent_id)
                self.evictions += 1

    def clear(self) -> None:
        for entry in self:
            self.drop(entry.context.agent_id)

    def written(self, entry: CacheEntry) -> None:
        """Drop a leaving entry that has been written, unless a newer one has replaced it."""
        if entry.leaving and self._entries.get(entry.context.agent_id) is entry:
            self.drop(entry.context.agent_id)

    def _drop_or_mark(self, entry: CacheEntry, failing: Collection[LowerTier]) -> bool:
        """Drop a clean entry, or mark a dirty one as leaving. Return False if `max_leaving` does not allow that."""
        if not entry.unwritten_tiers:
            return self.drop(entry.context.agent_id)
        while leaving := [other for other in self if other.leaving]:
            if sum(_sizes([*leaving, entry]).values()) <= self._max_leaving:
                break
            if not self.abandon(failing):
                return False
        entry.leaving = True
        return True

    def _too_large(self) -> bool:
        staying = [entry for entry in self if not entry.leaving]
        return len(staying) > self._max_agents or sum(_sizes(staying).values()) > self._max_bytes


def _sizes(entries: Collection[CacheEntry]) -> dict[int, int]:
    """Return the bytes of the entries' blocks by id, so that a shared block counts once."""
    sizes: dict[int, int] = {}
    for entry in entries:
        sizes |= entry.sizes
    return sizes
