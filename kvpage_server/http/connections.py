"""Connections: how many there may be, how long one may say nothing, and how much of what it says is read at a time.

uvicorn bounds none of it: who connects and stays silent keeps a socket for ever, and what one read of 256 KB holds is
parsed in one go, chunk by chunk and header by header.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import h11
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_SECONDS = 10.0  # from connecting or from a request's first byte to the end of its headers
IDLE_SECONDS = 30  # between two requests; longer than clients keep a connection that they do not use
UNREAD_SECONDS = 10.0  # that a client has to read what waits for it
SLICE_BYTES = 2048  # that are parsed before others have their turn; in the worst case some 500 chunks or headers
MAX_HEADERS_BYTES = 16_384
MAX_HEADER_LINES = 512  # of headers
MAX_CHUNK_LINES = 65_536  # of a body in chunks, two a chunk: each takes as long as kilobytes of a whole one
BETWEEN = {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}  # requests: one's headers are not complete


class Unanswered(NamedTuple):
    """Why a connection's request is not looked at; `retry_after` in seconds, None where that is no use."""

    status: int
    message: str
    code: str
    retry_after: int | None = None


BOTH_LENGTHS = Unanswered(400, "a request has Content-Length or Transfer-Encoding, not both", "invalid_length")
TOO_MANY = Unanswered(503, "too many connections", "too_many_connections", 1)


class Crowd:
    """Connections of everybody, or of one address."""

    def __init__(self, limit: int) -> None:
        """When there are `limit` of them, who comes takes the place of the one that has been silent for longest. There
        always is one: a part of the places is not for requests, but for their health's."""
        self._limit = limit
        self._asked_limit = limit - max(1, limit // 16)
        self._silent: dict[HttpConnection, None] = {}  # the one that has been so for longest first
        self._asked: set[HttpConnection] = set()

    def __len__(self) -> int:
        return len(self._silent) + len(self._asked)

    @property
    def full(self) -> bool:
        """Whether there are more that are being answered than may be."""
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


class Door:
    """Where connections come in."""

    def __init__(
        self,
        connections: int,
        for_each: int,
        *,
        closed: Callable[[str], object],
        refused: Callable[[Unanswered], Response],
        always: Collection[str],
    ) -> None:
        """At most so many, and of one address `for_each`. `closed` is told why one was closed, `refused` words what is
        answered instead. What is `always` answered are paths, however many connections there are."""
        self.closed = closed
        self.refused = refused
        self.always = always
        self._everybody = Crowd(connections)
        self._for_each = for_each
        self._addresses: dict[str, Crowd] = {}

    def join(self, connection: HttpConnection, host: str) -> tuple[Crowd, Crowd]:
        """Returns the crowds that it belongs to."""
        crowds = (self._everybody, self._addresses.setdefault(_address(host), Crowd(self._for_each)))
        for crowd in crowds:
            crowd.join(connection)
        return crowds

    def leave(self, connection: HttpConnection, host: str) -> None:
        address = _address(host)
        self._everybody.leave(connection)
        if (crowd := self._addresses.get(address)) is not None:
            crowd.leave(connection)
            if not crowd:
                del self._addresses[address]


def _address(host: str) -> str:
    """Whoever has an address of IPv6 has all that share its first half."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a socket of the system's, or one that has gone already
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


class _Flow(FlowControl):
    """Reads on when what was read is parsed, and not before."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        self.read_paused = False
        self._connection.read_on()


class HttpConnection(H11Protocol):
    """One of uvicorn's, with bounds."""

    def __init__(self, *args: Any, door: Door, **options: Any) -> None:
        super().__init__(*args, **options)
        self._door = door
        self._app, self.app = self.app, self._answer
        self._host = ""
        self._crowds: tuple[Crowd, ...] = ()
        self._incoming = bytearray()  # what was read and is not parsed yet
        self._lines = 0  # of headers that are not complete, or of a body in chunks
        self._chunked = False  # the body that comes
        self._requests = 0  # that are being answered
        self._silence: asyncio.TimerHandle | None = None  # until it has gone on for too long
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(self)
        self._host = self.client[0] if self.client else ""
        self._crowds = self._door.join(self, self._host)
        self._be_patient()

    def connection_lost(self, exc: Exception | None) -> None:
        self._incoming.clear()
        self._hear()
        self._read()
        self._door.leave(self, self._host)
        super().connection_lost(exc)

    def drop(self, reason: str) -> None:
        """Close it at once; it is nobody's loss but its own."""
        self._door.closed(reason)
        for crowd in self._crowds:
            crowd.leave(self)
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
            self._be_patient()
        super().data_received(part)
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
        """Unless there is something to be parsed, or to be answered, first."""
        if not self._incoming and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._hear()
        self._lines = 0
        self._chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
        self._requests += 1
        for crowd in self._crowds:
            crowd.asked(self)
        try:
            refusal = self._refusal(scope)
            if refusal:
                response = self._door.refused(refusal)
                response.headers["Connection"] = "close"
                await response(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            self._requests -= 1
            if not self._requests:
                for crowd in self._crowds:
                    crowd.answered(self)

    def _refusal(self, scope: Scope) -> Unanswered | None:
        """Why the request is refused; None if it is not."""
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:  # a proxy in front may have understood the other
            return BOTH_LENGTHS
        if any(crowd.full for crowd in self._crowds) and scope["path"] not in self._door.always:
            return TOO_MANY
        return None

    def _be_patient(self) -> None:
        self._silence = self.loop.call_later(HEADERS_SECONDS, self.drop, "silent")

    def _hear(self) -> None:
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
