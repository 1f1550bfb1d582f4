"""Contexts of agents: in memory, on the server, then in files; nothing is lost, leaked, written twice or mixed up."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

from block_pages import page_bodies
from contexts import BLOCK, SPEC, is_true, made, some_tokens
from engine_models import letter_tokenizer, tiny
from pools import pool_of
from proxy import start_proxy
from servers import RunningServer, free_port, resident, start_server
from test_engine_cold import computed
from waiting import PATIENCE, eventually

# isort: split
import hypothesis
import hypothesis.strategies as st
import pytest
import redis
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engine.memory.blocks import AgentBlocks, BlockError, IncompatibleBlocksError, block_names
from engine.memory.context_tree import HOLDER
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers import flush, loading
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.loading import Loaded
from engine.tiers.pages import PageTier
from engine.tiers.server import fetch
from engine.tiers.server.manifest import manifest_key
from engine.tiers.store import AgentCacheStore, CacheConfig

TOKENS = some_tokens(1, 60)


pool = pool_of(256)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is read because this machine is busy."""
    monkeypatch.setattr(loading, "HEDGE_AFTER_SECONDS", PATIENCE)


@pytest.fixture
def cold(tmp_path: Path, pool: BlockPool) -> SafetensorsCacheAdapter:
    return SafetensorsCacheAdapter(SPEC, pool, tmp_path)


def remember(store: AgentCacheStore, pool: BlockPool, agent_id: str, tokens: tuple[int, ...]) -> None:
    context = made(pool, agent_id, tokens)
    store.save(context)
    pool.free(context.block_ids, agent_id)


def recalled(store: AgentCacheStore, pool: BlockPool, agent_id: str, tokens: tuple[int, ...] | None) -> tuple[str, int]:
    """Return the tier and the number of tokens of a load; the context is checked and freed."""
    loaded = store.load(agent_id, tokens)
    return ("none", 0) if loaded is None else (loaded.tier, taken(pool, loaded))


def taken(pool: BlockPool, loaded: Loaded) -> int:
    assert loaded.blocks
    assert is_true(loaded.blocks)
    pool.free(loaded.blocks.block_ids, loaded.blocks.agent_id)
    return loaded.reach


def test_the_next_turn_finds_the_last_one_in_memory(pool: BlockPool) -> None:
    store = AgentCacheStore(SPEC, pool)
    remember(store, pool, "alice", TOKENS[:50])
    assert recalled(store, pool, "alice", TOKENS) == ("hot", 50)
    assert recalled(store, pool, "alice", None) == ("hot", 50)
    assert recalled(store, pool, "alice", TOKENS[:50]) == ("hot", 49)
    assert recalled(store, pool, "alice", (*TOKENS[:30], 95, 95, 95, 95)) == ("hot", 30)
    assert recalled(store, pool, "bob", TOKENS) == ("prefix", 50)
    assert recalled(store, pool, "bob@acme", TOKENS) == ("none", 0)
    metrics = store.metrics()
    assert (metrics.hot.hits, metrics.prefix.hits, metrics.misses) == (4, 1, {"absent": 1})
    assert metrics.hot_bytes == 50 * SPEC.token_nbytes
    store.close()


def test_the_least_recently_used_context_returns_from_its_file(pool: BlockPool, cold: SafetensorsCacheAdapter) -> None:
    store = AgentCacheStore(SPEC, pool, cold=cold, config=CacheConfig(max_hot_agents=2, prefix_bytes=0))
    for i, agent in enumerate(("alice", "bob", "carol")):
        remember(store, pool, agent, some_tokens(i, 30))
    store.flush_dirty()
    assert [info.agent_id for info in store.agents() if "hot" in info.tiers] == ["bob", "carol"]
    assert recalled(store, pool, "alice", (*some_tokens(0, 30), 5)) == ("cold", 30)
    assert [info.agent_id for info in store.agents() if "hot" in info.tiers] == ["alice", "carol"]
    assert recalled(store, pool, "alice", (*some_tokens(0, 30), 5)) == ("hot", 30)
    metrics = store.metrics()
    assert (metrics.cold.hits, metrics.disk_loads, metrics.evictions, metrics.dirty_flushes) == (1, 1, 2, 3)
    store.close()
    assert metrics.cold.saved_bytes > 90 * SPEC.token_nbytes


@pytest.fixture
def stores(server: RunningServer, client: redis.Redis, pool: BlockPool) -> Iterator[Callable[..., AgentCacheStore]]:
    """Makes stores on the emptied server, as so many engines have them, and closes them."""
    made: list[AgentCacheStore] = []

    def make(
        url: str = server.url, deadline: float = 5.0, cold: SafetensorsCacheAdapter | None = None, **limits: Any
    ) -> AgentCacheStore:
        pages = PageTier(url, SPEC, pool, deadline=deadline)
        made.append(AgentCacheStore(SPEC, pool, pages=pages, cold=cold, config=CacheConfig(**limits)))
        return made[-1]

    yield make
    for store in made:
        store.close()


