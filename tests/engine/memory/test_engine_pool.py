"""The block budget: the limits of blocks and bytes hold, no block is lost, and every holder is known."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.pool import UNLIMITED, BlockPool, LeakError, PoolExhaustedError


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(PoolExhaustedError, match=r"2 blocks needed, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.available_blocks == 1
    pool.free(held)
    assert pool.available_blocks == 4


def test_bytes_are_a_budget_of_their_own() -> None:
    pool = BlockPool(total_bytes=1000)
    held = pool.allocate(3, "alice", 700)
    with pytest.raises(PoolExhaustedError, match=r"301 bytes needed, 300 of 1000 are free"):
        pool.allocate(1, "bob", 301)
    assert (pool.used_blocks, pool.used_bytes, pool.available_bytes) == (3, 700, 300)
    pool.free(held[:2])
    assert pool.used_bytes == 234  # 700 over 3, to the byte
    pool.free(held[2:])
    assert (pool.used_blocks, pool.used_bytes) == (0, 0)


def test_an_unused_reservation_is_freed() -> None:
    pool = BlockPool(total_bytes=1000)
    small, large, unused = pool.allocate(3, "alice", 900)
    pool.settle({small: 50, large: 700, unused: 0})
    assert pool.available_bytes == 250
    with pytest.raises(PoolExhaustedError, match=r"251 bytes needed, 250 of 1000 are free"):
        pool.settle({small: 0, large: 1001})
    with pytest.raises(ValueError, match=r"blocks \[9\] are not allocated"):
        pool.settle({small: 1, 9: 1})
    with pytest.raises(ValueError, match="less than 0 bytes"):
        pool.settle({small: -1})
    assert pool.used_bytes == 750
    pool.free([large])
    assert pool.used_bytes == 50


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
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


def test_a_holder_frees_only_its_own_blocks() -> None:
    pool = BlockPool(3)
    block = pool.allocate(1, "alice")
    with pytest.raises(ValueError, match="more often than they are held by 'bob'"):
        pool.free(block, "bob")
    pool.share(block, "bob")
    pool.free(block, "bob")
    assert list(pool.holdings()) == ["alice"]


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    with pytest.raises(ValueError, match="not allocated"):
        pool.share([*held, 1])
    pool.free(held)
    assert pool.available_blocks == 2


@pytest.mark.parametrize(("blocks", "nbytes"), [(0, 1), (-1, 1), (1, 0), (1, -5)])
def test_a_pool_without_room_is_refused(blocks: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(blocks, total_bytes=nbytes)
    pool = BlockPool(5, total_bytes=500)
    with pytest.raises(ValueError, match="at least 1"):
        pool.reconfigure(blocks, nbytes)
    assert (pool.total_blocks, pool.total_bytes) == (5, 500)


def test_the_holders_of_blocks_are_known() -> None:
    pool = BlockPool(10, total_bytes=1000)
    shared = pool.allocate(2, "alice", 200)
    pool.share(shared, "bob")
    pool.allocate(1, "bob", 50)
    held = pool.holdings()
    assert {name: (found.blocks, found.nbytes) for name, found in held.items()} == {"alice": (2, 200), "bob": (3, 250)}
    assert held["alice"].since <= held["bob"].since
    assert (pool.used_blocks, pool.used_bytes) == (3, 250)


def test_a_leak_is_reported_with_its_holder_and_age() -> None:
    pool = BlockPool(10)
    pool.check_empty()
    kept = pool.allocate(2, "alice", 64)
    pool.allocate(1)
    assert [(reference.block_id, reference.agent_id) for reference in pool.references()] == [
        (kept[0], "alice"),
        (kept[1], "alice"),
        (2, ""),
    ]
    assert pool.references(older_than=3600) == []
    with pytest.raises(
        LeakError, match=r"3 blocks are not free: somebody holds 1 .*; alice holds 2 blocks of 64 bytes"
    ):
        pool.check_empty()


def test_a_pool_grows_at_once_and_shrinks_as_blocks_are_freed() -> None:
    pool = BlockPool(4)
    held = pool.allocate(4)
    pool.reconfigure(6)
    assert pool.available_blocks == 2
    pool.reconfigure(3)
    assert pool.available_blocks == 0
    pool.share(held)
    pool.free(held)
    pool.free(held[:1])
    with pytest.raises(PoolExhaustedError, match="0 of 3 are free"):
        pool.allocate(1)
    pool.free(held[1:2])
    assert pool.allocate(1)
    assert pool.available_blocks == 0


def test_a_shrunk_pool_still_lets_a_promise_be_settled() -> None:
    pool = BlockPool(total_bytes=1000)
    a, b = pool.allocate(2, "alice", 900)
    pool.reconfigure(total_bytes=100)
    pool.settle({a: 800, b: 100})
    assert (pool.used_bytes, pool.available_bytes) == (900, 0)
    pool.settle({a: 10, b: 10})
    assert pool.available_bytes == 80


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


AGENTS = st.sampled_from(["", "alice", "bob"])
IDS = st.lists(st.integers(0, 7), max_size=4)


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of allocate, settle, share, free and reconfigure, against a plain account of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.nbytes = 8, 100
        self.pool = BlockPool(self.blocks, total_bytes=self.nbytes)
        self.held: Counter[tuple[int, str]] = Counter()
        self.sizes: dict[int, int] = {}

    @rule(count=st.integers(0, 10), agent=AGENTS, nbytes=st.integers(0, 60))
    def allocate(self, count: int, agent: str, nbytes: int) -> None:
        fits = len(self.sizes) + count <= self.blocks and sum(self.sizes.values()) + nbytes <= self.nbytes
        if count and not fits:
            with pytest.raises(PoolExhaustedError):
                self.pool.allocate(count, agent, nbytes)
            return
        ids = self.pool.allocate(count, agent, nbytes)
        assert len(set(ids)) == count
        assert not set(ids) & set(self.sizes)
        self.held.update((block_id, agent) for block_id in ids)
        shares = dict.fromkeys(ids, nbytes // count if count else 0)
        self.sizes |= shares
        if count:  # tensors that cannot be divided are on the server that the pool chose
            self.pool.settle(shares)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), size=st.integers(0, 60))
    def settle(self, data: st.DataObject, size: int) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.sizes)))
        after = sum(self.sizes.values()) - self.sizes[block_id] + size
        if size > self.sizes[block_id] and after > self.nbytes:
            with pytest.raises(PoolExhaustedError):
                self.pool.settle({block_id: size})
        else:
            self.pool.settle({block_id: size})
            self.sizes[block_id] = size

    @rule(ids=IDS, agent=AGENTS)
    def share(self, ids: list[int], agent: str) -> None:
        if set(ids) <= set(self.sizes):
            self.pool.share(ids, agent)
            self.held.update((block_id, agent) for block_id in ids)
        else:
            with pytest.raises(ValueError, match="not allocated"):
                self.pool.share(ids, agent)

    @rule(ids=IDS, agent=AGENTS)
    def free(self, ids: list[int], agent: str) -> None:
        drops = Counter((block_id, agent) for block_id in ids)
        if not drops <= self.held:
            with pytest.raises(ValueError, match="freed more often"):
                self.pool.free(ids, agent)
            return
        self.pool.free(ids, agent)
        self.held -= drops
        still = {block_id for block_id, _ in self.held}
        self.sizes = {block_id: size for block_id, size in self.sizes.items() if block_id in still}

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def free_without_a_name(self, data: st.DataObject) -> None:
        """Free a block without its holder's name: it loses one reference."""
        block_id = data.draw(st.sampled_from(sorted(self.sizes)))
        oldest = next(r.agent_id for r in self.pool.references() if r.block_id == block_id)
        self.pool.free([block_id])
        self.held -= Counter([(block_id, oldest)])
        if not any(held == block_id for held, _ in self.held):
            del self.sizes[block_id]

    @rule(blocks=st.integers(1, 12) | st.none(), nbytes=st.integers(1, 150) | st.none())
    def reconfigure(self, blocks: int | None, nbytes: int | None) -> None:
        self.pool.reconfigure(blocks, nbytes)
        self.blocks, self.nbytes = blocks or self.blocks, nbytes or self.nbytes

    @invariant()
    def every_block_and_byte_is_either_held_or_available(self) -> None:
        assert (self.pool.used_blocks, self.pool.used_bytes) == (len(self.sizes), sum(self.sizes.values()))
        assert self.pool.available_blocks == max(0, self.blocks - len(self.sizes))
        assert self.pool.available_bytes == max(0, self.nbytes - sum(self.sizes.values()))

    @invariant()
    def every_reference_has_its_holder(self) -> None:
        assert Counter((r.block_id, r.agent_id) for r in self.pool.references()) == self.held
        expected = {
            agent: (len(ids), sum(self.sizes[i] for i in ids))
            for agent in {agent for _, agent in self.held}
            if (ids := {block_id for block_id, holder in self.held if holder == agent})
        }
        assert {name: (found.blocks, found.nbytes) for name, found in self.pool.holdings().items()} == expected

    def teardown(self) -> None:
        """Check that the pool is empty after every reference is freed."""
        for (block_id, agent), count in self.held.items():
            self.pool.free([block_id] * count, agent)
        self.pool.check_empty()
        assert self.pool.used_bytes == 0


TestPoolMachine = PoolMachine.TestCase


def test_without_limits_a_pool_only_counts() -> None:
    pool = BlockPool()
    held = pool.allocate(10_000, "alice", 10**15)
    assert (pool.used_blocks, pool.available_blocks) == (10_000, UNLIMITED - 10_000)
    pool.free(held, "alice")
    pool.check_empty()
