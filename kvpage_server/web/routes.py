"""The routes of the store's page and its data, which are read-only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import redis
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from kvpage_server.monitor.app import log_in, login_of
from kvpage_server.monitor.logins import DEFAULT
from kvpage_server.observe.asking import Reading, named, refused, text
from kvpage_server.observe.context import pages_of
from kvpage_server.observe.memory_by_agent import Agent, ContextBlock, Holdings
from kvpage_server.observe.observer import Observer
from kvpage_server.web import page_response, views

# -- Further queries of the page: slow commands, clients, and blocks that agents have lost -----------------------------

SLOW_CALLS = 32
MOST_CLIENTS = 200
MOST_LOSSES = 50
SHOWN_LETTERS = 80  # of an argument

Shown = dict[str, Any]


def slow_calls() -> Reading[list[Shown] | None]:
    """Return the last slow calls, newest first; None if the user lacks the right."""
    (answer,) = yield [[b"SLOWLOG", b"GET", SLOW_CALLS]]
    if refused(answer):
        return None
    return [_slow(call) for call in answer]


def _slow(call: Any) -> Shown:
    if isinstance(call, dict):  # redis-py has parsed it
        words, number, at, took = call["command"], call["id"], call["start_time"], call["duration"]
        command = text(words)
    else:
        number, at, took, words, *_ = call
        command = " ".join(text(word)[:SHOWN_LETTERS] for word in words[:8])
    return {"number": number, "at": at, "seconds": took / 1e6, "command": command[: 3 * SHOWN_LETTERS]}


def connected_clients() -> Reading[Shown | None]:
    """Return the connections; None if the user lacks the right."""
    (answer,) = yield [[b"CLIENT", b"LIST"]]
    if refused(answer):
        return None
    rows = answer.rstrip(b"\n").split(b"\n", MOST_CLIENTS)[:MOST_CLIENTS]
    lines = [dict(word.partition("=")[::2] for word in text(row).split(" ")) for row in rows]
    wanted = ("id", "addr", "name", "user", "age", "idle", "cmd", "lib-name", "flags")
    return {
        "count": answer.rstrip(b"\n").count(b"\n") + 1,
        "clients": [{name: line.get(name, "")[:SHOWN_LETTERS] for name in wanted} for line in lines],
    }


def losses_of(holdings: Holdings) -> Reading[list[Shown]]:
    """Return the first missing block of each agent with missing blocks, the reason, and the agent that was saved next.

    Blocks that were stored again meanwhile are left out. At most MOST_LOSSES blocks are queried.
    """
    holes = [(agent, *hole) for agent in holdings.agents if (hole := _first_hole(agent))]
    shown = list(islice(holes, MOST_LOSSES))
    reasons = yield [[b"KVPAGEWHY", block.name] for _, _, block in shown]
    return sorted(
        (
            _loss(holdings, agent, index, reason)
            for (agent, index, _), reason in zip(shown, reasons, strict=True)
            if refused(reason) or named(reason).get("reason") != b"stored"
        ),
        key=lambda loss: -loss["at"],
    )


def _first_hole(agent: Agent) -> tuple[int, ContextBlock] | None:
    return next(((index, block) for index, block in enumerate(agent.blocks) if not block.complete), None)


def _loss(holdings: Holdings, agent: Agent, index: int, reason: Any) -> Shown:
    why = {} if refused(reason) else named(reason)
    at = int(why.get("at", 0))
    later = [other for other in holdings.agents if at and other.manifest.saved_ms >= at and other is not agent]
    after = min(later, key=lambda other: other.manifest.saved_ms, default=None)
    return {
        "agent": agent.agent_id,
        "block": index,
        "missing": agent.missing,
        "tokens": agent.tokens - agent.found,
        "why": text(why.get("cause") or why.get("reason", b"unknown")),
        "by": text(why.get("policy") or why.get("quota") or b""),
        "at": at,
        "next": after.agent_id if after else "",
    }


# -- Events for the open pages of one user. The store is read once for all of them -------------------------------------

EVERY_SECONDS = 1.0
SLOWLY_SECONDS = 5.0  # between two reads of values that change slowly and take longer to read


class Feed:
    """The events for one user."""

    def __init__(self, observer: Observer) -> None:
        self.watchers = 0
        self._observer = observer
        self._slowly = b""  # the last events with values that change slowly
        self._looking: asyncio.Task[None] | None = None

    async def events(self, user: str) -> AsyncIterator[bytes]:
        """Yield events, one batch a second, until the store does not answer any more."""
        self.watchers += 1
        last, slowly = 0.0, b""
        try:
            while True:
                now = await self._observer.overview()
                moments = [moment for moment in self._observer.history.moments if moment.at > last]
                last = moments[-1].at if moments else last
                engines = await self._observer.engines()
                events = views.event("overview", views.overview(now, user, engines))
                if moments:
                    events += views.event("moments", [views.moment(moment) for moment in moments])
                if slowly is not self._slowly:
                    slowly = self._slowly
                    events += slowly
                yield events
                if self._looking is None:
                    self._looking = asyncio.create_task(self._look())
                elif self._looking.done():
                    self._looking.result()  # raises the error of the task
                    self._looking = None
                    continue
                await asyncio.sleep(EVERY_SECONDS)
        except redis.RedisError:
            self._looking = None
        finally:
            self.watchers -= 1

    async def _look(self) -> None:
        holdings = await self._observer.holdings()
        losses = await self._observer.read(losses_of(holdings))
        slow = await self._observer.read(slow_calls())
        clients = await self._observer.read(connected_clients())
        more = {"losses": losses, "slow": slow, "connected": clients}
        store = (await self._observer.overview()).server.store
        events = await asyncio.to_thread(_slow_events, holdings, store, more)
        self._slowly = events if events != self._slowly else self._slowly
        await asyncio.sleep(SLOWLY_SECONDS)


def _slow_events(holdings: Holdings, store: str, more: views.Shown) -> bytes:
    """Return the events with values that change slowly.

    It is called in a thread, because there may be thousands of agents and blocks.
    """
    return views.event("holdings", views.holdings(holdings, store)) + views.event("more", more)


_FEEDS: WeakKeyDictionary[Observer, Feed] = WeakKeyDictionary()


def feed_of(observer: Observer) -> Feed:
    return _FEEDS.setdefault(observer, Feed(observer))


PAGE = Path(__file__).with_name("store")
_LOG_OUT = '<form method="post" action="/logout"><button class="button" id="leave">Log out</button></form>'
MOST_WATCHERS = 64  # of one user


async def index(request: Request) -> Response:
    """Return the page, which has no data of the store.

    With the token in the URL, log the browser in. Raises NotLoggedIn without a login, as `login_of` does.
    """
    if token := request.query_params.get("token"):
        return await log_in(request, DEFAULT, token)
    await login_of(request)
    return page_response("store", PAGE / "main.html", source="server", leave=_LOG_OUT)


async def login(request: Request) -> Response:
    """Return the login form, which is sent to /login of the monitor."""
    return FileResponse(PAGE / "login.html")


async def events(request: Request) -> Response:
    """Return the store's state every second, and its agents when they change."""
    login = await login_of(request)
    await login.observer.overview()  # raises if the user lacks permission
    feed = feed_of(login.observer)
    if feed.watchers >= MOST_WATCHERS:
        raise HTTPException(503, f"this user has {MOST_WATCHERS} open pages, the most allowed", {"Retry-After": "10"})
    events = feed.events(login.user)
    return StreamingResponse(events, media_type="text/event-stream")


async def agent(request: Request) -> Response:
    """Return the contexts of an agent, one for each model, block by block."""
    login = await login_of(request)
    found = await login.observer.agent(request.query_params.get("id", ""))
    return await asyncio.to_thread(lambda: JSONResponse([views.context(agent, places) for agent, places in found]))


async def block(request: Request) -> Response:
    """Return one block, page by page; null if it is incomplete or too large."""
    login = await login_of(request)
    try:
        name = bytes.fromhex(request.query_params.get("name", ""))
    except ValueError:
        raise HTTPException(400, "a block's name is given in hexadecimal digits") from None
    found = await login.observer.read(pages_of(name))
    return await asyncio.to_thread(lambda: JSONResponse(views.pages(found) if found else None))


ROUTES: list[BaseRoute] = [
    Route("/", index),
    Route("/login", login),
    Route("/page/events", events),
    Route("/page/agent", agent),
    Route("/page/block", block),
    Mount("/page", StaticFiles(packages=[("kvpage_server.web", "store"), ("kvpage_server.web", "shared")])),
]
