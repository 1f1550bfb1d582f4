"""Lifetimes in the engine's memory: kept blocks are evicted after all others, and first after their end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from contexts import BLOCK, SPEC, made, some_tokens
from pools import pool_of

# isort: split
import mlx.core as mx

from engine.memory.blocks import AgentBlocks, block_names
from engine.memory.context_tree import FULL, ContextTree
from engine.memory.lifetimes import KeptContext, Lifetimes
from engine.pool import BlockPool
from kvpage_server.page import unix_ms

BYTES = BLOCK * SPEC.token_nbytes  # of a block

pool = pool_of(256)


@pytest.fixture
def tree(pool: BlockPool) -> Iterator[ContextTree]:
    tree = ContextTree(SPEC, pool, 20 * BYTES)
    yield tree
    tree.clear()


def shared(tree: ContextTree, pool: BlockPool, seed: int, blocks: int = 3, agent_id: str = "a") -> AgentBlocks:
    context = made(pool, agent_id, some_tokens(seed, blocks * BLOCK))
    kept = tree.adopt(context)
    pool.free(context.block_ids, agent_id)
    pool.free(kept.block_ids, agent_id)
    return kept


def found(tree: ContextTree, pool: BlockPool, context: AgentBlocks) -> int:
    """The number of the context's blocks in the tree."""
    there = tree.find(context.agent_id, (*context.tokens, 1))
    if there is None:
        return 0
    pool.free(there.block_ids, context.agent_id)
    return len(there.blocks)


def fill(tree: ContextTree, pool: BlockPool) -> None:
    for seed in range(100, 140):
        shared(tree, pool, seed)


def test_kept_blocks_stay_until_their_end_and_then_go_first(tree: ContextTree, pool: BlockPool) -> None:
    kept, other = shared(tree, pool, 1), shared(tree, pool, 2)
    report = tree.keep(kept, Lifetimes([(2 * BLOCK, 1)]))
    assert (report.tokens, report.why) == (2 * BLOCK, "")
    assert abs(report.until - unix_ms() - 1000) < 500
    fill(tree, pool)
    assert (found(tree, pool, kept), found(tree, pool, other)) == (2, 0)
    assert tree.kept_bytes == 2 * BYTES
    time.sleep(1)
    shared(tree, pool, 3, blocks=1)
    shared(tree, pool, 4, blocks=1)
    assert tree.kept_bytes == 0
    assert found(tree, pool, kept) <= 1


def test_blocks_that_were_used_after_their_end_do_not_go_first(tree: ContextTree, pool: BlockPool) -> None:
    kept = shared(tree, pool, 1)
    tree.keep(kept, Lifetimes([(len(kept), 1)]))
    for seed in range(10, 15):
        shared(tree, pool, seed)
    time.sleep(1)
    assert found(tree, pool, kept) == 3
    shared(tree, pool, 3)
    assert found(tree, pool, kept) == 3


def test_kept_blocks_take_half_and_a_tenant_its_share(tree: ContextTree, pool: BlockPool) -> None:
    first, second = shared(tree, pool, 1, blocks=9), shared(tree, pool, 2, blocks=9)
    assert tree.keep(first, Lifetimes([(len(first), 100)], "a", 2)).tokens == 5 * BLOCK
    refused = tree.keep(second, Lifetimes([(len(second), 100)], "a", 2))
    assert refused == KeptContext(0, 0, FULL)
    assert tree.keep(second, Lifetimes([(len(second), 100)], "b", 2)).tokens == 5 * BLOCK
    assert tree.keep(second, Lifetimes([(len(second), 100)], "c", 1)).tokens == 5 * BLOCK


def test_a_block_that_grows_stays_kept_within_the_share(tree: ContextTree, pool: BlockPool) -> None:
    """A longer block in place of a kept one has its lifetime, as far as the tenant's share allows."""
    contexts = [made(pool, "a", some_tokens(seed, BLOCK)) for seed in range(12)]
    for context in contexts:
        short = replace(context, tokens=context.tokens[:1], blocks=made(pool, "a", context.tokens[:1]).blocks)
        pool.free(tree.adopt(short).block_ids, "a")
        assert tree.keep(short, Lifetimes([(1, 100)], "a", 2)).tokens == 1
        pool.free(short.block_ids, "a")
    for context in contexts:
        pool.free(tree.adopt(context).block_ids, "a")
        pool.free(context.block_ids, "a")
    assert 4 * BYTES <= tree.kept_bytes <= 5 * BYTES


def test_replaced_blocks_keep_their_lifetimes_in_linear_time(pool: BlockPool) -> None:
    """Blocks of models with states are replaced when another answer has left a state elsewhere."""

    def calls(blocks: int) -> int:
        """Adopt a context again, with other states, and return the number of function calls that this takes."""
        tree, count = ContextTree(SPEC, pool, 1 << 30), 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        for after in (3, 5):
            context, state = made(pool, "a", some_tokens(1, blocks * BLOCK)), ((mx.zeros((2, 2)),),)
            changed = [block.with_state(2, state).with_state(after, state) for block in context.blocks]
            sys.setprofile(counted if after == 5 else None)
            try:
                kept = tree.adopt(replace(context, blocks=tuple(changed)))
            finally:
                sys.setprofile(None)
            pool.free(context.block_ids, "a")
            pool.free(kept.block_ids, "a")
            if after == 3:
                tree.keep(kept, Lifetimes([(len(kept), 300)]))
        assert tree.lifetimes(kept)[-1:] == [(len(kept), 300)]
        tree.clear()
        return count

    assert calls(80) < 8 * calls(20)


def test_the_agent_of_a_pinned_block_stays_known(
    tree: ContextTree, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the pin can be removed after many other blocks."""
    monkeypatch.setattr("engine.memory.context_tree.MOST_SEEN", 6)
    pinned, other = shared(tree, pool, 1), shared(tree, pool, 2)
    last = block_names(pinned.tokens, SPEC, "a")[-1]
    assert tree.pin(pinned, "a", 1)
    assert tree.pin(replace(pinned, tokens=pinned.tokens[:BLOCK], blocks=pinned.blocks[:1]), "a", 1)
    fill(tree, pool)
    assert found(tree, pool, pinned) == 3
    assert tree.agent_of(last) == "a"
    assert tree.agent_of(block_names(other.tokens, SPEC, "a")[-1]) is None
    assert tree.unpin(last)
    assert tree.agent_of(last) is None


def test_the_earliest_pin_of_blocks_ends_first(tree: ContextTree, pool: BlockPool) -> None:
    for seed in (1, 2):
        assert tree.pin(shared(tree, pool, seed, blocks=1), "a", 1)
    assert not tree.evict(kept=True)
    for left in (1, 0):
        assert tree.unpin_oldest()
        assert len(tree._pins) == left
        assert tree.evict()
    assert not tree.unpin_oldest()


def test_a_running_prompt_gets_kept_blocks_at_last(tree: ContextTree, pool: BlockPool) -> None:
    kept = shared(tree, pool, 1)
    tree.keep(kept, Lifetimes([(len(kept), 100)]))
    shared(tree, pool, 2, blocks=1)
    assert tree.evict()
    assert not tree.evict()
    assert tree.idle is None
    assert tree.evict(kept=True)
    assert found(tree, pool, kept) == 2
