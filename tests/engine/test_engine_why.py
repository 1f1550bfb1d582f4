"""`kvpage why AGENT`: the result of a load of an agent's context."""

from __future__ import annotations

import re

from contexts import SPEC, made, some_tokens
from servers import RunningServer
from test_kvpage_cli import kvpage

# isort: split
import redis

from engine.pool import BlockPool
from engine.tiers.pages import PageTier


def test_why_knows_an_agent_by_its_manifest(server: RunningServer, client: redis.Redis) -> None:
    pool = BlockPool(32)
    tier = PageTier(server.url, SPEC, pool)
    try:
        context = made(pool, "alice", some_tokens(1, 44))  # six blocks
        assert tier.save(context)
        pool.free(context.block_ids)
    finally:
        tier.close()
    code, shown, _ = kvpage("why", "alice", url=server.url)
    assert code == 0
    assert shown.startswith("an agent's context")
    assert "44 tokens in 6 blocks, all stored: a load would not miss\n" in shown


def test_why_lists_the_missing_blocks_of_an_agent(server: RunningServer, client: redis.Redis) -> None:
    pool = BlockPool(32)
    tier = PageTier(server.url, SPEC, pool)
    try:
        context = made(pool, "bob", some_tokens(2, 44))
        assert tier.save(context)
        pool.free(context.block_ids)
    finally:
        tier.close()
    (manifest,) = client.scan_iter("manifest:bob*")
    names = [name for name in client.get(manifest).decode().split('"') if len(name) == 32]
    client.execute_command("KVPAGEDEL", names[2])
    code, shown, _ = kvpage("why", "bob", url=server.url)
    assert code == 1
    assert "44 tokens, but of 6 blocks only the first 2 are there; then: deleted, " in shown
    client.set(manifest, "{")
    _, shown, _ = kvpage("why", "bob", url=server.url)
    assert "its manifest cannot be read" in shown
    client.delete(manifest)
    code, shown, _ = kvpage("why", "bob", url=server.url)
    assert code == 1
    assert re.fullmatch(r"an agent's context of model \w{16} is missing: its manifest was deleted, just now\n", shown)
    _, shown, _ = kvpage("why", "bo", url=server.url)
    assert shown.startswith("never stored")
