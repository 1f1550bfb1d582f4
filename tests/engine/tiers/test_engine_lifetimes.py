"""Lifetimes on the page server: their first end is reported, and hits begin them anew with few requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import contexts
import pytest
import redis
from engine_families import family
from pools import pool_of
from proxy import start_proxy
from servers import RunningServer
from stored_pages import small_store
from test_engine_pages import SPEC, TOKENS, context, page_keys
from waiting import PATIENCE, eventually, until

from engine.chains import unnamed_agent
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, block_names
from engine.memory.lifetimes import KeptContext, Lifetimes
from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore
from kvpage_server.page import unix_ms

MB = 1 << 20

pool = pool_of(32)


@pytest.fixture
def tier(server: RunningServer, client: redis.Redis, pool: BlockPool) -> Iterator[PageTier]:
    tier = PageTier(server.url, SPEC, pool)
    yield tier
    tier.close()


def keep(tier: PageTier, context: AgentBlocks, *wanted: tuple[int, int]) -> KeptContext:
    return tier.loop.run(tier.keep_async(context, Lifetimes(wanted)))


def renewed(tier: PageTier, context: AgentBlocks) -> KeptContext:
    """The part of a context whose lifetime begins anew, after a hit."""
    found: list[KeptContext] = []
    ended = threading.Event()
    tier.keep_anew(context, lambda kept: (found.append(kept), ended.set()))
    assert ended.wait(PATIENCE)
    return found[0]


def seconds_left(client: redis.Redis, name: str) -> int:
    """Seconds to the end of a block's lifetime; 0 without one."""
    stat = client.execute_command("KVPAGESTAT", name, 0, 0, 0, 0)
    return max(0, round((stat[b"kept_until_ms"] - unix_ms()) / 1000))


def test_the_first_of_several_ends_is_reported(tier: PageTier, client: redis.Redis) -> None:
    """The last block is contained in a longer one, which another request keeps for longer."""
    tier.save(context())
    client.execute_command("KVPAGEKEEP", "", 1, 7200, page_keys(block_names(TOKENS, SPEC)[-1])[0])
    shorter = context(TOKENS[:650], unnamed_agent(""))
    kept = keep(tier, shorter, (256, 3600), (650, 300))
    assert (kept.tokens, kept.why) == (650, "")
    assert abs(kept.until - unix_ms() - 300_000) < 5000


def test_ends_of_inherited_tokens_are_not_reported(tier: PageTier) -> None:
    tier.save(context())
    lifetimes = Lifetimes([(256, 3600)])
    lifetimes.inherit([(700, 300)])
    kept = tier.loop.run(tier.keep_async(context(), lifetimes))
    assert kept.tokens == 256
    assert abs(kept.until - unix_ms() - 3_600_000) < 5000


def test_a_record_that_cannot_be_kept_is_reported() -> None:
    """Without it, no other engine finds the context."""
    with small_store() as client:
        port = client.connection_pool.connection_kwargs["port"]
        small = PageTier(f"redis://127.0.0.1:{port}", SPEC, BlockPool(4))
        client.config_set("maxmemory", 256 * MB)
        small.publish(context(agent_id=unnamed_agent("")))
        for key in client.scan_iter("tails:*"):
            client.set(key, bytes(MB))
        client.execute_command("KVPAGEKEEP", "probe", 1, 1, *client.scan_iter("kv:*"))
        blocks = client.info("kvpage")["kept0"]["bytes"]
        lifetimes = Lifetimes([(700, 300)], "a", 128 * MB // (blocks + MB // 2))
        kept = small.loop.run(small.keep_async(context(agent_id=unnamed_agent("")), lifetimes))
        small.close()
    assert kept == KeptContext(0, 0, f"the share of the tenant, one of {lifetimes.tenants}, is used up")


def test_a_renewal_takes_few_requests(server: RunningServer, client: redis.Redis) -> None:
    """However many states a context has."""
    of = family("gemma3_text", block_tokens=16)
    states = {count: kvcache.capture(of.spec, of.computed(count)) for count in range(16, 161, 16)}
    whole = of.blocks(of.computed(165), 165, states)
    with start_proxy(server.port) as proxy:
        tier = PageTier(proxy.url, of.spec, BlockPool(64))
        assert tier.save(whole)
        assert keep(tier, whole, (165, 300)).tokens == 165
        for name in block_names(whole.tokens, of.spec):
            client.execute_command("KVPAGEKEEP", "", 1, 1000, *client.scan_iter(f"*:{name}*"))
        before = proxy.questions
        kept = renewed(tier, whole)
        assert kept.tokens == 165
        assert proxy.questions - before <= 3
        tier.close()


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "agent"])
def test_a_context_that_is_not_written_is_reported_at_once(server: RunningServer, pool: BlockPool, named: bool) -> None:
    """Another context of the agent has replaced it, or it was withdrawn. An answer waits for the report."""
    store = AgentCacheStore(contexts.SPEC, pool, pages=PageTier(server.url, contexts.SPEC, pool))
    agent_id, reports = "alice" if named else unnamed_agent(""), list[KeptContext]()
    made = [contexts.made(pool, agent_id, contexts.some_tokens(seed, 20)) for seed in (1, 2)]
    lifetimes = Lifetimes([(20, 300)])
    lifetimes.on_report(reports.append)
    with store._flusher.paused():
        if named:
            store.save(made[0], lifetimes)
            store.save(made[1])
        else:
            store.publish(made[0], lifetimes=lifetimes)
            store._flusher.withdraw(block_names(made[0].tokens, contexts.SPEC, agent_id))
    assert [one.why for one in reports] == ["the page server has not stored the context"]
    for one in made:
        pool.free(one.block_ids, agent_id)
    store.close()


