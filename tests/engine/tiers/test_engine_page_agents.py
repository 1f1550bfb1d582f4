"""Agents on the page server: forks cost nothing, unreferenced blocks are deleted, and writers do not interfere."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis
from engine_families import TOKENS as FAMILY_TOKENS
from engine_families import family
from pools import pool_of
from servers import RunningServer, free_port, start_server
from test_engine_pages import SPEC, TOKENS, context, held, same

from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, BlockError, KVBlock, block_names
from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.server import block_writer
from engine.tiers.server.block_writer import Saved
from engine.tiers.store import AgentCacheStore, StoreUnavailableError

pool = pool_of(64)


@pytest.fixture
def tier(server: RunningServer, client: redis.Redis, pool: BlockPool) -> Iterator[PageTier]:
    tier = PageTier(server.url, SPEC, pool)
    yield tier
    assert not tier.misses
    tier.close()


@pytest.fixture
def other(server: RunningServer, client: redis.Redis, pool: BlockPool) -> Iterator[PageTier]:
    tier = PageTier(server.url, SPEC, pool)
    yield tier
    tier.close()


def stored(client: redis.Redis) -> set[str]:
    """The names of all blocks."""
    keys = (key.decode().split(":") for key in client.scan_iter(count=10_000))
    return {name for kind, name, *_ in keys if len(name) == 32 and kind != "tails"}


def names(tokens: tuple[int, ...], agent_id: str = "") -> set[str]:
    return set(block_names(tokens, SPEC, agent_id))


def test_agents_with_unknown_blocks_are_left_out(
    tier: PageTier, other: PageTier, client: redis.Redis, pool: BlockPool
) -> None:
    """The server answers about the manifest alone."""
    tier.save(context())
    store = AgentCacheStore(SPEC, pool, pages=other)
    client.execute_command("ACL", "SETUSER", "default", "-kvblockexists")
    try:
        assert store.agents() == []
        with pytest.raises(StoreUnavailableError):
            store.agent("alice")
    finally:
        client.execute_command("ACL", "SETUSER", "default", "+kvblockexists")
    assert [(one.agent_id, one.tokens, one.saved) for one in store.agents()] == [("alice", 700, True)]
    store.close()


# -- forks and their remains -------------------------------------------------------------------------------------------


def test_a_fork_has_the_whole_context_for_a_manifest(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    tier.save(context())
    before = client.dbsize()
    assert tier.fork("alice", "twin")
    assert client.dbsize() == before + 1
    loaded = tier.load("twin")
    assert same(loaded, context(), 700)
    held(pool, loaded)
    assert tier.agents() == ["alice", "twin"]
    assert [tier.tokens_of(agent) for agent in ("alice", "twin", "nobody")] == [700, 700, None]


def test_counts_that_are_no_numbers_do_not_keep_an_agent(tier: PageTier, client: redis.Redis) -> None:
    """Another client has set them. The agent is deleted, and can be saved again."""
    for _ in range(2):
        tier.save(context())
        count, *_ = (f"refs:{name}" for name in names(TOKENS))
        client.set(count, "no number")
        assert tier.delete("alice") is True
        assert tier.agents() == []
        assert client.get(count) is None
        client.set(count, "no number")
    assert tier.save(context()) is not None
    assert tier.agents() == ["alice"]


def test_an_agent_that_was_deleted_after_its_use_is_not_saved(
    tier: PageTier, other: PageTier, client: redis.Redis
) -> None:
    tier.save(context())
    assert other.delete("alice")
    assert tier.save(context(), idle=60) == Saved(0, 0, 0)
    assert {*client.keys()} == {b"refs:deleted:alice"}
    assert tier.save_failure is None
    client.pexpire("refs:deleted:alice", 86_400_000 - 3_600_000)  # an hour later
    assert tier.save(context(), idle=1)
    assert tier.agents() == ["alice"]
    client.pexpire("refs:deleted:alice", 86_400_000 + 3_600_000)  # the clock of the server was set back
    assert tier.save(context(), idle=60)


@pytest.mark.parametrize("moment", ["begin", "write"])
def test_an_agent_that_is_deleted_during_a_save_stays_deleted(
    tier: PageTier, other: PageTier, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another engine deletes it, and then the server's clock is set back."""
    tier.save(context(TOKENS[:300]))
    parts, write = PageTier._parts, block_writer.write

    def delete() -> None:
        assert other.delete("alice")
        assert client.pexpire("refs:deleted:alice", 86_400_000 + 3_600_000)

    def delete_before(of: PageTier, *given: Any) -> Any:
        delete()
        return parts(of, *given)

    async def delete_after(*given: Any) -> Any:
        await asyncio.to_thread(delete)
        return await write(*given)

    if moment == "begin":
        monkeypatch.setattr(PageTier, "_parts", delete_before)
    else:
        monkeypatch.setattr(block_writer, "write", delete_after)
    assert tier.save(context()) == Saved(0, 0, 0)
    assert tier.agents() == []
    assert {*client.keys()} == {b"refs:deleted:alice"}


