"""Transports: the byte stream of a connection, over a plain socket or TLS.

On a plain socket, the session's parser receives the bytes, and output is sent with gathered writes, without copies. A
piece of output is kept until it is sent, so that its memory is not reused before.
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
    """Interface of the session that its transport calls."""

    def readable(self) -> None:
        """Receive from the socket, which has data, or whose peer has closed the connection."""

    def received(self, data: bytes) -> None:
        """Process received, decrypted bytes."""

    def drained(self) -> None:
        """Continue after the unsent output has fallen to HIGH_WATER bytes."""

    def lost(self) -> None:
        """Close the session after the connection has ended."""


class Transport(Protocol):
    """A connection's byte stream: a plain socket, or TLS."""

    bytes_out: int
    queued: int  # bytes that wait to be sent
    ignored: bool  # nothing is received, because of `ignore`

    def write(self, pieces: list[Piece]) -> None:
        """Queue pieces of output. They are sent in order as fast as the peer reads."""

    def renew(self) -> None:
        """Read the addresses of the output's memory again, because the memory has moved."""

    def ignore(self) -> None:
        """Stop receiving. Further bytes stay in the kernel's buffer, so the peer has to wait."""

    def attend(self) -> None:
        """Continue receiving."""

    def close(self) -> None:
        """Stop receiving, and close the connection when all output is sent."""

    def abort(self) -> None:
        """Close immediately and drop unsent output."""


class SocketTransport:
    """Transport over a plain socket, which it owns. Its methods must be called in the event loop's thread."""

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
        """Send pieces in order. Bytes that the kernel does not accept now are sent when the socket is writable."""
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
        """Watch for a writable socket while output is unsent. When all is sent, finish a close.

        Call the reader's `drained` when the unsent output has fallen to HIGH_WATER bytes.
        """
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


# -- TLS ---------------------------------------------------------------------------------------------------------------
#
# The event loop implements TLS, so received bytes pass through its buffers. Output is passed to it in parts, as long as
# its write buffer is not full.

_PART = 256 * 1024  # bytes passed to the loop at a time, and the limit of its write buffer


class TLSTransport(asyncio.Protocol):
    """Transport over TLS. `start` is called after the handshake, and returns the session that receives the bytes."""

    def __init__(self, start: Callable[[], SocketReader]) -> None:
        self._start = start
        self._queue: deque[Piece] = deque()
        self._sent = 0  # bytes of the first piece that were sent
        self._full = False  # the loop's write buffer is full
        self._closing = False
        self._crowded = False
        self.ignored = False
        self.queued = 0
        self.bytes_out = 0

    # -- the loop's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has its methods, but is no subclass
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
        """Remove the next bytes from the queue, `_PART` at most, and return a copy of them.

        A copy, because the loop may keep them after the memory is reused.
        """
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
