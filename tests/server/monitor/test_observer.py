"""Memory by agent is read again, less often if a read takes long."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from servers import RunningServer, start_server

from kvpage_server.observe import observer
from kvpage_server.observe.engines import Engines
from kvpage_server.observe.observer import Observer

NAMES = [b"request-%d" % number for number in range(10)]


async def _seen(server: RunningServer) -> list[list[bytes]]:
    """Return the requests that are found before and after a FLUSHALL, and after the deletion of one key of many."""
    store = redis.asyncio.Redis(port=server.port, protocol=3)
    seen = Observer(store, "default", Engines())
    found = []

    async def look() -> None:
        await seen.overview()
        found.append(sorted(request.req_id for request in (await seen.holdings()).requests))

    for name in NAMES:
        await store.execute_command("KVPAGESET", name, 0, 0, 0, 0, 1, 8, 8, 0, bytes(128))
    await look()
    await store.execute_command("KVPAGEDEL", NAMES[0])
    await look()
    await store.flushall()
    await store.execute_command("KVPAGESET", "new", 0, 0, 0, 0, 1, 8, 8, 0, bytes(128))
    await look()
    await seen.close()
    return found


def test_after_a_flush_the_store_is_looked_through_anew_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "HOLDINGS_SECONDS", 1000.0)
    monkeypatch.setattr(observer, "OVERVIEW_SECONDS", 0.0)
    with start_server() as server:
        assert asyncio.run(_seen(server)) == [NAMES, NAMES, [b"new"]]
