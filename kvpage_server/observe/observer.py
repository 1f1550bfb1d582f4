"""Asks a store for all viewers together: at most once a second, however many viewers there are."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import redis.asyncio

from kvpage_server.observe.asking import Reading, ask_async
from kvpage_server.observe.context import BlockPlace, context_of
from kvpage_server.observe.engines import Engines, EnginesSeen
from kvpage_server.observe.history import History
from kvpage_server.observe.overview import Overview, overview_of_store
from kvpage_server.observe.whose import Agent, Holdings, Known, holdings_of_store

OVERVIEW_SECONDS = 1.0  # for which an overview is shown again
HOLDINGS_SECONDS = 5.0
HOLDINGS_SHARE = 0.005  # the share of time that may be spent looking through the store

T = TypeVar("T")


@dataclass(slots=True)
class _Last(Generic[T]):
    """The last value that was read. It is good until `until`, in monotonic seconds. The lock is held during a read."""

    value: T | None = None
    until: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Observer:
    """Reads what the user of its connection may see. Its methods raise RedisError when the store gives no answer."""

    def __init__(self, store: redis.asyncio.Redis, user: str, engines: Engines) -> None:
        """All `engines` are shown to users who may read every key, to others those that have logged in as they have."""
        self.store = store
        self._user = user
        self._engines = engines
        self.history = History()
        self._overview: _Last[Overview] = _Last()
        self._holdings: _Last[Holdings] = _Last()
        self._known = Known()
        self._keys = 0  # in the store when it was last looked through

    async def overview(self) -> Overview:
        """The store in numbers, at most a second old. Each new overview is added to the history."""
        last = self._overview
        async with last.lock:
            if last.value is None or time.monotonic() >= last.until:
                last.value = await ask_async(self.store, overview_of_store())
                last.until = time.monotonic() + OVERVIEW_SECONDS
                self.history.add(last.value)
                if 2 * last.value.contents.keys < self._keys:  # flushed, say: what was found is not there any more
                    self._known, self._holdings.until = Known(), 0.0
            return last.value

    async def engines(self) -> EnginesSeen:
        """The engines that the user may see."""
        return self._engines.seen(None if (await self.overview()).everything else self._user)

    async def holdings(self) -> Holdings:
        """Who uses the memory, at most five seconds old, or two hundred times as old as reading it takes. It is
        read anew when more than half of the keys have gone."""
        last = self._holdings
        async with last.lock:
            now = await self.overview()
            if last.value is None or time.monotonic() >= last.until:
                began, self._keys = time.monotonic(), now.contents.keys
                last.value = await ask_async(self.store, holdings_of_store(known=self._known))
                took = time.monotonic() - began
                last.until = began + max(HOLDINGS_SECONDS, took / HOLDINGS_SHARE)
            return last.value

    async def agent(self, agent_id: str) -> list[tuple[Agent, list[BlockPlace]]]:
        """The contexts of an agent, one for each model, with the places of their blocks; empty if it is unknown."""
        holdings = await self.holdings()
        found = [agent for agent in holdings.agents if agent.agent_id == agent_id]
        return [(agent, await self.read(context_of(agent, holdings))) for agent in found]

    async def read(self, reading: Reading[T]) -> T:
        """The result of any reading."""
        return await ask_async(self.store, reading)

    async def close(self) -> None:
        await self.store.aclose()
