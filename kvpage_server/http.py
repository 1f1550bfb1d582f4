"""HTTP for the engine's API and the server's web page: connection limits, checks of requests, and a server based on
uvicorn.

This module needs uvicorn and starlette, and imports no other module of this project.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

# -- Protection against other sites: headers of every reply, and checks of every request -------------------------------
#
# A page of another site can make a browser send requests to this server, under its address or under a name that the
# site resolves to it (DNS rebinding). So the Host of a request must be a name of this machine. A request from another
# site is answered only if the user followed a link.

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SAFE_HEADERS = {
    "Content-Security-Policy": CSP,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # with no-referrer, forms of this server's pages would send Origin: null
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
RESERVED_SUFFIXES = (".localhost", ".local", ".internal", ".svc")  # names that no site can own
LINGER = 5.0  # seconds
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


def own_names() -> frozenset[str]:
    """Return the names of this machine."""
    return frozenset(name.lower() for name in ("localhost", socket.gethostname(), socket.getfqdn()))


class Guards:
    """ASGI middleware that refuses requests of other sites (403) and for other hosts (421), and adds headers to
    replies.

    A header that the reply has already is kept.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], origins: Collection[str] = ()) -> None:
        """Wrap an application. `names` are the host names of this machine; any IP address is accepted as Host, too.

        `origins` are sites, such as https://chat.example, whose pages may send requests, and whose names are accepted.
        """
        self._app = app
        self._names = {*names, *(urlsplit(origin).hostname for origin in origins)}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                of_answer = MutableHeaders(scope=message)
                for name, value in SAFE_HEADERS.items():
                    of_answer.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope["method"], headers)
        return await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, method: str, headers: Headers) -> PlainTextResponse | None:
        if not _is_own(headers.getlist("host"), self._names):
            return PlainTextResponse("the Host header names another machine\n", 421)
        if headers.get("origin") not in self._origins and not _is_from_here(method, headers):
            return PlainTextResponse("requests of other sites are not answered\n", 403)
        return None


def _is_own(hosts: list[str], names: Collection[str | None]) -> bool:
    if not hosts:  # every browser sends it
        return True
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if found is None:
        return False
    name = found[1].strip("[]").rstrip(".").lower()
    return name in names or "." not in name or name.endswith(RESERVED_SUFFIXES) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_from_here(method: str, headers: Headers) -> bool:
    """Return whether a request is from a page of this server, from a program, or from a link that the user followed."""
    site = headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin"):
        followed = headers.get("sec-fetch-mode") == "navigate"
        return method == "GET" and followed and headers.get("sec-fetch-dest", "document") == "document"  # not a frame
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


# -- Limits: the number of connections, the time for which one may be silent, and the bytes parsed at a time -----------
#
# uvicorn has no such limits. A client that connects and sends nothing keeps a socket forever, and all headers and
# chunks of one read, up to 256 KB, are parsed without a pause.

HEADERS_SECONDS = 10.0  # from connecting or from a request's first byte to the end of its headers
IDLE_SECONDS = 30  # between two requests; clients close idle connections sooner
UNREAD_SECONDS = 30.0  # for a client to receive output that the system has no buffers for
SLICE_BYTES = 2048  # parsed before other connections have their turn: at worst some 500 chunks or headers
MAX_HEADERS_BYTES = 16_384
MAX_HEADER_LINES = 512
MAX_CHUNK_LINES = 65_536  # two per chunk, which takes as long to parse as kilobytes of a plain body
BETWEEN = {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}  # states of h11 between two requests, or within headers


class Unanswered(NamedTuple):
    """Refusal of a request: HTTP status, message and error code. `retry_after` is in seconds, None if a retry is
    useless.
    """

    status: int
    message: str
    code: str
    retry_after: int | None = None


BOTH_LENGTHS = Unanswered(400, "a request has Content-Length or Transfer-Encoding, not both", "invalid_length")
TOO_MANY = Unanswered(503, "too many connections", "too_many_connections", 1)


_REFUSAL = "refusal"  # key in the state of a request's scope


class RefusalReplies:
    """ASGI middleware that replies to the requests that the connection limiter refuses. It belongs within the
    middleware that adds headers to every reply.
    """

    def __init__(self, app: ASGIApp, reply: Callable[[Request, Unanswered], Response]) -> None:
        self._app = app
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = scope.get("state", {}).get(_REFUSAL)
        if refusal is None:
            return await self._app(scope, receive, send)
        response = self._reply(Request(scope), refusal)
        response.headers["Connection"] = "close"
        return await response(scope, receive, send)