def test_both_reasons_for_a_short_lifetime_are_reported(server: RunningServer, pool: BlockPool) -> None:
    store = AgentCacheStore(contexts.SPEC, pool, pages=PageTier(server.url, contexts.SPEC, pool))
    made, reports = contexts.made(pool, unnamed_agent(""), contexts.some_tokens(1, 20)), list[KeptContext]()
    for most in (store._tree._max_bytes, 0):
        store._tree._max_bytes = most
        lifetimes = Lifetimes([(20, 300)])
        lifetimes.on_report(reports.append)
        store.publish(made, written=False, lifetimes=lifetimes)
        store._tree._kept.clear()
    assert [one.tokens for one in reports] == [20, 0]
    assert [one.why for one in reports] == [
        "only this engine keeps it: it may not be stored",
        "it may not be stored; the engine's memory has no room for the context",
    ]
    pool.free(made.block_ids, made.agent_id)
    store.close()


def test_hits_in_memory_renew_once_in_a_part_of_a_lifetime(
    server: RunningServer, client: redis.Redis, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is asked about a context without a lifetime as often as about the shortest one."""
    pages = PageTier(server.url, contexts.SPEC, pool)
    store = AgentCacheStore(contexts.SPEC, pool, pages=pages)
    begun, ended, keep_anew, agent_id = list[AgentBlocks](), list[int](), pages.keep_anew, unnamed_agent("")

    def counted(context: AgentBlocks, on_renewed: Callable[[KeptContext], object]) -> None:
        begun.append(context)
        keep_anew(context, lambda kept: (on_renewed(kept), ended.append(kept.tokens)))

    def publish(tokens: Sequence[int], seconds: int = 0) -> None:
        made = contexts.made(pool, agent_id, tokens)
        store.publish(made, lifetimes=Lifetimes([(len(tokens), seconds)] if seconds else []))
        pool.free(made.block_ids, agent_id)
        store.flush_dirty()

    def renewals(tokens: Sequence[int]) -> list[int]:
        """The tokens of each renewal by ten hits."""
        begun.clear()
        ended.clear()
        for _ in range(10):
            found = store.begin_load(agent_id, [*tokens, 95], named=False).result()
            assert found.blocks
            pool.free(found.blocks.block_ids, agent_id)
        assert eventually(lambda: len(ended) == len(begun))
        return list(ended)

    monkeypatch.setattr(pages, "keep_anew", counted)
    for seconds, renewed in ((300, 20), (0, 0), (20, 20)):
        tokens = contexts.some_tokens(seconds, 20)
        publish(tokens, seconds)
        assert renewals(tokens) == [renewed]
    again = time.monotonic() + 1
    until(lambda: time.monotonic() > again, "a part of the lifetime")
    assert renewals(tokens) == [20]
    store.close()


@pytest.mark.parametrize("other", [TOKENS[:600], (*TOKENS[:600], 1, 2, 3), TOKENS[:512]])
def test_a_kept_block_is_renewed_under_another_name(
    tier: PageTier, client: redis.Redis, other: tuple[int, ...]
) -> None:
    """This engine has other tokens in the last block than the one that the server keeps."""
    tier.save(context(TOKENS[:620]))
    keep(tier, context(TOKENS[:620]), (620, 300))
    names = block_names(TOKENS[:620], SPEC)
    for name in names:
        client.execute_command("KVPAGEKEEP", "", 1, 900, page_keys(name)[0])
    kept = renewed(tier, context(other, unnamed_agent("")))
    assert kept.tokens == min(len(other), 600)
    if len(other) > 512:
        assert [seconds_left(client, name) for name in names] == [900] * 3
