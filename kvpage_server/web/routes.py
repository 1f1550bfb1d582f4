"""The routes of the store's page and its data. Nothing here changes anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from kvpage_server.monitor.app import log_in, login_of
from kvpage_server.monitor.logins import DEFAULT
from kvpage_server.observe.context import pages_of
from kvpage_server.web import shown
from kvpage_server.web.feed import feed_of

PAGE = Path(__file__).with_name("store")
MOST_WATCHERS = 64  # of one user


async def index(request: Request) -> Response:
    """The page itself has no data. A browser that is not logged in is sent to /login, unless it has the token."""
    if token := request.query_params.get("token"):
        return await log_in(request, DEFAULT, token)
    await login_of(request)
    return FileResponse(PAGE / "index.html")


async def login(request: Request) -> Response:
    """The form is sent to the monitor's /login."""
    return FileResponse(PAGE / "login.html")


async def events(request: Request) -> Response:
    """The store's state every second, and its agents when they change."""
    login = await login_of(request)
    await login.observer.overview()  # who may not have it is told so
    feed = feed_of(login.observer)
    if feed.watchers >= MOST_WATCHERS:
        raise HTTPException(503, f"this user has {MOST_WATCHERS} open pages, the most allowed", {"Retry-After": "10"})
    events = feed.events(login.user)
    return StreamingResponse(events, media_type="text/event-stream")


async def agent(request: Request) -> Response:
    """The contexts of an agent, one for each model, block by block."""
    login = await login_of(request)
    found = await login.observer.agent(request.query_params.get("id", ""))
    return await asyncio.to_thread(lambda: JSONResponse([shown.context(agent, places) for agent, places in found]))


async def block(request: Request) -> Response:
    """One block, page by page; null if it is not complete."""
    login = await login_of(request)
    try:
        name = bytes.fromhex(request.query_params.get("name", ""))
    except ValueError:
        raise HTTPException(400, "a block's name is given in hexadecimal digits") from None
    found = await login.observer.read(pages_of(name))
    return await asyncio.to_thread(lambda: JSONResponse(shown.pages(found) if found else None))


ROUTES: list[BaseRoute] = [
    Route("/", index),
    Route("/login", login),
    Route("/page/events", events),
    Route("/page/agent", agent),
    Route("/page/block", block),
    Mount("/page", StaticFiles(packages=[("kvpage_server.web", "store"), ("kvpage_server.web", "shared")])),
]
