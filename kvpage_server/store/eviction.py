"""Which unit goes when memory is full. A unit is a whole block of pages, or a plain string key.

Reading or writing any page of a block is a use of the block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvpage_server.store.index import Block

Unit = Block | bytes

POLICIES = ("noeviction", "allkeys-lru")


class LRU:
    """Least recently used first. Every operation is O(1)."""

    def __init__(self) -> None:
        self.now = 0  # unix seconds, kept by the owner: looking at the clock at every use would cost more than the use
        self._units: OrderedDict[Unit, int] = OrderedDict()  # and when each was used

    def used(self, unit: Unit) -> None:
        """The unit was written or read."""
        self._units[unit] = self.now
        self._units.move_to_end(unit)

    def idle(self, unit: Unit) -> int:
        """Seconds since a unit's last use."""
        return self.now - self._units[unit]

    def removed(self, unit: Unit) -> None:
        """The unit is gone."""
        self._units.pop(unit, None)

    def victims(self) -> Iterator[Unit]:
        """The units in the order they should go. The caller may remove the one it was just given."""
        while self._units:
            yield next(iter(self._units))

    def clear(self) -> dict[Unit, int]:
        """Forget everything; what there was."""
        old, self._units = self._units, OrderedDict()
        return old
