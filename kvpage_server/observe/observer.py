"""Looks at a store for everybody who watches it: at most once a second, however many they are."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import redis.asyncio

from kvpage_server.observe.asking import Reading, ask_async
from kvpage_server.observe.context import BlockPlace, Pages, context_of, pages_of
from kvpage_server.observe.history import History
from kvpage_server.observe.manifests import Manifest
from kvpage_server.observe.overview import Overview, overview_of_store
from kvpage_server.observe.whose import Agent, Holdings, holdings_of_store

OVERVIEW_SECONDS = 1.0  # that an overview is shown for
HOLDINGS_SECONDS = 5.0
HOLDINGS_SHARE = 0.02  # of the time is spent looking through the store, at the most

T = TypeVar("T")


@dataclass(slots=True)
class _Last(Generic[T]):
    """What was read last, and until when (monotonic seconds) that is good enough. Who comes meanwhile waits for it."""

    value: T | None = None
    until: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Observer:
    """The eyes of one user: what it sees is what the user of its connection may. Raises RedisError when the store gives
    no answer."""

    def __init__(self, store: redis.asyncio.Redis) -> None:
        self.store = store
        self.history = History()
        self._overview: _Last[Overview] = _Last()
        self._holdings: _Last[Holdings] = _Last()
        self._known: dict[bytes, tuple[bytes, Manifest | None]] = {}

    async def overview(self) -> Overview:
        """The store in numbers, not older than a second. Each new one goes into the history."""
        last = self._overview
        async with last.lock:
            if last.value is None or time.monotonic() >= last.until:
                last.value = await ask_async(self.store, overview_of_store())
                last.until = time.monotonic() + OVERVIEW_SECONDS
                self.history.add(last.value)
            return last.value

    async def holdings(self) -> Holdings:
        """Whose memory it is, not older than five seconds, or than fifty times as long as it takes to find out."""
        last = self._holdings
        async with last.lock:
            if last.value is None or time.monotonic() >= last.until:
                began = time.monotonic()
                last.value = await ask_async(self.store, holdings_of_store(known=self._known))
                took = time.monotonic() - began
                last.until = began + max(HOLDINGS_SECONDS, took / HOLDINGS_SHARE)
            return last.value

    async def agent(self, agent_id: str) -> list[tuple[Agent, list[BlockPlace]]]:
        """An agent's contexts, one a model, each with where its blocks lie; empty when it is not known."""
        holdings = await self.holdings()
        found = [agent for agent in holdings.agents if agent.agent_id == agent_id]
        return [(agent, await self.read(context_of(agent, holdings))) for agent in found]

    async def pages(self, name: bytes, page: int = 0) -> Pages | None:
        """One block, page by page."""
        return await self.read(pages_of(name, page))

    async def read(self, reading: Reading[T]) -> T:
        """Ask something else."""
        return await ask_async(self.store, reading)

    async def close(self) -> None:
        """End its connection."""
        await self.store.aclose()