def test_of_nothing_there_is_no_fork(tier: PageTier, client: redis.Redis) -> None:
    assert not tier.fork("nobody", "twin")
    assert not tier.delete("nobody")
    assert client.dbsize() == 0


def test_a_delete_frees_only_unshared_blocks(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    longer = context((*TOKENS[:530], *TOKENS[:100]), "bob")
    tier.save(context())
    tier.save(longer)
    tier.fork("alice", "twin")
    assert tier.delete("alice")
    assert tier.tokens_of("alice") is None
    assert stored(client) == names(TOKENS) | names(longer.tokens)
    assert tier.delete("twin")
    assert stored(client) == names(longer.tokens)
    assert held(pool, tier.load("bob")) == 630
    assert tier.delete("bob")
    assert {*client.keys()} == {b"refs:deleted:alice", b"refs:deleted:bob", b"refs:deleted:twin"}


def test_a_fork_that_continues_does_not_change_its_origin(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    tier.save(context(TOKENS[:300]))
    tier.fork("alice", "twin")
    tier.save(context(TOKENS[:600], "twin"))
    assert stored(client) == names(TOKENS[:300]) | names(TOKENS[:600])
    for agent, count in (("alice", 300), ("twin", 600)):
        loaded = tier.load(agent)
        assert same(loaded, context(), count)
        held(pool, loaded)
    tier.fork("twin", "alice")  # in place of alice's context
    assert stored(client) == names(TOKENS[:600])


def test_repeated_saves_and_forks_count_each_agent_once(tier: PageTier, client: redis.Redis) -> None:
    for _ in range(3):
        tier.save(context())
        tier.fork("alice", "twin")
        tier.fork("alice", "alice")
    assert {client.get(f"refs:{name}") for name in names(TOKENS)} == {b"2"}
    tier.delete("alice")
    tier.delete("twin")
    assert {*client.keys()} == {b"refs:deleted:alice", b"refs:deleted:twin"}


def test_tenants_share_nothing(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    ours, theirs = context(TOKENS, "alice@acme"), context(TOKENS, "alice@other")
    assert tier.save(ours)
    assert tier.save(theirs) == Saved(3, 0, 700 * SPEC.token_nbytes)
    assert not names(TOKENS, "alice@acme") & names(TOKENS, "alice@other")
    with pytest.raises(BlockError, match="a fork belongs to its agent's tenant"):
        tier.fork("alice@acme", "alice@other")
    assert tier.fork("alice@acme", "bob@acme")
    tier.delete("alice@other")
    assert tier.load("eve@other", TOKENS) is None
    loaded = tier.load("bob@acme", TOKENS)
    assert same(loaded, context(), 700)
    held(pool, loaded)
    assert tier.misses.pop("absent") == 1


# -- prefixes ----------------------------------------------------------------------------------------------------------


def test_published_blocks_are_found_by_tokens_without_an_owner(
    tier: PageTier, client: redis.Redis, pool: BlockPool
) -> None:
    assert tier.publish(context(TOKENS[:600])) == Saved(3, 0, 600 * SPEC.token_nbytes)
    assert tier.publish(context(TOKENS[:10])) == Saved(0, 0, 0), "a few tokens are computed sooner"
    assert tier.agents() == []
    assert held(pool, tier.load("bob", TOKENS)) == 600
    assert tier.save(context()) == Saved(1, 2, 188 * SPEC.token_nbytes)


def test_how_much_of_a_prefix_is_stored(tier: PageTier, client: redis.Redis) -> None:
    prefix = block_names(TOKENS[:512], SPEC)
    assert tier.loop.run(tier.sealed(prefix)) == 0
    tier.publish(context(TOKENS[:300]))
    assert tier.loop.run(tier.sealed(prefix)) == 1
    tier.publish(context())
    assert tier.loop.run(tier.sealed(prefix)) == 2
    assert tier.loop.run(tier.sealed([*prefix, "f" * 32, prefix[0]])) == 2
    client.execute_command("KVPAGEDEL", prefix[0])
    assert tier.loop.run(tier.sealed(prefix)) == 0
    assert tier.loop.run(tier.sealed([])) == 0


def test_blocks_in_memory_are_not_fetched(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    tier.save(context())
    memory = tier.load("alice", TOKENS[:512])
    assert memory
    fetch = tier.fetch("bob", (*TOKENS[:530], 1), held=memory.blocks[:1])
    loaded = fetch.result()
    assert loaded
    assert fetch.report.nbytes == (700 - 256) * SPEC.token_nbytes
    assert fetch.reach == 530
    assert loaded.blocks[0] is memory.blocks[0]
    assert pool.used_blocks == 4
    assert same(loaded, context(), 700)
    held(pool, memory)
    held(pool, loaded)
    with pytest.raises(ValueError, match="held blocks are the first of 0 full ones, got 2"):
        tier.fetch("bob", TOKENS[:30], held=memory.blocks)


def test_a_state_that_memory_lacks_is_fetched_for_its_blocks(server: RunningServer, client: redis.Redis) -> None:
    """The blocks were kept without one. With one they are of use whatever the server does."""
    of = family("gemma3_text")
    at_256 = of.computed(256)
    whole = of.blocks(at_256, 256)
    tier = PageTier(server.url, of.spec, BlockPool(8))
    assert tier.save(whole)
    (block,) = whole.blocks
    (own,) = tier._remote.pool.allocate(1, "memory")
    fetch = tier.fetch("agent", FAMILY_TOKENS, held=[KVBlock(own, 256, block.layers)])
    loaded = fetch.result()
    assert loaded
    assert fetch.report.nbytes == of.spec.state_nbytes(256)
    assert loaded.block_ids == [own]
    tier._remote.pool.free([own], "memory")
    restored = kvcache.reconstruct(of.spec, loaded.blocks, 256)
    assert np.array_equal(of.continuation(restored, 256), of.continuation(of.computed(256), 256))
    nobody = PageTier(f"redis://127.0.0.1:{free_port()}", of.spec, tier._remote.pool)
    without = nobody.fetch("agent", FAMILY_TOKENS, held=loaded.blocks)
    again = without.result()
    assert again
    assert (again.blocks, without.reach, without.why) == (loaded.blocks, 256, "down")
    nobody.close()
    for one in (loaded, again):
        tier._remote.pool.free(one.block_ids)
    tier._remote.pool.check_empty()
    tier.close()


# -- who computes what -------------------------------------------------------------------------------------------------


def test_a_claim_lasts_until_its_release_or_its_engines_death(tier: PageTier, other: PageTier) -> None:
    assert tier.loop.run(tier.claim("name", 10))
    assert not other.loop.run(other.claim("name", 10))
    assert not other.loop.run(other.release("name"))
    assert not other.loop.run(other.renew("name", 10))
    assert tier.loop.run(tier.renew("name", 0.05))
    time.sleep(0.06)
    assert not tier.loop.run(tier.renew("name", 10))
    assert other.loop.run(other.claim("name", 10))
    assert other.loop.run(other.release("name"))
    assert not other.loop.run(other.release("name"))
    assert tier.loop.run(tier.claim("name", 10))
    assert not tier.unasked


# -- several writers ---------------------------------------------------------------------------------------------------


def test_concurrent_saves_of_an_agent_leave_one_whole_context(
    tier: PageTier, other: PageTier, client: redis.Redis, pool: BlockPool
) -> None:
    """Meanwhile every reader finds one of the two, or a part of it, but no mixture; in the end no key is left over."""
    turns = [context(TOKENS[:count]) for count in (300, 600, 257, 700)]
    others = [context(TOKENS[:0:-1][:count]) for count in (310, 680)]
    saving = threading.Event()

    def save(to: PageTier, contexts: list[AgentBlocks]) -> None:
        for _ in range(3):
            for one in contexts:
                assert to.save(one)

    def read() -> int:
        found = 0
        while not saving.is_set():
            loaded = other.load("alice")
            if loaded:
                assert any(same(loaded, one, len(loaded)) for one in (*turns, *others))
                found += held(pool, loaded)
        return found

    with ThreadPoolExecutor(3) as threads:
        reader = threads.submit(read)
        writers = [threads.submit(save, tier, turns), threads.submit(save, other, others)]
        for writer in writers:
            writer.result()
        saving.set()
        assert reader.result() > 0
    loaded = tier.load("alice")
    assert loaded
    (last,) = [one for one in (turns[-1], others[-1]) if one.tokens == loaded.tokens]
    assert same(loaded, last, len(last))
    held(pool, loaded)
    assert stored(client) == names(last.tokens)
    assert set(other.misses) <= {"gap", "shape", "absent"}


def test_a_block_deleted_during_another_save_exists_in_the_end(
    tier: PageTier, other: PageTier, client: redis.Redis, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between bob's check of existing blocks and his manifest alice, the only owner of the blocks, is deleted."""
    tier.save(context())
    write = block_writer.write
    deleted = []

    async def delete_before(connection: object, *args: object) -> object:
        if connection is tier._connection and not deleted:
            deleted.append(await_deletion())
        return await write(connection, *args)  # type: ignore[arg-type]

    def await_deletion() -> bool:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(other.delete, "alice").result()

    monkeypatch.setattr(block_writer, "write", delete_before)
    assert tier.save(context(TOKENS, "bob"))
    assert deleted == [True]
    loaded = tier.load("bob")
    assert same(loaded, context(), 700)
    held(pool, loaded)
    assert {client.get(f"refs:{name}") for name in names(TOKENS)} == {b"1"}


def test_an_interrupted_save_leaves_the_old_or_the_new_context(
    tier: PageTier, other: PageTier, client: redis.Redis, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever moment. The next one that is not disturbed leaves no more than the context."""
    monkeypatch.setattr("engine.tiers.server.manifest.CHUNK_BYTES", 1)
    old, new = context(TOKENS[::-1][:300]), context()
    ended = Counter[bool]()
    for milliseconds in (0.1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        assert other.save(old)
        tier._connection.deadline = milliseconds / 1000
        ended[tier.save(new) is not None] += 1
        tier.breaker.succeeded()
        loaded = other.load("alice")
        assert same(loaded, new, 700) or same(loaded, old, 300)
        held(pool, loaded)
    assert ended[False]
    tier._connection.deadline = 10.0
    assert other.save(old)
    assert tier.save(new)
    assert stored(client) == names(TOKENS)
    assert {client.get(f"refs:{name}") for name in names(TOKENS)} == {b"1"}
    assert not other.misses


def test_the_store_has_the_contexts_of_all_agents(
    tier: PageTier, other: PageTier, client: redis.Redis, pool: BlockPool
) -> None:
    """Sixty random saves, forks and deletions by two engines, and a model of them: agent -> tokens."""
    random = np.random.default_rng(11)
    contexts = [TOKENS[:100], TOKENS[:256], TOKENS[:300], TOKENS[:600], TOKENS[::-1][:520]]
    agents = ["alice", "bob", "carol"]
    kept: dict[str, tuple[int, ...]] = {}
    for step in range(60):
        engine = (tier, other)[step % 2]
        agent, another = random.choice(agents, 2)
        match random.integers(0, 4):
            case 0 | 1:
                kept[agent] = contexts[random.integers(0, len(contexts))]
                assert engine.save(replace(context(kept[agent]), agent_id=str(agent)))
            case 2:
                assert engine.fork(str(agent), str(another)) == (agent in kept)
                if agent in kept:
                    kept[another] = kept[agent]
            case 3:
                assert engine.delete(str(agent)) == (kept.pop(agent, None) is not None)
        named = [name for tokens in kept.values() for name in block_names(tokens, SPEC)]
        assert stored(client) == set(named)
        assert {name: int(client.get(f"refs:{name}")) for name in set(named)} == Counter(named)
    assert other.agents() == sorted(kept)
    for agent, tokens in kept.items():
        loaded = tier.load(agent)
        assert loaded
        assert loaded.tokens == tokens
        held(pool, loaded)


def test_as_many_loads_as_one_likes_share_some_connections(server: RunningServer, client: redis.Redis) -> None:
    tier = PageTier(server.url, SPEC, BlockPool(), deadline=60)
    assert tier.save(context(TOKENS[:300]))
    fetches = [tier.fetch("alice") for _ in range(150)]
    for fetch in fetches:
        assert held(tier._remote.pool, fetch.result()) == 300
    assert not tier.misses
    assert len(client.client_list()) < 60
    tier.close()


@pytest.mark.parametrize(("agent_id", "count"), [("alice", 10), ("bob", 512)], ids=["its manifest", "its first block"])
def test_an_evicted_context_is_called_evicted(pool: BlockPool, agent_id: str, count: int) -> None:
    with start_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru") as small, small.client() as client:
        tier = PageTier(small.url, SPEC, pool)
        assert tier.load(agent_id, TOKENS) is None
        assert tier.save(context(TOKENS[:count]))
        for number in range(1000):
            if not [*client.scan_iter("[kmst]*")]:
                break
            client.set(f"other:{number}", bytes(100_000))
        assert tier.load(agent_id, TOKENS) is None
        assert tier.misses == {"absent": 1, "evicted": 1}
        tier.close()


def test_loads_are_right_after_any_eviction(pool: BlockPool) -> None:
    """Twelve contexts where four have room. Blocks, seals, counts and manifests go one by one."""
    random = np.random.default_rng(3)
    with start_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru") as small:
        tier = PageTier(small.url, SPEC, pool)
        mine = [replace(context(), agent_id=f"agent{i}", tokens=TOKENS[i:] + TOKENS[:i]) for i in range(12)]
        found = Counter[int]()
        for one in random.choice(mine, 60):
            if random.integers(0, 2):
                assert tier.save(one)
            else:
                loaded = tier.load(one.agent_id, one.tokens)
                assert loaded is None or same(loaded, one, len(loaded))
                found[held(pool, loaded)] += 1
        assert found[0]
        assert found[700]
        assert set(tier.misses) <= {"absent", "gap", "evicted"}
        assert tier.misses["evicted"]
        assert not tier.unsaved
        tier.close()
