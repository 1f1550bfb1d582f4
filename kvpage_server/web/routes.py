"""The routes of the store's web page: the page, its events, and data of contexts and blocks. All are read-only."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
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
from kvpage_server.observe.context import BlockPlace, Pages, pages_of
from kvpage_server.observe.engines import EnginesSeen
from kvpage_server.observe.memory_by_agent import Agent, ContextBlock, Holdings, OtherRequest
from kvpage_server.observe.observer import Moment, Observer
from kvpage_server.observe.overview import STORES_NOTHING, Overview
from kvpage_server.system.text import name_as_text
from kvpage_server.web import page_response

# -- JSON of a store's state, with the fields that the page shows, and limits of their number --------------------------

MOST_AGENTS = 500
MOST_REQUESTS = 100
MOST_PREFIXES = 30
MOST_NAMES = 12  # of the agents that share a prefix or a block
MOST_LETTERS = 128  # of such a name; the rest is cut

Shown = dict[str, Any]


def event(name: str, data: object) -> bytes:
    """Return a server-sent event with `data` as JSON."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json.dumps(data, separators=(",", ":")).encode())


def overview_shown(now: Overview, user: str, engines: EnginesSeen) -> Shown:
    """Return the data of the event `overview`: the store's state in numbers, and the engines that `user` may see."""
    shown = asdict(now)
    for unshown in ("commands", "errors"):
        del shown[unshown]
    if now.disk is not None:
        shown["disk"]["full"] = now.disk.is_full
        for times in ("commits", "fetches"):
            shown["disk"][times] = getattr(now.disk, times).percentile(0.99)
    shown["families"] = {
        name: {"count": calls.count, "p50": calls.percentile(0.5), "p99": calls.percentile(0.99)}
        for name, calls in now.families.items()
        if calls.count
    }
    shown["traffic"]["hit_ratio"] = now.traffic.hit_ratio
    shown["user"] = user
    shown["engines"] = [asdict(each) | {"seconds_saved": round(each.seconds_saved, 1)} for each in engines.connected]
    return shown


def moment_shown(then: Moment) -> Shown:
    """Return the rates per second in the time between two overviews; `why` has the misses by reason."""
    return {
        "at": round(then.at, 2),
        "commands": round(then.commands, 1),
        "in": round(then.bytes_in),
        "out": round(then.bytes_out),
        "hits": round(then.hits, 2),
        "misses": round(then.misses, 2),
        "evicted": round(then.evicted, 2),
        "why": {reason: round(count, 2) for reason, count in then.page_misses.items()},
        "used": then.used,
    }


def holdings_shown(found: Holdings, store: str) -> Shown:
    """Return the data of the event `holdings`: agents, tenants, prefixes and other requests, the largest first.

    `shared` has the blocks of several agents, each once. `more_agents` is the bytes of agents beyond MOST_AGENTS.
    `unseen` is the reason if the user may not list keys, or the server is a gateway (`store` is "cluster").
    """
    agents = [_agent(agent) for agent in found.agents[:MOST_AGENTS]]
    requests = [_request(request) for request in found.requests[:MOST_REQUESTS]]
    tenants: Counter[str] = Counter()
    for agent in found.agents:
        tenants[agent.tenant] += agent.own_bytes
    return {
        "agents": agents,
        "agent_count": len(found.agents),
        "agent_bytes": found.bytes,
        "more_agents": sum(agent.own_bytes for agent in found.agents[MOST_AGENTS:]),
        "tenants": dict(tenants.most_common(MOST_AGENTS)),
        "shared": _shared(found),
        "prefixes": [
            {
                "tokens": prefix.tokens,
                "blocks": prefix.blocks,
                "bytes": prefix.bytes,
                "saved": prefix.saved,
                "count": len(prefix.agents),
                "agents": _names(prefix.agents),
            }
            for prefix in found.prefixes[:MOST_PREFIXES]
        ],
        "requests": requests,
        "request_count": len(found.requests),
        "request_bytes": sum(request.bytes for request in found.requests),
        "unreadable": len(found.unreadable),
        "cut": found.cut,
        "unseen": f"This is {STORES_NOTHING}." if store == "cluster" else found.refused,
    }


def _names(agents: Sequence[str]) -> list[str]:
    """Return the first MOST_NAMES names, each cut to MOST_LETTERS."""
    return [name[:MOST_LETTERS] for name in agents[:MOST_NAMES]]


def _agent(agent: Agent) -> Shown:
    return {
        "id": agent.agent_id,
        "model": agent.model,
        "tenant": agent.tenant,
        "tokens": agent.tokens,
        "found": agent.found,
        "bytes": agent.bytes,
        "own": agent.own_bytes,
        "memory": agent.memory,
        "idle": agent.idle,
        "missing": agent.missing,
        "saved": agent.manifest.saved_ms,
    }


def _request(request: OtherRequest) -> Shown:
    return {
        "id": request.label or name_as_text(request.req_id),
        "blocks": request.blocks,
        "pages": request.pages,
        "bytes": request.bytes,
        "memory": request.memory,
    }


