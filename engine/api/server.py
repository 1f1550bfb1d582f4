"""The server of `kvpage-engine serve`: routes, middleware, and the life of the process. It listens, loads the model,
serves requests, and saves all contexts when it stops.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import uvloop
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpage_server.http import (
    ConnectionLimiter,
    Guards,
    HttpServer,
    RefusalReplies,
    Unanswered,
    allowed_methods,
    own_names,
)
from kvpage_server.system.process import handle_signals, ignore_signals
from kvpage_server.tracing import continued

from ..memory.limits import set_limits
from ..startup import CANNOT_OPEN, Options
from . import agents, conversations, messages, responses
from .anthropic.shapes import error_body
from .auth import Tokens
from .completions import UNREAD_SECONDS, chat, complete
from .diagnosis import VolatileLines
from .hints import HINT_ROUTES
from .models import Models, ServedModel
from .openai.errors import ApiError
from .openapi import OPENAPI_ROUTES
from .records import Records
from .service import PAGE_ROUTES, Limits, Service

# -- The routes, and the middleware of every request -------------------------------------------------------------------

HEALTH = ("/health", "/health/live", "/health/ready")
METHODS = ["GET", "POST", "DELETE"]
REQUEST_ID, ANTHROPIC_REQUEST_ID = "x-request-id", "request-id"  # the headers that the SDKs read
READABLE = ["Retry-After", REQUEST_ID, ANTHROPIC_REQUEST_ID]  # headers that pages of other sites may read
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def make_app(service: Service, host: str, origins: Sequence[str] = ()) -> Starlette:
    """Return the ASGI application. `host` is the name on which it listens. Web pages of the sites `origins` may call
    the API (CORS).
    """
    names = own_names() | {host.lower()}
    started = int(time.time())

    async def models(request: Request) -> Response:
        """Reply with the list of the served models."""
        service.tokens.tenant(request)
        return JSONResponse(
            {"object": "list", "data": [_model(one, started) for one in service.models.by_name.values()]}
        )

    async def model(request: Request) -> Response:
        """Reply with a served model."""
        service.tokens.tenant(request)
        return JSONResponse(_model(service.models.named(request.path_params["model"]), started))

    async def live(request: Request) -> Response:
        """Reply whether only a restart of the engine would help: status 503."""
        return _health(service.alive, {})

    async def ready(request: Request) -> Response:
        """Reply whether the engine accepts prompts: status 503 if not."""
        return _health(service.ready, service.store_health)

    async def metrics(request: Request) -> Response:
        """Reply with metrics in Prometheus' format."""
        return Response(service.metrics.exposition(service.tokens.who(request)), media_type=EXPOSITION)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            *messages.MESSAGE_ROUTES,
            *responses.RESPONSE_ROUTES,
            *conversations.CONVERSATION_ROUTES,
            *agents.AGENT_ROUTES,
            *HINT_ROUTES,
            Route("/health", ready),
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/metrics", metrics),
            *OPENAPI_ROUTES,
            *PAGE_ROUTES,
        ],
        middleware=[
            Middleware(_Replies, service=service),
            Middleware(Guards, names=names, origins=origins),
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=METHODS,
                allow_headers=["*"],  # OpenAI's JavaScript client sends a dozen of its own
                expose_headers=READABLE,
            ),
            Middleware(
                RefusalReplies, reply=_refused
            ),  # this and the next within CORS, whose headers their replies need
            Middleware(ServerErrorMiddleware, handler=_handler(_failure)),
            Middleware(_Traced),
        ],
        exception_handlers={
            ApiError: _handler(lambda error: error),
            ClientDisconnect: _handler(lambda error: ApiError(499, "the client has gone")),
            HTTPException: _no_such_page,
        },
    )
    app.state.service = service
    return app


def _model(model: ServedModel, created: int) -> dict[str, object]:
    kvpage = {"loaded": model.loaded, "weights_bytes": model.weights, "contexts_bytes": model.contexts}
    return {"id": model.name, "object": "model", "created": created, "owned_by": "kvpage", "kvpage": kvpage}


def _health(well: bool, more: dict[str, object]) -> Response:
    return JSONResponse({"status": "ok" if well else "unavailable", **more}, 200 if well else 503)


def _handler(error_of: Callable[..., ApiError]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return _reply(request, error_of(error))

    return handle


def _refused(request: Request, refusal: Unanswered) -> Response:
    return _reply(request, ApiError(refusal.status, refusal.message, None, refusal.code, refusal.retry_after))


def _failure(error: Exception) -> ApiError:
    return ApiError(500, "the server has failed; its log says why")


def _reply(request: Request, error: ApiError) -> Response:
    """Return the reply with an error, in the format of the API to which the request belongs."""
    return error.response(error_body(error) if _is_anthropic(request.scope) else error.body)


def _is_anthropic(scope: Scope) -> bool:
    return str(scope["path"]).startswith("/v1/messages")


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path} here"
    if error.status_code != 405:
        return _reply(request, ApiError(error.status_code, message, code="unknown_url"))
    methods = allowed_methods(request)
    response = _reply(request, ApiError(405, f"{message}, only {methods}", code="unknown_url"))
    response.headers["Allow"] = methods
    return response


