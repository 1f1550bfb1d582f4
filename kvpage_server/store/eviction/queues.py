"""Queues of units in columns: the base of every policy.

**Data structure.** A unit has a *place*: an index into arrays, the *columns*, each of which has one field of every
unit. All columns together take about 50 bytes for each unit, and the core processes a batch of units in one call,
without Python code for each unit. A queue is a doubly linked ring of places, with a place of its own as head:

    place 0          NO_PLACE: stands for no place
    places 1 to 10   heads of the queues: 5 of this policy and 5 of the policy before it, see `_heads`
    places from 11   units, free places, and removed units that other units still refer to as parents

Every operation on a unit is O(1).

**A change of policy.** The new policy takes over the places and columns unchanged, and uses the other 5 heads for its
own queues. Then it takes over the units in steps, from the last used to the first used, and inserts each at the front
of its new queue. A unit that is used before its step is taken over by that use, and inserted at the end. So the new
queues are in the order of use, whatever the old policy was. Units that were not taken over are evicted first. The
change itself is O(1), however many units there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from heapq import merge
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from kvpage_server.core import Columns, enter, touch_many
from kvpage_server.store.memory.index import Block

# -- policy ------------------------------------------------------------------------------------------------------------
#
# A policy selects the units to evict when memory is full. A unit is a whole block of pages, or a string's key.
#
# A read or write of any page of a block is a use of the block. A policy stores units and the order of their uses, but
# not their sizes: the caller requests victims until enough memory is free.

Unit = Block | bytes
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

BURST = 2  # seconds; uses within them count as one use, because a block is written and read page by page


def name_of(unit: Unit) -> int:
    """Return the name of a unit's ghost: a hash of its request and page id, or of its key. Two units may share one."""
    return hash((unit.req_id, unit.page)) if isinstance(unit, Block) else hash(unit)


NO_PLACE = 0  # the place that stands for no place; it is its own neighbour, so unlinking it changes nothing
QUEUES = 5  # queues that a policy may have
FIRST = 1 + 2 * QUEUES  # the first place that a unit may have
_MOST_PLACES = 1024  # places added by one call of `_make_places`, at most
_RUN = 4096  # units that one step of `in_order` sorts
_PLACES_PER_SEARCH = 10_000  # places examined in one call of `_find_unlinked`, in a millisecond or two

Moved = list[tuple[int, int, int]]  # moves to the ends of queues, see `core.touch_many`


