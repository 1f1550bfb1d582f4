"""allkeys-lru: what was used longest ago goes first."""

from __future__ import annotations

from collections.abc import Iterator

from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.eviction.queues import Queues

_NO_TIME = -1  # no unit has this time


class LRU(Queues):
    """Least recently used first. Every operation is O(1)."""

    def used(self, unit: Unit) -> None:
        place = self._places.get(unit)
        if place is None:
            place = self._place_of(unit)
        elif self._after[place] == self._home + 1:  # nothing was used since
            self._at[place] = self.now
            return
        else:
            self.leave(place)
        self._at[place] = self.now
        self._enter(place, self._before[self._home + 1])

    def used_all(self, units: list[Unit]) -> None:
        if self.hands_over:
            super().used_all(units)
            return
        new, _, _ = self._use_again(units, _NO_TIME, _NO_TIME)
        if new:
            self._enter_all(new, 1, 0)

    def _enter(self, place: int, behind: int) -> None:
        self._queue[place] = self._home + 1
        self._link(place, behind)

    def inherit(self, place: int) -> None:
        self._enter(place, self._home + 1)

    def victims(self) -> Iterator[Unit]:
        yield from self._older_victims()
        queue = self._home + 1
        for _ in range(len(self._places)):
            place = self._after[queue]
            unit = self._units[place]
            if unit is None:
                return
            yield unit
            if self._places.get(unit) == place:
                self._unlink(place)
                self._link(place, self._before[queue])
