"""Eviction when memory is full: units leave in the order of the policy until memory is within `maxmemory`.

Without a tier below, a unit is evicted: its keys are removed. With a tier, a unit that is also on disk is demoted: its
bytes leave memory, and its keys stay. Leased, pinned and held units are spared.

The index does not count against `maxmemory`. It may take as much again, and at least LEAST_INDEX. Above that, units are
evicted, also with a tier, because the keys of a demoted unit stay in the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, cast

from kvpage_server.store.contents import Contents, unit_of
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.entry import Entry
from kvpage_server.store.memory.index import Block
from kvpage_server.system.text import monotonic_ms

MOST_LEAVE = 250  # keys evicted or demoted in one call, because other clients wait meanwhile
_MOST_PASSED = 1024  # spared units after which a search ends
LEAST_INDEX = 64 << 20  # bytes that the index may take in any case


class OutOfMemory(Exception):
    """Error: memory is full, and the policy may not evict anything. The message names the limit."""


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

    def evictable(self) -> Iterator[Unit]:
        """Yield the units that may be evicted from memory and disk, units on disk only first."""

    def evict_everywhere(self, unit: Unit) -> bool:
        """Evict a unit from memory and disk. Return True."""

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
    def index_size(self) -> int:
        """Approximate bytes of memory of the index. O(1)."""
        return self._contents.catalogue.index_size

    @property
    def most_index(self) -> int:
        """Bytes that the index may take."""
        return max(self.maxmemory, LEAST_INDEX)

    @property
    def is_full(self) -> bool:
        """Whether memory exceeds `maxmemory`, or the index its limit."""
        most = self.maxmemory
        if not most:
            return False
        values_may_be_full = self._arena.used + self._contents.texts > most
        return (values_may_be_full and self._values_are_full) or self._index_is_full

    @property
    def _values_are_full(self) -> bool:
        """Whether values exceed `maxmemory`. Values that are loaded for waiting commands do not count."""
        most = self.maxmemory
        if self._arena.used + self._contents.texts <= most:
            return False
        return self.used - (self.tier.held if self.tier is not None else 0) > most

    @property
    def _index_is_full(self) -> bool:
        return self._contents.catalogue.index_size > max(self.maxmemory, LEAST_INDEX)

    def make_room(self) -> bool:
        """Evict or demote units until memory is within its limit, but at most about MOST_LEAVE keys.

        Return False if the call has to be repeated for more units, and True otherwise: also if only spared units are
        left and memory is still full. Raise OutOfMemory if memory is full and the policy may not evict more.
        """
        if not self.is_full:
            return True
        for units, leave, is_full in self._sources():
            done = self._leave(units, leave, is_full)
            if done is False or not self.is_full:
                return done is not False
        if self.tier is not None:
            self.tier.hurry()
        if not self._contents.evictor.rules.evicts_any:
            if self._values_are_full:
                raise OutOfMemory("used memory > 'maxmemory'.")
            raise OutOfMemory(f"the index takes more than {self.most_index} bytes (maxmemory, and at least 64mb).")
        return True

    def _sources(self) -> Iterator[tuple[Iterator[Unit], Callable[[Unit], bool], Callable[[], bool]]]:
        """Yield units in the order of eviction, the function that evicts or demotes one, and whether it is needed.

        The next source is used if the units of the sources before did not free enough memory.
        """
        units, rules, tier = self._contents.evictor.units, self._contents.evictor.rules, self.tier
        if tier is None:
            if rules.evicts_expiring:
                yield units.victims() if rules.evicts_any else self.soonest(), self._evict, lambda: self.is_full
            return
        if self._index_is_full and rules.evicts_expiring:
            yield tier.evictable(), tier.evict_everywhere, lambda: self._index_is_full
            # If the disk fails, values that wait to be written may be evicted.
            yield units.victims() if rules.evicts_any else self.soonest(), tier.evict, lambda: self._index_is_full
        if self._values_are_full and tier.drops_any():
            yield units.victims(), tier.demote, lambda: self._values_are_full
        if self._values_are_full and rules.evicts_expiring and not rules.evicts_any:
            yield self.soonest(), tier.evict, lambda: self._values_are_full

    def _leave(self, units: Iterator[Unit], leave: Callable[[Unit], bool], is_full: Callable[[], bool]) -> bool | None:
        """Evict or demote units in order. Return True once `is_full` is False, and False after MOST_LEAVE keys.

        Return None if `is_full` is still True and no other unit may leave. With a tier the search ends after
        _MOST_PASSED spared units, because examining all of them would block the event loop.
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
            if not is_full():
                return True
            if left <= 0:
                return False
        return None if is_full() else True

    def _evict(self, unit: Unit) -> bool:
        self._contents.evict(unit)
        return True

    def soonest(self) -> Iterator[Unit]:
        """Yield the units that have an expiry, the next due first."""
        get = self._contents.catalogue.get
        return (unit_of(key, cast(Entry, get(key))) for key in self._contents.expirer.nearest(monotonic_ms()))
