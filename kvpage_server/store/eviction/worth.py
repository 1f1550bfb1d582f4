"""What units are worth, by kind and age: how soon they will be used again, learned from those that were.

An age is the time since the last use. For each kind and age it is known how much time units spent in it, whether they
still exist or were evicted, and how many uses ended it. The chance of a use at a moment is taken to be the product of a
factor for the kind and one for the age (proportional hazards: Cox, 1972). A unit's worth is the best mean of that
chance over any time from now on (the index of Gittins, 1979), so what usually comes back after minutes is not worth
less before that.

Time is counted in units that came, in slots. Every operation is amortised O(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from operator import mul

from kvpage_server.core.python.uses import SLOT_BITS as _SLOT

_AGES = 28  # the first four last a slot each; then each doubling has two
_EVERY, _SHARE = 256, 64  # learn after this many new units at least, or after this share of all
_MEMORY = 16  # how long what was learned counts, in times of the number of units
# Uses that a kind or an age is taken to have had as expected: many, since the blocks of a prompt come back together; as
# many as there are units in a store that is smaller.
_DOUBT = 1024

_LASTS = [1 << max(age // 2 - 1, 0) for age in range(_AGES)]  # in slots
_AGE_OF = bytes(age for age, lasts in enumerate(_LASTS) for _ in range(lasts))  # by slots
_OLDEST = len(_AGE_OF) - 1


class Worth:
    """What units of some kinds are worth. `expected` says how often each kind is used again, before anything is
    learned."""

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
        """A unit has become of a kind, and was used at that time."""
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
        """The unit is gone or forgotten."""
        self._last_used[kind][last >> _SLOT] -= 1

    def used_again(self, kind: int, last: int, now: int) -> None:
        """The unit was used again, and leaves this kind and age."""
        self.ended(kind, last)
        self._again[kind][_age(last, now)] += 1

    def of(self, kind: int, last: int, now: int) -> float:
        """What a unit of a kind is worth that was used last at that time."""
        return self._worth[kind][_age(last, now)]

    def learn(self, now: int, units: int) -> None:
        """Learn from what has become of the units."""
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
    """The highest mean, from each age on, over any time to wait."""
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
