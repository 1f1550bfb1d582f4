"""Queues of units, by place: the base of every policy.

A unit has a place, and a field there in each column. A queue is a ring of places, linked in two columns, which begins
and ends with a place of its own. Every operation on a unit is O(1), and a unit takes few bytes.

**A change of policy.** The new policy takes over the places and columns unchanged, and adds its own queues to the old
ones. It takes units over in steps, from the one used last to the one used first, each to the front of its queue. Units
that are used meanwhile go to the end, as always. So the order is that of use, whatever the old policy was. Units that
were not taken over yet are the first to go. The change itself costs nothing, however many units there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from kvpage_server.core import Columns, enter, touch_many
from kvpage_server.store.memory.index import Block

# -- policy ------------------------------------------------------------------------------------------------------------
#
# Which unit is evicted when memory is full. A unit is a whole block of pages, or a string's key.
#
# Reading or writing any page of a block is a use of the block. Policies know units and the order of their uses, not
# their sizes: the owner asks for victims as long as it needs room.

Unit = Block | bytes

BURST = 2  # seconds; closer uses count as one, since a block is written and read page by page


def name_of(unit: Unit) -> int:
    """Return the name under which a removed unit is remembered; the same when it is inserted again."""
    return hash((unit.req_id, unit.page)) if isinstance(unit, Block) else hash(unit)


NOBODY = 0  # no place
QUEUES = 5  # of a policy, at the most
FIRST = 1 + 2 * QUEUES  # the first place of a unit; before it are the queues of this policy and of the old one
_MOST_PLACES = 1024  # that are made at once
_LOOKED_AT = 10_000  # places at once, in a millisecond or two

Moved = list[tuple[int, int, int]]  # from which queue and slot of time, how many in a row


class Queues(ABC):
    """Units at their places. A policy chooses a unit's queue, and the order in which they go."""

    def __init__(self) -> None:
        self.now = 0  # monotonic seconds, kept by the owner, since reading the clock would cost more than noting a use
        self.reset()

    def reset(self) -> None:
        self._home = 0  # its queues are behind this place
        self._older = -1  # the old policy's queues are behind this place; negative if all was taken over
        self._waiting = 0  # units that were not taken over
        self._looked = FIRST  # once those queues are empty, none of these units is before this place
        self._places: dict[Unit, int] = {}
        self._free: list[int] = []
        self._units: list[Unit | None] = [None] * FIRST
        self._before = array("i", range(FIRST))  # neighbours in the queue; NOBODY if it is in none
        self._after = array("i", range(FIRST))
        self._queue = array("b", range(FIRST))  # its queue
        self._uses = array("B", bytes(FIRST))
        self._at = array("q", [0] * FIRST)  # last use, in seconds
        self._counted = array("q", [0] * FIRST)  # last use that counted, in seconds
        self._last = array("q", [0] * FIRST)  # use, as a number of inserted units
        self._parent = array("i", [NOBODY] * FIRST)  # the unit that it extends
        self._children = array("i", [0] * FIRST)  # how many extend it
        self._columns = self._all_columns()

    def _all_columns(self) -> Columns:
        queues = self._before, self._after, self._queue
        times = self._at, self._counted, self._last
        return Columns(*queues, *times, self._uses, self._parent, self._children)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Unit]:
        """Yield every unit, in the order of use as far as it is known."""
        return iter(self._places)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._places

    @abstractmethod
    def used(self, unit: Unit) -> None:
        """Note a write or read of a unit."""

    @abstractmethod
    def victims(self) -> Iterator[Unit]:
        """Yield the units in the order they should go. One that still exists when the next is asked for is spared."""

    def idle(self, unit: Unit) -> int:
        """Return seconds since a unit's last use; 0 if `now` is older than that."""
        return max(self.now - self._at[self._places[unit]], 0)

    def used_all(self, units: list[Unit]) -> None:
        """These units were written or read, in this order."""
        for unit in units:
            self.used(unit)

    def follows(self, units: Sequence[Unit]) -> None:  # noqa: B027 - most policies ignore it
        """Note that each unit extends the one before it. An unknown unit ends a run."""

    def removed(self, unit: Unit) -> None:
        """Forget a deleted or expired unit."""
        place = self._places.pop(unit, None)
        if place is not None:
            self.leave(place)
            self._units[place] = None
            self._give_back(place)

    def evicted(self, unit: Unit) -> None:
        """Forget an evicted unit."""
        self.removed(unit)

    def leave(self, place: int) -> None:
        """Take a unit out of its queue, and out of the units that wait to be taken over."""
        if self._older >= 0 and self._is_older(place):
            self._take(place)
        else:
            self._unlink(place)

    def clear(self) -> dict[Unit, Any]:
        """Forget everything. Return the former contents."""
        old = self._places
        self.reset()
        return old

    # -- places ------------------------------------------------------------------------------------------------------

    def _place_of(self, unit: Unit) -> int:
        """Return a place for a new unit."""
        if not self._free:
            self._make_places()
        place = self._free.pop()
        self._places[unit], self._units[place] = place, unit
        return place

    def _touch_many(self, units: list[Unit], time: int, since: int) -> tuple[list[Unit], list[Unit], Moved]:
        """See `core.touch_many`. Only when nothing waits to be taken over."""
        return touch_many(self._places, self._columns, units, self.now, time, since)

    def _enter_all(self, units: list[Unit], queue: int, time: int) -> int:
        """See `core.enter`. Only when nothing waits to be taken over."""
        while len(self._free) < len(units):
            self._make_places()
        return enter(self._places, self._units, self._free, self._columns, units, self._home + queue, self.now, time)

    def _make_places(self) -> None:
        first = len(self._units)
        more = min(first, _MOST_PLACES)
        self._units += [None] * more
        for column in (self._uses, self._queue, self._before, self._after, self._parent, self._children):
            column.frombytes(bytes(column.itemsize * more))
        for times in (self._at, self._counted, self._last):
            times.frombytes(bytes(times.itemsize * more))
        self._free.extend(range(first + more - 1, first - 1, -1))

    def _give_back(self, place: int) -> None:
        self._queue[place] = 0
        self._free.append(place)

    def _link(self, place: int, behind: int) -> None:
        after = self._after[behind]
        self._before[place], self._after[place] = behind, after
        self._after[behind] = self._before[after] = place

    def _unlink(self, place: int) -> None:
        before, after = self._before[place], self._after[place]
        self._after[before], self._before[after] = after, before
        self._before[place] = self._after[place] = NOBODY

    # -- a change of policy ------------------------------------------------------------------------------------------

    def take_over(self, old: Queues) -> None:
        """Take over from another policy, which has finished its own change and is not used any more."""
        assert not old.hands_over
        self.now = old.now
        self._home, self._waiting, self._looked = QUEUES - old._home, len(old), FIRST
        self._older = old._home if self._waiting else -1
        self._places, self._free, self._units = old._places, old._free, old._units
        self._before, self._after, self._queue, self._uses = old._before, old._after, old._queue, old._uses
        self._at, self._counted, self._last = old._at, old._counted, old._last
        self._parent, self._children = old._parent, old._children
        self._columns = old._columns

    @property
    def hands_over(self) -> bool:
        """Whether some units were not taken over yet."""
        return self._older >= 0

    def hand_over(self, most: int) -> list[Unit]:
        """Take over up to `most` units, and return them."""
        found: list[Unit] = []
        while self.hands_over and len(found) < most:
            ends = self._before[self._older + 1 : self._older + QUEUES + 1]
            place = max((end for end in ends if end >= FIRST), key=self._at.__getitem__, default=NOBODY)
            unit = self._units[place or self._left_over()]
            if unit is None:
                break
            place = self._places[unit]
            self._take(place)
            self.inherit(place)
            found.append(unit)
        return found

    def _left_over(self) -> int:
        """Return the place of a unit that waits and is in no queue. Looks at some places; NOBODY if it finds none.

        Places of removed units are released.
        """
        for place in range(self._looked, min(self._looked + _LOOKED_AT, len(self._units))):
            self._looked = place + 1
            if self._is_older(place):
                if self._units[place] is not None:
                    return place
                self._give_back(place)
        return NOBODY

    def _take(self, place: int) -> None:
        """Count a unit that was taken over, used or removed."""
        self._unlink(place)
        self._waiting -= 1
        if not self._waiting:
            self._older = -1

    def _is_older(self, place: int) -> bool:
        """Return whether a unit waits to be taken over."""
        return 0 <= self._queue[place] - 1 - self._older < QUEUES

    def _waits(self, place: int) -> bool:
        return self._older >= 0 and self._is_older(place)

    @abstractmethod
    def inherit(self, place: int) -> None:
        """Insert a unit with a last use before all units in the queues."""

    def _older_victims(self) -> Iterator[Unit]:
        """Yield the units that wait, the least recently used first. A spared one is taken over."""
        while self.hands_over:
            ends = self._after[self._older + 1 : self._older + QUEUES + 1]
            place = min((end for end in ends if end >= FIRST), key=self._at.__getitem__, default=NOBODY)
            place = place or self._left_over()
            unit = self._units[place]
            if unit is None:
                return
            yield unit
            if self._places.get(unit) == place and self._is_older(place):
                self._take(place)
                self.inherit(place)


def successor(old: Queues, kind: type[Queues]) -> Queues:
    """Return a policy that takes over from another; the same one if it is of that kind already."""
    if type(old) is kind:
        return old
    new = kind()
    new.take_over(old)
    return new
