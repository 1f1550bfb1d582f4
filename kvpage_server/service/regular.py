"""What a server does again and again, whoever asks it for something."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial

from kvpage_server.commands.context import Server
from kvpage_server.net.watch import Watch
from kvpage_server.page import unix_ms
from kvpage_server.store.memory_limit import OutOfMemory

SWEEP_EVERY = 0.1  # seconds
SWEEP_MOST = 400  # keys a sweep: some milliseconds
WATCH_EVERY = 1.0  # seconds
AGAIN_AFTER = 1.0  # seconds

logger = logging.getLogger("kvpage")


def regular_work(server: Server) -> Iterator[Coroutine[None, None, None]]:
    """Each as a task without an end.

    They delete expired keys, evict down to a lowered limit, and disconnect clients above their limits.
    """
    yield _again(partial(_sweep, server))
    yield _again(partial(_shrink, server))
    yield _again(partial(_watch, Watch(server)))


async def _again(work: Callable[[], Awaitable[None]]) -> None:
    """Do what has no end, and begin it again if an error ends it."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("the server's regular work was interrupted, and goes on in %g s", AGAIN_AFTER)
            await asyncio.sleep(AGAIN_AFTER)


async def _sweep(server: Server) -> None:
    while True:
        swept = server.keyspace.sweep(unix_ms(), SWEEP_MOST, expires=not server.is_paused)
        await asyncio.sleep(0 if swept == SWEEP_MOST else SWEEP_EVERY)


async def _shrink(server: Server) -> None:
    """Evict at once when maxmemory was lowered, not only with the next write. A pause postpones this."""
    memory = server.keyspace.memory
    most = memory.maxmemory
    while True:
        done = True
        if memory.maxmemory != most and not server.is_paused:
            with suppress(OutOfMemory):
                done = memory.make_room()
            most = memory.maxmemory if done else most
        await asyncio.sleep(SWEEP_EVERY if done else 0)


async def _watch(watch: Watch) -> None:
    while True:
        await asyncio.sleep(WATCH_EVERY)
        for _ in watch.look(time.monotonic()):
            await asyncio.sleep(0)
