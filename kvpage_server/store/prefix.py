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

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import exp, inf, log2

from kvpage_server.store.eviction import BURST, Unit, name_of
from kvpage_server.store.queues import NOBODY, QUEUES, Queues

_END, _ONCE, _OFTEN = 1, 2, 5  # kinds: the queues
_KINDS = range(1, QUEUES + 1)

_FRESH = 8  # units that came since
_GHOSTS = 4  # for each unit
_FEWEST_GHOSTS, _MOST_GHOSTS = 1 << 14, 1 << 17
# By kind, with none at 0. A bonus is in times the mean time between uses, and for the last two kinds in twice and three
# times that.
_FIRST_BONUS = (0.0, -4.0, 0.0, 1.0, 1.0, 1.0)
_LOWEST, _HIGHEST = (0.0, -4.0, 0.0, -1.0, -1.0, -1.0), (0.0, 1.0, 0.0, 4.0, 4.0, 4.0)
_TIMES = (0, 1, 0, 1, 2, 3)
_LEARN = 1.0  # of a doubling, in the mean time between uses
_MEMORY = 4  # times as many units as there are: how much time what was learned is worth
_DOUBT = 8  # comebacks a kind is taken to have had at the mean rate
_LEARN_EVERY = 64  # units that came
_MEAN_OVER = 256  # uses
_MOST_STEPS = 4096  # up a chain, to see that it does not bite its tail
_USES_BITS, _KIND_BITS = 8, 3