def _shared(found: Holdings) -> list[Shown]:
    """Return shared blocks as groups with the same agents: their sums of bytes, tokens and blocks, the largest
    first.
    """
    blocks = {
        block.name: block for agent in found.agents for block in agent.blocks if len(found.owners[block.name]) > 1
    }
    groups: dict[tuple[str, ...], list[int]] = {}
    for name, block in blocks.items():
        group = groups.setdefault(found.owners[name], [0, 0, 0])
        for i, value in enumerate((block.bytes, block.tokens, 1)):
            group[i] += value
    largest = sorted(groups.items(), key=lambda item: -item[1][0])[:MOST_AGENTS]
    return [
        {"agents": _names(names), "count": len(names), "bytes": size, "tokens": tokens, "blocks": count}
        for names, (size, tokens, count) in largest
    ]


def context_shown(agent: Agent, places: list[BlockPlace]) -> Shown:
    """Return an agent's context with its blocks, in order; `places` has the state of each."""
    return _agent(agent) | {
        "blocks": [
            {
                "name": place.block.name.hex(),
                "tokens": place.block.tokens,
                "bytes": place.block.bytes,
                "pages": place.block.pages,
                "there": place.block.complete,
                "with": _names([name for name in place.agents if name != agent.agent_id]),
                "shared": len(place.agents),
                "tier": place.tier,
                "pinned": place.pinned,
                "lease": place.lease,
                "kept_until": place.block.protection.until,
                "kept_by": place.block.protection.tenant,
                "why": place.why,
                "at": place.why_at,
                "by": place.by,
            }
            for place in places
        ]
    }


def pages_shown(found: Pages) -> Shown:
    """Return a block: its shape, and the norms of its pages by layer, plane and head."""
    return {
        "name": name_as_text(found.name),
        "tokens": found.tokens,
        "planes": found.planes,
        "dtypes": found.dtypes,
        "sizes": found.sizes,
        "layers": found.layers,
        "heads": found.heads,
        "norms": _finite(found.norms.tolist()),
    }


def _finite(norms: Any) -> Any:
    """Return nested lists of numbers, rounded to 4 digits, with None for NaN and infinity."""
    if isinstance(norms, list):
        return [_finite(norm) for norm in norms]
    return round(norms, 4) if math.isfinite(norms) else None


# -- Queries for the page only: the slow log, clients, and missing blocks of agents ------------------------------------

SLOW_CALLS = 32
MOST_CLIENTS = 200
MOST_LOSSES = 50
SHOWN_LETTERS = 80  # characters of an argument or a field; the rest is cut


def slow_calls() -> Reading[list[Shown] | None]:
    """Return the latest SLOW_CALLS entries of the slow log, newest first; None if the user may not read it."""
    (answer,) = yield [[b"SLOWLOG", b"GET", SLOW_CALLS]]
    if refused(answer):
        return None
    return [_slow(call) for call in answer]


def _slow(call: Any) -> Shown:
    """Return an entry of the slow log, with its time in unix seconds and its duration in seconds."""
    if isinstance(call, dict):  # redis-py has parsed it
        words, number, at, took = call["command"], call["id"], call["start_time"], call["duration"]
        command = text(words)
    else:
        number, at, took, words, *_ = call
        command = " ".join(text(word)[:SHOWN_LETTERS] for word in words[:8])
    return {"number": number, "at": at, "seconds": took / 1e6, "command": command[: 3 * SHOWN_LETTERS]}


def connected_clients() -> Reading[Shown | None]:
    """Return the number of connections and the first MOST_CLIENTS of them; None if the user may not call CLIENT
    LIST.
    """
    (answer,) = yield [[b"CLIENT", b"LIST"]]
    if refused(answer):
        return None
    rows = answer.rstrip(b"\n").split(b"\n", MOST_CLIENTS)[:MOST_CLIENTS]
    lines = [dict(word.partition("=")[::2] for word in text(row).split(" ")) for row in rows]
    fields = ("id", "addr", "name", "user", "age", "idle", "cmd", "lib-name", "flags")
    return {
        "count": answer.rstrip(b"\n").count(b"\n") + 1,
        "clients": [{name: line.get(name, "")[:SHOWN_LETTERS] for name in fields} for line in lines],
    }


