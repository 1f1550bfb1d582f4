"""Which unit goes when memory is full. A unit is a whole block of pages, or a plain string key.

Reading or writing any page of a block is a use of the block. Policies know units and the order of their uses, no
bytes: the owner asks for victims for as long as it needs room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kvpage_server.store.index import Block

Unit = Block | bytes

BURST = 2  # seconds: uses that come closer together count as one, since a block is written and read page by page


class Policy(Protocol):
    """What every policy does."""

    now: int  # unix seconds, kept by the owner: looking at the clock at every use would cost more than the use

    def __len__(self) -> int:
        """How many units it knows."""

    def __iter__(self) -> Iterator[Unit]:
        """Every unit; of those last used in one second, the first first, if that is known."""

    def __contains__(self, unit: Unit) -> bool:
        """Whether it knows a unit."""

    def used(self, unit: Unit) -> None:
        """The unit was written or read."""

    def follows(self, units: Sequence[Unit]) -> None:
        """Each of these extends the one before it and is worth nothing without it. Unknown ones end a run."""

    def idle(self, unit: Unit) -> int:
        """Seconds since a unit's last use."""

    def removed(self, unit: Unit) -> None:
        """The unit, if it is known, is gone and not missed: it was deleted or has expired."""

    def evicted(self, unit: Unit) -> None:
        """The unit, if it is known, is gone for want of room."""

    def victims(self) -> Iterator[Unit]:
        """The units in the order they should go. One that is still there when the next is asked for is spared."""

    def clear(self) -> dict[Unit, Any]:
        """Forget everything; what there was."""


class LRU:
    """Least recently used first. Every operation is O(1)."""

    def __init__(self) -> None:
        self.now = 0
        self._units: OrderedDict[Unit, int] = OrderedDict()  # and when each was used

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._units

    def used(self, unit: Unit) -> None:
        """The unit was written or read."""
        self._units[unit] = self.now
        self._units.move_to_end(unit)

    def follows(self, units: Sequence[Unit]) -> None:
        """What extends what makes no difference."""

    def idle(self, unit: Unit) -> int:
        """Seconds since a unit's last use."""
        return self.now - self._units[unit]

    def removed(self, unit: Unit) -> None:
        """The unit is gone."""
        self._units.pop(unit, None)

    evicted = removed

    def victims(self) -> Iterator[Unit]:
        """The units in the order they should go."""
        for _ in range(len(self._units)):
            unit = next(iter(self._units))
            yield unit
            if unit in self._units:
                self._units.move_to_end(unit)

    def clear(self) -> dict[Unit, Any]:
        """Forget everything; what there was."""
        old, self._units = self._units, OrderedDict()
        return old


def taken_over(old: Policy, new: Policy) -> Policy:
    """A policy that knows what another did; that one itself, when they are of one kind. O(n log n)."""
    if type(new) is type(old):
        return old
    for unit in sorted(old, key=old.idle, reverse=True):
        new.now = old.now - old.idle(unit)
        new.used(unit)
    new.now = old.now
    return new


def name_of(unit: Unit) -> int:
    """What a unit is remembered by when it is gone: the same when it comes back."""
    return hash((unit.req_id, unit.page)) if isinstance(unit, Block) else hash(unit)
