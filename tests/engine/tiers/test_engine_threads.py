"""The threads of an engine: at most six, each with a name and a documented purpose, and none after `close`."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Set
from pathlib import Path

from contexts import SPEC, made, some_tokens
from pools import pool_of
from servers import RunningServer
from waiting import PATIENCE, eventually

# isort: split
import pytest
import redis

from engine.event_loop import EventLoop
from engine.pool import BlockPool
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore, CacheConfig

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "architecture.md"
MOST = 6
OWNER = "engine"
TOKENS = some_tokens(1, 60)

pool = pool_of(256)


def documented() -> dict[str, int]:
    """Return the number of threads by name, from the table in docs/architecture.md."""
    text = DOCUMENT.read_text(encoding="utf-8")
    _, table = text.split("### The threads of an engine\n")
    rows = re.findall(r"^\| `?([\w-]+)`? \| (\d+) \| (.+) \|$", table.split("\n#")[0], re.MULTILINE)
    assert all(purpose for *_, purpose in rows)
    return {name: int(number) for name, number, _ in rows}


def started_since(before: Set[threading.Thread]) -> Counter[str]:
    """Return the number of threads that have been started, by name without the model's."""
    found = {*threading.enumerate()} - before
    return Counter(re.sub(r"( .*)?(_\d+)?\Z", "", thread.name) for thread in found)


@pytest.fixture
def before() -> set[threading.Thread]:
    return {*threading.enumerate()}


def test_an_engine_has_at_most_six_threads(
    server: RunningServer, client: redis.Redis, pool: BlockPool, tmp_path: Path, before: set[threading.Thread]
) -> None:
    allowed = documented()
    assert sum(allowed.values()) <= MOST
    del allowed[OWNER]
    store = AgentCacheStore(
        SPEC,
        pool,
        pages=PageTier(server.url, SPEC, pool),
        cold=SafetensorsCacheAdapter(SPEC, pool, tmp_path),
        config=CacheConfig(max_hot_agents=1, prefix_bytes=0),
    )
    store.publish_statistics()
    agents = [f"agent{i}" for i in range(8)]
    for i, agent in enumerate(agents):
        context = made(pool, agent, some_tokens(i, 50))
        store.save(context)
        pool.free(context.block_ids, agent)
    store.flush_dirty()
    claims = [store.claims.begin(agent, TOKENS) for agent in agents]
    loads = [store.begin_load(agent, some_tokens(i, 60)) for i, agent in enumerate(agents)]
    seen: Counter[str] = Counter()
    while not all(load.done() for load in loads):
        seen |= started_since(before)
    seen |= started_since(before)
    for load in loads:
        if blocks := load.result().blocks:
            pool.free(blocks.block_ids, blocks.agent_id)
    for claim in claims:
        claim.release()
    assert {"kvpage-loop", "kvpage-blocks", "kvpage-files"} <= seen.keys() <= allowed.keys()
    del seen["kvpage-connect"]  # one for each connection that is being opened
    assert seen <= Counter(allowed)
    assert eventually(lambda: started_since(before) <= Counter(allowed) - Counter({"kvpage-connect": 1}))
    store.close()
    assert eventually(lambda: not started_since(before))


def test_close_ends_the_threads_of_a_load_in_progress(
    server: RunningServer, pool: BlockPool, tmp_path: Path, before: set[threading.Thread]
) -> None:
    """A server that does not answer, and a store without one."""
    cold = SafetensorsCacheAdapter(SPEC, pool, tmp_path)
    stores = [
        AgentCacheStore(SPEC, pool, pages=PageTier("redis://192.0.2.1:1", SPEC, pool, deadline=0.2), cold=cold),
        AgentCacheStore(SPEC, pool, cold=cold),
        AgentCacheStore(SPEC, pool),
    ]
    loads = [store.begin_load("alice", TOKENS) for store in stores]
    for store in stores:
        store.close()
    assert all(load.done() for load in loads)
    assert eventually(lambda: not started_since(before))


def test_the_loop_does_not_wait_for_itself() -> None:
    loop = EventLoop("tiny")

    async def nothing() -> None:
        pass

    async def wait_for_itself() -> None:
        loop.run(nothing())

    with pytest.raises(RuntimeError, match="own thread cannot wait"):
        loop.run(wait_for_itself())
    loop.close()
    loop.close()
    assert not loop.call(lambda: None)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(nothing())


def test_work_that_is_started_during_close_is_refused() -> None:
    loop, closing = EventLoop("tiny"), threading.Event()

    async def ends_slowly() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            closing.set()
            await asyncio.sleep(0.2)

    loop.start(ends_slowly())
    assert eventually(lambda: loop.run(running()) == 2)
    closer = threading.Thread(target=loop.close)
    closer.start()
    assert closing.wait(PATIENCE)
    with pytest.raises(RuntimeError, match="the event loop is closed"):
        loop.start(ends_slowly())
    closer.join()


async def running() -> int:
    return len(asyncio.all_tasks())


def test_a_program_without_close_leaves_no_pending_task() -> None:
    program = """
from engine.event_loop import EventLoop
import asyncio
loop = EventLoop("tiny")
loop.start(asyncio.sleep(1000))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failure_in_the_background_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    loop = EventLoop("tiny")

    async def fail() -> None:
        raise ZeroDivisionError

    future = loop.start(fail())
    with pytest.raises(ZeroDivisionError):
        future.result()
    loop.close()
    assert [record.message for record in caplog.records] == ["an operation in the background failed"]
