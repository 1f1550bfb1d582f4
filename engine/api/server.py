"""The server process: it listens, loads, serves, and stops without losing contexts."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

import uvloop
from starlette.responses import Response

from engine.api.answering import UNREAD_SECONDS
from engine.api.app import HEALTH, make_app
from engine.api.auth import Tokens
from engine.api.openai.errors import ApiError
from engine.api.service import Limits, Service
from engine.api.worker import EngineThread
from engine.startup import CANNOT_OPEN, Engine, Options, model_name
from kvpage_server.http.connections import Door, Unanswered
from kvpage_server.http.serving import HttpServer
from kvpage_server.system import signals

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 1.0  # to see whether the engine's thread still runs

# Seconds that a token waits for the event loop to run, while the engine's thread builds its next step. Python's own, 5
# milliseconds, would be most of what HTTP adds to a first token.
SWITCH_INTERVAL_SECONDS = 0.0002


class ServeError(RuntimeError):
    """The engine can't be served; the message says why."""


def run(
    options: Options,
    listener: socket.socket,
    tokens: Tokens,
    limits: Limits,
    *,
    host: str,
    name: str | None,
    origins: Sequence[str],
    grace: float,
    sanitize: bool,
    hash_labels: bool,
    tell: Callable[[str], object],
) -> int:
    """Serve until a signal. Returns 0, or 1 if a context could not be saved or the engine failed.

    `tell` is called with the name of each step that takes long.

    The first signal ends listening, and leaves requests `grace` seconds to finish. A second one ends the process at
    once. Raises ServeError if the engine can't be opened.
    """
    signals.begin()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    worker = EngineThread(lambda: Engine.open(options, tell))
    model = name or model_name(options.model)
    service = Service(worker, model, tokens, limits, sanitize=sanitize, hash_labels=hash_labels)
    door = Door(
        limits.connections,
        limits.for_each,
        closed=lambda reason: service.metrics.closed.labels(reason).inc(),
        refused=_refused,
        always=HEALTH,
    )
    server = HttpServer(make_app(service, host, origins), door, grace=grace + UNREAD_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server, service, worker, listener, grace))


async def _serve(
    server: HttpServer, service: Service, worker: EngineThread, listener: socket.socket, grace: float
) -> int:
    stopping = asyncio.Event()
    signals.attend(asyncio.get_running_loop(), partial(_signalled, stopping), _nothing_to_renew)
    worker.start()
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await _first_of(service.load(), stopping.wait())
        if service.ready:
            host, port = listener.getsockname()[:2]
            print(f"{service.model_id} is served on http://{host}:{port}", flush=True)
        while not stopping.is_set() and service.alive:
            await _first_of(stopping.wait(), asyncio.sleep(LOOK_EVERY_SECONDS))
    except CANNOT_OPEN as error:
        raise ServeError(str(error)) from error
    finally:
        failed = not service.alive
        service.closing = True
        server.should_exit = True  # it stops listening
        await worker.finish(grace)
        await serving
        if worker.loading:
            os._exit(0)  # there is nothing to save, and loading can't be interrupted
        await worker.stop()
    return int(failed or worker.unsaved > 0)


def _refused(refusal: Unanswered) -> Response:
    return ApiError(refusal.status, refusal.message, None, refusal.code, refusal.retry_after).response()


async def _first_of(*waits: object) -> None:
    """Wait for the first of several, and raise its exception."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


def _signalled(stopping: asyncio.Event, number: int) -> None:
    if stopping.is_set() and number != signal.SIGHUP:  # a closing terminal may send it twice
        os._exit(128 + number)  # the second signal asks for a quick end
    stopping.set()


def _nothing_to_renew() -> None:
    logger.warning("SIGHUP: nothing is to be renewed here")
