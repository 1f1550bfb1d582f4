"""S3-FIFO: three queues, no order within them but that of arrival.

Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction, SOSP '23, algorithm 1. New units enter a
small queue, a tenth of all; those used more than once in it move to the main queue, the others leave and are remembered
as ghosts. Who comes back while it is one enters the main queue, where each use, up to three, is worth another round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from kvpage_server.store.eviction import BURST, Unit, name_of

_SMALL = 0.1  # of all units
_MOST_USES = 3


class _Uses:
    """How often a unit was used since it came, or was passed over: `uses`. When: `at`, and last counted: `counted`."""

    __slots__ = ("at", "counted", "uses")

    def __init__(self, now: int) -> None:
        self.uses = 0
        self.at = self.counted = now


class S3FIFO:
    """Quick to let go of what was used once. Every operation is O(1), amortised."""

    def __init__(self) -> None:
        self.now = 0
        self._small: OrderedDict[Unit, _Uses] = OrderedDict()
        self._main: OrderedDict[Unit, _Uses] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # names of units that left the small queue

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[Unit]:
        yield from self._main
        yield from self._small

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._main or unit in self._small

    def _find(self, unit: Unit) -> _Uses | None:
        return self._main.get(unit) or self._small.get(unit)

    def used(self, unit: Unit) -> None:
        """The unit was written or read."""
        found = self._find(unit)
        if found is None:
            name = name_of(unit)
            came_back = name in self._ghosts
            if came_back:
                del self._ghosts[name]
            (self._main if came_back else self._small)[unit] = _Uses(self.now)
            return
        found.at = self.now
        if self.now - found.counted >= BURST:
            found.counted = self.now
            found.uses = min(found.uses + 1, _MOST_USES)

    def follows(self, units: Sequence[Unit]) -> None:
        """What extends what makes no difference."""

    def idle(self, unit: Unit) -> int:
        """Seconds since a unit's last use."""
        found = self._find(unit)
        if found is None:
            raise KeyError(unit)
        return self.now - found.at

    def removed(self, unit: Unit) -> None:
        """The unit is gone and not missed."""
        if self._small.pop(unit, None) is None:
            self._main.pop(unit, None)

    def evicted(self, unit: Unit) -> None:
        """The unit is gone for want of room."""
        if unit in self._small:
            self._ghosts[name_of(unit)] = None
            while len(self._ghosts) > len(self) * (1 - _SMALL):
                self._ghosts.popitem(last=False)
        self.removed(unit)

    def victims(self) -> Iterator[Unit]:
        """The units in the order they should go."""
        left = len(self)
        while left and len(self):
            from_small = bool(self._small) and (len(self._small) >= _SMALL * len(self) or not self._main)
            queue = self._small if from_small else self._main
            unit, found = next(iter(queue.items()))
            if found.uses > (1 if from_small else 0):
                found.uses = 0 if from_small else found.uses - 1
            else:
                left -= 1
                yield unit
                if queue.get(unit) is not found:
                    continue
            del queue[unit]
            self._main[unit] = found

    def clear(self) -> dict[Unit, Any]:
        """Forget everything; what there was."""
        old = {**self._small, **self._main}
        self._small.clear()
        self._main.clear()
        self._ghosts.clear()
        return old
