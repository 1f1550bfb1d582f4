"""Eviction policies: allkeys-lru, allkeys-s3fifo, and the table of all policies.

**A new policy** is a subclass of `Queues` in a module of this folder, with a row in the table at the end. Callers
report each use to the policy, request its victims one by one, and remove as many of them as the limit requires.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvpage_server.store.eviction.prefix import Prefix
from kvpage_server.store.eviction.queues import BURST, FIRST, OrderedMap, Queues, Unit, name_of

# -- allkeys-lru: the least recently used unit is evicted first --------------------------------------------------------

_NO_TIME = -1  # before the time of every unit


class LRU(Queues):
    """The policy allkeys-lru: one queue, in the order of the last use. Every operation is O(1)."""

    def used(self, unit: Unit) -> None:
        place = self._places.get(unit)
        if place is None:
            place = self._place_of(unit)
        elif self._after[place] == self._heads + 1:  # it is at the end of the queue already
            self._at[place] = self.now
            return
        else:
            self.leave(place)
        self._at[place] = self.now
        self._enter(place, self._before[self._heads + 1])

    def used_all(self, units: list[Unit]) -> None:
        if self.hands_over:
            super().used_all(units)
            return
        new, _, _ = self._touch_many(units, _NO_TIME, _NO_TIME)
        if new:
            self._enter_all(new, 1, 0)

    def _enter(self, place: int, behind: int) -> None:
        self._queue[place] = self._heads + 1
        self._link(place, behind)

    def inherit(self, place: int) -> None:
        self._enter(place, self._heads + 1)

    def victims(self) -> Iterator[Unit]:
        yield from self._waiting_victims()
        queue = self._heads + 1
        for _ in range(len(self._places)):
            place = self._after[queue]
            unit = self._units[place]
            if unit is None:
                return
            yield unit
            if self._places.get(unit) == place:  # spared: examine it again after all others
                self._unlink(place)
                self._link(place, self._before[queue])


# -- allkeys-s3fifo: units that were used once are evicted early -------------------------------------------------------
#
# S3-FIFO of Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction, SOSP '23, algorithm 1.
#
# There are two queues in the order of insertion. A new unit enters the small queue, which has a tenth of all units. At
# the front of the small queue, a unit that was used more than once moves to the main queue. Any other unit is evicted,
# and its name becomes a ghost. A unit with a ghost that is inserted again enters the main queue. At the front of the
# main queue, a unit with counted uses loses one of them, and moves to the end. A unit without uses is evicted. So a
# unit passes the main queue at most _MOST_USES times after its last use.

_SMALL = 0.1  # share of all units that the small queue has
_MOST_USES = 3  # uses that are counted
_NEW, _MAIN = 1, 2  # the small and the main queue


class S3FIFO(Queues):
    """The policy allkeys-s3fifo, with two queues and ghosts. Every operation is amortised O(1)."""

    in_order_of_use = False

    def reset(self) -> None:
        super().reset()
        # Ghosts: names of units that were evicted from the small queue, the oldest first; as many as the main queue may
        # have units.
        self._ghosts: OrderedMap[int, bool] = OrderedMap()
        self._sizes = [0] * FIRST  # number of units in each queue of this policy, by the queue's number

    def used(self, unit: Unit) -> None:
        place = self._places.get(unit)
        if place is None:
            has_ghost = self._ghosts.pop(name_of(unit))
            self._insert_last(self._place_of(unit), _MAIN if has_ghost else _NEW)
            return
        if self._waits(place):
            self._unlink_waiting(place)
            self._insert_last(place, _NEW)
        self._at[place] = self.now
        if self.now - self._counted[place] >= BURST:
            self._counted[place] = self.now
            self._uses[place] = min(self._uses[place] + 1, _MOST_USES)

    def _insert_last(self, place: int, queue: int) -> None:
        """Insert a new unit at the end of a queue."""
        self._uses[place] = 0
        self._at[place] = self._counted[place] = self.now
        self._enter(place, queue, self._before[self._heads + queue])

    def _enter(self, place: int, queue: int, behind: int) -> None:
        """Insert a unit into a queue after the place `behind`."""
        self._sizes[queue] += 1
        self._queue[place] = self._heads + queue
        self._link(place, behind)

    def leave(self, place: int) -> None:
        if not self._waits(place):
            self._sizes[self._queue[place] - self._heads] -= 1
        super().leave(place)

    def inherit(self, place: int) -> None:
        self._uses[place] = 0
        self._counted[place] = self._at[place]
        self._enter(place, _NEW, self._heads + _NEW)

    def evicted(self, unit: Unit) -> None:
        place = self._places.get(unit)
        if place is not None and self._queue[place] == self._heads + _NEW:
            self._ghosts.append(name_of(unit), True)
            while len(self._ghosts) > len(self) * (1 - _SMALL):
                self._ghosts.popitem()
        self.removed(unit)

    def victims(self) -> Iterator[Unit]:
        yield from self._waiting_victims()
        spared: set[Unit] = set()  # spared units, all of which are in the main queue; each unit is offered once
        while len(spared) < self._sizes[_NEW] + self._sizes[_MAIN]:
            # Examine the first unit of the small queue if that has its share of all units, or if every unit of the main
            # queue was spared.
            small, main = self._sizes[_NEW], self._sizes[_MAIN]
            all_spared = len(spared) >= main
            queue = _NEW if small and (small >= _SMALL * len(self) or all_spared) else _MAIN
            place = self._after[self._heads + queue]
            unit = self._units[place]
            assert unit is not None
            # A used unit moves to the end of the main queue. Another unit is offered, and moves there if it is spared.
            if self._uses[place] > (1 if queue == _NEW else 0):
                self._uses[place] = 0 if queue == _NEW else self._uses[place] - 1
            elif unit not in spared:
                spared.add(unit)
                yield unit
                if self._places.get(unit) != place or self._queue[place] != self._heads + queue:
                    spared.discard(unit)
                    continue
            self.leave(place)
            self._enter(place, _MAIN, self._before[self._heads + _MAIN])


# -- The table of policies ---------------------------------------------------------------------------------------------


class Policy(NamedTuple):
    """A value of `maxmemory-policy`: the order of units, and which of them may be evicted.

    A policy that may not evict every unit refuses writes when no unit that it may evict is left.
    """

    order: type[Queues]  # the class that orders the units
    evicts_any: bool = True  # whether every unit may be evicted
    # Whether units with an expiry may be evicted; without `evicts_any`, the next due first.
    evicts_expiring: bool = True
    keeps_chains: bool = False  # whether a block stays on disk while another block extends it


POLICIES = {
    "allkeys-prefix": Policy(Prefix, keeps_chains=True),
    "allkeys-lru": Policy(LRU),
    "allkeys-s3fifo": Policy(S3FIFO),
    "volatile-ttl": Policy(LRU, evicts_any=False),  # LRU measures idle times; `ExpiryOrder` gives the order of eviction
    "noeviction": Policy(LRU, evicts_any=False, evicts_expiring=False),
}
