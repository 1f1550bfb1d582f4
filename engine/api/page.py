"""/: the page in the browser, and what it is told."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from engine.api.openai.errors import ApiError
from engine.api.service import Service
from engine.api.watching import MOST_WATCHERS

PAGE = Path(__file__).with_name("browser")


async def page(request: Request) -> Response:
    """Nothing in it is anybody's: what it shows, it asks for."""
    return FileResponse(PAGE / "index.html")


async def events(request: Request) -> Response:
    """What happens here, to whoever may see it."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    watchers, share = service.watching.watchers, service.tokens.share(MOST_WATCHERS)
    if watchers.total() >= MOST_WATCHERS and watchers[tenant.name] >= share:
        raise ApiError(503, f"{MOST_WATCHERS} pages are shown already, as many as may", retry_after=10)
    told = service.watching.events(service.engine, tenant, lambda: service.store_health)
    return StreamingResponse(told, media_type="text/event-stream")


ROUTES = [
    Route("/", page),
    Route("/page/events", events),
    Mount("/page", StaticFiles(packages=[("engine.api", "browser"), ("kvpage_server.web", "shared")])),
]
