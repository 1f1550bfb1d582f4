"""KV events of contexts in memory: the full blocks of the tree, with their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contexts import BLOCK, SPEC, made, some_tokens
from event_readers import hashes
from pools import pool_of

# isort: split
import hypothesis
import hypothesis.strategies as st
import pytest

from engine.chains import root_of, unnamed_agent
from engine.memory.blocks import block_names
from engine.memory.context_tree import ContextTree
from engine.pool import BlockPool
from kvpage_server.kv_events import hash_of

TOKENS = some_tokens(1, 60)
BYTES = BLOCK * SPEC.token_nbytes  # of a block

pool = pool_of(256)
Event = dict[str, Any]


@pytest.fixture
def events() -> list[Event]:
    return []


def share(tree: ContextTree, pool: BlockPool, agent_id: str, tokens: Sequence[int]) -> None:
    context = made(pool, agent_id, tuple(tokens))
    pool.free(tree.adopt(context).block_ids, agent_id)
    pool.free(context.block_ids, agent_id)


def names(agent_id: str, tokens: Sequence[int]) -> list[int]:
    """The hashes of the full blocks of a context."""
    found = block_names(tokens, SPEC, agent_id)
    return [hash_of(name) for name in found[: len(tokens) // BLOCK]]


def test_full_blocks_are_published_with_their_tokens(pool: BlockPool, events: list[Event]) -> None:
    tree = ContextTree(SPEC, pool, 100 * BYTES, events.append)
    share(tree, pool, "alice", TOKENS[:43])
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": names("alice", TOKENS[:43]),
            "parent_block_hash": None,
            "token_ids": list(TOKENS[:40]),
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "locality": "LOCAL",
            "ownership": f"kvpage:{SPEC.model_id}",
            "session_id": "alice",
        }
    ]
    tree.clear()


def test_only_new_blocks_are_published(pool: BlockPool, events: list[Event]) -> None:
    tree = ContextTree(SPEC, pool, 100 * BYTES, events.append)
    share(tree, pool, "alice", TOKENS[:43])
    share(tree, pool, unnamed_agent(""), TOKENS[:43])
    share(tree, pool, unnamed_agent(""), TOKENS[:51])
    first, second = events
    assert second["block_hashes"] == names("bob", TOKENS[:48])[5:]
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert second["token_ids"] == list(TOKENS[40:48])
    assert "session_id" not in second
    tree.clear()


def test_a_tenants_first_block_follows_its_root(pool: BlockPool, events: list[Event]) -> None:
    tree = ContextTree(SPEC, pool, 100 * BYTES, events.append)
    share(tree, pool, "alice@acme", TOKENS[:8])
    (event,) = events
    assert event["parent_block_hash"] == hash_of(root_of("alice@acme"))
    tree.clear()


def test_evicted_and_forgotten_blocks_are_removed(pool: BlockPool, events: list[Event]) -> None:
    tree = ContextTree(SPEC, pool, 100 * BYTES, events.append)
    share(tree, pool, "alice", TOKENS[:24])
    first, second, third = events.pop()["block_hashes"]
    assert tree.evict()
    assert events.pop() == {
        "type": "BlockRemoved",
        "block_hashes": [third],
        "medium": "GPU",
        "locality": "LOCAL",
        "ownership": f"kvpage:{SPEC.model_id}",
    }
    tree.forget_blocks(block_names(TOKENS[:16], SPEC)[1:])
    assert events.pop()["block_hashes"] == [second]
    tree.clear()
    assert events.pop()["block_hashes"] == [first]


def test_released_blocks_are_removed(pool: BlockPool, events: list[Event]) -> None:
    """With the part of a block after them, which was never published."""
    tree = ContextTree(SPEC, pool, 100 * BYTES, events.append)
    share(tree, pool, "alice", TOKENS[:20])
    published = hashes(events)
    assert len(published) == 2
    assert tree.release(block_names(TOKENS[:16], SPEC)[-1])
    assert len(tree) == 0
    assert hashes(events) == set()


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.booleans()), max_size=20), st.integers(2, 20)
)
def test_published_blocks_are_those_in_memory(actions: list[tuple[int, int, bool]], room: int) -> None:
    pool, events = BlockPool(256), list[Event]()
    tree = ContextTree(SPEC, pool, room * BYTES, events.append)
    contexts = [TOKENS, (*TOKENS[:20], *some_tokens(2, 40)), some_tokens(3, 60)]
    for which, length, evicts in actions:
        share(tree, pool, unnamed_agent(""), contexts[which][:length])
        if evicts:
            tree.evict()
        there = {hash_of(name) for name, node in tree._nodes.items() if len(node.tokens) == BLOCK}
        assert hashes(events) == there
    tree.clear()
    assert hashes(events) == set()
