"""What units are worth, by kind and age: how soon they may be used again, learned from those that were.

An age is the time since the last use. Of each kind and age it is known how long units were of it, whether they are
still there or had to go, and how many uses ended it. The chance of a use in a moment is taken to be the product of one
factor for the kind and one for the age (proportional hazards: Cox, 1972). What a unit is worth is the best mean of that
chance over any time from now on (the index of Gittins, 1979): what comes back after minutes is not worth less before.

Time is counted in units that came, and kept in slots. Every operation is O(1), amortised.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from operator import mul

from kvpage_server.core.python.uses import SLOT_BITS as _SLOT

_AGES = 28  # the first four last a slot each, then there are two to each doubling
_EVERY, _SHARE = 256, 64  # learn after so many units that came, at least, or that share of all
_MEMORY = 16  # times as many units as there are: how much time what was learned is worth
# Uses that a kind or an age is taken to have had as expected: many, since the blocks of a prompt come back together; as
# many as there are units in a store that is smaller.
_DOUBT = 1024

_LASTS = [1 << max(age // 2 - 1, 0) for age in range(_AGES)]  # in slots
_AGE_OF = bytes(age for age, lasts in enumerate(_LASTS) for _ in range(lasts))  # by slots
_OLDEST = len(_AGE_OF) - 1


class Worth:
    """What units of some kinds are worth, who are expected to be used again as often as `expected` says at first."""

    def __init__(self, expected: Sequence[float]) -> None:
        kinds = len(expected)
        self._expected = expected
        self._learned = 0  # when
        self.due = _EVERY  # when to learn again
        self._last_used: list[dict[int, int]] = [{} for _ in range(kinds)]  # how many, by slot
        self._again = [[0.0] * _AGES for _ in range(kinds)]  # uses that ended an age
        self._time = [[0.0] * _AGES for _ in range(kinds)]  # of all units together
        self._of_age = [1.0] * _AGES
        self._worth = [[factor] * _AGES for factor in expected]

    def began(self, kind: int, last: int) -> None:
        """A unit is of a kind, and was used at a time."""
        slots, slot = self._last_used[kind], last >> _SLOT
        slots[slot] = slots.get(slot, 0) + 1

    def came(self, kind: int, first: int, stop: int) -> None:
        """Units are of a kind, of which one was used at each time from `first` to before `stop`."""
        slots = self._last_used[kind]
        while first < stop:
            slot = first >> _SLOT
            end = min((slot + 1) << _SLOT, stop)
            slots[slot] = slots.get(slot, 0) + end - first
            first = end

    def moved(self, kind: int, slot: int, count: int, now: int) -> None:
        """So many of a kind that were used in a slot of time are used now, which does not count as another use."""
        slots, to = self._last_used[kind], now >> _SLOT
        slots[slot] -= count
        slots[to] = slots.get(to, 0) + count

    def ended(self, kind: int, last: int) -> None:
        """It is no more, or nobody knows."""
        self._last_used[kind][last >> _SLOT] -= 1

    def used_again(self, kind: int, last: int, now: int) -> None:
        """It was used again, and is of that kind and age no more."""
        self.ended(kind, last)
        self._again[kind][_age(last, now)] += 1

    def of(self, kind: int, last: int, now: int) -> float:
        """What a unit of a kind is worth that was last used at a time."""
        return self._worth[kind][_age(last, now)]

    def learn(self, now: int, units: int) -> None:
        """See what has become of the units."""
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
        before = 1.0  # of an age that nothing is known of it is taken that it is as the one before
        for age in range(_AGES):
            again = sum(row[age] for row in self._again)
            expected = rate * sum(row[age] * factor for row, factor in zip(self._time, of_kind, strict=True))
            before = of_age[age] = (again + doubt * before) / (expected + doubt)
        best = _best_means(of_age)
        self._worth = [[factor * mean for mean in best] for factor in of_kind]


def _best_means(of_age: list[float]) -> list[float]:
    """From each age on, the highest mean that can be had by waiting for some time."""
    best = [0.0] * _AGES
    later: list[tuple[float, int]] = []  # sums and times of what is waited for from a later age on, the next one last
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
