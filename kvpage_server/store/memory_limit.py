"""The memory limit: units leave memory in the policy's order, until it is within `maxmemory`.

Without a tier below, a unit is evicted: it is removed. With a tier, a unit that is on disk is dropped: its key stays,
and its bytes leave memory. Units that are leased, pinned or held are spared.
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

MOST_LEAVE = 250  # keys that leave memory before others have their turn
_MOST_PASSED = 1024  # units that can't leave, before the search ends


class OutOfMemory(Exception):
    """Memory is full, and the policy may not evict anything."""


class TierBelow(Protocol):
    """The tier to which memory drops values."""

    @property
    def held(self) -> int:
        """Bytes that were fetched to be used in a moment. They do not count until then."""

    def holds(self, unit: Unit) -> bool:
        """Return whether somebody is about to use a unit."""

    def demote(self, unit: Unit) -> bool:
        """Drop a unit, or evict it if it is in memory only. False if it has to stay."""

    def evict(self, unit: Unit) -> bool:
        """Evict a unit. False if it waits to be written, or memory would gain nothing."""

    def drops_any(self) -> bool:
        """Return whether there may be something to drop, whatever the policy."""

    def hurry(self) -> None:
        """Write to disk soon, since memory has to drop more."""


class MemoryLimit:
    """Keeps memory within `maxmemory`, in bytes, 0 for no limit."""

    def __init__(self, contents: Contents, maxmemory: int) -> None:
        self.maxmemory = maxmemory
        self.receiving = 0  # bytes of slots that are being received; they do not count yet
        self.tier: TierBelow | None = None
        self._contents = contents
        self._arena = contents.arena

    @property
    def used(self) -> int:
        """Bytes that count against maxmemory: short strings, and slots except those being received."""
        return self._arena.used - self.receiving + self._contents.texts

    @property
    def is_full(self) -> bool:
        """Whether memory has more than it may."""
        most = self.maxmemory
        if not most or self._arena.used + self._contents.texts <= most:
            return False
        return self.used - (self.tier.held if self.tier is not None else 0) > most

    def make_room(self) -> bool:
        """Let units leave until memory is within its limit, or until many have left. Returns whether this is done for
        now.

        Raises OutOfMemory if the policy forbids it.
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
        """Yield the units that may leave memory, in order, with the function that removes them. The next pair is used
        if the units before were not enough.
        """
        evictor, tier = self._contents.evictor, self.tier
        if tier is not None and tier.drops_any():
            yield evictor.units.victims(), tier.demote
        elif evictor.policy not in (NO_EVICTION, VOLATILE_TTL):
            yield evictor.units.victims(), self._evict
        if evictor.policy == VOLATILE_TTL:
            yield self.soonest(), tier.evict if tier is not None else self._evict

    def _leave(self, units: Iterator[Unit], leave: Callable[[Unit], bool]) -> bool | None:
        """Have units leave memory in order. True if it is within its limit then, False if many have left.

        Return None if not enough units may leave.
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
        get = self._contents.catalogue.get
        return (unit_of(key, cast(Entry, get(key))) for key in self._contents.expirer.nearest(monotonic_ms()))
