"""uvicorn, with our connections, and without its signal handlers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from kvpage_server.http.connections import IDLE_SECONDS, MAX_HEADERS_BYTES, Door, HttpConnection
from kvpage_server.http.failures import SELDOM


class HttpServer(uvicorn.Server):
    """Leaves signals to us. uvicorn would end the process as if the signal had killed it."""

    def __init__(self, app: ASGIApp, door: Door, *, grace: float) -> None:
        """At a stop, running requests have `grace` seconds to finish."""
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", partial(HttpConnection, door=door)),
                h11_max_incomplete_event_size=MAX_HEADERS_BYTES,
                timeout_keep_alive=IDLE_SECONDS,
                log_level="error",  # clients can cause warnings at will, and fill the disk
                access_log=False,
                server_header=False,
                date_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=math.ceil(grace),
            )
        )

        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(SELDOM)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
