"""Memory by agent is read again, less often if a read takes long."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
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


@pytest.mark.parametrize("change", [["off"], ["resetpass", ">second"]])
def test_disabled_user_loses_access_at_the_next_login(change: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "LOGIN_SECONDS", 0.0)
    monkeypatch.setattr(observer, "OVERVIEW_SECONDS", 0.0)

    async def observe(server: RunningServer) -> None:
        once = Retry(NoBackoff(), 1)
        store = redis.asyncio.Redis(port=server.port, username="viewer", password="first", retry=once)
        seen = Observer(store, "viewer", Engines())
        await seen.overview()
        await redis.asyncio.Redis(port=server.port).execute_command("ACL", "SETUSER", "viewer", *change)
        with pytest.raises(redis.AuthenticationError):
            await seen.overview()
        await seen.close()

    with start_server() as server, server.client() as client:
        client.execute_command("ACL", "SETUSER", "viewer", "on", ">first", "~*", "+@all")
        asyncio.run(observe(server))
