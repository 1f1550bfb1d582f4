"""AsyncPageClient: the behaviour of PageClient, in an event loop that keeps running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import uvloop
from page_batches import NO_RETRY, SHAPE, batch, block_body, key, room, same
from proxy import Proxy, start_proxy
from servers import RunningServer, free_port
from waiting import PATIENCE, until

from kvpage_server.client import (
    AsyncPageClient,
    BadBuffer,
    DeadlineExceeded,
    Disconnected,
    PageClient,
    Refused,
    Unsupported,
)
from kvpage_server.page import KVType, PageKey


@pytest.fixture(params=[True, False], ids=["verify", "no verify"])
async def pages(either_server: RunningServer, request: pytest.FixtureRequest) -> AsyncIterator[AsyncPageClient]:
    async with AsyncPageClient(either_server.url, verify=request.param, deadline=30) as pages:
        yield pages


@pytest.fixture
def proxy(either_server: RunningServer) -> Iterator[Proxy]:
    with start_proxy(either_server.port) as proxy:
        yield proxy


async def test_pages_are_read_as_they_were_written(pages: AsyncPageClient) -> None:
    written = batch(64)
    await pages.mset([page for i, page in enumerate(written) if i % 5])
    there = [i % 5 != 0 for i in range(64)]
    keys, into = [page.key for page in written], room(written)
    assert await pages.mget_into(keys, into) == there
    assert await pages.mexists(keys) == there
    found = await pages.mget(keys)
    assert [page is not None for page in found] == there
    for array, page, copy in zip(into, written, found, strict=True):
        assert copy is None or (same(array, page) and same(copy.body, page))
    assert pages.misses == {"absent": 26}
    assert await pages.delete(keys[:3]) == 2
    assert not await pages.exists(keys[1])


async def test_truncated_and_short_replies_are_not_waited_for(
    pages: AsyncPageClient,
) -> None:
    written = batch(100, rows=512)
    await pages.mset(written[:60])
    keys, into = [page.key for page in written], room(written)
    for _ in range(2):
        assert await pages.mget_into(keys, into, deadline=5) == [True] * 60 + [False] * 40
        assert all(map(same, into[:60], written[:60]))
        assert await pages.mexists(keys[58:62], deadline=5) == [True, True, False, False]
        assert await pages.mget_into(keys[:60], into[:60], deadline=5) == [True] * 60
        assert await pages.exists(keys[0], deadline=5)


async def test_one_page_at_a_time(pages: AsyncPageClient) -> None:
    (page,) = batch(1)
    await pages.set_page(page, ttl=100)
    into = np.zeros(2048, np.uint8)
    assert await pages.get_page_into(page.key, into)
    assert same(into, page)
    assert await pages.get_page(key(8)) is None
    assert await pages.mget([]) == await pages.mget_into([], []) == []
    await pages.mset([])


async def test_blocks(pages: AsyncPageClient) -> None:
    names = [(b"agent", i) for i in range(4)]
    bodies = [block_body(i) for i in range(4)]
    await pages.mset_blocks(names[:3], SHAPE, bodies[:3])
    await pages.set_block(names[3], SHAPE, bodies[3])
    await pages.delete([PageKey(b"agent", 1, 1, 2, KVType.V)])
    into = [np.zeros(SHAPE.nbytes, np.uint8) for _ in range(4)]
    assert await pages.mget_blocks_into(names, SHAPE, into) == [True, True, False, True]
    assert all((into[i] == bodies[i]).all() for i in (0, 1, 3))
    assert not await pages.get_block_into(names[2], SHAPE, into[0])


async def test_commands_of_kvpage_server_only(pages: AsyncPageClient) -> None:
    names = [(b"ctx", i) for i in range(3)]
    await pages.mset_blocks(names, SHAPE, [block_body()] * 3)
    try:
        assert await pages.prefix([*names, (b"ctx", 3)], pages_per_block=SHAPE.pages, lease_ms=1000) == 3
        states = [(*names[0], 1), (*names[0], 2)]
        assert await pages.lengths(names, states, pages_per_block=SHAPE.pages, lease_ms=1000) == [1, 2]
        assert await pages.lease(b"ctx", 1000) == 3
        with pytest.raises(Refused):
            await pages.lease(b"ctx", -5)
        assert await pages.delete_request(b"ctx", [2]) == SHAPE.pages
    except Unsupported:
        assert await pages.exists(PageKey(b"ctx", 0, 0, 0, 0))  # a plain Redis, which goes on


async def test_a_batch_may_use_several_connections_at_once(either_server: RunningServer) -> None:
    written = batch(200, rows=512)
    async with AsyncPageClient(either_server.url, connections=4, deadline=30) as pages:
        await pages.mset(written)
        await pages.delete([key(3)])
        into = room(written)
        found = await pages.mget_into([page.key for page in written], into)
        assert found == [i != 3 for i in range(200)]
        assert all(same(array, page) for array, page, there in zip(into, written, found, strict=True) if there)


def test_uvloop_is_a_loop_as_well(either_server: RunningServer) -> None:
    async def main() -> None:
        written = batch(200, rows=512)
        async with AsyncPageClient(either_server.url, connections=2, deadline=30) as pages:
            await pages.mset(written)
            into = room(written)
            assert all(await pages.mget_into([page.key for page in written], into))
            assert all(map(same, into, written))

    uvloop.run(main())


async def test_many_calls_at_once(either_server: RunningServer) -> None:
    async def work(task: int, pages: AsyncPageClient) -> None:
        written = batch(20, seed=task, req_id=b"task%d" % task)
        into = room(written)
        for _ in range(5):
            await pages.mset(written)
            assert all(await pages.mget_into([page.key for page in written], into))
            assert all(map(same, into, written))

    async with AsyncPageClient(either_server.url, deadline=30) as pages:
        await asyncio.gather(*(work(task, pages) for task in range(16)))


async def test_the_event_loop_keeps_running(server: RunningServer) -> None:
    """64 MiB, some 20 ms of copying at the least, hold nobody up for long."""
    written = batch(64, rows=16384)
    keys, into = [page.key for page in written], room(written)
    turns: list[float] = []

    async def turn() -> None:
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0)

    async with AsyncPageClient(server.url, deadline=60) as pages:
        await pages.mset(written)
        turning = asyncio.create_task(turn())
        await asyncio.sleep(0)
        turns.clear()
        assert all(await pages.mget_into(keys, into))
        # or the content of the socket, which may be large on a busy machine
        assert len(turns) > 4, "it moved all at once"
        turning.cancel()


async def test_bad_memory_is_refused_before_anything_is_sent() -> None:
    async with AsyncPageClient(f"redis://127.0.0.1:{free_port()}") as pages:
        with pytest.raises(BadBuffer, match="read-only"):
            await pages.mget_into([key(0)], [bytes(8)])
        with pytest.raises(Disconnected):
            await pages.mget_into([key(0)], [bytearray(8)])


async def test_a_truncated_reply_is_an_error_and_the_next_one_is_right(proxy: Proxy) -> None:
    written = batch(20)
    keys = [page.key for page in written]
    async with AsyncPageClient(proxy.url, retry=NO_RETRY) as pages:
        await pages.mset(written)
        for cut_after in (0, 12, 3000, 20_000):
            proxy.cut_after = cut_after
            with pytest.raises(Disconnected):
                await pages.mget_into(keys, room(written))
            proxy.cut_after = None
            into = room(written)
            assert await pages.mget_into(keys[::-1], into) == [True] * 20
            assert all(map(same, into, written[::-1]))
    async with AsyncPageClient(proxy.url) as pages:  # one retry is its default
        assert await pages.exists(keys[0])
        proxy.cut_after, proxy.mend_after = 3000, 1
        assert await pages.mget_into(keys, into) == [True] * 20
        assert all(map(same, into, written))


def test_a_truncated_long_reply_is_not_waited_for(proxy: Proxy) -> None:
    written = batch(100, rows=512)
    keys, into = [page.key for page in written], room(written)

    async def ask() -> None:
        async with AsyncPageClient(proxy.url, retry=NO_RETRY) as pages:
            await pages.mset(written)
            proxy.cut_after = 1_500_000
            with pytest.raises(Disconnected):
                await pages.mget_into(keys, into)
            proxy.cut_after, proxy.stall_after = None, 1_500_000
            with pytest.raises(DeadlineExceeded):
                await pages.mget_into(keys, into, deadline=0.3)
            proxy.stall_after = None
            assert await pages.mget_into(keys, into) == [True] * 100
            assert all(map(same, into, written))

    uvloop.run(ask())


async def test_one_of_several_connections_that_fails_fails_the_call(proxy: Proxy) -> None:
    written = batch(200, rows=512)
    async with AsyncPageClient(proxy.url, connections=3, retry=NO_RETRY, deadline=30) as pages:
        await pages.mset(written)
        proxy.cut_after, proxy.mend_after = 1_000_000, 1
        with pytest.raises(Disconnected):
            await pages.mget_into([page.key for page in written], room(written))


async def test_a_deadline_is_for_the_whole_call(proxy: Proxy) -> None:
    written = batch(4)
    keys = [page.key for page in written]
    async with AsyncPageClient(proxy.url, retry=NO_RETRY) as pages:
        await pages.mset(written)
        proxy.drip = 0.02
        for _ in range(2):  # the second is still in its handshake
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"within 0\.4 s"):
                await pages.mget_into(keys, room(written), deadline=0.4)
            assert 0.35 < time.monotonic() - started < 30
        proxy.drip = 0
        into = room(written)
        assert await pages.mget_into(keys, into) == [True] * 4
        assert all(map(same, into, written))


async def test_a_cancelled_call_does_not_write_into_its_buffers(proxy: Proxy) -> None:
    written = batch(20)
    keys, into = [page.key for page in written], room(written)
    async with AsyncPageClient(proxy.url, retry=NO_RETRY) as pages:
        await pages.mset(written)
        proxy.drip = 0.0001
        call = asyncio.create_task(pages.mget_into(keys, into))
        await asyncio.to_thread(until, lambda: any(array.any() for array in into), "some of it")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        before = [bytes(array) for array in into]
        await asyncio.sleep(0.1)
        assert [bytes(array) for array in into] == before
        proxy.drip = 0
        assert await pages.mget_into(keys[::-1], into) == [True] * 20
        assert all(map(same, into, written[::-1]))


async def test_a_call_cancelled_at_connect_returns_its_connection(
    either_server: RunningServer,
) -> None:
    """The only connection of the pool returns to it when the thread that connects it gives up."""
    with start_proxy(either_server.port) as proxy:
        proxy.stall_after = 4  # within the first reply: redis-py before 8 gets 10 bytes while it connects
        async with AsyncPageClient(proxy.url, retry=NO_RETRY, max_connections=1) as pages:
            call = asyncio.create_task(pages.exists(key(0), deadline=2))
            await asyncio.sleep(0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            with pytest.raises(Disconnected, match="Too many connections"):
                await pages.exists(key(0))  # the thread has not given up yet
            proxy.stall_after = None
            async with asyncio.timeout(PATIENCE):
                while True:
                    with suppress(Disconnected):
                        assert not await pages.exists(key(0))
                        break
                    await asyncio.sleep(0.05)


def test_both_clients_have_the_same_methods() -> None:
    def methods(of: type) -> dict[str, Any]:
        return {name for name in dir(of) if not name.startswith("_")}

    of_gateways_and_engines = {"carry_out", "cluster", "nodes", "words"}
    assert methods(PageClient) == methods(AsyncPageClient) - of_gateways_and_engines
