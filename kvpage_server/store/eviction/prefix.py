"""allkeys-prefix: units that are used again are kept longer, and the end of a prefix is evicted before its beginning.

**Kinds.** There are five kinds of units, each with a queue in the order of last use:

    1  the end of a chain, used once
    2  another unit, used once
    3  used 2 or 3 times
    4  used 4 to 7 times
    5  used 8 times or more

The victim is the unit with the lowest score among the first units of the queues. Time is the number of inserted units,
so no unit ages while none is inserted. The last `_FRESH` inserted units are evicted only if no others are left, because
their client may not have finished its chain.

**Scores** are learned: the score of a unit is the frequency with which units of its kind and age are used again (see
`ReuseScores`). An evicted unit becomes a ghost: the policy keeps its name, kind and last use, and counts them like
those of other units. So the policy also learns which units are used again after their eviction. (ARC, Megiddo and
Modha, FAST '03, uses ghosts to divide memory between units with one use and with several; LHD, Beckmann et al., NSDI
'18, ranks units by the hits of their class and age per used space and time.)

**Prefixes.** The caller of `follows` reports which units extend which: a block extends the block of the tokens before
it. When such a unit with extensions becomes the victim, it is taken out of its queue instead, and returns when its last
extension is removed. So chains are evicted from their ends. If the end of a chain is spared, the whole chain is spared,
unless no other units are left. Spared units are examined again after as many evictions as there are spared units.

Every operation is amortised O(1). A unit takes about 150 bytes, in the columns of `Queues` and in `_places`. A ghost
takes about 150 bytes, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, inf
from operator import mul

from kvpage_server.core.python.lru import SLOT_BITS as _SLOT
from kvpage_server.store.eviction.queues import BURST, NO_PLACE, QUEUES, OrderedMap, Queues, Unit, name_of

# -- scores ------------------------------------------------------------------------------------------------------------
#
# The scores of units by kind and age: an estimate of how soon a unit is used again, learned from earlier uses.
#
# The age of a unit is the time since its last use. Time is the number of inserted units, in slots of 2**_SLOT. For each
# kind and age two numbers are kept: the time that units and ghosts have spent at this age, and the number of uses that
# happened at it. Their quotient, uses per unit and time, is the frequency of use.
#
# The frequency is modelled as the product of a factor for the kind and a factor for the age (proportional hazards: Cox,
# 1972), so that each factor is learned from the uses of many kinds or ages. A unit's score is the highest mean of the
# frequency over any period that starts now (the index of Gittins, 1979). So a unit that is usually used again after
# some minutes keeps its score until these minutes are over.
#
# Every operation is amortised O(1); `learn` is O(kinds * ages + slots in use).

_AGES = 28  # number of ages: the first four last a slot each, then there are two ages for each doubling of the time
# New units after which `learn` is due: 256, or a 64th of all units if that is more
_LEARN_EVERY, _LEARN_SHARE = 256, 64
_DECAY_TIME = 16  # the learned numbers decay to 1/e while this many times the number of units are inserted
# Weight of the prior in `_estimate`, as a number of uses of each kind and age. It is large, because the blocks of a
# prompt are used together, so that a thousand uses may be one event. In a smaller store it is the number of its units.
_PRIOR_USES = 1024

_AGE_LENGTHS = [1 << max(age // 2 - 1, 0) for age in range(_AGES)]  # length of each age, in slots
# Age by the slots since the last use
_AGE_OF = bytes(age for age, lasts in enumerate(_AGE_LENGTHS) for _ in range(lasts))
_OLDEST = len(_AGE_OF) - 1


class ReuseScores:
    """Scores of units by kind and age. `expected` is the prior frequency of use of each kind, relative to the mean.

    The policy calls `add_unit` or `add_units` when a unit enters a kind, `used_again` or `remove_unit` when the unit
    leaves the kind, and `change_kind` for both. `moved` changes the last use of units that stay in their kind.
    """

    def __init__(self, expected: Sequence[float]) -> None:
        kinds = len(expected)
        self._expected = expected
        self._learned = 0  # time of the last `learn`
        self.due = _LEARN_EVERY  # time of the next `learn`

        # Number of units and ghosts of each kind, by the slot of their last use. An age is a range of these slots that
        # moves with time, so nothing has to be updated when units grow older.
        self._last_used: list[dict[int, int]] = [{} for _ in range(kinds)]

        # The statistics by kind and age, which decay at each `learn`.
        self._again = [[0.0] * _AGES for _ in range(kinds)]  # number of uses at this age
        self._time = [[0.0] * _AGES for _ in range(kinds)]  # sum of the times that units and ghosts spent at this age

        # The results of `learn`.
        self._age_factors = [1.0] * _AGES  # factor of each age
        self._score_table = [[factor] * _AGES for factor in expected]  # scores by kind and age

    def add_unit(self, kind: int, last: int) -> None:
        """Count a unit that enters a kind, with the time of its last use."""
        slots, slot = self._last_used[kind], last >> _SLOT
        slots[slot] = slots.get(slot, 0) + 1

    def add_units(self, kind: int, first: int, stop: int) -> None:
        """Count units that enter a kind, one with its last use at each time from `first` to before `stop`."""
        slots = self._last_used[kind]
        while first < stop:
            slot = first >> _SLOT
            end = min((slot + 1) << _SLOT, stop)
            slots[slot] = slots.get(slot, 0) + end - first
            first = end

    def moved(self, kind: int, slot: int, count: int, now: int) -> None:
        """Set the last use of `count` units of a kind from `slot` to `now`, without counting a use, see BURST."""
        slots, to = self._last_used[kind], now >> _SLOT
        slots[slot] -= count
        slots[to] = slots.get(to, 0) + count

    def remove_unit(self, kind: int, last: int) -> None:
        """Count a unit that leaves a kind, or a ghost that is dropped, with the time of its last use."""
        self._last_used[kind][last >> _SLOT] -= 1

    def change_kind(self, old: int, new: int, last: int) -> None:
        """Move a unit from one kind to another, with the time of its last use."""
        slots, slot = self._last_used[new], last >> _SLOT
        self._last_used[old][slot] -= 1
        slots[slot] = slots.get(slot, 0) + 1

    def used_again(self, kind: int, last: int, now: int) -> None:
        """Count a use at `now` of a unit or ghost, and remove it from this kind. Its use before was at `last`."""
        self.remove_unit(kind, last)
        self._again[kind][_age(last, now)] += 1

    def of(self, kind: int, last: int, now: int) -> float:
        """Return the score at `now` of a unit of a kind with its last use at `last`."""
        return self._score_table[kind][_age(last, now)]

    def learn(self, now: int, units: int) -> None:
        """Update the scores with the uses since the last call. `units` is the number of units in the store."""
        passed, self._learned = now - self._learned, now
        self.due = now + max(_LEARN_EVERY, units // _LEARN_SHARE)
        kept = exp(-passed / (_DECAY_TIME * max(units, _LEARN_EVERY)))
        for slots, again, time in zip(self._last_used, self._again, self._time, strict=True):
            # Let the old statistics decay.
            for age in range(_AGES):
                again[age] *= kept
                time[age] *= kept
            # Add the time that passed to the present age of each unit, and drop slots without units.
            for slot, count in list(slots.items()):
                if count:
                    time[_AGE_OF[min((now >> _SLOT) - slot, _OLDEST)]] += count * passed
                else:
                    del slots[slot]
        self._estimate(min(_PRIOR_USES, units))

    def _estimate(self, prior: int) -> None:
        """Estimate the factors of kinds and ages from the statistics, and the scores from the factors.

        A factor is the number of observed uses, divided by the number that the mean frequency and the other factors
        predict. A prior of `prior` predicted uses is added to both numbers.
        """
        # The mean frequency of use; without any uses the scores stay as they are.
        uses, time = sum(map(sum, self._again)), sum(map(sum, self._time))
        if not uses or not time:
            return
        rate, age_factors = uses / time, self._age_factors
        # The factors of kinds, with the last factors of ages. The prior is the expected frequency.
        kind_factors = [
            (sum(again) + prior * expected) / (rate * sum(map(mul, time, age_factors)) + prior)
            for again, time, expected in zip(self._again, self._time, self._expected, strict=True)
        ]
        # The factors of ages, with the new factors of kinds. The prior is the factor of the age before.
        before = 1.0
        for age in range(_AGES):
            again = sum(row[age] for row in self._again)
            expected = rate * sum(row[age] * factor for row, factor in zip(self._time, kind_factors, strict=True))
            before = age_factors[age] = (again + prior * before) / (expected + prior)
        best = _best_means(age_factors)
        self._score_table = [[factor * mean for mean in best] for factor in kind_factors]


def _best_means(age_factors: list[float]) -> list[float]:
    """Return for each age the highest mean of the factors over any period that starts with it. O(ages).

    The best period from an age on is the age itself, extended by the best periods that follow as long as they have
    higher means (pool adjacent violators). So consecutive periods on the stack have decreasing means.
    """
    best = [0.0] * _AGES
    later: list[tuple[float, int]] = []  # sum of factors and length in slots of later periods, the next one last
    for age in range(_AGES - 1, -1, -1):
        total, time = age_factors[age] * _AGE_LENGTHS[age], _AGE_LENGTHS[age]
        while later and later[-1][0] * time > total * later[-1][1]:
            more, longer = later.pop()
            total, time = total + more, time + longer
        later.append((total, time))
        best[age] = total / time
    return best


def _age(last: int, now: int) -> int:
    """Return the age at `now` of a unit with its last use at `last`."""
    return _AGE_OF[min((now >> _SLOT) - (last >> _SLOT), _OLDEST)]


_END, _ONCE, _OFTEN = 1, 2, 5  # kinds, which are also the numbers of the queues
_KINDS = range(1, QUEUES + 1)

_FRESH = 8  # inserted units: a unit used once is fresh until that many others were inserted
_GHOSTS = 4  # ghosts that are kept for each unit, within the two bounds below
_FEWEST_GHOSTS, _MOST_GHOSTS = 1 << 14, 1 << 17
# Prior frequency of use by kind; there is no kind 0. A unit with twice the uses is expected to be used again in half
# the time. The end of a prompt is expected to be used again a fourth as often as another unit that was used once.
_EXPECTED = (1.0, 0.25, 1.0, 2.0, 4.0, 8.0)
_MOST_STEPS = 4096  # steps up a chain in the search for a cycle
_USES_BITS, _KIND_BITS = 8, 3  # low bits of a ghost's number that contain the uses and the kind, see `_packed`


class Prefix(Queues):
    """The policy allkeys-prefix. `_parent` and `_children` of `Queues` link a unit to the unit that it extends.

    A unit is in the queue of its kind. It is in no queue if it was selected as a victim and either has children or was
    spared. A removed unit with children keeps its place until the last of them is removed, so that their links stay
    valid.
    """

    def reset(self) -> None:
        super().reset()
        self._time = 0  # number of units inserted so far: the clock of `_last` and `ReuseScores`
        # Last use of the unit that was taken over last: a negative time, before the uses of all inserted units.
        self._before_time = 0
        # Ghosts, by the unit's `name_of`: last use, uses and kind in one number (`_packed`). The first evicted is
        # first.
        self._ghosts: OrderedMap[int, int] = OrderedMap()
        # Spared units, the first spared first, with the unit's place and its parent's place when it was spared.
        self._spared: list[tuple[Unit, int, int]] = []
        self._evictions = 0  # number of units evicted since spared units were returned to their queues
        self._scores = ReuseScores(_EXPECTED)

    # -- uses ------------------------------------------------------------------------------------------------------

    def used(self, unit: Unit) -> None:
        # Insert a new unit.
        place = self._places.get(unit)
        if place is None:
            self._insert_last(self._place_of(unit), self._uses_before(unit))
            return
        # Skip a unit that was already used in this second, if none was inserted since.
        if self._last[place] == self._time and self._at[place] == self.now:
            return
        # Take over a unit of the policy before this one as a new unit.
        if self._waits(place):
            self._unlink_waiting(place)
            self._insert_last(place, 1)
            return
        # Count the use, unless it is less than BURST after the last counted one. A counted use may change the kind.
        self._unlink(place)
        kind, last = self._queue[place] - self._heads, self._last[place]
        if self.now - self._counted[place] >= BURST:
            self._counted[place] = self.now
            self._scores.used_again(kind, last, self._time)
            uses = self._uses[place] = min(self._uses[place] + 1, 255)
            kind = _kind(uses)
            self._queue[place] = self._heads + kind
        else:
            self._scores.remove_unit(kind, last)
        # Move the unit to the end of the queue of its kind.
        self._scores.add_unit(kind, self._time)
        self._at[place] = self.now
        self._last[place] = self._time
        self._link(place, self._before[self._queue[place]])

    def used_all(self, units: list[Unit]) -> None:
        """Note writes or reads of units, in this order. New units are inserted after all others."""
        if len(units) == 1:
            self.used(units[0])
            return
        if self._old_heads >= 0:
            super().used_all(units)
            return
        # The core moves the known units whose last counted use is less than BURST ago: this use does not count.
        new, due, moved = self._touch_many(units, self._time, self.now - BURST)
        for queue, slot, count in moved:
            self._scores.moved(queue - self._heads, slot, count, self._time)
        # Uses that count, and units with a ghost, are processed one by one.
        if self._ghosts:
            due += [unit for unit in new if name_of(unit) in self._ghosts]
        for unit in due:
            self.used(unit)
        # The core inserts the remaining new units.
        if new:
            before, self._time = self._time, self._enter_all(new, _ONCE, self._time)
            self._scores.add_units(_ONCE, before + 1, self._time + 1)
            if self._time >= self._scores.due:
                self._scores.learn(self._time, len(self._places))

    def _uses_before(self, unit: Unit) -> int:
        """Return the number of uses of a new unit, including this one and those of its ghost. Drop the ghost."""
        if not self._ghosts:
            return 1
        ghost = self._ghosts.pop(name_of(unit))
        if ghost is None:
            return 1
        last, before, kind = _unpacked(ghost)
        self._scores.used_again(kind, last, self._time)
        return min(before + 1, 255)

    def _insert_last(self, place: int, uses: int) -> None:
        """Insert a new unit at the end of the queue of its kind, and learn if that is due."""
        self._time += 1
        self._at[place] = self.now
        self._enter(place, uses, self._time)
        self._link(place, self._before[self._queue[place]])
        if self._time >= self._scores.due:
            self._scores.learn(self._time, len(self._places))

    def _enter(self, place: int, uses: int, last: int) -> None:
        """Set the fields of a new unit. `last` is its last use, as a number of inserted units."""
        self._uses[place] = uses
        self._counted[place] = self._at[place]
        self._last[place] = last
        self._parent[place], self._children[place] = NO_PLACE, 0
        kind = _kind(uses)
        self._queue[place] = self._heads + kind
        self._scores.add_unit(kind, last)

    def inherit(self, place: int) -> None:
        self._before_time -= 1
        self._enter(place, 1, self._before_time)
        self._link(place, self._queue[place])

    # -- prefixes --------------------------------------------------------------------------------------------------

    def follows(self, units: Sequence[Unit]) -> None:
        # Link each unit to the one before it, unless it has a parent already or the link would close a cycle.
        before = NO_PLACE
        for unit in units:
            place = self._places.get(unit, NO_PLACE)
            if self._old_heads >= 0 and self._is_in_old_queue(place):  # the unit waits
                place = NO_PLACE
            if before and place and before != place:
                parent = self._parent[place]
                is_orphan = parent == NO_PLACE or self._units[parent] is None  # it extends no existing unit
                if is_orphan and not (self._children[place] and self._descends(before, place)):
                    self._adopt(before, place)
            before = place
        # The last unit is the end of a chain, if it was used once and nothing extends it.
        if before != NO_PLACE and self._queue[before] == self._heads + _ONCE and not self._children[before]:
            self._requeue(before, _END)

    def _descends(self, place: int, ancestor: int) -> bool:
        """Return whether a unit is `ancestor`, or extends it directly or through other units.

        Return True also after _MOST_STEPS, since a link that is not made costs less than a longer search.
        """
        for _ in range(_MOST_STEPS):
            if place == ancestor:
                return True
            place = self._parent[place]
            if place == NO_PLACE:
                return False
        return True

    def _adopt(self, parent: int, child: int) -> None:
        """Link a unit to the unit that it extends, which then is no end of a chain."""
        if self._parent[child] != NO_PLACE:
            self._abandon(child)
        self._parent[child] = parent
        self._children[parent] += 1
        if self._queue[parent] == self._heads + _END:
            self._requeue(parent, _ONCE)

    def _abandon(self, child: int) -> None:
        """Remove the link from a unit to its parent. A parent without children may be evicted next."""
        parent = self._parent[child]
        if parent == NO_PLACE:
            return
        self._parent[child] = NO_PLACE
        self._children[parent] -= 1
        if self._children[parent]:
            return
        # Free the place of a removed parent. An existing parent in no queue returns to the front of its queue.
        if self._units[parent] is None:
            self._free_place(parent)
        elif not self._after[parent]:
            self._link(parent, self._queue[parent])

    def _requeue(self, place: int, kind: int) -> None:
        """Move a unit to the queue of another kind: to the front if its last use is before all uses there, else to the
        end.
        """
        self._unlink(place)
        self._scores.change_kind(self._queue[place] - self._heads, kind, self._last[place])
        queue = self._queue[place] = self._heads + kind
        first = self._after[queue]
        is_first = first != queue and self._last[place] < self._last[first]
        self._link(place, queue if is_first else self._before[queue])

    # -- removal and eviction --------------------------------------------------------------------------------------

    def removed(self, unit: Unit) -> None:
        place = self._places.get(unit)
        if place is None:
            return
        if not self._waits(place):
            self._scores.remove_unit(self._queue[place] - self._heads, self._last[place])
        self._leave(unit, place)

    def evicted(self, unit: Unit) -> None:
        place = self._places.get(unit)
        if place is None:
            return
        if not self._waits(place):
            self._remember(unit, place)
        self._leave(unit, place)

    def _leave(self, unit: Unit, place: int) -> None:
        """Remove a unit. Its place becomes free, unless other units extend it."""
        del self._places[unit]
        self._units[place] = None
        if self._waits(place):
            self._unlink_waiting(place)
            self._free_place(place)
            return
        self._unlink(place)
        self._abandon(place)
        if not self._children[place]:
            self._free_place(place)

    def _remember(self, unit: Unit, place: int) -> None:
        """Record the ghost of an evicted unit. Drop the oldest ghosts that are too many."""
        self._evictions += 1
        name = name_of(unit)
        if (old := self._ghosts.pop(name)) is not None:
            self._forget(old)
        self._ghosts.append(name, _packed(self._last[place], self._uses[place], self._queue[place] - self._heads))
        most = min(max(_GHOSTS * len(self), _FEWEST_GHOSTS), _MOST_GHOSTS)
        while len(self._ghosts) > most:
            self._forget(self._ghosts.popitem()[1])

    def _forget(self, ghost: int) -> None:
        """Remove a ghost, which was dropped from `_ghosts`, from the scores."""
        last, _, kind = _unpacked(ghost)
        self._scores.remove_unit(kind, last)

    def victims(self) -> Iterator[Unit]:
        # Units of the policy before this one are evicted first.
        yield from self._waiting_victims()
        # Examine spared units again after as many evictions, so that each eviction costs amortised O(1).
        if self._evictions >= len(self._spared):
            self._bring_back(len(self._spared))
        before, cut = len(self._spared), 0
        while True:
            # Offer the unit with the lowest score. A unit that still exists after that was spared.
            place = self._next()
            if place is not None:
                unit = self._units[place]
                assert unit is not None
                yield unit
                if self._places.get(unit) == place:
                    self._unlink(place)
                    self._spared.append((unit, place, self._parent[place]))
            # If the queues are empty, examine the units again that were spared in earlier calls.
            elif before:
                self._bring_back(before)
                before = 0
            # If only parents of spared units are left, unlink the spared units from them, so that the parents can be
            # evicted.
            elif cut < len(self._spared):
                unit, place, _ = self._spared[cut]
                cut += 1
                if self._places.get(unit) == place:
                    self._abandon(place)
            else:
                return

    def _bring_back(self, count: int) -> None:
        """Return the first `count` spared units to the ends of their queues, and link them to their parents again."""
        some, self._spared = self._spared[:count], self._spared[count:]
        self._evictions = 0
        for unit, place, parent in some:
            if self._places.get(unit) != place:  # removed since
                continue
            if not self._after[place] and not self._children[place]:
                self._link(place, self._before[self._queue[place]])
            before = self._units[parent] if parent != NO_PLACE and self._parent[place] == NO_PLACE else None
            if before is not None:
                self.follows((before, unit))

    def _next(self) -> int | None:
        """Return the place of the unit with the lowest score that no unit extends; None if the queues have none.

        Units that others extend are taken out of their queues on the way. `_abandon` returns them.
        """
        after, home, now, score_of = self._after, self._heads, self._time, self._scores.of
        while True:
            # Compare the first units of the queues: in a queue, the first has the oldest use.
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
                elif (score := score_of(kind, last, now)) < lowest:
                    found, lowest = first, score
            # A fresh unit is the victim only if there is no other.
            if found is None:
                found = fresh
            if found is None or not self._children[found]:
                return found
            self._unlink(found)


def _kind(uses: int) -> int:
    """Return the kind of a unit with a number of uses, if it is no end of a chain."""
    return min(uses.bit_length() + 1, _OFTEN)


def _packed(last: int, uses: int, kind: int) -> int:
    """Return a ghost as one number, which takes less memory than a tuple."""
    return (last << _USES_BITS | uses) << _KIND_BITS | kind


def _unpacked(ghost: int) -> tuple[int, int, int]:
    """Return the last use, the uses and the kind of a ghost."""
    rest, kind = ghost >> _KIND_BITS, ghost & (1 << _KIND_BITS) - 1
    return rest >> _USES_BITS, rest & (1 << _USES_BITS) - 1, kind