class _Replies:
    """ASGI middleware that counts requests by endpoint and status, and gives each reply the id of its request. At the
    end of each request, it closes the ExitStack `request.state.ends`.
    """

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
                header = ANTHROPIC_REQUEST_ID if _is_anthropic(scope) else REQUEST_ID
                MutableHeaders(scope=message)[header] = f"req_{uuid.uuid4().hex}"
            await send(message)

        with ExitStack() as ends:
            scope.setdefault("state", {})["ends"] = ends
            await self._app(scope, receive, counted)
        return None


class _Traced:
    """ASGI middleware that continues the trace of a request, which its headers name (W3C Trace Context)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with continued(scope.get("headers", ())):
            await self._app(scope, receive, send)


logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 1.0  # between two checks whether the engine's thread is still running

# For so long the event loop waits for the interpreter's lock before it can send a token, while the engine's thread
# builds its next step. Python's default, 5 milliseconds, would be most of the time that HTTP adds to a first token.
SWITCH_INTERVAL_SECONDS = 0.0002


class ServeError(RuntimeError):
    """Error: the engine cannot be started. The message has the reason."""


def run(
    options: Mapping[str, Options],
    listener: socket.socket,
    tokens: Tokens,
    limits: Limits,
    *,
    host: str,
    origins: Sequence[str],
    grace: float,
    sanitize: bool,
    hash_labels: bool,
    volatile_lines: VolatileLines,
    report: Callable[[str], object],
) -> int:
    """Serve until a signal arrives. Return the exit code: 0, or 1 if an engine failed, or a context or a stored
    response could not be saved.

    `options` are those of each model, by its name in the API; all have the same page server. `report` is called with a
    text before each long step of a load. `host` is the name on which `listener` listens, and `origins` are sites whose
    web pages may call the API. With `sanitize`, control tokens in the content of users and tools are encoded as text.
    `hash_labels` is as for `Service`, `volatile_lines` as for `without_volatile`.

    The first signal ends listening, and gives running requests `grace` seconds. A second one, except SIGHUP, ends the
    process immediately. Raises ServeError if the engine cannot be started.
    """
    ignore_signals()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    first = next(iter(options.values()))
    try:
        models = Models(options, set_limits(), report, sanitize=sanitize)
    except CANNOT_OPEN as error:
        raise ServeError(str(error)) from error
    records = Records(first.store, first.restore_within)
    service = Service(models, tokens, limits, records, hash_labels=hash_labels)
    service.volatile_lines = volatile_lines
    limiter = ConnectionLimiter(
        limits.connections,
        limits.for_each,
        closed=lambda reason: service.metrics.closed.labels(reason).inc(),
        always=HEALTH,
    )
    server = HttpServer(make_app(service, host, origins), limiter, grace=grace + UNREAD_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server, service, records, listener, grace))


async def _serve(server: HttpServer, service: Service, records: Records, listener: socket.socket, grace: float) -> int:
    """Run the server until a signal arrives or an engine fails, and stop all engines. Return the exit code as `run`."""
    models = service.models
    stopping = asyncio.Event()
    handle_signals(asyncio.get_running_loop(), partial(_signalled, stopping), _nothing_to_renew)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await _first_of(service.start(), stopping.wait())
        if service.ready:
            host, port = listener.getsockname()[:2]
            for name in models.by_name:
                print(f"{name} is served on http://{host}:{port}", flush=True)
        while not stopping.is_set() and service.alive:
            await _first_of(stopping.wait(), asyncio.sleep(LOOK_EVERY_SECONDS))
    except (*CANNOT_OPEN, ApiError) as error:
        raise ServeError(str(error)) from error
    finally:
        failed = not service.alive
        service.closing = True
        server.should_exit = True  # it stops listening
        models.stop_loading()
        await asyncio.gather(*(worker.finish(grace) for worker in models.workers))
        await serving
        lost, _ = await asyncio.gather(records.close(), models.close())
    return int(failed or lost > 0 or models.unsaved > 0)


async def _first_of(*waits: object) -> None:
    """Wait until the first of several awaitables is done, and cancel the others. Raises the exception of the first."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


def _signalled(stopping: asyncio.Event, number: int) -> None:
    if stopping.is_set() and number != signal.SIGHUP:  # a terminal that is closed may send SIGHUP twice
        os._exit(128 + number)  # a second signal requests an immediate end
    stopping.set()


def _nothing_to_renew() -> None:
    logger.warning("SIGHUP: nothing is to be renewed here")
