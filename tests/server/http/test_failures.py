"""An application that fails at every request: each kind of failure is logged once a minute, and each is answered."""

from __future__ import annotations

import asyncio
import logging
import socket

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvpage_server.http import MOST_KINDS, ConnectionLimiter, HttpServer, RateLimitedLog


async def fail(scope: Scope, receive: Receive, send: Send) -> None:
    raise LookupError(scope["path"])


async def ask(times: int) -> list[int]:
    limiter = ConnectionLimiter(8, 8, closed=print, always=[])
    server = HttpServer(fail, limiter, grace=1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
            statuses = [(await client.get(f"/{number}", timeout=60)).status_code for number in range(times)]
        server.should_exit = True
        await serving
    return statuses


def test_a_failure_is_logged_once_and_answered_each_time(capfd: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(ask(20)) == [500] * 20
    assert capfd.readouterr().err.count("LookupError: /") == 1


def failure(kind: int) -> logging.LogRecord:
    error = type(f"Failure{kind}", (Exception,), {})()
    return logging.LogRecord("name", logging.ERROR, "file", 1, "failed", None, (type(error), error, None))


def test_failures_are_logged_by_kind_with_a_bound() -> None:
    seldom = RateLimitedLog()
    assert [seldom.filter(failure(kind)) for kind in range(MOST_KINDS)] == [True] * MOST_KINDS
    assert [seldom.filter(failure(MOST_KINDS + kind)) for kind in range(3)] == [True, False, False]
    assert seldom.filter(logging.LogRecord("name", logging.ERROR, "file", 1, "ends", None, None))