class Prefix(Queues):
    """See the module."""

    def _reset(self) -> None:
        super()._reset()
        self._time = 0  # units that came so far
        self._before_time = 0  # the last use of what was handed over last
        self._ghosts: OrderedDict[int, int] = OrderedDict()  # by name: last use, uses and kind in one number
        self._aside: list[tuple[Unit, int, int]] = []  # units that were spared, with their places and their parents'
        self._gone = 0  # so many were evicted since the last of them were queued again
        self._between = 0.0  # two uses of a unit, on average
        self._seen = 0  # so many uses went into it
        self._factor = list(_FIRST_BONUS)
        self._bonus = [0.0] * (QUEUES + 1)
        self._learned = 0  # when
        self._absent = [0] * (QUEUES + 1)  # ghosts by kind
        self._away = [0.0] * (QUEUES + 1)  # for how long they were, together
        self._back = [0.0] * (QUEUES + 1)  # how many came back

    # -- uses ------------------------------------------------------------------------------------------------------

    def used(self, unit: Unit) -> None:
        """The unit was written or read."""
        place = self._places.get(unit)
        if place is None:
            self._come(self._place_of(unit), self._uses_before(unit))
            return
        if self._older >= 0 and self._is_older(place):
            self._take(place)
            self._come(place, 1)
            return
        self._unlink(place)
        if self.now - self._counted[place] >= BURST:
            self._counted[place] = self.now
            self._note_time_between(self._time - self._last[place])
            uses = self._uses[place] = min(self._uses[place] + 1, 255)
            self._queue[place] = self._home + _kind(uses)
        self._at[place] = self.now
        self._last[place] = self._time
        self._link(place, self._before[self._queue[place]])

    def _uses_before(self, unit: Unit) -> int:
        """How often a unit that comes was used, this time included, as far as is remembered."""
        ghost = self._ghosts.pop(name_of(unit), None)
        if ghost is None:
            return 1
        last, before, kind = _unpacked(ghost)
        self._absent[kind] -= 1
        self._back[kind] += 1
        self._note_time_between(self._time - last)
        return min(before + 1, 255)

    def _come(self, place: int, uses: int) -> None:
        self._time += 1
        self._at[place] = self.now
        self._enter(place, uses, self._time)
        self._link(place, self._before[self._queue[place]])
        if self._time - self._learned >= _LEARN_EVERY:
            self._learn()

    def _enter(self, place: int, uses: int, last: int) -> None:
        self._uses[place] = uses
        self._counted[place] = self._at[place]
        self._last[place] = last
        self._parent[place], self._children[place] = NOBODY, 0
        self._queue[place] = self._home + _kind(uses)

    def _inherit(self, place: int) -> None:
        self._before_time -= 1
        self._enter(place, 1, self._before_time)
        self._link(place, self._queue[place])

    # -- prefixes --------------------------------------------------------------------------------------------------

    def follows(self, units: Sequence[Unit]) -> None:
        """Each of these extends the one before it."""
        before = NOBODY
        for unit in units:
            place = self._places.get(unit, NOBODY)
            if self._older >= 0 and self._is_older(place):
                place = NOBODY
            if NOBODY not in (before, place) and self._is_orphan(place) and not self._descends(before, place):
                self._adopt(before, place)
            before = place
        if before != NOBODY and self._queue[before] == self._home + _ONCE and not self._children[before]:
            self._requeue(before, _END)

    def _is_orphan(self, place: int) -> bool:
        parent = self._parent[place]
        return parent == NOBODY or self._units[parent] is None

    def _descends(self, place: int, ancestor: int) -> bool:
        """Whether a unit extends another, in any number of steps; taken for granted when there are too many."""
        if not self._children[ancestor]:
            return place == ancestor
        for _ in range(_MOST_STEPS):
            if place == ancestor:
                return True
            place = self._parent[place]
            if place == NOBODY:
                return False
        return True

    def _adopt(self, parent: int, child: int) -> None:
        self._abandon(child)
        self._parent[child] = parent
        self._children[parent] += 1
        if self._queue[parent] == self._home + _END:
            self._requeue(parent, _ONCE)

    def _abandon(self, child: int) -> None:
        """A unit extends its parent no more."""
        parent = self._parent[child]
        if parent == NOBODY:
            return
        self._parent[child] = NOBODY
        self._children[parent] -= 1
        if self._children[parent]:
            return
        if self._units[parent] is None:
            self._give_back(parent)
        elif not self._after[parent]:
            self._link(parent, self._queue[parent])

    def _requeue(self, place: int, kind: int) -> None:
        self._unlink(place)
        queue = self._queue[place] = self._home + kind
        first = self._after[queue]
        is_first = first != queue and self._last[place] < self._last[first]
        self._link(place, queue if is_first else self._before[queue])

    # -- going -----------------------------------------------------------------------------------------------------

    def removed(self, unit: Unit) -> None:
        """The unit is gone and not missed."""
        place = self._places.pop(unit, None)
        if place is None:
            return
        self._units[place] = None
        if self._older >= 0 and self._is_older(place):
            self._take(place)
            self._give_back(place)
            return
        self._unlink(place)
        self._abandon(place)
        if not self._children[place]:
            self._give_back(place)

    def evicted(self, unit: Unit) -> None:
        """The unit is gone for want of room."""
        place = self._places.get(unit)
        if place is None or (self._older >= 0 and self._is_older(place)):
            self.removed(unit)
            return
        kind = self._queue[place] - self._home
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
        yield from self._older_victims()
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
            if not self._after[place] and not self._children[place]:
                self._link(place, self._before[self._queue[place]])
            before = self._units[parent] if parent != NOBODY and self._parent[place] == NOBODY else None
            if before is not None:
                self.follows((before, unit))

    def _next(self) -> int | None:
        """The place of the unit to go next, which nothing extends."""
        after, home, fresh_from = self._after, self._home, self._time - _FRESH
        while True:
            found = fresh = None
            lowest = lowest_fresh = inf
            for kind in _KINDS:
                first = after[home + kind]
                if first == home + kind:
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
        for kind in _KINDS:
            self._back[kind] *= kept
            self._away[kind] = self._away[kind] * kept + self._absent[kind] * passed
        came_back, away = sum(self._back), sum(self._away)
        if came_back and away:
            doubt = _DOUBT / (came_back / away)
            rates = [(back + _DOUBT) / (gone + doubt) for back, gone in zip(self._back, self._away, strict=True)]
            step = _LEARN * passed / max(self._between, 1.0)
            for kind in _KINDS:
                better = min(max(log2(rates[kind] / rates[_ONCE]), -2.0), 2.0)
                self._factor[kind] = min(max(self._factor[kind] + step * better, _LOWEST[kind]), _HIGHEST[kind])
        between = self._between or float(len(self._places))
        self._bonus = [factor * times * between for factor, times in zip(self._factor, _TIMES, strict=True)]


def _kind(uses: int) -> int:
    return min(uses.bit_length() + 1, _OFTEN)


def _packed(last: int, uses: int, kind: int) -> int:
    return (last << _USES_BITS | uses) << _KIND_BITS | kind


def _unpacked(ghost: int) -> tuple[int, int, int]:
    rest, kind = ghost >> _KIND_BITS, ghost & (1 << _KIND_BITS) - 1
    return rest >> _USES_BITS, rest & (1 << _USES_BITS) - 1, kind
