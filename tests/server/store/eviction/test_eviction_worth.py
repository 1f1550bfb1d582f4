"""The worth of units: learned from the uses of their kind and age."""

from __future__ import annotations

from kvpage_server.store.eviction.prefix import Prefix, Worth

RARE, OFTEN = 0, 1


def lived(again_after: dict[int, int], step: int = 100, until: int = 60_000) -> Worth:
    """Return the learned worth if units of each kind are inserted all the time, and half are used again after a given
    time, if any.
    """
    worth = Worth((1.0, 1.0))
    for now in range(0, until, step):
        for kind in (RARE, OFTEN):
            for _ in range(20):
                worth.add_unit(kind, now)
            if (last := now - again_after.get(kind, until)) >= 0:
                for _ in range(10):
                    worth.used_again(kind, last, now)
        worth.learn(now, 1000)
    return worth


def test_a_reused_kind_is_worth_more_than_an_unused_one() -> None:
    worth = lived({OFTEN: 2000})
    assert worth.of(OFTEN, 60_000, 60_000) > 2 * worth.of(RARE, 60_000, 60_000)


def test_a_periodically_used_unit_keeps_its_worth_until_then() -> None:
    worth = lived({OFTEN: 4000, RARE: 4000})
    at = [worth.of(OFTEN, 60_000 - age, 60_000) for age in (0, 2000, 4000, 20_000)]
    assert at[0] <= at[1] <= at[2]
    assert at[3] < at[2] * 2 / 3


def test_an_unknown_unit_has_the_expected_worth() -> None:
    worth = Worth((1.0, 8.0))
    assert [worth.of(kind, last, 10**6) for kind in (0, 1) for last in (0, 10**6)] == [1, 1, 8, 8]


def test_existing_and_remembered_units_are_counted_once() -> None:
    policy = Prefix()
    for number in range(8_000):
        policy.now += 1
        policy.used(b"%d" % (number % 997 if number % 3 else number))
        if len(policy) > 300:
            policy.evicted(next(policy.victims()))
        if number % 50 == 0:
            policy.removed(b"%d" % (number % 997))
    counted = sum(sum(slots.values()) for slots in policy._worth._last_used)
    assert counted == len(policy) + len(policy._ghosts)
