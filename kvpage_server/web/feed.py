"""Events for the open pages of one user. The store is asked once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

import redis

from kvpage_server.observe.observer import Observer
from kvpage_server.observe.whose import Holdings
from kvpage_server.web import asked, shown

EVERY_SECONDS = 1.0
SLOWLY_SECONDS = 5.0  # between two readings of what changes slowly and takes longer to read


class Feed:
    """The events for one user."""

    def __init__(self, observer: Observer) -> None:
        self.watchers = 0
        self._observer = observer
        self._slowly = b""  # the last events of that kind
        self._looking: asyncio.Task[None] | None = None

    async def events(self, user: str) -> AsyncIterator[bytes]:
        """Events, until the store does not answer any more."""
        self.watchers += 1
        last, slowly = 0.0, b""
        try:
            while True:
                now = await self._observer.overview()
                moments = [moment for moment in self._observer.history.moments if moment.at > last]
                last = moments[-1].at if moments else last
                engines = await self._observer.engines()
                told = shown.event("overview", shown.overview(now, user, engines))
                if moments:
                    told += shown.event("moments", [shown.moment(moment) for moment in moments])
                if slowly is not self._slowly:
                    slowly = self._slowly
                    told += slowly
                yield told
                if self._looking is None:
                    self._looking = asyncio.create_task(self._look())
                elif self._looking.done():
                    self._looking.result()  # raises what went wrong
                    self._looking = None
                    continue
                await asyncio.sleep(EVERY_SECONDS)
        except redis.RedisError:
            self._looking = None
        finally:
            self.watchers -= 1

    async def _look(self) -> None:
        holdings = await self._observer.holdings()
        losses = await self._observer.read(asked.losses(holdings))
        slow = await self._observer.read(asked.slow_calls())
        clients = await self._observer.read(asked.clients())
        more = {"losses": losses, "slow": slow, "connected": clients}
        store = (await self._observer.overview()).server.store
        told = await asyncio.to_thread(_told_slowly, holdings, store, more)
        self._slowly = told if told != self._slowly else self._slowly
        await asyncio.sleep(SLOWLY_SECONDS)


def _told_slowly(holdings: Holdings, store: str, more: shown.Shown) -> bytes:
    """The events, in a thread: there may be thousands of agents and blocks."""
    return shown.event("holdings", shown.holdings(holdings, store)) + shown.event("more", more)


_FEEDS: WeakKeyDictionary[Observer, Feed] = WeakKeyDictionary()


def feed_of(observer: Observer) -> Feed:
    return _FEEDS.setdefault(observer, Feed(observer))