class Queues(ABC):
    """Places and columns of all units. A subclass selects the queue of each unit, and the order of the victims."""

    in_order_of_use = True  # whether the units of each queue are in the order of their last use

    def __init__(self) -> None:
        self.now = 0  # monotonic seconds; the store sets it, because reading the clock costs more than noting a use
        self.reset()

    def reset(self) -> None:
        """Remove all units."""
        # The heads of this policy's queues are at places `_heads` + 1 to `_heads` + QUEUES, where `_heads` is 0 or
        # QUEUES. The heads of the old policy, the one before this, are at `_old_heads` + 1 to `_old_heads` + QUEUES;
        # `_old_heads` is -1 when all units were taken over.
        self._heads = 0
        self._old_heads = -1
        self._waiting = 0  # number of waiting units: those in old queues, which were not taken over yet
        self._defers_unused = False  # whether `hand_over` still defers units that were not used again
        self._next_unlinked = FIRST  # every waiting unit that is linked in no queue has this place or a higher one

        # Places: each unit has one, and `_units[_places[unit]]` is the unit. A place without a unit has None in
        # `_units`. It is in `_free`, unless its unit was removed while other units extend it.
        self._places: dict[Unit, int] = {}
        self._free: list[int] = []
        self._units: list[Unit | None] = [None] * FIRST

        # Columns: the fields of the unit at each place. All have the same length as `_units`.
        self._before = array("i", range(FIRST))  # place before it in its queue; NO_PLACE if it is in no queue
        self._after = array("i", range(FIRST))  # place after it; of a head, the first unit
        self._queue = array("b", range(FIRST))  # head of the queue that the unit belongs to; 0 for a free place
        self._uses = array("B", bytes(FIRST))  # number of uses, as the policy counts them
        self._at = array("q", [0] * FIRST)  # last use, in monotonic seconds
        self._counted = array("q", [0] * FIRST)  # last use that was counted in `_uses`, in monotonic seconds
        self._last = array("q", [0] * FIRST)  # last use, as the number of units that were inserted until then
        self._parent = array("i", [NO_PLACE] * FIRST)  # place of the unit that this one extends; NO_PLACE for none
        self._children = array("i", [0] * FIRST)  # number of units that extend this one
        self._columns = self._all_columns()

    def _all_columns(self) -> Columns:
        queues = self._before, self._after, self._queue
        times = self._at, self._counted, self._last
        return Columns(*queues, *times, self._uses, self._parent, self._children)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Unit]:
        """Yield every unit, in the order of insertion."""
        return iter(self._places)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._places

    @abstractmethod
    def used(self, unit: Unit) -> None:
        """Note a write or read of a unit. A new unit is inserted."""

    @abstractmethod
    def victims(self) -> Iterator[Unit]:
        """Yield the units in the order of eviction.

        The caller evicts or demotes a unit before it requests the next. A unit that is still there then was spared.
        """

    def idle(self, unit: Unit) -> int:
        """Return the seconds since a unit's last use; 0 if `now` is before that use."""
        return max(self.now - self._at[self._places[unit]], 0)

    def in_order(self) -> Iterator[Unit | None]:
        """Yield all units, the least recently used first. Before that, yield None between the steps of the sort, which
        is a merge of sorted runs. Meanwhile, units may be used, added and removed.
        """
        at, last = self._at, self._last
        runs: list[array[int]] = []
        for start in range(FIRST, len(self._units), _RUN):
            places = slice(start, start + _RUN)
            run = np.lexsort((last[places], at[places])).astype(np.int64) + start
            if runs:
                yield None
            runs.append(array("q", run.tobytes()))
        for place in merge(*runs, key=lambda place: (at[place], last[place])):
            if place < len(self._units) and (unit := self._units[place]) is not None:
                yield unit

    def extended(self, unit: Unit) -> Unit | None:
        """Return the unit that a unit extends; None if there is none."""
        return self._units[self._parent[self._places.get(unit, NO_PLACE)]]

    def used_all(self, units: list[Unit]) -> None:
        """Note a write or read of each unit, in this order."""
        for unit in units:
            self.used(unit)

    def follows(self, units: Sequence[Unit]) -> None:  # noqa: B027 - most policies ignore it
        """Note that each unit extends the one before it. An unknown unit extends none, and none extends it."""

    def removed(self, unit: Unit) -> None:
        """Remove a unit that was deleted or has expired. Ignore an unknown unit."""
        place = self._places.pop(unit, None)
        if place is not None:
            self.leave(place)
            self._units[place] = None
            self._free_place(place)

    def evicted(self, unit: Unit) -> None:
        """Remove a unit that was evicted or demoted. A policy with ghosts records one."""
        self.removed(unit)

    def leave(self, place: int) -> None:
        """Unlink a unit from its queue. A waiting unit does not wait any longer."""
        if self._old_heads >= 0 and self._is_in_old_queue(place):
            self._unlink_waiting(place)
        else:
            self._unlink(place)

    def clear(self) -> dict[Unit, Any]:
        """Remove all units. Return the former map from units to places, which the caller may free in steps."""
        old = self._places
        self.reset()
        return old

    # -- places ------------------------------------------------------------------------------------------------------

    def _place_of(self, unit: Unit) -> int:
        """Assign a free place to a new unit, and return it. The place is in no queue."""
        if not self._free:
            self._make_places()
        place = self._free.pop()
        self._places[unit], self._units[place] = place, unit
        return place

    def _touch_many(self, units: list[Unit], time: int, since: int) -> tuple[list[Unit], list[Unit], Moved]:
        """Move used units to the ends of their queues with `core.touch_many`. No unit may wait."""
        return touch_many(self._places, self._columns, units, self.now, time, since)

    def _enter_all(self, units: list[Unit], queue: int, time: int) -> int:
        """Insert new units at the end of queue number `queue` with `core.enter`.

        No unit may wait. Return the new time.
        """
        while len(self._free) < len(units):
            self._make_places()
        return enter(self._places, self._units, self._free, self._columns, units, self._heads + queue, self.now, time)

    def _make_places(self) -> None:
        """Add places: as many as there are, but at most _MOST_PLACES. The lowest new place is used first."""
        first = len(self._units)
        more = min(first, _MOST_PLACES)
        self._units += [None] * more
        for column in (self._uses, self._queue, self._before, self._after, self._parent, self._children):
            column.frombytes(bytes(column.itemsize * more))
        for times in (self._at, self._counted, self._last):
            times.frombytes(bytes(times.itemsize * more))
        self._free.extend(range(first + more - 1, first - 1, -1))

    def _free_place(self, place: int) -> None:
        """Add a place without a unit to the free places."""
        self._queue[place] = 0
        self._free.append(place)

    def _link(self, place: int, behind: int) -> None:
        """Insert a place into a queue after another one, which may be the queue's head."""
        after = self._after[behind]
        self._before[place], self._after[place] = behind, after
        self._after[behind] = self._before[after] = place

    def _unlink(self, place: int) -> None:
        """Take a place out of its queue. A place in no queue is not changed."""
        before, after = self._before[place], self._after[place]
        self._after[before], self._before[after] = after, before
        self._before[place] = self._after[place] = NO_PLACE

    # -- a change of policy ------------------------------------------------------------------------------------------

    def take_over(self, old: Queues) -> None:
        """Take over the places and columns of another policy, which must not be used afterwards. O(1).

        The other policy must have taken over all units of the one before it, because there are only two sets of heads.
        """
        assert not old.hands_over
        self.now = old.now
        self._heads, self._waiting, self._next_unlinked = QUEUES - old._heads, len(old), FIRST
        self._old_heads = old._heads if self._waiting else -1
        self._places, self._free, self._units = old._places, old._free, old._units
        self._before, self._after, self._queue, self._uses = old._before, old._after, old._queue, old._uses
        self._at, self._counted, self._last = old._at, old._counted, old._last
        self._parent, self._children = old._parent, old._children
        self._columns = old._columns
        self._defers_unused = not old.in_order_of_use

    @property
    def hands_over(self) -> bool:
        """Whether some units of the old policy wait to be taken over."""
        return self._old_heads >= 0

    def hand_over(self, most: int) -> list[Unit]:
        """Take over units, the last used first, in up to `most` steps, and return them.

        If the old policy's queues are in the order of insertion, units that were not used again are deferred: they move
        to the last old queue, which such a policy does not use, and are taken over after all others. Amortised O(1) for
        each step.
        """
        found: list[Unit] = []
        for _ in range(most):
            if not self.hands_over:
                break
            # The last used unit is at the end of one of the old queues. Units in no queue follow after all of these.
            deferred = self._old_heads + QUEUES
            stop = deferred if self._defers_unused else deferred + 1
            ends = self._before[self._old_heads + 1 : stop]
            place = max((end for end in ends if end >= FIRST), key=self._at.__getitem__, default=NO_PLACE)
            if self._defers_unused and not (place and self._uses[place]):
                if place:
                    self._unlink(place)
                    self._queue[place] = deferred
                    self._link(place, deferred)
                else:
                    self._defers_unused = False
                continue
            unit = self._units[place or self._find_unlinked()]
            if unit is None:
                break
            place = self._places[unit]
            self._unlink_waiting(place)
            self.inherit(place)
            found.append(unit)
        return found

    def _find_unlinked(self) -> int:
        """Return the place of a waiting unit that is in no queue; NO_PLACE if the next places have none.

        A call examines up to _PLACES_PER_SEARCH places from `_next_unlinked` on. The next call returns the same place
        if its unit still waits, so all calls together examine each place at most twice. Places of removed units that
        the old policy kept become free.
        """
        for place in range(self._next_unlinked, min(self._next_unlinked + _PLACES_PER_SEARCH, len(self._units))):
            self._next_unlinked = place
            if self._is_in_old_queue(place):
                if self._units[place] is not None:
                    return place
                self._free_place(place)
            self._next_unlinked = place + 1
        return NO_PLACE

    def _unlink_waiting(self, place: int) -> None:
        """Unlink a waiting unit from its old queue. If it was the last one, the change of policy is complete."""
        self._unlink(place)
        self._waiting -= 1
        if not self._waiting:
            self._old_heads = -1

    def _is_in_old_queue(self, place: int) -> bool:
        """Return whether a unit belongs to an old queue. Valid only while some units wait."""
        return 0 <= self._queue[place] - 1 - self._old_heads < QUEUES

    def _waits(self, place: int) -> bool:
        """Return whether a unit waits to be taken over."""
        return self._old_heads >= 0 and self._is_in_old_queue(place)

    @abstractmethod
    def inherit(self, place: int) -> None:
        """Insert a unit of the old policy into a queue. Its last use was before those of all units in the queues."""

    def _waiting_victims(self) -> Iterator[Unit]:
        """Yield the waiting units, the least recently used first. A spared unit is taken over."""
        while self.hands_over:
            ends = self._after[self._old_heads + 1 : self._old_heads + QUEUES + 1]
            place = min((end for end in ends if end >= FIRST), key=self._at.__getitem__, default=NO_PLACE)
            place = place or self._find_unlinked()
            unit = self._units[place]
            if unit is None:
                return
            yield unit
            if self._places.get(unit) == place and self._is_in_old_queue(place):
                self._unlink_waiting(place)
                self.inherit(place)


