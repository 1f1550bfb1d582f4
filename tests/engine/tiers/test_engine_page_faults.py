"""A page server that is slow, full, faulty or unavailable costs time, never an answer, and the reason is counted."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pools import pool_of
from proxy import Proxy, start_proxy
from servers import RunningServer, free_port, start_server
from test_engine_pages import BLOCK, SPEC, TOKENS, context, held, same

# isort: split
import mlx.core as mx

from engine.memory.blocks import AgentBlocks, block_names
from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.server.connection import FAILURES, SHORTEST, State
from engine.tiers.server.manifest import manifest_key

pool = pool_of(32)


@pytest.fixture
def proxy(server: RunningServer, client: redis.Redis) -> Iterator[Proxy]:
    """In front of a server on which alice has TOKENS."""
    direct = PageTier(server.url, SPEC, BlockPool(4))
    assert direct.save(context())
    direct.close()
    with start_proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def tier(proxy: Proxy, pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageTier]:
    """Behind the proxy; it asks for block after block."""
    monkeypatch.setattr("engine.tiers.server.manifest.CHUNK_BYTES", BLOCK)
    monkeypatch.setattr("engine.tiers.server.connection.CONNECTIONS", 1)
    tier = PageTier(proxy.url, SPEC, pool, deadline=10.0)
    yield tier
    tier.close()


def test_an_unavailable_server_is_a_miss(pool: BlockPool) -> None:
    tier = PageTier(f"redis://127.0.0.1:{free_port()}", SPEC, pool)
    assert tier.load("alice", TOKENS) is None
    assert tier.save(context()) is None
    assert (tier.misses, tier.unsaved) == ({"down": 1}, {"down": 1})
    tier.close()


def test_a_server_that_never_answers_is_a_miss_in_time(pool: BlockPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = PageTier(f"redis://127.0.0.1:{silent.getsockname()[1]}", SPEC, pool, deadline=0.2)
        begun = time.monotonic()
        assert tier.load("alice", TOKENS) is None
        assert tier.save(context(TOKENS[:9])) is None
        assert time.monotonic() - begun < 30
        tier.close()
    assert (tier.misses, tier.unsaved) == ({"slow": 1}, {"slow": 1})


def test_a_chunk_must_arrive_within_the_deadline(proxy: Proxy, tier: PageTier, pool: BlockPool) -> None:
    proxy.drip = 0.01
    tier._connection.deadline = 0.5
    begun = time.monotonic()
    assert tier.load("alice", TOKENS) is None
    assert time.monotonic() - begun < 30
    assert tier.misses == {"slow": 1}


def test_several_chunks_may_exceed_the_deadline_together(proxy: Proxy, tier: PageTier, pool: BlockPool) -> None:
    """A slow link needs many of them, in both directions."""
    assert held(pool, tier.load("alice")) == 700  # is connected
    proxy.hold, tier._connection.deadline = 0.25, 2.0
    begun = time.monotonic()
    loaded = tier.load("alice", TOKENS)
    assert same(loaded, context(), 700)
    assert time.monotonic() - begun > tier._connection.deadline
    held(pool, loaded)
    begun = time.monotonic()
    assert tier.save(context(TOKENS[::-1]))
    assert time.monotonic() - begun > tier._connection.deadline
    assert (tier.misses, tier.unsaved) == ({}, {})


def test_a_slowly_arriving_rest_is_computed(
    proxy: Proxy, tier: PageTier, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link was fast when it was decided to fetch."""
    monkeypatch.setattr("engine.tiers.server.fetch.LEAST_MEASURED", 1)
    tier.rates.received(1 << 30, 1.0, 1 << 30)
    assert held(pool, tier.load("alice")) == 700
    tier.rates.prefilled(1000, 1.0)
    proxy.hold = 0.1
    fetch = tier.fetch("alice", TOKENS)
    loaded = fetch.result()
    assert same(loaded, context(), 256)
    held(pool, loaded)
    assert fetch.report.decision
    assert not fetch.report.decision.fetch
    assert fetch.report.decision.tokens == 700 - 256
    assert tier.misses == {"recompute": 1}


def test_blocks_received_before_the_deadline_are_used(proxy: Proxy, tier: PageTier, pool: BlockPool) -> None:
    """The link stalls in the second block."""
    proxy.stall_after = BLOCK + BLOCK // 2
    tier._connection.deadline = 3.0
    loaded = tier.load("alice", TOKENS)
    assert same(loaded, context(), 256)
    held(pool, loaded)
    assert tier.misses == {"slow": 1}