def test_write_behind_of_one_engine_is_found_by_another(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    here, there = stores(), stores()
    remember(here, pool, "alice", TOKENS[:50])
    assert eventually(lambda: here.metrics().dirty_agents == 0)
    assert recalled(there, pool, "alice", TOKENS) == ("page", 50)
    assert recalled(there, pool, "alice", TOKENS[:56]) == ("hot", 50), "it came up"
    assert recalled(there, pool, "bob", TOKENS) == ("prefix", 50)
    metrics = there.metrics()
    assert (metrics.page.hits, metrics.hot.hits, metrics.page.loaded_bytes) == (1, 1, 50 * SPEC.token_nbytes)
    assert metrics.page.load_seconds > 0
    with pytest.raises(FrozenInstanceError):
        metrics.evictions = 7  # type: ignore[misc]


def test_a_partial_context_in_memory_is_not_taken_for_all_of_it(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    here, there = stores(), stores(prefix_bytes=0)
    remember(here, pool, "alice", TOKENS[:50])
    here.flush_dirty()
    assert recalled(there, pool, "alice", (*TOKENS[:20], 95, 95, 95, 95, 95)) == ("page", 20)
    assert recalled(there, pool, "alice", TOKENS[:21]) == ("hot", 20)
    assert recalled(there, pool, "bob", (*TOKENS[:20], 95, 95, 95, 95, 95)) == ("page", 20)
    assert [info.agent_id for info in there.agents() if "hot" in info.tiers] == ["alice"], "bob has nothing of his own"
    assert recalled(there, pool, "alice", None) == ("page", 50)
    assert recalled(there, pool, "alice", None) == ("hot", 50)


def test_a_context_shorter_than_a_block_is_found_below_too(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, cold: SafetensorsCacheAdapter
) -> None:
    first = stores()
    remember(first, pool, "alice", TOKENS[:5])
    remember(first, pool, "bob", (*TOKENS[:16], 95, 95, 95))
    first.close()
    second = stores()
    assert recalled(second, pool, "alice", (*TOKENS[:5], 95, 95)) == ("page", 5)
    assert recalled(second, pool, "carol", TOKENS) == ("page", 16)
    assert recalled(second, pool, "bob", (*TOKENS[:16], 95, 95, 95, 95)) == ("page", 19)
    third = AgentCacheStore(SPEC, pool, cold=cold)
    remember(third, pool, "alice", TOKENS[:5])
    third.evict_all_to_disk()
    assert recalled(third, pool, "alice", TOKENS[:7]) == ("cold", 5)
    third.close()


def test_an_agent_continued_elsewhere_does_not_get_old_memory(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    here, there = stores(), stores()
    remember(here, pool, "alice", TOKENS[:20])
    here.flush_dirty()
    remember(there, pool, "alice", TOKENS[:50])
    there.flush_dirty()
    assert recalled(here, pool, "alice", TOKENS) == ("page", 50)
    assert here.metrics().page.loaded_bytes == 50 * SPEC.token_nbytes
    assert pool.holdings()[HOLDER].blocks == 2 * 7, "each engine has each block once"


def test_an_agent_continued_elsewhere_in_its_last_block(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    """Memory has every full block of the prompt, and the server more of the last block."""
    here, there = stores(), stores()
    remember(here, pool, "alice", TOKENS[:17])
    here.flush_dirty()
    remember(there, pool, "alice", TOKENS[:22])
    there.flush_dirty()
    assert recalled(here, pool, "alice", TOKENS[:24]) == ("page", 22)


def test_only_the_newest_context_is_written_and_files_when_idle(
    stores: Callable[..., AgentCacheStore],
    pool: BlockPool,
    cold: SafetensorsCacheAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flush, "IDLE_SECONDS", 60.0)
    store = stores(cold=cold)
    with store._flusher.paused():  # the server is slow
        for count in range(10, 60):
            remember(store, pool, "alice", TOKENS[:count])
        assert store._frees()
    assert eventually(lambda: store.metrics().page.saves > 0)
    metrics = store.metrics()
    assert (metrics.page.saves, metrics.cold.saves, metrics.dirty_agents) == (1, 0, 1)
    monkeypatch.setattr(flush, "IDLE_SECONDS", 0.0)  # as if it had been so long
    store.evict_lru(0)
    assert eventually(lambda: store.metrics().dirty_agents == 0)
    assert (store.metrics().cold.saves, store.metrics().dirty_flushes) == (1, 1)
    assert cold.reach("alice") == 59
    before = store.metrics()
    store.flush_dirty()
    store.evict_all_to_disk()
    assert not store._frees()
    store.close()
    assert (store.metrics().page.saves, store.metrics().cold.saves) == (before.page.saves, before.cold.saves)


def test_dirty_contexts_are_written_at_the_end(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, cold: SafetensorsCacheAdapter
) -> None:
    first = stores(cold=cold)
    for i in range(4):
        remember(first, pool, f"agent{i}", some_tokens(i, 20))
    first.close()
    assert [cold.reach(f"agent{i}") for i in range(4)] == [20] * 4
    second = stores()
    assert [recalled(second, pool, f"agent{i}", None) for i in range(4)] == [("page", 20)] * 4


def test_files_store_contexts_during_an_outage_of_the_server(
    pool: BlockPool, cold: SafetensorsCacheAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush, "RETRY_SECONDS", 0.1)
    port = free_port()
    store = AgentCacheStore(SPEC, pool, pages=PageTier(f"redis://127.0.0.1:{port}", SPEC, pool), cold=cold)
    remember(store, pool, "alice", TOKENS[:50])
    assert eventually(lambda: cold.reach("alice") == 50), "at once, though it was used just now"
    assert store.metrics().dirty_agents == 1
    assert store.metrics().unsaved.get("page", 0) > 0
    with start_server(port=port) as server:
        assert eventually(lambda: store.metrics().dirty_agents == 0)
        other = AgentCacheStore(SPEC, pool, pages=PageTier(server.url, SPEC, pool))
        assert recalled(other, pool, "alice", None) == ("page", 50)
        other.close()
        assert store.metrics().cold.saves == 1
        store.close()


@pytest.fixture
def sleeping(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Lets the server fall asleep; it wakes up at the end of the test."""
    monkeypatch.setattr(loading, "HEDGE_AFTER_SECONDS", 0.1)
    yield lambda: server.process.send_signal(signal.SIGSTOP)
    server.process.send_signal(signal.SIGCONT)


def test_a_file_is_read_in_parallel_to_a_slow_server(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, cold: SafetensorsCacheAdapter, sleeping: Callable[[], None]
) -> None:
    first = stores(cold=cold)
    remember(first, pool, "alice", TOKENS[:50])
    first.close()
    second = stores(cold=cold, deadline=60.0, restore_within=60.0)
    sleeping()
    asked = time.monotonic()
    assert recalled(second, pool, "alice", TOKENS) == ("cold", 50)
    assert time.monotonic() - asked < 30, "before the server's deadline"
    metrics = second.metrics()
    assert (metrics.hedges, metrics.hedges_won, metrics.cold.hits, metrics.page.hits) == (1, 1, 1, 0)


def test_a_late_server_reply_precedes_a_waiting_file(
    stores: Callable[..., AgentCacheStore],
    pool: BlockPool,
    cold: SafetensorsCacheAdapter,
    server: RunningServer,
    sleeping: Callable[[], None],
) -> None:
    first = stores(cold=cold)
    remember(first, pool, "alice", TOKENS[:50])
    first.close()
    second = stores(cold=cold, deadline=60.0, restore_within=60.0)
    sleeping()
    loading = second.begin_load("alice", TOKENS)
    disk = threading.Event()
    for _ in range(2):
        second._loop.files.submit(disk.wait)  # behind the look at the file, before its reading
    assert eventually(lambda: loading._hedged)
    server.process.send_signal(signal.SIGCONT)
    loaded = loading.result(timeout=60)
    assert (loaded.tier, taken(pool, loaded)) == ("page", 50)
    disk.set()
    second._loop.files.submit(lambda: None).result()
    metrics = second.metrics()
    assert (metrics.hedges, metrics.hedges_won, metrics.cold.hits, metrics.page.hits) == (1, 0, 0, 1)
    assert eventually(lambda: pool.used_blocks == 7), "what memory keeps; the file's own blocks are given back"


def test_a_hanging_disk_does_not_delay_fetched_blocks(
    stores: Callable[..., AgentCacheStore],
    pool: BlockPool,
    cold: SafetensorsCacheAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "HEDGE_AFTER_SECONDS", 0.1)
    first = stores(cold=cold)
    remember(first, pool, "alice", TOKENS[:50])
    first.close()
    second = stores(cold=cold, deadline=60.0, restore_within=60.0)
    disk = threading.Event()
    for _ in range(2):
        second._loop.files.submit(disk.wait)
    try:
        loaded = second.begin_load("alice", TOKENS).result(timeout=20)
    finally:
        disk.set()
    assert (loaded.tier, taken(pool, loaded)) == ("page", 50)


def test_a_damaged_file_leaves_the_load_to_the_slow_server(
    stores: Callable[..., AgentCacheStore],
    pool: BlockPool,
    cold: SafetensorsCacheAdapter,
    server: RunningServer,
    sleeping: Callable[[], None],
    tmp_path: Path,
) -> None:
    first = stores(cold=cold)
    remember(first, pool, "alice", TOKENS[:50])
    first.close()
    file = tmp_path / "alice.safetensors"
    stored = file.read_bytes()
    file.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    second = stores(cold=cold, deadline=60.0, restore_within=60.0)
    sleeping()
    loading = second.begin_load("alice", TOKENS)
    assert eventually(lambda: second.metrics().cold_misses == {"damaged": 1})
    assert not loading.done()
    server.process.send_signal(signal.SIGCONT)
    loaded = loading.result(timeout=60)
    assert (loaded.tier, taken(pool, loaded)) == ("page", 50)
    assert (second.metrics().hedges, second.metrics().hedges_won) == (1, 0)


def test_a_context_in_memory_does_not_wait_long_for_a_longer_one(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, sleeping: Callable[[], None]
) -> None:
    store = stores(deadline=60.0, restore_within=60.0)
    remember(store, pool, "alice", TOKENS[:40])
    store.flush_dirty()
    sleeping()
    asked = time.monotonic()
    assert recalled(store, pool, "alice", TOKENS) == ("hot", 40)
    assert time.monotonic() - asked < 30
    assert recalled(store, pool, "alice", TOKENS[:44]) == ("hot", 40)


def test_an_error_of_an_unneeded_fetch_is_logged_and_counted(
    stores: Callable[..., AgentCacheStore],
    pool: BlockPool,
    server: RunningServer,
    sleeping: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The load has ended with the context in memory, and does not wait for the fetch."""
    writer, store = stores(), stores(deadline=60.0, restore_within=60.0)
    remember(writer, pool, "bob", TOKENS)
    writer.flush_dirty()
    remember(store, pool, "alice", TOKENS[:40])
    sleeping()
    load = store.begin_load("alice", TOKENS)
    assert eventually(load.done)
    with monkeypatch.context() as failing:
        failing.setattr(fetch, "_verified", lambda *_: 1 / 0)
        server.process.send_signal(signal.SIGCONT)
        assert eventually(lambda: store.metrics().server.misses == {"error": 1})
    found = load.result()
    assert (found.tier, taken(pool, found)) == ("hot", 40)
    assert eventually(
        lambda: [record.message for record in caplog.records] == ["the context of alice could not be fetched"]
    )


def test_a_load_blocks_no_caller_and_can_be_cancelled(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, cold: SafetensorsCacheAdapter, sleeping: Callable[[], None]
) -> None:
    store = stores()
    remember(store, pool, "alice", TOKENS[:20])
    store.flush_dirty()
    sleeping()
    before = len(pool.references())
    loading = store.begin_load("bob", TOKENS)
    received: list[bool] = []
    loading.add_done_callback(lambda: received.append(True))
    assert not loading.done()
    with pytest.raises(TimeoutError):
        loading.result(timeout=0.01)
    loading.cancel()
    loading.cancel()
    assert received == [True]
    with pytest.raises(CancelledError):
        loading.result()
    assert eventually(lambda: len(pool.references()) == before)
    settled = store.begin_load("alice", TOKENS[:21])
    assert settled.done()
    settled.cancel()
    assert len(pool.references()) == before


def test_a_file_completes_a_server_with_lost_blocks(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, cold: SafetensorsCacheAdapter, client: redis.Redis
) -> None:
    first = stores(cold=cold)
    remember(first, pool, "alice", TOKENS[:50])
    first.close()
    client.delete(
        manifest_key("alice", SPEC.fingerprint),
        *(f"seal:{name}" for name in block_names(TOKENS, SPEC)[2:]),
        *client.scan_iter("tails:*"),
    )
    second = stores(cold=cold)
    assert recalled(second, pool, "alice", TOKENS) == ("cold", 50)
    third = stores()
    assert recalled(third, pool, "alice", TOKENS) == ("page", 16)
    client.flushall()
    fourth = stores(cold=cold)
    assert recalled(fourth, pool, "alice", None) == ("cold", 50)
    assert recalled(fourth, pool, "nobody", None) == ("none", 0)
    assert fourth.metrics().misses == {"absent": 1}
    assert fourth.metrics().disk_loads == 1
    assert third.metrics().server.misses == {}
    assert fourth.metrics().server.misses == fourth.metrics().cold_misses | {"absent": 2}


def test_a_fork_costs_no_bytes_and_outlives_its_origin(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, cold: SafetensorsCacheAdapter
) -> None:
    store = stores(cold=cold)
    remember(store, pool, "alice", TOKENS[:50])
    store.flush_dirty()
    blocks, written = pool.used_blocks, store.metrics().page.saved_bytes
    assert store.fork("alice", "bob")
    assert not store.fork("nobody", "carol")
    with pytest.raises(BlockError, match="tenant"):
        store.fork("alice", "alice@acme")
    store.flush_dirty()
    assert (pool.used_blocks, store.metrics().page.saved_bytes) == (blocks, written)
    assert store.delete("alice")
    assert not store.delete("alice")
    assert recalled(store, pool, "bob", TOKENS) == ("hot", 50)
    assert [(info.agent_id, info.tokens, info.tiers) for info in store.agents()] == [
        ("bob", 50, ("hot", "page", "cold"))
    ]
    assert [store.agent("bob"), store.agent("alice")] == [*store.agents(), None]
    elsewhere = stores()
    assert [elsewhere.agent("bob"), elsewhere.agent("alice")] == [*elsewhere.agents(), None]
    assert elsewhere.fork("bob", "carol")
    assert recalled(elsewhere, pool, "carol", None) == ("page", 50)
    store.delete("bob")
    assert recalled(elsewhere, pool, "carol", TOKENS) == ("hot", 50)


@pytest.mark.parametrize("longer", [46, 60])
def test_deleting_an_agent_keeps_the_context_it_continued(pool: BlockPool, longer: int) -> None:
    """The partial last block of the shorter context is not in the tree while a longer one contains it."""
    store = AgentCacheStore(SPEC, pool)
    remember(store, pool, "alice", TOKENS[:45])
    remember(store, pool, "bob", TOKENS[:longer])
    assert store.delete("bob")
    assert recalled(store, pool, "carol", TOKENS[:60]) == ("prefix", 45)
    store.close()


def test_a_fork_can_be_made_of_a_file(tmp_path: Path, pool: BlockPool, cold: SafetensorsCacheAdapter) -> None:
    store = AgentCacheStore(SPEC, pool, cold=cold)
    remember(store, pool, "alice", TOKENS[:50])
    store.evict_all_to_disk()
    assert store.fork("alice", "bob")
    store.close()
    assert cold.agents() == ["alice", "bob"]
    assert cold.reach("bob") == 50


def test_a_loaded_context_can_be_written_by_the_file_thread(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, cold: SafetensorsCacheAdapter
) -> None:
    first = stores()
    remember(first, pool, "alice", TOKENS[:50])
    first.close()
    second = stores(cold=cold)
    assert recalled(second, pool, "alice", None) == ("page", 50)
    assert second.fork("alice", "bob")
    second.evict_lru(2)
    assert eventually(lambda: second.metrics().hot_agents == 0)
    third = AgentCacheStore(SPEC, pool, cold=cold)
    assert recalled(third, pool, "bob", None) == ("cold", 50)
    third.close()


def test_a_deleted_agent_is_removed_and_shared_blocks_stay(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, cold: SafetensorsCacheAdapter, client: redis.Redis
) -> None:
    store = stores(cold=cold)
    remember(store, pool, "alice", TOKENS[:50])
    remember(store, pool, "bob", (*TOKENS[:16], 95, 95, 95))
    store.flush_dirty()
    assert pool.used_blocks == 7 + 1
    store.delete("alice")
    assert [info.agent_id for info in store.agents()] == ["bob"]
    assert pool.used_blocks == 3, "nor are her blocks kept for others"
    assert recalled(store, pool, "alice", TOKENS) == ("prefix", 16)
    store.delete("bob")
    assert {*client.keys()} == {b"refs:deleted:alice", b"refs:deleted:bob"}
    assert cold.agents() == []
    assert pool.used_blocks == 0


@pytest.mark.parametrize("tier", ["page", "cold"])
@pytest.mark.parametrize("tokens", [None, TOKENS])
def test_an_agent_deleted_during_its_load_does_not_return(
    stores: Callable[..., AgentCacheStore],
    pool: BlockPool,
    cold: SafetensorsCacheAdapter,
    tier: str,
    tokens: tuple[int, ...] | None,
) -> None:
    """A concurrent load returns the former context, but no load after the deletion finds anything."""
    store = stores() if tier == "page" else AgentCacheStore(SPEC, pool, cold=cold)
    store_was = stores(cold=cold)
    remember(store_was, pool, "alice", TOKENS[:50])
    store_was.close()
    loading = store.begin_load("alice", tokens)
    assert eventually(loading.done)
    assert store.delete("alice")
    loaded = loading.result()
    assert (loaded.tier, taken(pool, loaded)) == (tier, 50)
    assert store.agents() == []
    assert recalled(store, pool, "alice", None) == ("none", 0)
    assert recalled(store, pool, "alice", TOKENS) == ("none", 0)
    assert pool.used_blocks == 0
    store.close()


def test_a_load_ending_after_a_delete_does_not_restore_the_agent(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()
    remember(store, pool, "alice", TOKENS[:50])
    store.evict_all_to_disk()
    assert store._pages
    delete = store._pages.delete

    def loaded_and_deleted(agent_id: str) -> bool:
        assert recalled(store, pool, "alice", None) == ("page", 50)
        return delete(agent_id)

    monkeypatch.setattr(store._pages, "delete", loaded_and_deleted)
    assert store.delete("alice")
    assert recalled(store, pool, "alice", None) == ("none", 0)
    assert store.agents() == []


def test_an_agent_with_an_unremovable_file_leaves_memory(
    stores: Callable[..., AgentCacheStore],
    pool: BlockPool,
    cold: SafetensorsCacheAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(agent_id: str) -> bool:
        raise PermissionError(agent_id)

    store = stores(cold=cold)
    remember(store, pool, "alice", TOKENS[:50])
    store.flush_dirty()
    monkeypatch.setattr(cold, "delete", refused)
    with pytest.raises(PermissionError):
        store.delete("alice")
    assert [info.tiers for info in store.agents()] == [("cold",)]


def test_a_context_saved_during_an_older_load_stays_in_memory(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    """Or a fork would copy the older one, and write it."""
    store = stores()
    remember(store, pool, "alice", TOKENS[:8])
    store.evict_all_to_disk()
    loading = store.begin_load("alice")
    assert eventually(loading.done)
    remember(store, pool, "alice", TOKENS[:50])
    store.flush_dirty()
    loaded = loading.result()
    assert (loaded.tier, taken(pool, loaded)) == ("page", 8)
    assert recalled(store, pool, "alice", None) == ("hot", 50)
    assert store.fork("alice", "bob")
    store.close()
    elsewhere = stores()
    assert [(info.agent_id, info.tokens) for info in elsewhere.agents()] == [("alice", 50), ("bob", 50)]


def test_a_context_forked_over_during_its_load_is_dropped(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    store = stores()
    remember(store, pool, "alice", TOKENS[:50])
    remember(store, pool, "bob", TOKENS[:8])
    store.evict_all_to_disk()
    loading = store.begin_load("bob")
    assert eventually(loading.done)
    assert store.fork("alice", "bob"), "by the server: nobody is in memory"
    loaded = loading.result()
    assert (loaded.tier, taken(pool, loaded)) == ("page", 8)
    assert recalled(store, pool, "bob", None) == ("page", 50)


def test_concurrent_loads_of_an_agent_leave_one_context(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    store = stores()
    remember(store, pool, "alice", TOKENS[:50])
    store.evict_all_to_disk()
    loadings = [store.begin_load("alice") for _ in range(3)]
    assert [taken(pool, loading.result()) for loading in loadings] == [50] * 3
    assert recalled(store, pool, "alice", None) == ("hot", 50)
    loadings.clear()
    assert eventually(lambda: gc.collect() >= 0 and not store._versions)


def test_two_agents_with_one_system_prompt_store_it_once(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    """Though each has computed it, at the same moment."""
    store = stores()
    contexts = [made(pool, agent, (*TOKENS[:40], *some_tokens(i, 8))) for i, agent in enumerate(("alice", "bob"))]
    for context in contexts:
        store.save(context)
        pool.free(context.block_ids, context.agent_id)
    assert pool.used_blocks == 5 + 2
    store.flush_dirty()
    assert store.metrics().page.saved_bytes == 7 * BLOCK * SPEC.token_nbytes


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2"])
def test_states_of_layers_are_restored_from_every_tier(
    server: RunningServer, client: redis.Redis, pool: BlockPool, tmp_path: Path, family: str
) -> None:
    model = tiny(family)
    spec = ModelCacheSpec.probe(model, letter_tokenizer(), block_tokens=64)
    tokens = some_tokens(3, 150)
    unowned = computed(model, spec, tokens, [64, 128])
    ids = pool.allocate(3, "alice")
    context = replace(
        unowned, blocks=tuple(replace(block, block_id=i) for i, block in zip(ids, unowned.blocks, strict=True))
    )

    def opened() -> AgentCacheStore:
        return AgentCacheStore(
            spec, pool, pages=PageTier(server.url, spec, pool), cold=SafetensorsCacheAdapter(spec, pool, tmp_path)
        )

    def found(store: AgentCacheStore, agent_id: str, prompt: tuple[int, ...]) -> tuple[str, int]:
        loaded = store.load(agent_id, prompt)
        assert loaded
        assert loaded.blocks
        for block, saved in zip(loaded.blocks.blocks, context.blocks, strict=False):
            assert list(page_bodies(block.layers)) == list(page_bodies(saved.layers))
        assert block.state is not None
        assert list(page_bodies(block.state)) == list(page_bodies(saved.state))
        assert loaded.blocks.reusable(spec, len(prompt) - 1) == loaded.reach
        pool.free(loaded.blocks.block_ids, agent_id)
        return loaded.tier, loaded.reach

    first = opened()
    first.save(context)
    assert found(first, "alice", (*tokens, 1)) == ("hot", 150)
    assert found(first, "alice", tokens[:140]) == ("hot", 128)
    assert found(first, "bob", tokens) == ("prefix", 128)
    first.close()
    second = opened()
    assert found(second, "bob", tokens) == ("page", 128)
    assert found(second, "alice", (*tokens, 1)) == ("page", 150)
    second.close()
    client.flushall()
    third = opened()
    assert found(third, "alice", (*tokens, 1)) == ("cold", 150)
    third.close()
    pool.free(ids, "alice")


def test_a_pinned_agent_stays_in_memory(pool: BlockPool, cold: SafetensorsCacheAdapter) -> None:
    store = AgentCacheStore(SPEC, pool, cold=cold, config=CacheConfig(max_hot_agents=1, prefix_bytes=0))
    assert not store.pin("alice")
    remember(store, pool, "alice", TOKENS[:50])
    assert store.pin("alice")
    remember(store, pool, "bob", TOKENS[:30])
    store.flush_dirty()
    assert {info.agent_id: (info.tiers, info.pinned) for info in store.agents()} == {
        "alice": (("hot", "cold"), True),
        "bob": (("cold",), False),
    }
    assert store.evict_all_to_disk() == 0
    assert store.unpin("alice")
    assert store.evict_lru(5) == 1
    assert pool.used_blocks == 0
    store.close()


def test_the_least_recently_used_contexts_are_evicted(pool: BlockPool, cold: SafetensorsCacheAdapter) -> None:
    pool.reconfigure(20)
    store = AgentCacheStore(SPEC, pool, cold=cold, config=CacheConfig(hot_bytes=1 << 30))
    for i, agent in enumerate(("alice", "bob")):
        remember(store, pool, agent, some_tokens(i, 64))
    assert pool.available_blocks == 4
    assert eventually(lambda: store.make_room(10))
    assert not any("hot" in info.tiers for info in store.agents() if info.agent_id == "alice")
    assert recalled(store, pool, "bob", None) == ("hot", 64)
    assert eventually(lambda: store.make_room(20))
    assert not store.make_room(21)
    store.close()


def test_a_full_pool_evicts_for_a_load(pool: BlockPool, cold: SafetensorsCacheAdapter) -> None:
    pool.reconfigure(20)
    store = AgentCacheStore(SPEC, pool, cold=cold, config=CacheConfig(hot_bytes=1 << 30))
    for i, agent in enumerate(("alice", "bob", "carol")):
        remember(store, pool, agent, some_tokens(i, 64))
        store.evict_all_to_disk()
    for i, agent in enumerate(("alice", "bob", "carol", "alice")):
        assert recalled(store, pool, agent, (*some_tokens(i % 3, 64), 1)) == ("cold", 64)
    store.close()


def test_a_file_waits_for_memory_that_is_being_freed(pool: BlockPool, cold: SafetensorsCacheAdapter) -> None:
    pool.reconfigure(20)
    store = AgentCacheStore(SPEC, pool, cold=cold, config=CacheConfig(prefix_bytes=0))
    remember(store, pool, "alice", some_tokens(0, 64))
    store.evict_all_to_disk()
    asked = []

    def frees() -> bool:
        asked.append(store._frees())
        return asked[-1]

    store._sources = replace(store._sources, frees=frees)
    with store._flusher.paused():  # the disk is slow
        remember(store, pool, "bob", some_tokens(1, 64))
        remember(store, pool, "carol", some_tokens(2, 64))
        loading = store.begin_load("alice", (*some_tokens(0, 64), 1))
        assert eventually(lambda: len(asked) > 1)
    loaded = loading.result(timeout=PATIENCE)
    assert (loaded.tier, taken(pool, loaded)) == ("cold", 64)
    store.close()


def test_an_unwritable_context_is_lost_only_when_space_is_needed(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush, "RETRY_SECONDS", 0.05)
    gone = PageTier(f"redis://127.0.0.1:{free_port()}", SPEC, pool)
    room = 64 * SPEC.token_nbytes
    store = AgentCacheStore(
        SPEC, pool, pages=gone, config=CacheConfig(max_hot_agents=1, queue_bytes=room, prefix_bytes=0)
    )
    for i in range(3):
        remember(store, pool, f"agent{i}", some_tokens(i, 64))
        assert eventually(lambda: store.metrics().unsaved.get("page", 0) > 0)
    assert eventually(lambda: store.metrics().lost == 1)
    assert recalled(store, pool, "agent0", None) == ("none", 0)
    assert recalled(store, pool, "agent1", None) == ("hot", 64)
    assert pool.used_blocks == 2 * 8
    store.close()


def test_a_context_of_another_model_is_refused(pool: BlockPool) -> None:
    store = AgentCacheStore(SPEC, pool)
    with pytest.raises(IncompatibleBlocksError):
        store.save(AgentBlocks("alice", (), (), SPEC.fingerprint ^ 1))
    with pytest.raises(BlockError, match="an agent id is"):
        store.load("../alice", TOKENS)
    with pytest.raises(ValueError, match="a limit is at least 0"):
        AgentCacheStore(SPEC, pool, config=CacheConfig(hot_bytes=-1))
    store.save(AgentBlocks("alice", (), (), SPEC.fingerprint))
    assert store.agents() == []
    store.close()


AGENTS = [f"agent{i}" for i in range(5)]
agents = st.sampled_from(AGENTS)
contexts = st.builds(
    lambda trunk, common, seed, more: (*some_tokens(trunk, 24)[:common], *some_tokens(seed, more)),
    trunk=st.integers(100, 101),
    common=st.sampled_from([0, 8, 13, 24]),
    seed=st.integers(0, 3),
    more=st.integers(1, 30),
)


def unnamed(store: AgentCacheStore, pool: BlockPool, tokens: tuple[int, ...], *, written: bool = True) -> int:
    """A prompt without a name: how many tokens of it are found. Its context is published."""
    loaded = store.begin_load("anon", tokens, named=False).result()
    if loaded.blocks:
        pool.free(loaded.blocks.block_ids, "anon")
    context = made(pool, "anon", tokens)
    store.publish(context, written=written)
    pool.free(context.block_ids, "anon")
    return loaded.reach


def test_contexts_that_no_server_takes_count_as_not_written(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    store = stores(f"redis://127.0.0.1:{free_port()}", keep="all")
    unnamed(store, pool, TOKENS)
    store.flush_dirty()
    metrics = store.metrics()
    assert (metrics.unnamed_written, metrics.unnamed_left) == (0, 0)


def test_a_context_without_a_name_is_written_if_it_is_worth_it(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    store = stores()
    store.prefilled(10_000, 10)  # 60 tokens take 0.06 s
    assert unnamed(store, pool, TOKENS) == 0
    store.flush_dirty()
    elsewhere = stores()
    assert recalled(elsewhere, pool, "bob", (*TOKENS, 95)) == ("none", 0), "used once, and soon computed"
    assert unnamed(store, pool, (*TOKENS[:30], *some_tokens(9, 20))) == 30
    store.flush_dirty()
    assert recalled(elsewhere, pool, "bob", (*TOKENS[:30], 95)) == ("page", 30), "a second prompt has reused it"
    assert recalled(elsewhere, pool, "carol", (*TOKENS[:30], *some_tokens(9, 20), 95)) == ("prefix", 30)
    assert [info.agent_id for info in elsewhere.agents()] == [], "nobody has a context of their own"
    metrics = store.metrics()
    assert (metrics.unnamed_written, metrics.unnamed_left) == (1, 2)
    store.prefilled(10, 10_000)
    assert unnamed(store, pool, some_tokens(10, 40)) == 0
    store.flush_dirty()
    assert recalled(elsewhere, pool, "bob", some_tokens(10, 41)) == ("page", 40), "computing takes long"


def test_demoted_blocks_are_saved_or_stay_in_memory(stores: Callable[..., AgentCacheStore], pool: BlockPool) -> None:
    """However few bytes may wait for the page server."""
    contexts = [some_tokens(seed, 3 * BLOCK) for seed in range(4)]
    names = [block_names(tokens, SPEC)[-1] for tokens in contexts]
    for room in (BLOCK * SPEC.token_nbytes, 0):
        store, elsewhere = stores(keep="named", queue_bytes=room), stores()
        for tokens in contexts:
            unnamed(store, pool, tokens)
        demoted = store.demote_blocks(names)
        assert demoted is bool(room)
        for tokens in contexts:
            found = recalled(elsewhere if demoted else store, pool, "bob", (*tokens, 95))
            assert found == ("page" if demoted else "prefix", len(tokens))


def test_a_withheld_context_is_written_when_a_prompt_allows_it(
    stores: Callable[..., AgentCacheStore], pool: BlockPool
) -> None:
    store, elsewhere = stores(), stores()
    store.prefilled(10, 10_000)  # each context is worth it
    for _ in range(2):  # the second one reuses the first one
        unnamed(store, pool, TOKENS[:40], written=False)
        store.flush_dirty()
    assert recalled(elsewhere, pool, "bob", TOKENS) == ("none", 0)
    assert unnamed(store, pool, TOKENS[:40]) > 0
    store.flush_dirty()
    assert recalled(elsewhere, pool, "bob", TOKENS) == ("page", 40)


def test_unnamed_contexts_wait_for_a_failing_server(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, server: RunningServer
) -> None:
    with start_proxy(server.port) as proxy:
        store = stores(url=proxy.url, keep="all")
        proxy.cut_after = 0
        unnamed(store, pool, TOKENS[:40])
        assert eventually(lambda: store.metrics().unsaved.get("page", 0) > 0)
        unnamed(store, pool, TOKENS[:50])
        unnamed(store, pool, some_tokens(9, 40))
        assert store.metrics().dirty_bytes == 90 * SPEC.token_nbytes, "the longer context of two covers the shorter"
        proxy.cut_after = None
        assert eventually(lambda: store.metrics().published == 2)
        elsewhere = stores()
        assert recalled(elsewhere, pool, "bob", TOKENS) == ("page", 50)
        assert recalled(elsewhere, pool, "bob", (*some_tokens(9, 40), 1)) == ("page", 40)
        assert store.close() == 0
        assert store.metrics().lost == 0


def test_waiting_unnamed_contexts_give_way_to_prompts(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.reconfigure(24)
    room = 64 * SPEC.token_nbytes
    url = f"redis://127.0.0.1:{free_port()}"
    store = stores(url=url, keep="all", queue_bytes=room, prefix_bytes=0)
    for seed in range(3):
        unnamed(store, pool, some_tokens(seed, 30))
        assert eventually(lambda: store.metrics().unsaved.get("page", 0) > 0)
    assert eventually(lambda: store.metrics().dirty_bytes == 60 * SPEC.token_nbytes)
    assert store.metrics().lost == 1, "the oldest is dropped for the newest"
    assert pool.used_blocks == 2 * 4
    assert store.make_room(20)
    assert store.metrics().lost == 2
    assert store.close() == 1
    assert "1 context could not be saved (page: " in caplog.text
    assert pool.used_blocks == 0


@pytest.mark.parametrize(("keep", "found"), [("all", 40), ("named", 0)])
def test_the_kinds_of_written_contexts_are_configurable(
    stores: Callable[..., AgentCacheStore], pool: BlockPool, keep: str, found: int
) -> None:
    store = stores(keep=keep)
    store.prefilled(10_000_000, 1)
    for _ in range(2):
        unnamed(store, pool, TOKENS[:40])
    store.flush_dirty()
    assert recalled(stores(), pool, "bob", TOKENS) == (("page", found) if found else ("none", 0))
    with pytest.raises(ValueError, match="keep is one of all, worth, named, got 'some'"):
        CacheConfig(keep="some")  # type: ignore[arg-type]


class Remembering(RuleBasedStateMachine):
    """Every operation of a store, in any order, compared with a dict of its expected contexts."""

    server: RunningServer
    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(64, total_bytes=64 * BLOCK * SPEC.token_nbytes)
        with self.server.client() as client:
            client.flushall()
        self.cold = SafetensorsCacheAdapter(SPEC, self.pool, self.directory)
        for agent in self.cold.agents():
            self.cold.delete(agent)
        self.open()
        self.remembered: dict[str, tuple[int, ...]] = {}
        self.forgetful = False  # whether the tiers below have lost something

    def open(self) -> None:
        room = 12 * BLOCK * SPEC.token_nbytes
        self.store = AgentCacheStore(
            SPEC,
            self.pool,
            pages=PageTier(self.server.url, SPEC, self.pool),
            cold=self.cold,
            config=CacheConfig(max_hot_agents=2, queue_bytes=room, prefix_bytes=room),
        )

    @rule(agent=agents, tokens=contexts)
    def save(self, agent: str, tokens: tuple[int, ...]) -> None:
        if self.store.make_room(SPEC.blocks_for(len(tokens)), len(tokens) * SPEC.token_nbytes):
            remember(self.store, self.pool, agent, tokens)
            self.remembered[agent] = tokens

    @rule(agent=agents, tokens=contexts)
    def load(self, agent: str, tokens: tuple[int, ...]) -> None:
        loaded = self.store.load(agent, tokens)
        if loaded:
            assert loaded.blocks
            assert loaded.blocks.tokens[: loaded.reach] == tokens[: loaded.reach]
            assert 0 < loaded.reach < len(tokens)
            taken(self.pool, loaded)
        elif not self.forgetful and agent in self.remembered:
            assert len(tokens) == 1 or self.remembered[agent][0] != tokens[0]

    @rule(agent=agents)
    def load_all(self, agent: str) -> None:
        loaded = self.store.load(agent)
        if loaded:
            assert loaded.blocks
            assert loaded.blocks.tokens == self.remembered[agent]
            taken(self.pool, loaded)
        else:
            assert self.forgetful or agent not in self.remembered

    @rule(agent=agents, tokens=contexts)
    def give_up(self, agent: str, tokens: tuple[int, ...]) -> None:
        self.store.begin_load(agent, tokens).cancel()

    @rule(agent=agents, tokens=contexts)
    def publish(self, agent: str, tokens: tuple[int, ...]) -> None:
        if self.store.make_room(SPEC.blocks_for(len(tokens)), len(tokens) * SPEC.token_nbytes):
            context = made(self.pool, agent, tokens)
            self.store.publish(context)
            self.pool.free(context.block_ids, agent)

    @rule(agent=agents, new=agents)
    def fork(self, agent: str, new: str) -> None:
        forked = self.store.fork(agent, new)
        assert forked <= (agent in self.remembered)
        assert self.forgetful or forked == (agent in self.remembered)
        if forked:
            self.remembered[new] = self.remembered[agent]

    @rule(agent=agents)
    def delete(self, agent: str) -> None:
        deleted = self.store.delete(agent)
        assert deleted <= (self.remembered.pop(agent, None) is not None)

    @rule(agent=agents, pinned=st.booleans())
    def pin(self, agent: str, pinned: bool) -> None:
        (self.store.pin if pinned else self.store.unpin)(agent)

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        self.store.evict_lru(count)

    @rule()
    def flush(self) -> None:
        self.store.flush_dirty()
        assert self.store.metrics().dirty_agents == 0

    @rule()
    def evict_all(self) -> None:
        self.store.evict_all_to_disk()
        pinned = sum(info.pinned for info in self.store.agents())
        assert self.store.metrics().hot_agents == pinned

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.pool.check_empty()
        self.open()

    @rule()
    def lose_what_the_server_has(self) -> None:
        with self.server.client() as client:
            client.flushall()
        self.forgetful = True

    @invariant()
    def everything_is_within_its_bounds(self) -> None:
        metrics = self.store.metrics()
        assert metrics.lost == 0
        assert metrics.prefix_bytes <= 12 * BLOCK * SPEC.token_nbytes
        assert set(self.pool.holdings()) <= {*AGENTS, HOLDER}

    def teardown(self) -> None:
        self.store.close()
        self.pool.check_empty()


@pytest.mark.parametrize("examples", [12, pytest.param(400, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_no_sequence_of_operations_mixes_loses_or_leaks_contexts(
    server: RunningServer, tmp_path: Path, examples: int
) -> None:
    Remembering.server, Remembering.directory = server, tmp_path
    run_state_machine_as_test(
        Remembering, settings=hypothesis.settings(max_examples=examples, stateful_step_count=30, deadline=None)
    )


@pytest.mark.parametrize("seconds", [1.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_fifty_agents_on_eight_slots_stay_within_the_limit(
    server: RunningServer, client: redis.Redis, tmp_path: Path, seconds: float
) -> None:
    """Each goes on where it was, from whichever tier, and begins as all of them do."""
    pool = BlockPool(400)
    store = AgentCacheStore(
        SPEC, pool, pages=PageTier(server.url, SPEC, pool), cold=SafetensorsCacheAdapter(SPEC, pool, tmp_path)
    )
    system = some_tokens(9, 3 * BLOCK)
    remembered = {f"agent{i}": system for i in range(50)}
    chance = random.Random(3)
    tiers: Counter[str] = Counter()
    most = threads = turns = 0
    wanted = {"hot", "page", "prefix"}
    began = time.monotonic()
    while time.monotonic() < began + seconds or turns < 120 or not tiers.keys() >= wanted:
        assert time.monotonic() < began + seconds + PATIENCE, tiers
        agent = f"agent{turns}" if turns < 50 else f"agent{chance.randrange(50)}"
        prompt = (*remembered[agent], *some_tokens(turns, 12))
        loaded = store.load(agent, prompt)
        if turns >= 50:
            assert loaded, f"{agent} is forgotten"
            assert loaded.reach >= len(remembered[agent]), f"{agent} is remembered in part"
        if loaded:
            tiers[loaded.tier] += 1
            taken(pool, loaded)
        answer = prompt if len(prompt) < 8 * BLOCK else system
        assert eventually(partial(store.make_room, SPEC.blocks_for(len(answer))))
        remember(store, pool, agent, answer)
        remembered[agent] = answer
        turns += 1
        if turns == 100:
            most, threads = resident(os.getpid()), threading.active_count()
    assert resident(os.getpid()) < most + (32 << 20)
    assert threading.active_count() <= threads + 2
    assert store.metrics().lost == 0
    assert eventually(lambda: store.metrics().hot_agents < 50)
    store.close()
    pool.check_empty()
    assert client.dbsize() > 0


# -- how long a load may take ------------------------------------------------------------------------------------------


def test_a_load_waits_for_no_server_or_pipe_beyond_its_limit(
    server: RunningServer, client: redis.Redis, pool: BlockPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers, too slowly, and the file is a pipe that nobody writes to. The part in memory is used, and the
    engine computes the rest.
    """
    cold = SafetensorsCacheAdapter(SPEC, pool, tmp_path)
    os.mkfifo(tmp_path / "alice.safetensors")
    monkeypatch.setattr(loading, "HEDGE_AFTER_SECONDS", 0.1)
    with start_proxy(server.port) as proxy:
        pages = PageTier(proxy.url, SPEC, pool)
        store = AgentCacheStore(SPEC, pool, pages=pages, cold=cold, config=CacheConfig(restore_within=1.0))
        context = made(pool, "bob", TOKENS[:24])
        store.publish(context)
        pool.free(context.block_ids, "bob")
        proxy.hold = 0.7
        begun = time.monotonic()
        loaded = store.load("alice", TOKENS)
        assert time.monotonic() - begun > 0.9
        assert loaded
        assert (loaded.tier, loaded.reach, loaded.why) == ("prefix", 24, "late")
        assert taken(pool, loaded) == 24
        assert pages.breaker.state == "closed"
        proxy.hold = 0
        store.close()


def test_a_repeated_load_shares_the_time_limit(pool: BlockPool) -> None:
    store = AgentCacheStore(SPEC, pool, config=CacheConfig(restore_within=1.0))
    assert store.begin_load("alice", TOKENS, within=-0.5).done()
    with pytest.raises(ValueError, match="restore_within must be more than 0 seconds, got 0"):
        AgentCacheStore(SPEC, pool, config=CacheConfig(restore_within=0))
    store.close()
