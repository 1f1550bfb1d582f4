"""The memory limit, which evicts or demotes units in the policy's order until memory is within `maxmemory`.

Without a tier below, a unit is evicted: its keys are removed. With a tier, a unit that is also on disk is demoted: its
bytes leave memory, and its keys stay. Leased, pinned and held units are spared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, cast

from kvpage_server.store.contents import Contents, unit_of
from kvpage_server.store.eviction.policies import NO_EVICTION, VOLATILE_TTL
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.entry import Entry
from kvpage_server.store.memory.index import Block
from kvpage_server.system.text import monotonic_ms

MOST_LEAVE = 250  # keys evicted or demoted in one call, because other clients wait meanwhile
_MOST_PASSED = 1024  # spared units after which a search ends


class OutOfMemory(Exception):
    """Error: memory is full, and the policy may not evict anything."""


class TierBelow(Protocol):
    """The tier to which memory drops values."""

    @property
    def held(self) -> int:
        """Bytes loaded for commands that have not run yet. They do not count against maxmemory."""

    def holds(self, unit: Unit) -> bool:
        """Return whether a waiting command needs a unit in memory."""

    def demote(self, unit: Unit) -> bool:
        """Demote a unit, or evict it if it is in memory only. Return False if it has to stay."""

    def evict(self, unit: Unit) -> bool:
        """Evict a unit. Return False if it is dirty, or if its eviction would free no memory."""

    def drops_any(self) -> bool:
        """Return whether some units may be demoted, whatever the policy."""

    def hurry(self) -> None:
        """Write dirty values soon, because memory has to demote more units."""


class MemoryLimit:
    """The limit `maxmemory`, in bytes; 0 for no limit."""

    def __init__(self, contents: Contents, maxmemory: int) -> None:
        self.maxmemory = maxmemory
        self.receiving = 0  # bytes of slots whose values are not received completely; they do not count yet
        self.tier: TierBelow | None = None
        self._contents = contents
        self._arena = contents.arena

    @property
    def used(self) -> int:
        """Bytes that count against maxmemory: short strings, and slots of completely received values."""
        return self._arena.used - self.receiving + self._contents.texts

    @property
    def is_full(self) -> bool:
        """Whether memory exceeds `maxmemory`. Values that are loaded for waiting commands do not count."""
        most = self.maxmemory
        if not most or self._arena.used + self._contents.texts <= most:
            return False
        return self.used - (self.tier.held if self.tier is not None else 0) > most

    def make_room(self) -> bool:
        """Evict or demote units until memory is within its limit, but at most about MOST_LEAVE keys.

        Return False if the call has to be repeated for more units, and True otherwise: also if only spared units are
        left and memory is still full. Raise OutOfMemory if memory is full and the policy may not evict more.
        """
        if not self.is_full:
            return True
        for units, leave in self._ways():
            done = self._leave(units, leave)
            if done is not None:
                return done
        if self.tier is not None:
            self.tier.hurry()
        if self._contents.evictor.policy in (NO_EVICTION, VOLATILE_TTL):
            raise OutOfMemory
        return True

    def _ways(self) -> Iterator[tuple[Iterator[Unit], Callable[[Unit], bool]]]:
        """Yield pairs of units in the order of eviction and the function that evicts or demotes one.

        The next pair is used if the units of the pairs before did not free enough memory.
        """
        evictor, tier = self._contents.evictor, self.tier
        if tier is not None and tier.drops_any():
            yield evictor.units.victims(), tier.demote
        elif evictor.policy not in (NO_EVICTION, VOLATILE_TTL):
            yield evictor.units.victims(), self._evict
        if evictor.policy == VOLATILE_TTL:
            yield self.soonest(), tier.evict if tier is not None else self._evict

    def _leave(self, units: Iterator[Unit], leave: Callable[[Unit], bool]) -> bool | None:
        """Evict or demote units in order. Return True once memory is within its limit, False after MOST_LEAVE keys.

        Return None if memory is still full and no other unit may leave. With a tier the search ends after _MOST_PASSED
        spared units, because examining all of them would block the event loop.
        """
        now, passed, left, tier = monotonic_ms(), 0, MOST_LEAVE, self.tier
        leases = self._contents.leases
        leases.settle(now)
        for unit in units:
            pages = unit.pages if isinstance(unit, Block) else 1
            if (tier is not None and tier.holds(unit)) or leases.spares(unit, now) or not leave(unit):
                passed += tier is not None
                if passed == _MOST_PASSED:
                    break
                continue
            left -= pages
            if not self.is_full:
                return True
            if left <= 0:
                return False
        return None if self.is_full else True

    def _evict(self, unit: Unit) -> bool:
        self._contents.evict(unit)
        return True

    def soonest(self) -> Iterator[Unit]:
        """Yield the units that have an expiry, the next due first."""
        get = self._contents.catalogue.get
        return (unit_of(key, cast(Entry, get(key))) for key in self._contents.expirer.nearest(monotonic_ms()))
