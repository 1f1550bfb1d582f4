"""The block budget: never more blocks than there are, never a block lost, whatever is asked for."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.pool import BlockPool, PoolExhaustedError


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(PoolExhaustedError, match=r"2 blocks needed, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.available_blocks == 1
    pool.free(held)
    assert pool.available_blocks == 4


def test_a_shared_block_is_free_only_when_its_last_holder_has_freed_it() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1)
    pool.share(block)
    pool.free(block)
    assert pool.available_blocks == 1
    pool.free(block)
    assert pool.available_blocks == 2


def test_a_double_free_is_refused_and_frees_nothing() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.free([a])
    with pytest.raises(ValueError, match=f"blocks \\[{a}\\] are freed more often"):
        pool.free([b, a])
    with pytest.raises(ValueError, match="freed more often"):
        pool.free([b, b])
    assert pool.available_blocks == 2


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    with pytest.raises(ValueError, match="not allocated"):
        pool.share([*held, 1])
    pool.free(held)
    assert pool.available_blocks == 2


@pytest.mark.parametrize("count", [0, -1])
def test_a_pool_without_blocks_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(count)


def test_threads_never_hold_the_same_block() -> None:
    pool = BlockPool(50)

    def churn(_: int) -> int:
        clashes = 0
        for _ in range(300):
            try:
                ids = pool.allocate(7)
            except PoolExhaustedError:
                continue
            clashes += len(holders & set(ids))
            holders.update(ids)
            holders.difference_update(ids)
            pool.free(ids)
        return clashes

    holders: set[int] = set()
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(churn, range(8))) == 0
    assert pool.available_blocks == 50


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of allocate, share and free, against a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.held: Counter[int] = Counter()

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        free = 8 - len(self.held)
        if count > free:
            with pytest.raises(PoolExhaustedError):
                self.pool.allocate(count)
        else:
            ids = self.pool.allocate(count)
            assert len(set(ids)) == count
            assert not set(ids) & set(self.held)
            self.held.update(ids)

    @rule(ids=st.lists(st.integers(0, 7), max_size=4))
    def share(self, ids: list[int]) -> None:
        if set(ids) <= set(self.held):
            self.pool.share(ids)
            self.held.update(ids)
        else:
            with pytest.raises(ValueError, match="not allocated"):
                self.pool.share(ids)

    @rule(ids=st.lists(st.integers(0, 7), max_size=4))
    def free(self, ids: list[int]) -> None:
        if Counter(ids) <= self.held:
            self.pool.free(ids)
            self.held = self.held - Counter(ids)
        else:
            with pytest.raises(ValueError, match="freed more often"):
                self.pool.free(ids)

    @invariant()
    def every_block_is_either_held_or_available(self) -> None:
        assert self.pool.available_blocks == 8 - len(self.held)


TestPoolMachine = PoolMachine.TestCase
