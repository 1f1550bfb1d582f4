"""The score of units: learned from the uses of their kind and age."""

from __future__ import annotations

from kvpage_server.store.eviction.prefix import Prefix, ReuseScores

RARE, OFTEN = 0, 1


def lived(again_after: dict[int, int], step: int = 100, until: int = 60_000) -> ReuseScores:
    """Return the learned score if units of each kind are inserted all the time, and half are used again after a given
    time, if any.
    """
    scores = ReuseScores((1.0, 1.0))
    for now in range(0, until, step):
        for kind in (RARE, OFTEN):
            for _ in range(20):
                scores.add_unit(kind, now)
            if (last := now - again_after.get(kind, until)) >= 0:
                for _ in range(10):
                    scores.used_again(kind, last, now)
        scores.learn(now, 1000)
    return scores


def test_a_reused_kind_scores_higher_than_an_unused_one() -> None:
    scores = lived({OFTEN: 2000})
    assert scores.of(OFTEN, 60_000, 60_000) > 2 * scores.of(RARE, 60_000, 60_000)


def test_a_periodically_used_unit_keeps_its_score_until_then() -> None:
    scores = lived({OFTEN: 4000, RARE: 4000})
    at = [scores.of(OFTEN, 60_000 - age, 60_000) for age in (0, 2000, 4000, 20_000)]
    assert at[0] <= at[1] <= at[2]
    assert at[3] < at[2] * 2 / 3


def test_an_unknown_unit_has_the_expected_score() -> None:
    scores = ReuseScores((1.0, 8.0))
    assert [scores.of(kind, last, 10**6) for kind in (0, 1) for last in (0, 10**6)] == [1, 1, 8, 8]


def test_existing_and_remembered_units_are_counted_once() -> None:
    policy = Prefix()
    for number in range(8_000):
        policy.now += 1
        policy.used(b"%d" % (number % 997 if number % 3 else number))
        if len(policy) > 300:
            policy.evicted(next(policy.victims()))
        if number % 50 == 0:
            policy.removed(b"%d" % (number % 997))
    counted = sum(sum(slots.values()) for slots in policy._scores._last_used)
    assert counted == len(policy) + len(policy._ghosts)
