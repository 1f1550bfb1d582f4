"""allkeys-prefix: units that are used again are kept longer, and the end of a prefix is evicted before its beginning.

**Kinds.** There are five kinds of units, each with a queue in the order of last use: ends of a chain that were used
once, others used once, and those used 2 or 3, 4 to 7, 8 or more times. The victim is the unit that is worth least among
the first of each queue. Time is the number of inserted units, so nothing ages while nothing is inserted. The newest
units stay while there is anything else, since their writer may not have finished its chain.

**Worth** is learned: how often units of a kind and an age are used again (see `worth`). A unit that was evicted becomes
a ghost: its name, kind and last use are remembered and count like those of other units. So the policy also learns which
units are used again after their eviction. (ARC, Megiddo and Modha, FAST '03, uses ghosts to divide memory between units
with one use and with several; LHD, Beckmann et al., NSDI '18, ranks units by the hits of their class and age per used
space and time.)

**Prefixes.** The owner says which units extend which (`follows`). A unit with extensions leaves its queue at its turn,
and is evicted once it has no extension any more. So chains go from their ends. If the end of a chain is spared, so is
the rest, unless nothing else is left. Protected units are examined again after the same number of evictions.

Every operation is amortised O(1). A unit takes some 150 bytes: its fields are in columns, at the place that `_places`
has for it; the first places are the queues themselves. A ghost takes some 150 bytes, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import exp, inf
from operator import mul

from kvpage_server.core.python.lru import SLOT_BITS as _SLOT
from kvpage_server.store.eviction.queues import BURST, NOBODY, QUEUES, Queues, Unit, name_of

# -- worth -------------------------------------------------------------------------------------------------------------
#
# The worth of units by kind and age: how soon they will be used again, learned from earlier uses.
#
# An age is the time since the last use. For each kind and age it is known how much time units spent in it, whether they
# still exist or were evicted, and how many uses ended it. The chance of a use at a moment is taken to be the product of
# a factor for the kind and one for the age (proportional hazards: Cox, 1972). A unit's worth is the highest mean of
# that chance over any period that starts now (the index of Gittins, 1979), so units that are usually used again after
# minutes are not worth less before that.
#
# Time is the number of inserted units, in slots. Every operation is amortised O(1).

_AGES = 28  # the first four last a slot each; then each doubling has two
_EVERY, _SHARE = 256, 64  # learn after this many new units at least, or after this share of all
_MEMORY = 16  # how long learned values count, in multiples of the number of units
# Prior uses of each kind and age, with the expected frequency: many, because the blocks of a prompt are used together;
# in a smaller store, the number of its units.
_DOUBT = 1024

_LASTS = [1 << max(age // 2 - 1, 0) for age in range(_AGES)]  # in slots
_AGE_OF = bytes(age for age, lasts in enumerate(_LASTS) for _ in range(lasts))  # by slots
_OLDEST = len(_AGE_OF) - 1


class Worth:
    """The worth of units of several kinds. `expected` is the prior frequency of use of each kind."""

    def __init__(self, expected: Sequence[float]) -> None:
        kinds = len(expected)
        self._expected = expected
        self._learned = 0  # when
        self.due = _EVERY  # when to learn again
        self._last_used: list[dict[int, int]] = [{} for _ in range(kinds)]  # number of units, by slot
        self._again = [[0.0] * _AGES for _ in range(kinds)]  # uses that ended an age
        self._time = [[0.0] * _AGES for _ in range(kinds)]  # of all units together
        self._of_age = [1.0] * _AGES
        self._worth = [[factor] * _AGES for factor in expected]

    def began(self, kind: int, last: int) -> None:
        """Count a unit that now belongs to a kind, with its last use."""
        slots, slot = self._last_used[kind], last >> _SLOT
        slots[slot] = slots.get(slot, 0) + 1

    def came(self, kind: int, first: int, stop: int) -> None:
        """Units have become of a kind. One of them was used at each time from `first` to before `stop`."""
        slots = self._last_used[kind]
        while first < stop:
            slot = first >> _SLOT
            end = min((slot + 1) << _SLOT, stop)
            slots[slot] = slots.get(slot, 0) + end - first
            first = end

    def moved(self, kind: int, slot: int, count: int, now: int) -> None:
        """Units that were used in a slot of time count as used now, without another use."""
        slots, to = self._last_used[kind], now >> _SLOT
        slots[slot] -= count
        slots[to] = slots.get(to, 0) + count

    def ended(self, kind: int, last: int) -> None:
        """Count a unit that was removed or forgotten."""
        self._last_used[kind][last >> _SLOT] -= 1

    def used_again(self, kind: int, last: int, now: int) -> None:
        """Count another use of a unit, which leaves this kind and age."""
        self.ended(kind, last)
        self._again[kind][_age(last, now)] += 1

    def of(self, kind: int, last: int, now: int) -> float:
        """Return the worth of a unit of a kind with its last use at `last`."""
        return self._worth[kind][_age(last, now)]

    def learn(self, now: int, units: int) -> None:
        """Update the worths with the uses since the last update."""
        passed, self._learned = now - self._learned, now
        self.due = now + max(_EVERY, units // _SHARE)
        kept = exp(-passed / (_MEMORY * max(units, _EVERY)))
        for slots, again, time in zip(self._last_used, self._again, self._time, strict=True):
            for age in range(_AGES):
                again[age] *= kept
                time[age] *= kept
            for slot, count in list(slots.items()):
                if count:
                    time[_AGE_OF[min((now >> _SLOT) - slot, _OLDEST)]] += count * passed
                else:
                    del slots[slot]
        self._estimate(min(_DOUBT, units))

    def _estimate(self, doubt: int) -> None:
        uses, time = sum(map(sum, self._again)), sum(map(sum, self._time))
        if not uses or not time:
            return
        rate, of_age = uses / time, self._of_age
        of_kind = [
            (sum(again) + doubt * expected) / (rate * sum(map(mul, time, of_age)) + doubt)
            for again, time, expected in zip(self._again, self._time, self._expected, strict=True)
        ]
        before = 1.0  # an age without data is like the one before
        for age in range(_AGES):
            again = sum(row[age] for row in self._again)
            expected = rate * sum(row[age] * factor for row, factor in zip(self._time, of_kind, strict=True))
            before = of_age[age] = (again + doubt * before) / (expected + doubt)
        best = _best_means(of_age)
        self._worth = [[factor * mean for mean in best] for factor in of_kind]


def _best_means(of_age: list[float]) -> list[float]:
    """Return the highest mean, from each age on, over any time to wait."""
    best = [0.0] * _AGES
    later: list[tuple[float, int]] = []  # sums and times of later ages, the next one last
    for age in range(_AGES - 1, -1, -1):
        total, time = of_age[age] * _LASTS[age], _LASTS[age]
        while later and later[-1][0] * time > total * later[-1][1]:
            more, longer = later.pop()
            total, time = total + more, time + longer
        later.append((total, time))
        best[age] = total / time
    return best


def _age(last: int, now: int) -> int:
    return _AGE_OF[min((now >> _SLOT) - (last >> _SLOT), _OLDEST)]


_END, _ONCE, _OFTEN = 1, 2, 5  # kinds: the queues
_KINDS = range(1, QUEUES + 1)

_FRESH = 8  # inserted units; a unit is fresh until that many others were inserted
_GHOSTS = 4  # as many times as there are units
_FEWEST_GHOSTS, _MOST_GHOSTS = 1 << 14, 1 << 17
# By kind, with none at 0: a unit with twice the uses is used again in half the time, and the end of a prompt seldom.
_EXPECTED = (1.0, 0.25, 1.0, 2.0, 4.0, 8.0)
_MOST_STEPS = 4096  # steps up a chain in the search for a circle
_USES_BITS, _KIND_BITS = 8, 3


class Prefix(Queues):
    """See the module."""

    def reset(self) -> None:
        super().reset()
        self._time = 0  # number of inserted units
        self._before_time = 0  # the last use of the unit that was handed over last
        self._ghosts: OrderedDict[int, int] = OrderedDict()  # by name: last use, uses and kind in one number
        self._aside: list[tuple[Unit, int, int]] = []  # spared units, with their places and their parents'
        self._gone = 0  # units evicted since the last spared ones were queued again
        self._worth = Worth(_EXPECTED)

    # -- uses ------------------------------------------------------------------------------------------------------

    def used(self, unit: Unit) -> None:
        place = self._places.get(unit)
        if place is None:
            self._come(self._place_of(unit), self._uses_before(unit))
            return
        if self._last[place] == self._time and self._at[place] == self.now:
            return  # used in this second, without insertions since
        if self._waits(place):
            self._take(place)
            self._come(place, 1)
            return
        self._unlink(place)
        kind, last = self._queue[place] - self._home, self._last[place]
        if self.now - self._counted[place] >= BURST:
            self._counted[place] = self.now
            self._worth.used_again(kind, last, self._time)
            uses = self._uses[place] = min(self._uses[place] + 1, 255)
            kind = _kind(uses)
            self._queue[place] = self._home + kind
        else:
            self._worth.ended(kind, last)
        self._worth.began(kind, self._time)
        self._at[place] = self.now
        self._last[place] = self._time
        self._link(place, self._before[self._queue[place]])

    def used_all(self, units: list[Unit]) -> None:
        """Units were written or read, in this order. New ones are placed after all others."""
        if len(units) == 1:
            self.used(units[0])
            return
        if self.hands_over:
            super().used_all(units)
            return
        new, due, moved = self._touch_many(units, self._time, self.now - BURST)
        for queue, slot, count in moved:
            self._worth.moved(queue - self._home, slot, count, self._time)
        if self._ghosts:
            due += [unit for unit in new if name_of(unit) in self._ghosts]
        for unit in due:
            self.used(unit)
        if new:
            before, self._time = self._time, self._enter_all(new, _ONCE, self._time)
            self._worth.came(_ONCE, before + 1, self._time + 1)
            if self._time >= self._worth.due:
                self._worth.learn(self._time, len(self._places))

    def _uses_before(self, unit: Unit) -> int:
        """Return how often a new unit was used, including now, as far as is remembered."""
        if not self._ghosts:
            return 1
        ghost = self._ghosts.pop(name_of(unit), None)
        if ghost is None:
            return 1
        last, before, kind = _unpacked(ghost)
        self._worth.used_again(kind, last, self._time)
        return min(before + 1, 255)

    def _come(self, place: int, uses: int) -> None:
        self._time += 1
        self._at[place] = self.now
        self._enter(place, uses, self._time)
        self._link(place, self._before[self._queue[place]])
        if self._time >= self._worth.due:
            self._worth.learn(self._time, len(self._places))

    def _enter(self, place: int, uses: int, last: int) -> None:
        self._uses[place] = uses
        self._counted[place] = self._at[place]
        self._last[place] = last
        self._parent[place], self._children[place] = NOBODY, 0
        kind = _kind(uses)
        self._queue[place] = self._home + kind
        self._worth.began(kind, last)

    def inherit(self, place: int) -> None:
        self._before_time -= 1
        self._enter(place, 1, self._before_time)
        self._link(place, self._queue[place])

    # -- prefixes --------------------------------------------------------------------------------------------------

    def follows(self, units: Sequence[Unit]) -> None:
        before = NOBODY
        for unit in units:
            place = self._places.get(unit, NOBODY)
            if self._waits(place):
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
        """Return whether a unit extends another, directly or not. Assumed if there are too many steps."""
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
        """Remove the link from a unit to its parent."""
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
        self._worth.ended(self._queue[place] - self._home, self._last[place])
        self._worth.began(kind, self._last[place])
        queue = self._queue[place] = self._home + kind
        first = self._after[queue]
        is_first = first != queue and self._last[place] < self._last[first]
        self._link(place, queue if is_first else self._before[queue])

    # -- going -----------------------------------------------------------------------------------------------------

    def removed(self, unit: Unit) -> None:
        place = self._places.get(unit)
        if place is None:
            return
        if not self._waits(place):
            self._worth.ended(self._queue[place] - self._home, self._last[place])
        self._leave(unit, place)

    def evicted(self, unit: Unit) -> None:
        place = self._places.get(unit)
        if place is None:
            return
        if not self._waits(place):
            self._remember(unit, place)
        self._leave(unit, place)

    def _leave(self, unit: Unit, place: int) -> None:
        del self._places[unit]
        self._units[place] = None
        if self._waits(place):
            self._take(place)
            self._give_back(place)
            return
        self._unlink(place)
        self._abandon(place)
        if not self._children[place]:
            self._give_back(place)

    def _remember(self, unit: Unit, place: int) -> None:
        self._gone += 1
        name = name_of(unit)
        if (old := self._ghosts.pop(name, None)) is not None:
            self._forget(old)
        self._ghosts[name] = _packed(self._last[place], self._uses[place], self._queue[place] - self._home)
        most = min(max(_GHOSTS * len(self), _FEWEST_GHOSTS), _MOST_GHOSTS)
        while len(self._ghosts) > most:
            self._forget(self._ghosts.popitem(last=False)[1])

    def _forget(self, ghost: int) -> None:
        last, _, kind = _unpacked(ghost)
        self._worth.ended(kind, last)

    def victims(self) -> Iterator[Unit]:
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
            elif before:  # units that were protected in earlier rounds may be evicted now
                self._bring_back(before)
                before = 0
            elif cut < len(self._aside):  # only the beginnings of spared chains are left
                unit, place, _ = self._aside[cut]
                cut += 1
                if self._places.get(unit) == place:
                    self._abandon(place)
            else:
                return

    def _bring_back(self, count: int) -> None:
        """Queue the first `count` spared units again."""
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
        """Return the place of the next victim, which nothing extends."""
        after, home, now, worth_of = self._after, self._home, self._time, self._worth.of
        while True:
            found = fresh = None
            lowest = inf
            for kind in _KINDS:
                first = after[home + kind]
                if first == home + kind:
                    continue
                last = self._last[first]
                if kind <= _ONCE and last > now - _FRESH:
                    if fresh is None or last < self._last[fresh]:
                        fresh = first
                elif (worth := worth_of(kind, last, now)) < lowest:
                    found, lowest = first, worth
            if found is None:
                found = fresh
            if found is None or not self._children[found]:
                return found
            self._unlink(found)


def _kind(uses: int) -> int:
    return min(uses.bit_length() + 1, _OFTEN)


def _packed(last: int, uses: int, kind: int) -> int:
    return (last << _USES_BITS | uses) << _KIND_BITS | kind


def _unpacked(ghost: int) -> tuple[int, int, int]:
    rest, kind = ghost >> _KIND_BITS, ghost & (1 << _KIND_BITS) - 1
    return rest >> _USES_BITS, rest & (1 << _USES_BITS) - 1, kind