# -- an ordered map whose growth blocks nobody -------------------------------------------------------------------------

_PARTS = 64  # dicts of an OrderedMap, a power of two
_CHUNK = 256  # items of a chunk
_SPARSE = (16, 64)  # items of a chunk that was full, with which its table is made smaller


class OrderedMap(Generic[K, V]):
    """A map from keys to values, in an order of its own, for any number of keys.

    An OrderedDict copies all its items when its table is full: 12 ms for 175,000 items, and again and again if an old
    item is removed for each new one. This map consists of small OrderedDicts, the chunks, in order, and of _PARTS dicts
    with the chunk of each key, among which the keys are divided by their hashes. So it copies few items at a time.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all items."""
        self._count = 0
        self._parts: list[dict[K, OrderedDict[K, V]]] = [{} for _ in range(_PARTS)]
        self._last: OrderedDict[K, V] = OrderedDict()
        self._chunks = OrderedDict({id(self._last): self._last})  # without empty ones, except a single one

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: K) -> bool:
        return key in self._parts[hash(key) % _PARTS]

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._chunks.values())

    def keys_of_now(self) -> Iterator[K]:
        """Yield the keys in order, while the map may change: it may lack a key that moves, or yield it twice."""
        for chunk in list(self._chunks.values()):
            yield from list(chunk)

    def __reversed__(self) -> Iterator[K]:
        return chain.from_iterable(map(reversed, reversed(self._chunks.values())))

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if there is none."""
        chunk = self._parts[hash(key) % _PARTS].get(key)
        return None if chunk is None else chunk[key]

    def append(self, key: K, value: V) -> None:
        """Insert an item at the end, or move it there."""
        part = self._parts[hash(key) % _PARTS]
        if key in part:
            self.pop(key)
        if len(self._last) >= _CHUNK:
            self._last = OrderedDict()
            self._chunks[id(self._last)] = self._last
        self._last[key] = value
        part[key] = self._last
        self._count += 1

    def prepend(self, key: K, value: V) -> None:
        """Insert an item at the front, or move it there."""
        self.pop(key)
        chunk = next(iter(self._chunks.values()))
        if len(chunk) >= _CHUNK:
            chunk = OrderedDict()
            self._chunks[id(chunk)] = chunk
            self._chunks.move_to_end(id(chunk), last=False)
        chunk[key] = value
        chunk.move_to_end(key, last=False)
        self._parts[hash(key) % _PARTS][key] = chunk
        self._count += 1

    def pop(self, key: K) -> V | None:
        """Remove an item, and return its value; None if there is none."""
        chunk = self._parts[hash(key) % _PARTS].pop(key, None)
        if chunk is None:
            return None
        value = chunk.pop(key)
        self._count -= 1
        if chunk is not self._last:
            if not chunk:
                del self._chunks[id(chunk)]
            elif len(chunk) in _SPARSE:
                items = list(chunk.items())
                chunk.clear()
                chunk.update(items)
        elif not chunk and len(self._chunks) > 1:
            del self._chunks[id(chunk)]
            self._last = next(reversed(self._chunks.values()))
        return value

    def popitem(self) -> tuple[K, V]:
        """Remove the first item, and return it. Raises KeyError if there is none."""
        chunk = next(iter(self._chunks.values()))
        item = chunk.popitem(last=False)
        del self._parts[hash(item[0]) % _PARTS][item[0]]
        self._count -= 1
        if not chunk and chunk is not self._last:
            del self._chunks[id(chunk)]
        return item


def successor(old: Queues, kind: type[Queues]) -> Queues:
    """Return a policy of the class `kind` that takes over from `old`; `old` itself if it is of that class."""
    if type(old) is kind:
        return old
    new = kind()
    new.take_over(old)
    return new
