"""Due keys, for any changes by their consumers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.store import expire
from kvpage_server.store.expire import ExpiryOrder

Times = dict[bytes, int]  # when keys expire, in milliseconds
NEVER = 10**9


def expirer_of(times: Times) -> ExpiryOrder:
    """One that knows these keys."""
    expirer = ExpiryOrder(lambda key: times.get(key, 0))
    for key, expires in times.items():
        expirer.keys += 1
        expirer.note(key, expires)
    return expirer


def put(expirer: ExpiryOrder, times: Times, key: bytes, expires: int) -> None:
    expirer.keys += key not in times
    times[key] = expires
    expirer.note(key, expires)


def tidy(expirer: ExpiryOrder, times: Times) -> None:
    """Note a key again and again, until stale notes are dropped."""
    for more in range(2 * expirer.keys + expire._SLACK + 2):
        put(expirer, times, b"restless", NEVER + more)


def given_by(keys: Iterator[bytes], expirer: ExpiryOrder, times: Times, on: Callable[[bytes], None]) -> list[bytes]:
    """The keys that are given, each of which is removed after something else was done."""
    found = []
    for key in keys:
        found.append(key)
        on(key)
        expirer.keys -= 1
        del times[key]
    return found


def due(expirer: ExpiryOrder) -> Iterator[bytes]:
    return expirer.due(100_000)


def nearest(expirer: ExpiryOrder) -> Iterator[bytes]:
    return expirer.nearest(0)


WAYS = pytest.mark.parametrize("way", [due, nearest])


@WAYS
def test_a_key_noted_during_a_tidy_up_of_its_second_is_returned(way: Callable[[ExpiryOrder], Iterator[bytes]]) -> None:
    times: Times = {b"first": 5000}
    expirer = expirer_of(times)

    def wake(key: bytes) -> None:
        if key == b"first":
            for page in range(60):
                put(expirer, times, b"%d" % page, 5000)
                if page % 20 == 10:
                    tidy(expirer, times)

    found = given_by(way(expirer), expirer, times, wake)
    assert sorted(found) == sorted([b"first", *(b"%d" % page for page in range(60)), *[b"restless"] * (way is nearest)])


@WAYS
def test_a_later_second_stays_after_a_tidy_up(
    way: Callable[[ExpiryOrder], Iterator[bytes]],
) -> None:
    times: Times = {b"now": 5000, b"next": 6000, b"later": 7000}
    expirer = expirer_of(times)
    found = given_by(way(expirer), expirer, times, lambda key: tidy(expirer, times) if key == b"now" else None)
    assert found[:3] == [b"now", b"next", b"later"]


@WAYS
def test_an_earlier_second_that_is_noted_meanwhile_is_given(way: Callable[[ExpiryOrder], Iterator[bytes]]) -> None:
    times: Times = {b"now": 5000, b"next": 6000}
    expirer = expirer_of(times)
    found = given_by(
        way(expirer), expirer, times, lambda key: put(expirer, times, b"early", 2000) if key == b"now" else None
    )
    assert found == [b"now", b"early", b"next"]


def test_a_key_noted_during_an_eviction_is_due_in_its_time() -> None:
    times: Times = {b"now": 5000, b"next": 6000}
    expirer = expirer_of(times)
    for key in expirer.nearest(0):
        if key == b"now":
            put(expirer, times, b"early", 2000)
            tidy(expirer, times)
    assert given_by(expirer.due(100_000), expirer, times, lambda key: None) == [b"early", b"now", b"next"]


@given(
    first=st.dictionaries(st.integers(0, 30), st.integers(1, 9000), min_size=1),
    changes=st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9000)), max_size=8), max_size=20),
    spared=st.sets(st.integers(0, 30)),
    slack=st.integers(0, 6),
)
def test_no_key_is_lost(
    first: dict[int, int], changes: list[list[tuple[int, int]]], spared: set[int], slack: int
) -> None:
    """For any changes by the consumers of a key, in eviction or in a sweep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expire, "_SLACK", slack)
        times = {b"%d" % key: expires for key, expires in first.items()}
        expirer, left = expirer_of(times), iter(changes)

        def change() -> None:
            for key, expires in next(left, ()):
                put(expirer, times, b"%d" % key, expires)

        for key in expirer.nearest(0):
            change()
            if int(key) not in spared and key in times:
                del times[key]
                expirer.keys -= 1
        for key in expirer.due(20_000):
            change()
            del times[key]
            expirer.keys -= 1
        assert not times
        assert (expirer.keys, expirer._notes) == (0, 0)
