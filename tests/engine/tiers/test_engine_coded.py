"""Contexts that travel to and from a page server in the lossless code: bit for bit those without it."""

from __future__ import annotations

from engine_models import tiny, tiny_llama
from pools import pool_of
from servers import RunningServer
from test_engine_cold import TOKENIZER, TOKENS, bits, computed, fetch_same

# isort: split
import mlx.core as mx
import pytest
import redis

from engine.agent_engine import Reuse
from engine.commands.talk import account
from engine.memory.blocks import AgentBlocks
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

pool = pool_of(64)


def of_bfloat16() -> tuple[ModelCacheSpec, AgentBlocks]:
    model = tiny_llama(dtype=mx.bfloat16)
    spec = ModelCacheSpec.probe(model, TOKENIZER, model_id="tiny")
    return spec, computed(model, spec, TOKENS)


def calls(client: redis.Redis) -> set[str]:
    return {name.removeprefix("cmdstat_") for name in client.info("commandstats")}


def test_a_context_travels_in_the_code(server: RunningServer, client: redis.Redis, pool: BlockPool) -> None:
    spec, saved = of_bfloat16()
    client.config_resetstat()
    tier = PageTier(server.url, spec, pool, code="always")
    try:
        assert tier.save(saved)
        report = fetch_same(tier, saved, pool)
        assert report.coded
        assert 1.2 < report.coded < 1.5
        assert {"kvblocksetcoded", "kvblockmgetcoded"} <= calls(client)
    finally:
        tier.close()


def test_raw_and_coded_engines_share_blocks(server: RunningServer, client: redis.Redis, pool: BlockPool) -> None:
    spec, saved = of_bfloat16()
    for writes, reads in (("always", "never"), ("never", "always"), ("never", "auto")):
        client.flushall()
        with_code, without = PageTier(server.url, spec, pool, code=writes), PageTier(server.url, spec, pool, code=reads)
        try:
            assert with_code.save(saved)
            assert (fetch_same(without, saved, pool).coded is not None) is (reads == "always")
        finally:
            with_code.close()
            without.close()


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2", "mamba2"])
def test_states_travel_in_the_code(server: RunningServer, client: redis.Redis, pool: BlockPool, family: str) -> None:
    model = tiny(family)
    spec = ModelCacheSpec.probe(model, TOKENIZER, block_tokens=64)
    saved = computed(model, spec, TOKENS[:150], [64, 128])
    coded, raw = (PageTier(server.url, spec, pool, code=code) for code in ("always", "never"))
    try:
        assert coded.save(saved)
        loads = [tier.load("alice") for tier in (coded, raw)]
        assert [load and bits(load)[-1] for load in loads] == [bits(saved)[-1]] * 2
        assert loads[0]
        assert loads[1]
        assert bits(loads[0]) == bits(loads[1])
        for load in loads:
            pool.free(load.block_ids, "alice")
    finally:
        coded.close()
        raw.close()


def test_a_changed_block_is_a_miss(server: RunningServer, client: redis.Redis, pool: BlockPool) -> None:
    """The server sends the code of the changed bytes, and the seal does not match."""
    spec, saved = of_bfloat16()
    tier = PageTier(server.url, spec, pool, code="always")
    try:
        assert tier.save(saved)
        key = next(key for key in client.scan_iter("kv:*", count=1000) if client.type(key) != b"set")
        page = bytearray(client.get(key))
        page[-1] ^= 1
        page[56:64] = bytes(8)  # no checksum
        client.set(key, bytes(page))
        found = tier.load("alice", TOKENS)
        assert found is None or bits(found) == bits(saved)[: len(found.blocks)]
        assert found is None or len(found) < len(TOKENS)
        assert sum(tier.misses.values()) == 1
        if found:
            pool.free(found.block_ids, "alice")
    finally:
        tier.close()


def test_an_answer_reports_the_code() -> None:
    class Answered:
        reuse = Reuse("page", 100, 0.1, coded=1.42)
        prompt_tokens = 120

    assert "from the page server (coded 1.42) in 100 ms" in account(Answered())  # type: ignore[arg-type]
