"""The routes, and what every request goes through."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api import agents, page
from engine.api.completions import chat, complete
from engine.api.openai.errors import ApiError
from engine.api.service import Service
from kvpage_server.http.guards import Guards, own_names
from kvpage_server.tracing import continued

HEALTH = ("/health", "/health/live", "/health/ready")
METHODS = ["GET", "POST", "DELETE"]
READABLE = ["Retry-After"]  # headers that pages of other sites may read
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def make_app(service: Service, host: str, origins: Sequence[str] = ()) -> Starlette:
    """The application. Pages of `origins` may send requests, too."""
    names = own_names() | {host.lower()}
    started = int(time.time())

    async def models(request: Request) -> Response:
        service.tokens.tenant(request)
        return JSONResponse({"object": "list", "data": [_model(service.model_id, started)]})

    async def model(request: Request) -> Response:
        service.tokens.tenant(request)
        service.check_model(request.path_params["model"])
        return JSONResponse(_model(service.model_id, started))

    async def live(request: Request) -> Response:
        return _health(service.alive, {})

    async def ready(request: Request) -> Response:
        return _health(service.ready, service.store_health)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.exposition(service.tokens.who(request)), media_type=EXPOSITION)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            *agents.ROUTES,
            Route("/health", ready),
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/metrics", metrics),
            *page.ROUTES,
        ],
        middleware=[
            Middleware(_Counting, service=service),
            Middleware(Guards, names=names, origins=origins),
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=METHODS,
                allow_headers=["*"],  # OpenAI's JavaScript client sends a dozen of its own
                expose_headers=READABLE,
            ),
            Middleware(_Traced),
        ],
        exception_handlers={
            ApiError: _handler(lambda error: error),
            ClientDisconnect: _handler(lambda error: ApiError(499, "the client has gone")),
            HTTPException: _no_such_page,
            Exception: _handler(lambda error: ApiError(500, "the server has failed; its log says why")),
        },
    )
    app.state.service = service
    return app


def _model(model_id: str, created: int) -> dict[str, object]:
    return {"id": model_id, "object": "model", "created": created, "owned_by": "kvpage"}


def _health(well: bool, more: dict[str, object]) -> Response:
    return JSONResponse({"status": "ok" if well else "unavailable", **more}, 200 if well else 503)


def _handler(told: Callable[..., ApiError]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return told(error).response()

    return handle


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path} here"
    response = ApiError(error.status_code, message, code="unknown_url").response()
    response.headers.update(error.headers or {})  # such as the methods that are allowed
    return response


class _Counting:
    """Counts requests by endpoint and status."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = getattr(scope.get("endpoint"), "__name__", "none")
                self._service.metrics.requests.labels(endpoint, message["status"]).inc()
            await send(message)

        return await self._app(scope, receive, counted)


class _Traced:
    """Continues the trace that a request names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with continued(scope.get("headers", ())):
            await self._app(scope, receive, send)
