"""Hears what engines tell of themselves, for as long as the process lives."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import redis

from kvpage_server.monitor.entrance import MONITOR, Entrance
from kvpage_server.observe.engines import ALL_CHANNELS, Engines

AGAIN_SECONDS = 5.0  # after the connection was lost: a server that is full counts who asks
TURN_SECONDS = 5.0


async def listen(entrance: Entrance, engines: Engines) -> None:
    """Until this is cancelled."""
    while True:
        store = entrance.store(MONITOR)
        with suppress(redis.RedisError, OSError):  # the server ends, or has ended the connection
            async with store.pubsub(ignore_subscribe_messages=True) as channel:
                await channel.psubscribe(ALL_CHANNELS)
                while True:
                    message = await channel.get_message(timeout=TURN_SECONDS)
                    if message is not None:
                        engines.heard(message["channel"], message["data"])
        await store.aclose()
        await asyncio.sleep(AGAIN_SECONDS)
