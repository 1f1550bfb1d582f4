"""A page client that is closed while calls are under way in other threads or tasks: they end, and say why."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
import uvloop
from page_batches import batch, room
from servers import RunningServer, start_server
from waiting import PATIENCE, until

from benchmarks.valkey_cluster import Cluster
from kvpage_server.client import AsyncPageClient, Closed, PageClient, PageClientError
from kvpage_server.client.raw_commands import RawCommand, ok, text

PAGES = batch(40, rows=1024, columns=128)  # 5 MiB
KEYS = [page.key for page in PAGES]
GET, SET = RawCommand(["GET", "k"], text), RawCommand(["SET", "k", "v"], ok)
CALLS: dict[str, Callable[[Any], Any]] = {
    "read": lambda pages: pages.mget_into(KEYS, room(PAGES)),
    "write": lambda pages: pages.mset(PAGES),
    "ask": lambda pages: pages.ask([GET]),
    "transaction": lambda pages: pages.transaction(["k"], GET, lambda _: [SET]),
}


@dataclass
class Store:
    """One server or several, and how to reach them."""

    url: str
    servers: list[Any]
    options: dict[str, Any] = field(default_factory=dict)

    def signal(self, number: signal.Signals) -> None:
        for server in self.servers:
            server.process.send_signal(number) if isinstance(server, RunningServer) else server.signal(number)

    def client(self, kind: type[Any]) -> Any:
        return kind(self.url, deadline=PATIENCE, **self.options)


@pytest.fixture(scope="module")
def two() -> Iterator[list[RunningServer]]:
    with start_server() as one, start_server() as other:
        yield [one, other]


@pytest.fixture(params=["one server", "several connections", "side by side", "cluster"])
def store(request: pytest.FixtureRequest, two: list[RunningServer]) -> Store:
    several = {"node_deadline": PATIENCE}
    if request.param == "cluster":
        masters: Cluster = request.getfixturevalue("masters")
        return Store(masters.url, list(masters.masters), several)
    if request.param == "side by side":
        return Store(",".join(server.url for server in two), list(two), several)
    return Store(two[0].url, two[:1], {"connections": 4} if request.param == "several connections" else {})


def waiting(client: Any) -> int:
    """Connections that wait for the server."""
    pools = client._several.peers._pools.values() if client._several else [client._pool]
    return sum(len(pool._in_use_connections) for pool in pools)


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connecting"])
def test_calls_in_other_threads_end(store: Store, connected: bool) -> None:
    before = descriptors()
    client = store.client(PageClient)
    if connected:
        client.mset(PAGES)
    store.signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(len(CALLS)) as threads:
            calls = [threads.submit(call, client) for call in CALLS.values()]
            until(lambda: waiting(client) >= len(calls))
            client.close()
            for call in calls:
                with pytest.raises(Closed, match="the client was closed"):
                    call.result(PATIENCE)
    finally:
        store.signal(signal.SIGCONT)
    until(lambda: descriptors() == before, "the end of all sockets")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connecting"])
def test_calls_in_other_tasks_end_and_the_loop_is_as_it_was(
    store: Store, connected: bool, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def main() -> None:
        received: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: received.append(about))
        client = store.client(AsyncPageClient)
        if connected:
            await client.mset(PAGES)
        store.signal(signal.SIGSTOP)
        try:
            calls = [asyncio.create_task(call(client)) for call in CALLS.values()]
            while waiting(client) < len(calls):  # noqa: ASYNC110 - there is no notification
                await asyncio.sleep(0.01)
            await client.close()
            for call in calls:
                with pytest.raises(Closed, match="the client was closed"):
                    await call
        finally:
            store.signal(signal.SIGCONT)
        async with store.client(AsyncPageClient) as another:  # its sockets have the descriptors of the closed ones
            await another.mset(PAGES)
            assert all(await another.mget_into(KEYS, room(PAGES)))
        assert not received

    run(asyncio.sleep(0))  # a loop may keep some descriptors for the next one
    before = descriptors()
    run(main())
    until(lambda: descriptors() == before, "the end of all sockets")


def test_a_closed_client_raises_closed(store: Store) -> None:
    client = store.client(PageClient)
    client.mset(PAGES)
    for _ in range(2):
        client.close()
        for call in CALLS.values():
            with pytest.raises(Closed):
                call(client)

    async def main() -> None:
        client = store.client(AsyncPageClient)
        await client.mset(PAGES)
        for _ in range(2):
            await client.close()
            for call in CALLS.values():
                with pytest.raises(Closed):
                    await call(client)

    asyncio.run(main())


def test_it_is_an_error_that_callers_know_already() -> None:
    assert issubclass(Closed, PageClientError)
    assert issubclass(Closed, redis.ConnectionError)


def test_a_client_closed_during_a_call_gives_pages_or_an_error(two: list[RunningServer]) -> None:
    """Another thread closes it while bytes move, a little later each time."""
    with PageClient(two[0].url) as writer:
        writer.mset(PAGES)
    ended = 0
    with ThreadPoolExecutor(1) as threads:
        for moment in range(40):
            client, rooms = PageClient(two[0].url, connections=1 + moment % 3, deadline=PATIENCE), room(PAGES)
            call = threads.submit(client.mget_into, KEYS, rooms)
            for _ in range(moment * 20):
                waiting(client)
            client.close()
            try:
                assert all(call.result(PATIENCE))
                assert all(bytes(a) == bytes(page.body) for a, page in zip(rooms, PAGES, strict=True))
            except Closed:
                ended += 1
    assert ended
