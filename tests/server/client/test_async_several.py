"""AsyncPageClient on a real Valkey Cluster and on servers side by side: the behaviour of PageClient."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from page_batches import NO_RETRY, SHAPE, batch, block_body, key, room, same
from proxy import Weather, start_proxy
from servers import start_server

from benchmarks import valkey_cluster
from kvpage_server.client import AsyncPageClient, PageClient, PageClientError, Unsupported
from kvpage_server.client.cluster.nodes import Peers
from kvpage_server.client.raw_commands import RawCommand, integer

NAMES = [(b"{segment-%d}%d" % (i // 4, i), i) for i in range(160)]  # 40 segments: servers have random names
BODIES = [block_body(i) for i in range(len(NAMES))]
Store = tuple[str, Callable[[signal.Signals], None]]  # its URL, and a function that sends one of its servers a signal


@pytest.fixture(scope="module", params=["cluster", "side by side"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with ExitStack() as stack:
        if request.param == "cluster":
            cluster = stack.enter_context(valkey_cluster.run("--cluster-node-timeout", "60000", replicas=False))
            yield cluster.url, cluster.masters[0].signal
        else:
            servers = [stack.enter_context(start_server()) for _ in range(3)]
            yield ",".join(server.url for server in servers), servers[0].process.send_signal


async def read(pages: AsyncPageClient, deadline: float = 30) -> list[bool]:
    """Return which blocks were found. Each has the right bytes."""
    into = [np.zeros(SHAPE.nbytes, np.uint8) for _ in NAMES]
    found = await pages.mget_blocks_into(NAMES, SHAPE, into, deadline=deadline)
    assert all((a == b).all() for a, b, there in zip(into, BODIES, found, strict=True) if there)
    return found


async def test_both_clients_read_each_others_writes(store: Store) -> None:
    url, _ = store
    async with AsyncPageClient(url, deadline=30) as pages:
        await pages.mset_blocks(NAMES, SHAPE, BODIES)
        assert all(await read(pages))
        assert await pages.prefix([*NAMES, (b"nobody's", 0)], pages_per_block=SHAPE.pages, lease_ms=1000) == len(NAMES)
        written = batch(100)
        await pages.mset(written)
        into = room(written)
        assert all(await pages.mget_into([page.key for page in written], into))
        assert all(map(same, into, written))
        assert await pages.delete([key(1), key(999)]) == 1
    with PageClient(url, deadline=30) as twin:
        rooms: list[Any] = [np.zeros(SHAPE.nbytes, np.uint8) for _ in NAMES]
        assert all(twin.mget_blocks_into(NAMES, SHAPE, rooms))


async def test_many_tasks_may_share_a_client(store: Store) -> None:
    url, _ = store
    async with AsyncPageClient(url, deadline=60) as pages:
        await pages.mset_blocks(NAMES, SHAPE, BODIES)
        assert all(map(all, await asyncio.gather(*(read(pages) for _ in range(20)))))


async def test_a_call_costs_a_round_trip_a_server(store: Store) -> None:
    url, _ = store
    async with AsyncPageClient(url, deadline=30) as pages:
        await pages.mset_blocks(NAMES, SHAPE, BODIES)
        assert pages._several
        before = pages._several.peers.round_trips
        assert all(await read(pages))
        assert pages._several.peers.round_trips - before == 3


async def test_a_hanging_server_costs_its_blocks_within_the_deadline(store: Store) -> None:
    url, send = store
    async with AsyncPageClient(url, deadline=30, node_deadline=4) as pages:
        await pages.mset_blocks(NAMES, SHAPE, BODIES)
        send(signal.SIGSTOP)
        try:
            found = await read(pages)
            assert 0 < sum(found) < len(NAMES)
            assert pages.misses == {"gone": found.count(False)}
        finally:
            send(signal.SIGCONT)
        async with asyncio.timeout(60):
            while not all(await read(pages)):
                pass


async def test_a_call_that_is_cancelled_leaves_a_client_that_works(store: Store) -> None:
    url, send = store
    async with AsyncPageClient(url, deadline=30, node_deadline=20) as pages:
        await pages.mset_blocks(NAMES, SHAPE, BODIES)
        send(signal.SIGSTOP)
        try:
            task = asyncio.create_task(read(pages))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            send(signal.SIGCONT)
        assert all(await read(pages))


async def test_a_cancelled_call_is_no_answer_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered: list[str] = []
    monkeypatch.setattr(Peers, "remember", lambda _, node, failure: remembered.append(str(node)))
    with start_server() as server, socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncPageClient(f"{server.url},redis://{name}", deadline=30, node_deadline=30) as pages:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(pages), 2)
    assert len(remembered) > 0
    assert not any(name in node for node in remembered)


async def test_bad_weather_never_becomes_wrong_bytes() -> None:
    written = batch(200, rows=64)
    written = [page._replace(key=key(i, b"r%d" % i)) for i, page in enumerate(written)]
    with start_server() as one, start_server() as other, start_proxy(one.port) as proxy:
        url = f"{proxy.url},{other.url}"
        async with AsyncPageClient(url, deadline=30) as pages:
            await pages.mset(written)
        proxy.weather = Weather(flips=60, cuts=30, truncations=30, delays=60)
        some = 0
        async with AsyncPageClient(url, deadline=5, node_deadline=0.3, retry=NO_RETRY) as pages:
            for _ in range(40):
                into = room(written)
                try:
                    found = await pages.mget_into([page.key for page in written], into)
                except PageClientError:
                    continue
                some += sum(found)
                assert all(same(a, page) for a, page, there in zip(into, written, found, strict=True) if there)
        assert some


async def test_commands_without_pages_are_refused_on_several_servers(store: Store) -> None:
    url, _ = store
    async with AsyncPageClient(url) as pages:
        with pytest.raises(Unsupported, match="several servers"):
            await pages.ask([RawCommand(["DBSIZE"], integer)])
    with PageClient(url) as twin, pytest.raises(Unsupported, match="several servers"):
        twin.ask([RawCommand(["DBSIZE"], integer)])
