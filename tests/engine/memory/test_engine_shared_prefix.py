"""Contexts with a common beginning have it once in memory, and one engine or agent computes it for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from contexts import BLOCK, SPEC, is_true, made, some_tokens
from engine_models import letter_tokenizer, tiny
from pools import pool_of
from servers import RunningServer, free_port
from waiting import PATIENCE, eventually

# isort: split
import hypothesis
import hypothesis.strategies as st
import mlx.core as mx
import pytest
import redis
from mlx_lm.models.cache import make_prompt_cache

from engine.chains import common_prefix
from engine.event_loop import EventLoop
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks
from engine.memory.context_tree import HOLDER, ContextTree
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers import prefill_claims
from engine.tiers.pages import PageTier
from engine.tiers.prefill_claims import Claim, Claims
from engine.tiers.store import AgentCacheStore

TOKENS = some_tokens(1, 60)
BYTES = BLOCK * SPEC.token_nbytes  # of a block


pool = pool_of(256)


def adopted(tree: ContextTree, pool: BlockPool, agent_id: str, tokens: tuple[int, ...]) -> AgentBlocks:
    context = made(pool, agent_id, tokens)
    result = tree.adopt(context)
    pool.free(context.block_ids, agent_id)
    return result


def share(tree: ContextTree, pool: BlockPool, agent_id: str, tokens: tuple[int, ...]) -> None:
    pool.free(adopted(tree, pool, agent_id, tokens).block_ids, agent_id)


def found(tree: ContextTree, pool: BlockPool, agent_id: str, tokens: tuple[int, ...]) -> int:
    """How many of `tokens` can be reused. The blocks are checked and freed."""
    context = tree.find(agent_id, tokens)
    if context is None:
        return 0
    assert is_true(context)
    pool.free(context.block_ids, agent_id)
    return context.reusable_for(SPEC, tokens)


def test_the_longest_beginning_is_found_to_the_token(pool: BlockPool) -> None:
    tree = ContextTree(SPEC, pool, 100 * BYTES)
    share(tree, pool, "alice", TOKENS[:43])
    assert len(tree) == 6
    assert found(tree, pool, "bob", TOKENS) == 43
    assert found(tree, pool, "bob", TOKENS[:43]) == 42, "the last token of a prompt is always computed"
    assert found(tree, pool, "bob", TOKENS[:40]) == 39
    assert found(tree, pool, "bob", (*TOKENS[:20], 95, *TOKENS[21:])) == 20
    assert found(tree, pool, "bob", (*TOKENS[:42], 95, 95)) == 42
    assert found(tree, pool, "bob", TOKENS[1:]) == 0
    assert tree.hits == 5
    tree.clear()


def test_a_partial_block_is_dropped_for_a_longer_one(pool: BlockPool) -> None:
    tree = ContextTree(SPEC, pool, 100 * BYTES)
    for count in (1, 3, 5, 8, 9, 4, 14, 16, 19, 17):
        share(tree, pool, "alice", TOKENS[:count])
    assert len(tree) == 3
    assert tree.nbytes == 19 * SPEC.token_nbytes
    share(tree, pool, "alice", (*TOKENS[:17], 95, 95))
    assert len(tree) == 4, "it goes on differently"
    assert found(tree, pool, "bob", (*TOKENS[:17], 95, 95, 5)) == 19
    assert found(tree, pool, "bob", TOKENS[:25]) == 19
    tree.clear()


def test_tenants_share_nothing(pool: BlockPool) -> None:
    tree = ContextTree(SPEC, pool, 100 * BYTES)
    share(tree, pool, "alice@acme", TOKENS)
    assert found(tree, pool, "bob@acme", TOKENS) == 59
    assert found(tree, pool, "bob@other", TOKENS) == 0
    assert found(tree, pool, "bob", TOKENS) == 0
    tree.clear()


def test_a_common_prefix_is_held_once(pool: BlockPool) -> None:
    tree = ContextTree(SPEC, pool, 100 * BYTES)
    alice = adopted(tree, pool, "alice", TOKENS[:50])
    bob = adopted(tree, pool, "bob", (*TOKENS[:40], 95, 95))
    assert alice.blocks[:5] == bob.blocks[:5]
    assert is_true(bob)
    assert pool.used_blocks == 5 + 2 + 1
    assert {name: held.blocks for name, held in pool.holdings().items()} == {"alice": 7, "bob": 6, HOLDER: 8}
    tree.clear()
    for context in (alice, bob):
        pool.free(context.block_ids, context.agent_id)


def test_the_leaf_that_is_worth_least_is_evicted_first(pool: BlockPool) -> None:
    tree = ContextTree(SPEC, pool, 20 * BYTES)
    share(tree, pool, "alice", (*TOKENS[:16], *some_tokens(2, 32)))
    share(tree, pool, "bob", (*TOKENS[:16], *some_tokens(3, 32)))
    assert (len(tree), tree.nbytes) == (10, 10 * BYTES)
    assert found(tree, pool, "carol", (*TOKENS[:16], 95)) == 16
    for seed in range(100):
        share(tree, pool, "carol", some_tokens(100 + seed, 32))
        assert tree.nbytes <= 20 * BYTES
    assert found(tree, pool, "david", (*TOKENS[:16], 95)) == 16, "it was used again"
    assert found(tree, pool, "david", (*some_tokens(199, 32), 5)) == 32, "the newest is kept"
    while tree.evict():
        pass
    assert (len(tree), tree.nbytes, tree.idle) == (0, 0, None)


def test_a_context_over_the_budget_keeps_its_beginning(pool: BlockPool) -> None:
    tree = ContextTree(SPEC, pool, 8 * BYTES)
    share(tree, pool, "alice", some_tokens(4, 200))
    assert found(tree, pool, "bob", some_tokens(4, 200)) == 64
    assert tree.evict()
    assert found(tree, pool, "bob", some_tokens(4, 200)) == 56
    tree.clear()
    assert not tree.evict()


@hypothesis.given(
    contexts=st.lists(st.tuples(st.sampled_from(["a", "b@acme"]), st.lists(st.integers(0, 1), max_size=30))),
    room=st.integers(1, 30),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_a_prompt_finds_every_common_prefix_of_its_tenant(contexts: list[tuple[str, list[int]]], room: int) -> None:
    """With room for all contexts, the result is that of a comparison with each. With less, it is a part of that, and
    the tree is within its limits."""
    pool = BlockPool()
    ample, tight = ContextTree(SPEC, pool, 1 << 30), ContextTree(SPEC, pool, room * SPEC.token_nbytes)
    known: list[tuple[str, tuple[int, ...]]] = []
    for agent, some in contexts:
        tokens = tuple(some)
        best = max((common_prefix(before, tokens) for of, before in known if of == agent), default=0)
        best = max(0, min(best, len(tokens) - 1))
        assert found(ample, pool, agent, tokens) == best
        assert found(tight, pool, agent, tokens) <= best
        for tree in (ample, tight):
            share(tree, pool, agent, tokens)
        known.append((agent, tokens))
        assert tight.nbytes <= room * SPEC.token_nbytes
        assert pool.used_bytes <= ample.nbytes + tight.nbytes
    assert pool.holdings().keys() <= {HOLDER}
    ample.clear()
    tight.clear()
    pool.check_empty()


def test_a_prefix_ends_where_a_state_was_kept(pool: BlockPool) -> None:
    model = tiny("gemma3_text")
    spec = ModelCacheSpec.probe(model, letter_tokenizer(), block_tokens=64)
    tokens = some_tokens(5, 256)
    tree = ContextTree(spec, pool, 1 << 30)

    def computed(agent_id: str, checkpoint: int) -> AgentBlocks:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([tokens[:checkpoint]]), cache=cache))
        states = {checkpoint: kvcache.capture(spec, cache)}
        mx.eval(model(mx.array([tokens[checkpoint:]]), cache=cache))
        blocks = kvcache.extract(spec, cache, pool.allocate(4, agent_id), len(tokens), 0, states)
        return AgentBlocks(agent_id, tokens, blocks, spec.fingerprint)

    for agent, checkpoint, reach in (("alice", 64, 64), ("bob", 192, 192), ("carol", 128, 192)):
        context = computed(agent, checkpoint)
        pool.free(tree.adopt(context).block_ids, agent)
        pool.free(context.block_ids, agent)
        beginning = tree.find("david", tokens)
        assert beginning
        assert len(beginning) == beginning.reusable(spec, 255) == reach
        pool.free(beginning.block_ids, "david")
    assert found_states(tree) == 4
    tree.clear()


def found_states(tree: ContextTree) -> int:
    return sum(block.state is not None for block in (node.block for node in tree._nodes.values()))


@pytest.fixture
def engines(
    server: RunningServer, client: redis.Redis, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Claims]]:
    """Makes the claims of engines that share the emptied server, however long that takes for an answer."""
    monkeypatch.setattr(prefill_claims, "ANSWER_SECONDS", PATIENCE)
    monkeypatch.setattr(prefill_claims, "LEASE_SECONDS", PATIENCE)
    opened: list[tuple[Claims, PageTier]] = []

    def make(url: str = server.url) -> Claims:
        pages = PageTier(url, SPEC, pool)
        opened.append((Claims(SPEC, pages, pages.loop), pages))
        return opened[-1][0]

    yield make
    for claims, pages in opened:
        claims.close()
        pages.close()
    assert client.keys("claim:*") == []


@pytest.fixture
def alone() -> Iterator[Claims]:
    loop = EventLoop("tiny")
    claims = Claims(SPEC, None, loop)
    yield claims
    claims.close()
    loop.close()


def ends(waiting: Claim, within: float = PATIENCE) -> str:
    over = threading.Event()
    waiting.add_done_callback(over.set)
    over.wait(within)
    return waiting.state


def test_one_of_two_agents_computes_and_the_other_waits(alone: Claims) -> None:
    first, second, third = (alone.begin(agent, TOKENS) for agent in ("alice", "bob", "carol"))
    assert [first.state, second.state, third.state] == ["mine", "wait", "wait"]
    received: list[str] = []
    second.add_done_callback(lambda: received.append(second.state))
    first.add_done_callback(lambda: received.append("at once"))
    assert received == ["at once"]
    first.published()
    assert received == ["at once", "proceed"]
    assert third.state == "proceed"
    first.release()
    first.release()


def test_a_claim_on_a_published_block_does_not_wait(alone: Claims) -> None:
    """Its prompt was looked up before, and loads again; the first one still writes the block to the server."""
    first = alone.begin("alice", TOKENS)
    first.published()
    late = alone.begin("bob", TOKENS)
    assert ends(late) == "proceed"
    late.release()
    first.release()
    assert alone.begin("carol", TOKENS).state == "mine"


def test_a_released_claim_passes_to_the_next_waiter_only(alone: Claims) -> None:
    first, second, third = (alone.begin(agent, TOKENS) for agent in ("alice", "bob", "carol"))
    second.release()
    first.release()
    assert third.state == "mine"
    third.release()
    again = alone.begin("alice", TOKENS)
    assert again.state == "mine"
    again.release()


def test_only_common_missing_blocks_are_waited_for(alone: Claims) -> None:
    held = alone.begin("alice", TOKENS, known=8)
    assert alone.begin("bob", TOKENS, known=15).state == "wait"
    others = [
        alone.begin("bob", TOKENS),
        alone.begin("bob", TOKENS, known=16),
        alone.begin("bob@acme", TOKENS, known=8),
        alone.begin("bob", (*TOKENS[:12], 95, *TOKENS[13:]), known=8),
    ]
    assert [other.state for other in others] == ["mine"] * 4
    assert alone.begin("bob", TOKENS[:16], known=8).state == "proceed", "its last token is never known"
    assert alone.begin("bob", TOKENS[:5]).state == "proceed"
    for other in (held, *others):
        other.release()


def test_waits_are_bounded(alone: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_claims, "PATIENCE_SECONDS", 0.2)
    first, second = alone.begin("alice", TOKENS), alone.begin("bob", TOKENS)
    assert ends(second) == "proceed"
    assert first.state == "mine"
    first.release()


def test_of_two_engines_one_computes_and_the_other_fetches(
    engines: Callable[[], Claims], server: RunningServer, pool: BlockPool
) -> None:
    here, there = engines(), engines()
    mine = here.begin("alice", TOKENS)
    assert ends(mine) == "mine"
    theirs = there.begin("bob", TOKENS)
    time.sleep(0.2)
    assert theirs.state == "wait"
    store = AgentCacheStore(SPEC, pool, pages=PageTier(server.url, SPEC, pool))
    prompt = made(pool, "alice", TOKENS)
    store.publish(prompt, mine)
    pool.free(prompt.block_ids, "alice")
    assert ends(theirs) == "proceed"
    store.flush_dirty()
    elsewhere = AgentCacheStore(SPEC, pool, pages=PageTier(server.url, SPEC, pool))
    loaded = elsewhere.load("bob", TOKENS)
    assert loaded
    assert loaded.blocks
    assert (loaded.tier, loaded.reach) == ("page", 59)
    pool.free(loaded.blocks.block_ids, "bob")
    assert store.agents() == [], "nothing is stored in alice's name"
    assert store.metrics().published == 1
    for each in (store, elsewhere):
        each.close()


def test_a_claim_is_held_for_as_long_as_its_engine_lives(
    engines: Callable[[], Claims], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_claims, "LEASE_SECONDS", 2.0)
    monkeypatch.setattr(prefill_claims, "RENEWAL_SECONDS", 0.1)
    here, there = engines(), engines()
    mine = here.begin("alice", TOKENS)
    assert ends(mine) == "mine"
    theirs = there.begin("bob", TOKENS)
    time.sleep(2.5)
    assert theirs.state == "wait"
    mine.release()
    assert ends(theirs) == "mine"
    theirs.release()


def test_a_waiter_takes_over_the_claim_of_a_dead_holder(engines: Callable[[], Claims], client: redis.Redis) -> None:
    """A dead engine leaves a lease that expires."""
    here, there = engines(), engines()
    name = ContextTree(SPEC, BlockPool(1), 0).names("alice", TOKENS)[0]
    client.set(f"claim:{name}", "one that is dead", px=500)
    waiting = [claims.begin(agent, TOKENS) for claims in (here, there) for agent in ("alice", "bob")]
    while waiting:
        assert eventually(lambda: any(each.state == "mine" for each in waiting))
        time.sleep(0.1)
        (mine,) = (each for each in waiting if each.state == "mine")
        assert {each.state for each in waiting if each is not mine} <= {"wait"}, "no stampede"
        waiting.remove(mine)
        mine.release()


def test_without_an_answer_of_the_server_each_engine_computes(
    engines: Callable[..., Claims], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_claims, "ANSWER_SECONDS", 0.1)
    gone = engines(f"redis://127.0.0.1:{free_port()}")
    first, second = gone.begin("alice", TOKENS), gone.begin("bob", TOKENS)
    assert ends(first) == "mine"
    assert second.state == "wait", "within the engine one is enough"
    first.published()
    assert second.state == "proceed"
    first.release()
