"""allkeys-prefix: what is used again is kept longer, what extends a prefix goes before the prefix.

**Kinds.** Units are of five kinds, each a queue by last use: ends of a chain that were used once, others used once,
and those used 2 or 3, 4 to 7, 8 or more times. Among the first of each queue the victim is the one with the lowest
``last use + bonus of its kind``. Time is counted in units that came, so nothing ages while nothing comes. What came
last stays, as long as there is anything else: who writes a chain may not be through.

**Bonuses** are learned. A unit that leaves is a ghost: its name, kind and last use are remembered. If ghosts of one
kind come back more often, each for the time it was one, than those of units used once, that kind left too early and its
bonus grows; if less often, it shrinks. A bonus is a multiple of the mean time between two uses of a unit, so that it is
long enough for the next use, and not much longer, whatever the size of the store. (ARC, Megiddo and Modha, FAST '03,
learns from ghosts how to share memory between what was used once and more often; LHD, Beckmann et al., NSDI '18, ranks
by how often a kind is hit for the time it takes up.)

**Prefixes.** The owner says which units extend which (`follows`). Units that something extends leave the queue when
their turn comes, and are the next to go when nothing does any more: chains go from their ends. While the end of one is
spared, so is all before it, unless nothing else is left. Spared units are not looked at again before as many others
have gone.

Every operation is O(1), amortised. A unit takes some 150 bytes: its fields lie in columns, at the place that `_places`
tells; the first places are the queues themselves. A ghost takes some 150 bytes too.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import exp, inf, log2
from typing import Any

from kvpage_server.store.eviction import BURST, Unit, name_of

_END, _ONCE, _OFTEN = 0, 1, 4
_KINDS = 5
_NOBODY = -1

_FRESH = 8  # units that came since
_GHOSTS = 4  # for each unit
_FEWEST_GHOSTS, _MOST_GHOSTS = 1 << 14, 1 << 17
_FIRST_BONUS = (-4.0, 0.0, 1.0, 1.0, 1.0)  # times the mean time between uses, and for the last two once and twice more
_LOWEST, _HIGHEST = (-4.0, 0.0, -1.0, -1.0, -1.0), (1.0, 0.0, 4.0, 4.0, 4.0)
_TIMES = (1, 0, 1, 2, 3)
_LEARN = 1.0  # of a doubling, in the mean time between uses
_MEMORY = 4  # times as many units as there are: how much time what was learned is worth
_DOUBT = 8  # comebacks a kind is taken to have had at the mean rate
_LEARN_EVERY = 64  # units that came
_MEAN_OVER = 256  # uses
_MOST_STEPS = 4096  # up a chain, to see that it does not bite its tail
_USES_BITS, _KIND_BITS = 8, 3


class Prefix:
    """See the module."""

    def __init__(self) -> None:
        self.now = 0
        self._reset()

    def _reset(self) -> None:
        self._time = 0  # units that came so far
        self._places: dict[Unit, int] = {}
        self._free: list[int] = []
        self._units: list[Unit | None] = [None] * _KINDS
        self._before = array("i", range(_KINDS))  # neighbours in the queue: itself when it is in none
        self._after = array("i", range(_KINDS))
        self._kind = array("b", range(_KINDS))
        self._uses = array("B", bytes(_KINDS))
        self._last = array("q", [0] * _KINDS)  # use, in units that came
        self._at = array("q", [0] * _KINDS)  # last use, in seconds
        self._counted = array("q", [0] * _KINDS)  # last use that counted, in seconds
        self._parent = array("i", [_NOBODY] * _KINDS)
        self._children = array("i", [0] * _KINDS)
        self._ghosts: OrderedDict[int, int] = OrderedDict()  # by name: last use, uses and kind in one number
        self._aside: list[tuple[Unit, int, int]] = []  # units that were spared, with their places and their parents'
        self._gone = 0  # so many were evicted since the last of them were queued again
        self._between = 0.0  # two uses of a unit, on average
        self._seen = 0  # so many uses went into it
        self._factor = list(_FIRST_BONUS)
        self._bonus = [0.0] * _KINDS
        self._learned = 0  # when
        self._absent = [0] * _KINDS  # ghosts by kind
        self._away = [0.0] * _KINDS  # for how long they were, together
        self._back = [0.0] * _KINDS  # how many came back

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._places)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._places

    # -- uses ------------------------------------------------------------------------------------------------------

    def used(self, unit: Unit) -> None:
        """The unit was written or read."""
        place = self._places.get(unit)
        if place is None:
            self._enter(unit)
            return
        self._unlink(place)
        if self.now - self._counted[place] >= BURST:
            self._counted[place] = self.now
            self._note_time_between(self._time - self._last[place])
            uses = self._uses[place] = min(self._uses[place] + 1, 255)
            self._kind[place] = min(uses.bit_length(), _OFTEN)
        self._at[place] = self.now
        self._last[place] = self._time
        self._link(place, self._before[self._kind[place]])

    def _enter(self, unit: Unit) -> None:
        uses = 1
        ghost = self._ghosts.pop(name_of(unit), None)
        if ghost is not None:
            last, before, kind = _unpacked(ghost)
            self._absent[kind] -= 1
            self._back[kind] += 1
            self._note_time_between(self._time - last)
            uses = min(before + 1, 255)
        self._time += 1
        place = self._new_place()
        self._places[unit], self._units[place] = place, unit
        self._uses[place] = uses
        self._at[place] = self._counted[place] = self.now
        self._last[place] = self._time
        self._parent[place], self._children[place] = _NOBODY, 0
        self._kind[place] = min(uses.bit_length(), _OFTEN)
        self._link(place, self._before[self._kind[place]])
        if self._time - self._learned >= _LEARN_EVERY:
            self._learn()

    def _new_place(self) -> int:
        if self._free:
            return self._free.pop()
        place = len(self._units)
        self._units.append(None)
        for column in (self._before, self._after):
            column.append(place)
        for numbers in (self._kind, self._uses, self._last, self._at, self._counted, self._parent, self._children):
            numbers.append(0)
        return place

    def idle(self, unit: Unit) -> int:
        """Seconds since a unit's last use."""
        return self.now - self._at[self._places[unit]]

    # -- prefixes --------------------------------------------------------------------------------------------------

    def follows(self, units: Sequence[Unit]) -> None:
        """Each of these extends the one before it."""
        before = _NOBODY
        for unit in units:
            place = self._places.get(unit, _NOBODY)
            if _NOBODY not in (before, place) and self._is_orphan(place) and not self._descends(before, place):
                self._adopt(before, place)
            before = place
        if before != _NOBODY and self._kind[before] == _ONCE and not self._children[before]:
            self._requeue(before, _END)

    def _is_orphan(self, place: int) -> bool:
        parent = self._parent[place]
        return parent == _NOBODY or self._units[parent] is None

    def _descends(self, place: int, ancestor: int) -> bool:
        """Whether a unit extends another, in any number of steps; taken for granted when there are too many."""
        if not self._children[ancestor]:
            return place == ancestor
        for _ in range(_MOST_STEPS):
            if place == ancestor:
                return True
            place = self._parent[place]
            if place == _NOBODY:
                return False
        return True

    def _adopt(self, parent: int, child: int) -> None:
        self._abandon(child)
        self._parent[child] = parent
        self._children[parent] += 1
        if self._kind[parent] == _END:
            self._requeue(parent, _ONCE)

    def _abandon(self, child: int) -> None:
        """A unit extends its parent no more."""
        parent = self._parent[child]
        if parent == _NOBODY:
            return
        self._parent[child] = _NOBODY
        self._children[parent] -= 1
        if self._children[parent]:
            return
        if self._units[parent] is None:
            self._free.append(parent)
        elif self._after[parent] == parent:
            self._link(parent, self._kind[parent])

    def _requeue(self, place: int, kind: int) -> None:
        self._unlink(place)
        self._kind[place] = kind
        self._link(place, self._before[kind])

    # -- queues ----------------------------------------------------------------------------------------------------

    def _link(self, place: int, behind: int) -> None:
        after = self._after[behind]
        self._before[place], self._after[place] = behind, after
        self._after[behind] = self._before[after] = place

    def _unlink(self, place: int) -> None:
        before, after = self._before[place], self._after[place]
        self._after[before], self._before[after] = after, before
        self._before[place] = self._after[place] = place

    # -- going -----------------------------------------------------------------------------------------------------

    def removed(self, unit: Unit) -> None:
        """The unit is gone and not missed."""
        place = self._places.pop(unit, None)
        if place is None:
            return
        self._unlink(place)
        self._units[place] = None
        self._abandon(place)
        if not self._children[place]:
            self._free.append(place)

    def evicted(self, unit: Unit) -> None:
        """The unit is gone for want of room."""
        place = self._places.get(unit)
        if place is None:
            return
        kind = self._kind[place]
        name = name_of(unit)
        if (old := self._ghosts.pop(name, None)) is not None:
            self._absent[_unpacked(old)[2]] -= 1
        self._ghosts[name] = _packed(self._last[place], self._uses[place], kind)
        self._absent[kind] += 1
        self._gone += 1
        self.removed(unit)
        most = min(max(_GHOSTS * len(self), _FEWEST_GHOSTS), _MOST_GHOSTS)
        while len(self._ghosts) > most:
            _, ghost = self._ghosts.popitem(last=False)
            self._absent[_unpacked(ghost)[2]] -= 1

    def victims(self) -> Iterator[Unit]:
        """The units in the order they should go."""
        if self._gone >= len(self._aside):
            self._bring_back(len(self._aside))
        before, cut = len(self._aside), 0
        while True:
            place = self._next()
            if place is not None:
                unit = self._units[place]
                assert unit is not None
                yield unit
                if self._places.get(unit) == place:
                    self._unlink(place)
                    self._aside.append((unit, place, self._parent[place]))
            elif before:  # what was spared in earlier rounds may go by now
                self._bring_back(before)
                before = 0
            elif cut < len(self._aside):  # nothing else is left than what comes before what is spared
                unit, place, _ = self._aside[cut]
                cut += 1
                if self._places.get(unit) == place:
                    self._abandon(place)
            else:
                return

    def _bring_back(self, count: int) -> None:
        """Queue the first of those again that were spared."""
        some, self._aside = self._aside[:count], self._aside[count:]
        self._gone = 0
        for unit, place, parent in some:
            if self._places.get(unit) != place:
                continue
            if self._after[place] == place and not self._children[place]:
                self._link(place, self._before[self._kind[place]])
            before = self._units[parent] if parent != _NOBODY and self._parent[place] == _NOBODY else None
            if before is not None:
                self.follows((before, unit))

    def _next(self) -> int | None:
        """The place of the unit to go next, which nothing extends."""
        after, fresh_from = self._after, self._time - _FRESH
        while True:
            found = fresh = None
            lowest = lowest_fresh = inf
            for kind in range(_KINDS):
                first = after[kind]
                if first == kind:
                    continue
                last = self._last[first]
                rank = last + self._bonus[kind]
                if kind <= _ONCE and last > fresh_from:
                    if rank < lowest_fresh:
                        fresh, lowest_fresh = first, rank
                elif rank < lowest:
                    found, lowest = first, rank
            if found is None:
                found = fresh
            if found is None or not self._children[found]:
                return found
            self._unlink(found)

    # -- learning --------------------------------------------------------------------------------------------------

    def _note_time_between(self, uses: int) -> None:
        self._seen = min(self._seen + 1, _MEAN_OVER)
        self._between += (uses - self._between) / self._seen

    def _learn(self) -> None:
        passed, self._learned = self._time - self._learned, self._time
        kept = exp(-passed / (_MEMORY * max(len(self._places), 1)))
        for kind in range(_KINDS):
            self._back[kind] *= kept
            self._away[kind] = self._away[kind] * kept + self._absent[kind] * passed
        came_back, away = sum(self._back), sum(self._away)
        if came_back and away:
            doubt = _DOUBT / (came_back / away)
            rates = [(self._back[kind] + _DOUBT) / (self._away[kind] + doubt) for kind in range(_KINDS)]
            step = _LEARN * passed / max(self._between, 1.0)
            for kind in range(_KINDS):
                better = min(max(log2(rates[kind] / rates[_ONCE]), -2.0), 2.0)
                self._factor[kind] = min(max(self._factor[kind] + step * better, _LOWEST[kind]), _HIGHEST[kind])
        between = self._between or float(len(self._places))
        self._bonus = [factor * times * between for factor, times in zip(self._factor, _TIMES, strict=True)]

    def clear(self) -> dict[Unit, Any]:
        """Forget everything; what there was."""
        old = self._places
        self._reset()
        return old


def _packed(last: int, uses: int, kind: int) -> int:
    return (last << _USES_BITS | uses) << _KIND_BITS | kind


def _unpacked(ghost: int) -> tuple[int, int, int]:
    rest, kind = ghost >> _KIND_BITS, ghost & (1 << _KIND_BITS) - 1
    return rest >> _USES_BITS, rest & (1 << _USES_BITS) - 1, kind