def test_blocks_received_before_the_servers_death_are_used(proxy: Proxy, tier: PageTier, pool: BlockPool) -> None:
    proxy.die_after = BLOCK + BLOCK // 2
    loaded = tier.load("alice", TOKENS)
    assert same(loaded, context(), 256)
    held(pool, loaded)
    assert tier.misses == {"down": 1}


def test_a_connection_that_breaks_once_is_made_anew(proxy: Proxy, tier: PageTier, pool: BlockPool) -> None:
    proxy.cut_after, proxy.mend_after = BLOCK + BLOCK // 2, 1
    loaded = tier.load("alice", TOKENS)
    assert same(loaded, context(), 700)
    held(pool, loaded)
    assert not tier.misses


@pytest.mark.parametrize("where", [BLOCK // 2, BLOCK + BLOCK // 2])
def test_a_bit_that_turns_over_on_the_way_is_a_miss(proxy: Proxy, tier: PageTier, pool: BlockPool, where: int) -> None:
    proxy.flip_at = where
    loaded = tier.load("alice", TOKENS)
    assert same(loaded, context(), where // BLOCK * 256) or loaded is None
    held(pool, loaded)
    assert tier.misses == {"checksum": 1}


def test_an_answer_that_makes_no_sense_is_a_miss(pool: BlockPool) -> None:
    def babble(listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            with client:
                client.recv(4096)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=babble, args=(listening,), daemon=True).start()
        tier = PageTier(f"redis://127.0.0.1:{listening.getsockname()[1]}", SPEC, pool)
        assert tier.load("alice", TOKENS) is None
        assert tier.save(context()) is None
        assert (tier.misses, tier.unsaved) == ({"garbled": 1}, {"garbled": 1})
        tier.close()
        listening.shutdown(socket.SHUT_RDWR)


def test_a_full_server_keeps_its_contexts(pool: BlockPool) -> None:
    """The manifest still names the context that is complete. That is more than half of the server's memory, of which
    no more can be leased: it is loaded all the same."""
    with start_server("--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as full:
        tier = PageTier(full.url, SPEC, pool)
        assert tier.save(context())
        assert tier.save(context(TOKENS[::-1])) is None
        assert tier.unsaved == {"full": 1}
        loaded = tier.load("alice")
        assert same(loaded, context(), 700)
        held(pool, loaded)
        assert not tier.misses
        assert tier.breaker.state == State.CLOSED
        tier.close()


def test_a_server_that_knows_no_pages_is_no_tier(redis_server: RunningServer, pool: BlockPool) -> None:
    tier = PageTier(redis_server.url, SPEC, pool)
    assert tier.save(context(TOKENS[:9])) is None
    assert tier.load("alice") is None
    assert (tier.misses, tier.unsaved) == ({"absent": 1}, {"refused": 1})
    tier.close()


def test_a_server_that_is_restarted_is_found_again(tmp_path: Path, pool: BlockPool) -> None:
    """With the data on its disk."""
    port = free_port()
    with start_server("--store", "tiered", port=port, directory=tmp_path):
        tier = PageTier(f"redis://127.0.0.1:{port}", SPEC, pool)
        assert tier.save(context())
        assert held(pool, tier.load("alice")) == 700
    assert tier.load("alice") is None
    assert tier.save(context()) is None
    with start_server("--store", "tiered", port=port, directory=tmp_path):
        loaded = tier.load("alice")
        assert same(loaded, context(), 700)
        held(pool, loaded)
        assert tier.save(context())
    assert (tier.misses, tier.unsaved) == ({"down": 1}, {"down": 1})
    tier.close()


def test_a_failing_server_is_not_asked_until_a_probe_succeeds(proxy: Proxy, tier: PageTier, pool: BlockPool) -> None:
    now = 1000.0
    tier.breaker._clock = lambda: now
    proxy.stall_after = 0
    tier._connection.deadline = 0.1
    for _ in range(FAILURES):
        assert tier.load("alice", TOKENS) is None
    assert tier.breaker.state == State.OPEN
    assert tier.load("alice", TOKENS) is None
    assert tier.save(context()) is None
    assert tier.agents() == []
    assert tier.loop.run(tier.claim("name", 1))
    assert tier.misses == {"slow": FAILURES, "open": 1}
    assert (tier.unsaved, tier.unasked) == ({"open": 1}, {"open": 2})
    assert tier.save_failure == "slow"  # the reason of the outage
    tier._connection.deadline, proxy.stall_after = 10.0, None
    now += SHORTEST
    assert tier.breaker.state == State.HALF_OPEN
    assert held(pool, tier.load("alice", TOKENS)) == 700
    assert tier.breaker.state == State.CLOSED


def test_blocks_in_memory_are_used_with_any_server(pool: BlockPool) -> None:
    tier = PageTier(f"redis://127.0.0.1:{free_port()}", SPEC, pool)
    ours = own(pool, 2)
    loaded = tier.load("bob", TOKENS, held=ours.blocks)
    assert loaded
    assert loaded.blocks == ours.blocks
    assert tier.misses == {"down": 1}
    held(pool, loaded)
    held(pool, ours)
    tier.close()


def own(pool: BlockPool, count: int) -> AgentBlocks:
    """The first blocks of TOKENS, allocated in the pool."""
    tokens = TOKENS[: 256 * count]
    ids = pool.allocate(count)
    whole = context(tokens).blocks
    blocks = tuple(type(block)(i, block.tokens, block.layers) for i, block in zip(ids, whole, strict=True))
    return AgentBlocks("alice", tokens, blocks, SPEC.fingerprint)


def test_a_load_that_is_given_up_holds_nothing(proxy: Proxy, tier: PageTier, pool: BlockPool) -> None:
    """At any moment: before the first byte, in the middle, after the end."""
    for wait in (0, 0.002, 0.005, 0.01, 0.02, 0.05, None):
        ours = own(pool, 1)
        fetch = tier.fetch("alice", TOKENS, held=ours.blocks)
        held(pool, ours)
        if wait is None:
            ended = threading.Event()
            fetch.add_done_callback(lambda _, ended=ended: ended.set())
            ended.wait(60)
        else:
            time.sleep(wait)
        fetch.cancel()
        fetch.cancel()
        assert fetch.result() is None
        pool.check_empty()
    assert fetch.reach == 699


def test_closing_ends_operations_in_progress(proxy: Proxy, pool: BlockPool) -> None:
    proxy.stall_after = BLOCK
    tier = PageTier(proxy.url, SPEC, pool, deadline=30)
    fetch = tier.fetch("alice", TOKENS)
    time.sleep(0.2)
    assert not fetch.done()
    begun = time.monotonic()
    tier.close()
    assert fetch.result() is None
    assert time.monotonic() - begun < 20


def test_an_engine_computes_while_contexts_arrive(server: RunningServer, client: redis.Redis, pool: BlockPool) -> None:
    """Memory is made on the tier's thread and arrays of it on this one, which uses MLX all the time."""
    tier = PageTier(server.url, SPEC, pool)
    tier.save(context())
    rng = mx.random.normal((64, 64))
    for _ in range(15):
        fetches = [tier.fetch("alice") for _ in range(4)]
        while not all(fetch.done() for fetch in fetches):
            mx.eval(rng @ rng)
        for fetch in fetches:
            loaded = fetch.result()
            assert same(loaded, context(), 700)
            held(pool, loaded)
    assert not tier.misses
    tier.close()


def test_a_manifest_of_an_older_version_is_a_miss_and_replaced(
    client: redis.Redis, server: RunningServer, pool: BlockPool
) -> None:
    """The blocks of a prompt are found all the same."""
    tier = PageTier(server.url, SPEC, pool)
    tier.save(context())
    key = manifest_key("alice", SPEC.fingerprint)
    older = json.loads(client.get(key).partition(b" ")[2]) | {"format": 3}
    client.delete(key)
    client.set("manifest:alice", json.dumps(older))
    assert tier.load("alice") is None
    assert held(pool, tier.load("alice", TOKENS)) == 700
    assert tier.misses == {"manifest": 2}
    assert tier.save(context())
    assert held(pool, tier.load("alice", TOKENS)) == 700
    assert client.get(f"refs:{block_names(TOKENS, SPEC)[0]}") == b"1"
    assert not client.exists("manifest:alice")
    client.set("manifest:alice", json.dumps(older))
    assert tier.delete("alice")
    assert client.keys() == [b"refs:deleted:alice"]
    tier.close()