async def discard_body(request: Request) -> None:
    """Read the rest of a refused body, for up to LINGER seconds.

    The client can then send all of it, and reads the reply: the system resets a connection that is closed while it has
    unread bytes. Nothing is read from a client that waits for 100 Continue.
    """
    if request.headers.get("Expect", "").lower() == "100-continue":
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while (await request.receive()).get("more_body"):
                pass


def allowed_methods(request: Request) -> str:
    """Return the methods that the application takes for the URL of a request, as in the header Allow."""
    scope = {**request.scope, "root_path": ""}  # a mount has set it to its own path
    routes = [route for route in request.app.routes if route.matches(scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in getattr(route, "methods", ("GET", "HEAD"))}  # a mount has files
    return ", ".join(sorted(methods))


class ConnectionTable:
    """Open connections, of the whole server or of one address, up to a limit. A connection with a complete request is
    busy, any other one is silent.
    """

    def __init__(self, limit: int) -> None:
        """Set the limit. At the limit, a new connection replaces the one that has been silent longest.

        There is always a silent one, because requests are refused when more than 15/16 of the limit are busy. A
        connection is silent until its request is complete, so incomplete requests do not exclude other clients.
        """
        self._limit = limit
        self._asked_limit = max(limit - max(1, limit // 16), 1)
        self._silent: dict[HttpConnection, None] = {}  # without a complete request, the longest silent one first
        self._asked: set[HttpConnection] = set()  # with a request that is being answered

    def __len__(self) -> int:
        return len(self._silent) + len(self._asked)

    @property
    def full(self) -> bool:
        """Whether a further request should be refused, because too many connections are busy."""
        return len(self._asked) > self._asked_limit

    def join(self, connection: HttpConnection) -> None:
        if len(self) >= self._limit and self._silent:
            next(iter(self._silent)).drop("crowded")
        self._silent[connection] = None

    def leave(self, connection: HttpConnection) -> None:
        self._silent.pop(connection, None)
        self._asked.discard(connection)

    def asked(self, connection: HttpConnection) -> None:
        self.leave(connection)
        self._asked.add(connection)

    def answered(self, connection: HttpConnection) -> None:
        if connection in self._asked:
            self._asked.remove(connection)
            self._silent[connection] = None


class ConnectionLimiter:
    """Limits of the number of connections: in total, and for each address."""

    def __init__(
        self,
        connections: int,
        for_each: int,
        *,
        closed: Callable[[str], object],
        always: Collection[str],
    ) -> None:
        """Allow `connections` in total, and `for_each` from one address.

        `closed` is called with the reason, a word for metrics, when the limiter closes a connection. The application
        replies to refused requests with `RefusalReplies`. Requests for the paths in `always` are never refused.
        """
        self.closed = closed
        self.always = always
        self._everybody = ConnectionTable(connections)
        self._for_each = for_each
        self._addresses: dict[str, ConnectionTable] = {}

    def join(self, connection: HttpConnection, host: str) -> tuple[ConnectionTable, ConnectionTable]:
        """Add a connection from `host`. Return its two tables: of all connections, and of its address."""
        tables = (self._everybody, self._addresses.setdefault(_address(host), ConnectionTable(self._for_each)))
        for table in tables:
            table.join(connection)
        return tables

    def leave(self, connection: HttpConnection, host: str) -> None:
        address = _address(host)
        self._everybody.leave(connection)
        if (table := self._addresses.get(address)) is not None:
            table.leave(connection)
            if not table:
                del self._addresses[address]


def _address(host: str) -> str:
    """Return the address under which connections of `host` are counted. For IPv6 it is the /64 network, because a
    client has all of its addresses.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a unix socket, or a connection that is closed already
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


class _Flow(FlowControl):
    """uvicorn's flow control, changed: it resumes reading only when all received bytes were parsed."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        self.read_paused = False
        self._connection.read_on()


class HttpConnection(H11Protocol):
    """uvicorn's HTTP connection with the limits of a `ConnectionLimiter`, of silence, of headers and of unread
    output.
    """

    def __init__(self, *args: Any, limiter: ConnectionLimiter, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limiter = limiter
        self._app, self.app = self.app, self._answer
        self._host = ""
        self._tables: tuple[ConnectionTable, ...] = ()
        self._incoming = bytearray()  # received, and not parsed yet
        self._lines = 0  # number of lines of incomplete headers, or of a chunked body
        self._chunked = False  # whether the body has chunked transfer encoding
        self._requests = 0  # number of requests that are being answered
        self._silence: asyncio.TimerHandle | None = None  # closes a silent connection
        self._unread: asyncio.TimerHandle | None = None  # closes a connection whose client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # a stream of events rarely has more than a few kilobytes to send
        self.flow = _Flow(self)
        self._host = self.client[0] if self.client else ""
        self._tables = self._limiter.join(self, self._host)
        self._start_silence_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._incoming.clear()
        self._stop_silence_timer()
        self._read()
        self._limiter.leave(self, self._host)
        super().connection_lost(exc)

    def drop(self, reason: str) -> None:
        """Close the connection immediately. `reason` is passed to the limiter's `closed`."""
        self._limiter.closed(reason)
        for table in self._tables:
            table.leave(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        waiting = bool(self._incoming)
        self._incoming += data
        if not waiting:
            self._parse()

    def _parse(self) -> None:
        if not self._incoming or self.transport.is_closing():
            return None
        part = bytes(self._incoming[:SLICE_BYTES])
        del self._incoming[:SLICE_BYTES]
        if not self._requests and not self._silence:
            self._start_silence_timer()
        super().data_received(part)
        self._note_asked()
        if self.conn.states == BETWEEN:
            self._lines += part.count(b"\n")
            if self._lines > MAX_HEADER_LINES:
                return self.send_400_response("Too many headers.")
        elif self._chunked:
            self._lines += part.count(b"\r\n")
            if self._lines > MAX_CHUNK_LINES:
                return self.drop("chunks")
        if self._incoming:
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        else:
            self.read_on()
        return None

    def read_on(self) -> None:
        """Resume reading, unless received bytes wait to be parsed, or the application has paused it."""
        if not self._incoming and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._stop_silence_timer()
        self._lines = 0
        self._chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
        self._requests += 1
        self._note_asked()
        try:
            scope["state"][_REFUSAL] = self._refusal(scope)
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1
            if not self._requests:
                for table in self._tables:
                    table.answered(self)

    def _note_asked(self) -> None:
        if self._requests and self.conn.their_state is not h11.SEND_BODY:
            for table in self._tables:
                table.asked(self)

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed bytes, and close the connection. A reply that has begun is cut off."""
        if self.cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # the reply has begun
            self.transport.close()
            return
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the head was sent, and a reply to HEAD has no body
            self.transport.close()

    def _refusal(self, scope: Scope) -> Unanswered | None:
        """Return the refusal of a request: for both body lengths, or for too many busy connections; None if it is
        allowed.
        """
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:  # a proxy in front may have used the other one
            return BOTH_LENGTHS
        if any(table.full for table in self._tables) and scope["path"] not in self._limiter.always:
            return TOO_MANY
        return None

    def _start_silence_timer(self) -> None:
        self._silence = self.loop.call_later(HEADERS_SECONDS, self.drop, "silent")

    def _stop_silence_timer(self) -> None:
        if self._silence:
            self._silence.cancel()
            self._silence = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.drop, "unread")

    def resume_writing(self) -> None:
        self._read()
        super().resume_writing()

    def _read(self) -> None:
        if self._unread:
            self._unread.cancel()
            self._unread = None


# -- Filter for repeated failures in the log, so that a client that causes failures cannot fill it ---------------------

EVERY_SECONDS = 60.0
MOST_KINDS = 256  # further kinds count as one
# Errors of a system without descriptors or memory, and of accept(2) for a connection that has failed.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPROTO, errno.ENETDOWN, errno.EPERM}


class RateLimitedLog(logging.Filter):
    """Log filter that passes records without an exception, and one record a minute for each line of code that
    raises. The record of a system without descriptors or memory is one line, without a traceback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._again: dict[tuple[object, ...], float] = {}  # monotonic seconds when the next record of a kind may pass

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        kind: tuple[object, ...] = (type(error), *_place(error))
        now = time.monotonic()
        if kind not in self._again and len(self._again) >= MOST_KINDS:
            kind = ()
        if now < self._again.get(kind, now):
            return False
        self._again[kind] = now + EVERY_SECONDS
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            message = record.getMessage().partition("\n")[0]
            record.msg, record.args, record.exc_info = f"{message}: {error.strerror}", (), None
        return True


def _place(error: BaseException) -> tuple[str, int]:
    """Return the file and line that raised an exception."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else ("", 0)


RATE_LIMITED_LOG = RateLimitedLog()


# -- The server of uvicorn, with these connections, and without its signal handlers ------------------------------------


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would make the process exit as if the signal had killed
    it.
    """

    def __init__(self, app: ASGIApp, limiter: ConnectionLimiter, *, grace: float) -> None:
        """Configure uvicorn with the connection limits of `limiter`. When it stops, running requests have `grace`
        seconds to finish.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", partial(HttpConnection, limiter=limiter)),
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
            logging.getLogger(name).addFilter(RATE_LIMITED_LOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
