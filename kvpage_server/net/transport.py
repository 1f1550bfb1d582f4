"""A plain socket. The session's parser receives the bytes; output is gathered and sent from its place in memory.

A piece is kept until it is sent, so that its memory is not used again before.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, cast

from kvpage_server.core import Outbox
from kvpage_server.core.pieces import Piece

HIGH_WATER = 1024 * 1024  # bytes waiting to be sent above which a session stops answering


class Ends(NamedTuple):
    """Both ends of a connection: addresses as CLIENT LIST shows them, and the socket's descriptor."""

    address: str
    local_address: str
    descriptor: int


class SocketReader(Protocol):
    """The session's interface for its transport."""

    def readable(self) -> None:
        """There is something on the socket, or its end."""

    def received(self, data: bytes) -> None:
        """Process received, decrypted bytes."""

    def drained(self) -> None:
        """Continue after the output queue has fallen below the high-water mark."""

    def lost(self) -> None:
        """Close the session after the connection has ended."""


class Transport(Protocol):
    """A connection's byte stream: a plain socket, or TLS."""

    bytes_out: int
    queued: int  # bytes that wait to be sent
    ignored: bool  # since `ignore`

    def write(self, pieces: list[Piece]) -> None:
        """Send pieces in order, when the peer takes them."""

    def renew(self) -> None:
        """Read the output's addresses again, because its memory may have moved."""

    def ignore(self) -> None:
        """Stop receiving: bytes stay in the kernel, so the peer slows down."""

    def attend(self) -> None:
        """Continue receiving."""

    def close(self) -> None:
        """Read no more; close once everything is sent."""

    def abort(self) -> None:
        """Close immediately and drop unsent output."""


class SocketTransport:
    """Owns the socket. Every method is to be called in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, reader: SocketReader) -> None:
        self._loop = loop
        self._sock = sock
        self._descriptor = sock.fileno()
        self._reader = reader
        self._outbox = Outbox()
        self.bytes_out = 0
        self.queued = 0  # bytes that wait to be sent
        self.ignored = True
        self._writing = False
        self._closing = False
        self._over = False
        self._crowded = False
        self.attend()

    # -- reading ---------------------------------------------------------------------------------------------------

    def attend(self) -> None:
        if self.ignored and not self._closing:
            self.ignored = False
            self._loop.add_reader(self._sock, self._reader.readable)

    def ignore(self) -> None:
        if not self.ignored:
            self.ignored = True
            self._loop.remove_reader(self._sock)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, pieces: list[Piece]) -> None:
        """Send pieces in order, now as far as the kernel takes them, the rest when it does."""
        if self._over:
            return
        outbox = self._outbox
        outbox.add(pieces)
        if not self._writing:
            try:
                self.bytes_out += outbox.send(self._descriptor)
            except OSError:
                self.abort()
                return
        self.queued = outbox.nbytes
        if self.queued or self._closing:
            self._settle()
            self._crowded = self._crowded or self.queued > HIGH_WATER

    def renew(self) -> None:
        self._outbox.renew()

    def _advance(self) -> None:
        """Send more output."""
        try:
            self.bytes_out += self._outbox.send(self._descriptor)
        except OSError:
            self.abort()
            return
        self.queued = self._outbox.nbytes
        self._settle()

    def _settle(self) -> None:
        """Wait for a writable socket as long as output is queued."""
        if self.queued:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._advance)
        else:
            if self._writing:
                self._writing = False
                self._loop.remove_writer(self._sock)
            if self._closing:
                self.abort()
                return
        if self._crowded and self.queued <= HIGH_WATER:
            self._crowded = False
            self._loop.call_soon(self._reader.drained)

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closing = True
        self.ignore()
        if not self.queued:
            self.abort()

    def abort(self) -> None:
        if self._over:
            return
        self._over = self._closing = True
        self.ignore()
        if self._writing:
            self._loop.remove_writer(self._sock)
        self._outbox.clear()
        self.queued = 0
        self._sock.close()
        self._reader.lost()


# -- tls ---------------------------------------------------------------------------------------------------------------
#
# A transport like `SocketTransport` that encrypts.
#
# asyncio implements TLS, so received bytes pass through its buffers. Output is handed over in parts, each after asyncio
# has taken the part before.

_PART = 256 * 1024  # bytes handed to the loop at a time


class TLSTransport(asyncio.Protocol):
    """An encrypted connection, once the handshake is over: then `start` gives it the session that reads it."""

    def __init__(self, start: Callable[[], SocketReader]) -> None:
        self._start = start
        self._queue: deque[Piece] = deque()
        self._sent = 0  # bytes of the first piece that were sent
        self._full = False  # the loop takes no more for now
        self._closing = False
        self._crowded = False
        self.ignored = False
        self.queued = 0
        self.bytes_out = 0

    # -- the loop's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has these methods and does not say so
        self._transport.set_write_buffer_limits(high=_PART)
        self._reader = self._start()

    def data_received(self, data: bytes) -> None:
        self._reader.received(data)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        self._queue.clear()
        self.queued = 0
        self._reader.lost()
        del self._reader, self._start

    # -- the session's side ----------------------------------------------------------------------------------------

    def attend(self) -> None:
        if self.ignored and not self._closing:
            self.ignored = False
            self._transport.resume_reading()

    def ignore(self) -> None:
        if not self.ignored and not self._closing:
            self.ignored = True
            self._transport.pause_reading()

    def write(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._queue.append(piece)
            self.queued += len(piece) if isinstance(piece, bytes) else len(piece.view)
        self._flush()
        self._crowded = self._crowded or self.queued > HIGH_WATER

    def renew(self) -> None:
        """Do nothing, because a piece's address is read when it is sent."""

    def _flush(self) -> None:
        while self._queue and not self._full:
            part = self._take_part()
            self._transport.write(part)
            self.bytes_out += len(part)
            self.queued -= len(part)
        if self._closing and not self._queue:
            self._transport.close()
        elif self._crowded and self.queued <= HIGH_WATER:
            self._crowded = False
            asyncio.get_running_loop().call_soon(self._reader.drained)

    def _take_part(self) -> bytes:
        """Return the next bytes of the queue, copied: the loop may keep them longer than their owner does."""
        parts: list[bytes | memoryview] = []
        room = _PART
        while self._queue and room:
            piece = self._queue[0]
            view = memoryview(piece) if isinstance(piece, bytes) else piece.view
            part = view[self._sent : self._sent + room]
            parts.append(part)
            room -= len(part)
            self._sent += len(part)
            if self._sent == len(view):
                self._queue.popleft()
                self._sent = 0
        return b"".join(parts)

    def close(self) -> None:
        self.ignore()
        self._closing = True
        self._flush()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()