def losses_of(holdings: Holdings) -> Reading[list[Shown]]:
    """Return for each agent with missing blocks the first one, and the reason and time of its removal, latest first.

    `next` is the agent whose context was saved first after the removal: its save may have caused it. Blocks that were
    stored again meanwhile are omitted. At most MOST_LOSSES blocks are queried.
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
    """Return the index and the block of the first block that is not complete; None if the context is complete."""
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
SLOW_VALUES_SECONDS = 5.0  # between two reads of memory by agent, losses, slow log and clients


class Feed:
    """The events for the open pages of one user."""

    def __init__(self, observer: Observer) -> None:
        self.watchers = 0
        self._observer = observer
        self._slow_data = b""  # the last events `holdings` and `more`, which change rarely and take longer to read
        self._reading: asyncio.Task[None] | None = None

    async def events(self, user: str) -> AsyncIterator[bytes]:
        """Yield server-sent events every second: `overview`, new `moments`, and `holdings` and `more` after a change.

        Ends when the store does not answer.
        """
        self.watchers += 1
        last, slow_data = 0.0, b""
        try:
            while True:
                now = await self._observer.overview()
                moments = [moment for moment in self._observer.history.moments if moment.at > last]
                last = moments[-1].at if moments else last
                engines = await self._observer.engines()
                events = event("overview", overview_shown(now, user, engines))
                if moments:
                    events += event("moments", [moment_shown(moment) for moment in moments])
                if slow_data is not self._slow_data:
                    slow_data = self._slow_data
                    events += slow_data
                yield events
                if self._reading is None:
                    self._reading = asyncio.create_task(self._read_slow_values())
                elif self._reading.done():
                    self._reading.result()  # raises the exception of the task
                    self._reading = None
                    continue
                await asyncio.sleep(EVERY_SECONDS)
        except redis.RedisError:
            self._reading = None
        finally:
            self.watchers -= 1

    async def _read_slow_values(self) -> None:
        """Read the data of the events `holdings` and `more`, and then wait for SLOW_VALUES_SECONDS."""
        holdings = await self._observer.holdings()
        losses = await self._observer.read(losses_of(holdings))
        slow = await self._observer.read(slow_calls())
        clients = await self._observer.read(connected_clients())
        more = {"losses": losses, "slow": slow, "connected": clients}
        store = (await self._observer.overview()).server.store
        events = await asyncio.to_thread(_slow_events, holdings, store, more)
        self._slow_data = events if events != self._slow_data else self._slow_data
        await asyncio.sleep(SLOW_VALUES_SECONDS)


def _slow_events(holdings: Holdings, store: str, more: Shown) -> bytes:
    """Return the events `holdings` and `more`.

    It runs in a thread, because thousands of agents and blocks would hold the event loop.
    """
    return event("holdings", holdings_shown(holdings, store)) + event("more", more)


_FEEDS: WeakKeyDictionary[Observer, Feed] = WeakKeyDictionary()


def feed_of(observer: Observer) -> Feed:
    """Return the feed of an observer, one for all pages of its user."""
    return _FEEDS.setdefault(observer, Feed(observer))


PAGE = Path(__file__).with_name("store")
_LOG_OUT = '<form method="post" action="/logout"><button class="button" id="leave">Log out</button></form>'
MOST_WATCHERS = 64  # of one user


async def index(request: Request) -> Response:
    """Return the page, which gets its data from the other routes. With `token` in the URL, log the browser in first.

    Raises NotLoggedIn or RedisError as `login_of`.
    """
    if token := request.query_params.get("token"):
        return await log_in(request, DEFAULT, token)
    login = await login_of(request)
    try:
        await login.observer.overview()
    except redis.AuthenticationError:
        raise
    except redis.RedisError:
        pass  # the page reports it, and tries again
    return page_response("store", PAGE / "main.html", source="server", leave=_LOG_OUT)


async def login(request: Request) -> Response:
    """Return the login form, which is sent to /login with POST."""
    return FileResponse(PAGE / "login.html")


async def events(request: Request) -> Response:
    """Return a stream of `Feed.events`. Raises HTTPException if the user has MOST_WATCHERS open pages."""
    login = await login_of(request)
    await login.observer.overview()  # raises if the user lacks permission
    feed = feed_of(login.observer)
    if feed.watchers >= MOST_WATCHERS:
        raise HTTPException(503, f"this user has {MOST_WATCHERS} open pages, the most allowed", {"Retry-After": "10"})
    events = feed.events(login.user)
    return StreamingResponse(events, media_type="text/event-stream")


async def agent(request: Request) -> Response:
    """Return the contexts of the agent `id`, one for each model, with the state of each block."""
    login = await login_of(request)
    found = await login.observer.agent(request.query_params.get("id", ""))
    return await asyncio.to_thread(lambda: JSONResponse([context_shown(agent, places) for agent, places in found]))


async def block(request: Request) -> Response:
    """Return the norms of the pages of the block `name`, a request id in hexadecimal digits.

    Return null if the block is incomplete or too large.
    """
    login = await login_of(request)
    await login.observer.overview()  # raises in time if the store hangs
    try:
        name = bytes.fromhex(request.query_params.get("name", ""))
    except ValueError:
        raise HTTPException(400, "a block's name is given in hexadecimal digits") from None
    found = await login.observer.read(pages_of(name))
    return await asyncio.to_thread(lambda: JSONResponse(pages_shown(found) if found else None))


ROUTES: list[BaseRoute] = [
    Route("/", index),
    Route("/login", login),
    Route("/page/events", events),
    Route("/page/agent", agent),
    Route("/page/block", block),
    Mount("/page", StaticFiles(packages=[("kvpage_server.web", "store"), ("kvpage_server.web", "shared")])),
]
