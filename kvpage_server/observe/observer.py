"""The observer: it reads a store for the viewers of one user, at most once a second for all of them together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio

from kvpage_server.observe.asking import Reading, ask_async
from kvpage_server.observe.context import BlockPlace, context_of
from kvpage_server.observe.engines import Engines, EnginesSeen
from kvpage_server.observe.memory_by_agent import Agent, Holdings, Known, holdings_of_store
from kvpage_server.observe.overview import Overview, hit_ratio, overview_of_store

# -- The last minutes, second by second: the differences between overviews ---------------------------------------------

MINUTES = 10


@dataclass(frozen=True, slots=True)
class Moment:
    """The rates per second between two overviews, and the state at the second one."""

    at: float  # unix seconds of the first overview, plus the monotonic seconds since then
    seconds: float  # seconds between the overviews
    commands: float
    bytes_in: float
    bytes_out: float
    hits: float
    misses: float
    evicted: float  # keys
    expired: float  # keys
    page_misses: Mapping[str, float]  # by reason, without zeros
    p99: Mapping[str, float]  # 99th percentile of the calls' seconds, by family of commands, without idle families
    used: int  # bytes of memory
    disk: int  # bytes on disk
    waiting: int  # bytes that wait to be written to disk
    clients: int

    @property
    def hit_ratio(self) -> float | None:
        """Share of reads that were hits; None if there were no reads."""
        return hit_ratio(self.hits, self.misses)


class History:
    """The moments of the last MINUTES at one a second, the oldest first."""

    def __init__(self) -> None:
        self.moments: deque[Moment] = deque(maxlen=60 * MINUTES)
        self._last: Overview | None = None
        self._at = 0.0  # time of the last overview, see `Moment.at`

    def add(self, now: Overview) -> Moment | None:
        """Add an overview. Return the moment between the last overview and this one.

        Return None for the first overview, after a restart of the store, and after CONFIG RESETSTAT.
        """
        before, self._last = self._last, now
        if before is None:
            self._at = now.at
            return None
        seconds = now.read - before.read
        self._at += seconds
        if seconds <= 0:
            return None
        if before.server.pid != now.server.pid or now.traffic.commands < before.traffic.commands:
            return None
        moment = _between(before, now, self._at)
        self.moments.append(moment)
        return moment


def _between(before: Overview, now: Overview, at: float) -> Moment:
    seconds = now.read - before.read
    old, new = before.traffic, now.traffic

    def rate(was: int, count: int) -> float:
        return max(count - was, 0) / seconds

    missed = {reason: rate(before.misses.get(reason, 0), count) for reason, count in now.misses.items()}
    return Moment(
        at=at,
        seconds=seconds,
        commands=rate(old.commands, new.commands),
        bytes_in=rate(old.bytes_in, new.bytes_in),
        bytes_out=rate(old.bytes_out, new.bytes_out),
        hits=rate(old.hits, new.hits),
        misses=rate(old.misses, new.misses),
        evicted=rate(old.evicted, new.evicted),
        expired=rate(old.expired, new.expired),
        page_misses={reason: each for reason, each in missed.items() if each},
        p99=_slowest(before, now),
        used=now.memory.used,
        disk=now.disk.bytes if now.disk is not None else 0,
        waiting=now.disk.waiting_bytes if now.disk is not None else 0,
        clients=now.connections.now,
    )


def _slowest(before: Overview, now: Overview) -> dict[str, float]:
    """Return the 99th percentile of the duration of calls between two overviews, in seconds, by family of commands."""
    found = {}
    for name, calls in now.families.items():
        was = before.families.get(name)
        since = calls.since(was) if was is not None else calls
        if since.count:
            found[name] = since.percentile(0.99)
    return found


OVERVIEW_SECONDS = 1.0  # seconds for which an overview is used again
HOLDINGS_SECONDS = 5.0  # least seconds for which holdings are used again
HOLDINGS_SHARE = 0.005  # share of the time in which the holdings may be read
ANSWER_SECONDS = 3.0  # for the store to answer a request for an overview, or to check a password
LOGIN_SECONDS = 5.0  # seconds after which the observer logs in again, because the user may have been disabled

T = TypeVar("T")


def next_reading(began: float, used: float) -> float:
    """Return when to read the holdings again, after a reading that began at `began` and took `used` CPU seconds.

    The time is in monotonic seconds. Elapsed seconds would be long on a busy machine.
    """
    return began + max(HOLDINGS_SECONDS, used / HOLDINGS_SHARE)


@dataclass(slots=True)
class _Last(Generic[T]):
    """The last value that was read, which is used until `until`, in monotonic seconds."""

    value: T | None = None
    until: float = 0.0
    _reading: asyncio.Task[T] | None = None

    async def get(self, read: Callable[[], Coroutine[Any, Any, T]], seconds: float | None = None) -> T:
        """Return the value, or the result of `read`, which all callers share: one read runs at a time.

        Raises the errors of `read`, and TimeoutError of redis-py after `seconds`. The read goes on, for later callers.
        """
        if self.value is not None and time.monotonic() < self.until:
            return self.value
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(read())
            self._reading.add_done_callback(_ended)
        reading = self._reading
        if not (await asyncio.wait([reading], timeout=seconds))[0]:
            raise redis.TimeoutError("the store does not answer")
        return reading.result()


def _ended(reading: asyncio.Task[Any]) -> None:
    """Take the error of a read for which nobody waits any more, so that asyncio does not log it."""
    if not reading.cancelled():
        reading.exception()


class Observer:
    """Reader of the parts of a store that its user may see. All viewers of one user share it.

    Its methods raise RedisError if the store does not answer.
    """

    def __init__(self, store: redis.asyncio.Redis, user: str, engines: Engines) -> None:
        """Read with `store`, a client that has logged in as `user`.

        A user with access to every key sees all `engines`, others only engines that have logged in as the same user.
        """
        self.store = store
        self._user = user
        self._engines = engines
        self.history = History()
        self._overview: _Last[Overview] = _Last()
        self._holdings: _Last[Holdings] = _Last()
        self._known = Known()
        self._keys = 0  # number of keys at the last read of the holdings
        self._next_login = time.monotonic() + LOGIN_SECONDS
        self.revoked = False  # whether the store has refused the user's login

    async def overview(self) -> Overview:
        """Return the overview of the store, at most OVERVIEW_SECONDS old. Add each new one to `history`.

        Raises AuthenticationError at most LOGIN_SECONDS after the store has disabled the user or changed its password:
        connections that have logged in before stay open, as in Redis. Raises TimeoutError of redis-py after
        ANSWER_SECONDS.
        """
        return await self._overview.get(self._read_overview, ANSWER_SECONDS)

    async def _read_overview(self) -> Overview:
        if time.monotonic() >= self._next_login:
            await self.store.connection_pool.disconnect(inuse_connections=False)
            self._next_login = time.monotonic() + LOGIN_SECONDS
        last = self._overview
        last.value = await self.read(overview_of_store())
        last.until = time.monotonic() + OVERVIEW_SECONDS
        self.history.add(last.value)
        if 2 * last.value.contents.keys < self._keys:  # for example flushed: the known keys no longer exist
            self._known, self._holdings.until = Known(), 0.0
        return last.value

    async def engines(self) -> EnginesSeen:
        """Return the engines that the user may see."""
        return self._engines.seen(None if (await self.overview()).everything else self._user)

    async def holdings(self) -> Holdings:
        """Return the memory by agent.

        It is read again at `next_reading`, or early if more than half of the keys were removed.
        """
        await self.overview()  # which removes the last holdings after a removal of keys
        return await self._holdings.get(self._read_holdings)

    async def _read_holdings(self) -> Holdings:
        last = self._holdings
        self._keys = (await self.overview()).contents.keys
        began, used = time.monotonic(), time.thread_time()
        last.value = await self.read(holdings_of_store(known=self._known))
        last.until = next_reading(began, time.thread_time() - used)
        return last.value

    async def agent(self, agent_id: str) -> list[tuple[Agent, list[BlockPlace]]]:
        """Return the contexts of an agent, one for each model, each with the states of its blocks.

        The list is empty if the store has no agent of this name.
        """
        holdings = await self.holdings()
        found = [agent for agent in holdings.agents if agent.agent_id == agent_id]
        return [(agent, await self.read(context_of(agent, holdings))) for agent in found]

    async def read(self, reading: Reading[T]) -> T:
        """Execute a reading over the user's connection, and return its result.

        After the first AuthenticationError, raise it without another login: the store would count a wrong password.
        """
        if self.revoked:
            raise redis.AuthenticationError("the store has refused the login")
        try:
            return await ask_async(self.store, reading)
        except redis.AuthenticationError:
            self.revoked = True
            raise

    async def close(self) -> None:
        await self.store.aclose()
