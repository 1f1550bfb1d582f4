"""Uses of many units at once: both cores note them as one."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.core import python
from kvpage_server.core.python.lru import SLOT_BITS

native = pytest.importorskip("kvpage_server.core.native.uses", reason="the core is not built here")

QUEUES, PLACES = 3, 40


class Queues:
    """Units in two queues, driven by one of the cores."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.places: dict[str, int] = {}
        self.units: list[str | None] = [None] * PLACES
        self.free = list(range(PLACES - 1, QUEUES, -1))
        links = [array("i", range(PLACES)) for _ in range(2)]
        times = [array("q", bytes(8 * PLACES)) for _ in range(3)]
        rest = array("B", bytes(PLACES)), array("i", bytes(4 * PLACES)), array("i", bytes(4 * PLACES))
        self.columns = python.Columns(*links, array("b", bytes(PLACES)), *times, *rest)
        self.time = 0

    def use(self, units: list[str], now: int, queue: int) -> Any:
        new, due, moved = self.core.touch_many(self.places, self.columns, units, now, self.time, now - 2)
        self.time = self.core.enter(self.places, self.units, self.free, self.columns, new, queue, now, self.time)
        return new, due, moved

    def order(self, queue: int) -> list[str | None]:
        found, place = [], self.columns.after[queue]
        while place != queue:
            found.append(self.units[place])
            place = self.columns.after[place]
        return found


@given(st.lists(st.tuples(st.lists(st.sampled_from("abcdefghij"), max_size=20), st.integers(0, 2), st.integers(1, 2))))
def test_both_cores_note_the_same_uses(batches: list[tuple[list[str], int, int]]) -> None:
    one, other = Queues(python), Queues(native)
    now = 100
    for units, later, queue in batches:
        now += later
        assert one.use(units, now, queue) == other.use(units, now, queue)
        assert one.columns == other.columns
        assert (one.places, one.units, one.free, one.time) == (other.places, other.units, other.free, other.time)
        for queue in (1, 2):
            assert one.order(queue) == other.order(queue)
    assert sorted(unit for queue in (1, 2) for unit in one.order(queue) if unit) == sorted(one.places)


@pytest.mark.parametrize("core", [python, native], ids=["python", "native"])
def test_recently_used_units_are_evicted_last(core: Any) -> None:
    queues = Queues(core)
    assert queues.use(["a", "b", "c"], 100, 1) == (["a", "b", "c"], [], [])
    assert queues.use(["c", "a"], 101, 1) == ([], [], [(1, 0, 2)])
    assert queues.order(1) == ["b", "c", "a"]
    assert queues.use(["b"], 200, 1) == ([], ["b"], [])
    queues.time = 1 << SLOT_BITS
    assert queues.use(["d", "d"], 200, 2)[0] == ["d", "d"]
    assert queues.order(2) == ["d"]
    assert queues.time == (1 << SLOT_BITS) + 1
