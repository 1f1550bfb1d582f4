"""Due keys, for any changes by their consumers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.core import NewPages
from kvpage_server.page import BlockShape, DType, Plane, checksum, unix_ms
from kvpage_server.store import contents, expire
from kvpage_server.store.expire import ExpiryOrder
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.index import Extent

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
    """Note a key again and again, until all notes were examined."""
    for more in range(4 * (expirer.keys + expire._SLACK)):
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


def test_stale_notes_are_dropped_a_few_with_each_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """No note or sweep examines all keys, and at most three notes of a key are kept."""
    monkeypatch.setattr(expire, "_SLACK", 10)
    times = {b"%d" % key: NEVER for key in range(3000)}
    looked_up = 0

    def expires_of(key: bytes) -> int:
        nonlocal looked_up
        looked_up += 1
        return times.get(key, 0)

    expirer = ExpiryOrder(expires_of)
    expirer.keys = len(times)
    for again in range(10):
        for key in times:
            looked_up = 0
            times[key] = NEVER + 1000 * again
            expirer.note(key, times[key])
            assert looked_up <= 2
            assert expirer._notes <= 3 * len(times) + 20
    expirer.keys = 0
    times.clear()
    for _ in range(10):
        looked_up = 0
        expirer.remove_due(0, 100, lambda _: None)
        assert looked_up <= expire._EXAMINED_AT_ONCE
    assert expirer._notes == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=50, max_size=300), st.integers(0, 6))
def test_keys_leave_in_order_while_stale_notes_are_dropped(noted: list[tuple[int, int]], slack: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expire, "_SLACK", slack)
        times: Times = {}
        expirer = expirer_of(times)
        for key, second in noted:
            put(expirer, times, b"%d" % key, 1000 * second)
        wanted, found = sorted(times.values()), []
        for taken in expirer.nearest(0):
            found.append(times.pop(taken))
            expirer.keys -= 1
        assert found == wanted
        assert (expirer.keys, expirer._notes) == (0, 0)


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


PAGES = [b"kv:r:%d:%d:0:0" % (layer, head) for layer in range(10) for head in range(100)]
LATER = unix_ms() + 3_600_000


def store_with_pages(expiring: list[bytes], events: list[tuple[str, bytes]]) -> Keyspace:
    """Return a store with a block of single pages, some of which expire; its events are added to a list."""
    keyspace = Keyspace()
    words = [b"r", b"", b"", b"0", b"0", b"8", b"1", b"32", b"0", bytes(32)]
    every: list[Any] = []
    for key in PAGES:
        _, _, words[1], words[2], _, _ = key.split(b":")
        every += words
    keyspace.contents.set_pages(NewPages(every, 0, len(PAGES), keyspace.arena, 1, False, True))
    for key in expiring:
        keyspace.contents.set_expiry(key, LATER)
    keyspace.contents.on_event = lambda event, key: events.append((event, key))
    keyspace.contents.on_block = lambda _, more: events.extend(more)
    return keyspace


@pytest.mark.parametrize("left", [0, 1, 500])
def test_pages_of_a_block_expire_together(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is the same as after the removal of one page after another, which calls 30 functions for each."""
    together, single = list[tuple[str, bytes]](), list[tuple[str, bytes]]()
    expiring = PAGES[left:]
    stores = store_with_pages(expiring, together), store_with_pages(expiring, single)
    monkeypatch.setattr(contents, "unix_ms", lambda: LATER)
    blocks = [store.index.block(b"r", 0) for store in stores]
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    assert blocks[0] is not None
    sys.setprofile(count)
    found = stores[0].contents.unexpired(blocks[0])
    sys.setprofile(None)
    assert found is (blocks[0] if left else None)
    assert calls < 10 * len(PAGES)
    for key in expiring:
        stores[1].contents.expire(key)
    assert together == single == [("expired", key) for key in expiring]
    assert [*map(state, stores)] == [state(stores[1])] * 2
    assert stores[0].contents.counters.expired == len(expiring)
    assert sorted(stores[0].listing.keys()) == sorted(PAGES[:left])


@pytest.mark.parametrize("as_block", [False, True], ids=["page", "block"])
@pytest.mark.parametrize("listener", [False, True], ids=["no listener", "listener"])
def test_a_write_over_expired_pages_reports_their_expiry(
    as_block: bool, listener: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SET of a string also removes an expired value before it stores another."""
    events = list[tuple[str, bytes]]()
    store, written = store_with_pages(PAGES[1:], events), PAGES[:2]
    if not listener:
        store.contents.on_event = store.contents.on_block = None
    monkeypatch.setattr(contents, "unix_ms", lambda: LATER)
    if as_block:
        shape = BlockShape(1, 2, 8, (Plane(0, DType.FLOAT32, 1),))
        body = bytes(shape.nbytes)
        store.set_block(b"r", 0, Extent(shape, store.contents.slot_of(body), checksum(body), 1, 0))
    else:
        words = [[b"r", b"0", b"%d" % head, b"0", b"0", b"8", b"1", b"32", b"0", bytes(32)] for head in range(2)]
        store.contents.set_pages(NewPages([*chain(*words)], 0, 2, store.arena, 1, False, True))
    assert store.contents.counters.expired == len(PAGES) - 1
    assert sorted(store.listing.keys()) == written
    assert store.contents.expiry_order.keys == 0
    if listener:
        assert events[: len(PAGES) - 1] == [("expired", key) for key in PAGES[1:]]
        assert ("new", PAGES[0]) not in events
        assert ("new", PAGES[1]) in events


def state(store: Keyspace) -> tuple[object, ...]:
    block, ghosts = store.index.block(b"r", 0), store.ghosts._blocks[b"r", 0]
    of_block = (block.pages, block.footprint, dict(block.rows)) if block is not None else ()
    rows = {reason: {row: heads for row, heads in ghost.rows.items() if heads} for reason, ghost in ghosts.items()}
    return of_block, rows, store.contents.expiry_order.keys, store.contents.catalogue.key_bytes
