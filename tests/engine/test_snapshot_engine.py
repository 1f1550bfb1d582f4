"""An engine's contexts survive in a dump: blocks, seals and manifests, which mean nothing to the server."""

from __future__ import annotations

from pathlib import Path

import redis
from servers import RunningServer
from test_engine_pages import SPEC, context, held, same
from test_kvpage_cli import kvpage

from engine.pool import BlockPool
from engine.tiers.pages import PageTier


def test_an_agent_continues_from_a_restored_dump(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    pool = BlockPool(32)
    tier = PageTier(server.url, SPEC, pool)
    tier.save(context())
    assert kvpage("dump", str(tmp_path), url=server.url)[0] == 0
    client.flushall()
    assert tier.load("alice") is None
    assert kvpage("restore", str(tmp_path), url=server.url)[0] == 0
    loaded = tier.load("alice")
    assert same(loaded, context(), len(context().tokens))
    held(pool, loaded)
    assert tier.save(context()).blocks_present == 3
    tier.close()
