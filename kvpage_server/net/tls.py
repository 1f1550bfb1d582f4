"""A transport like `SocketTransport` that encrypts.

The event loop does the TLS, so what is received passes through its buffers, and what is sent is handed to it in parts
that it has taken before the next ones follow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from kvpage_server.core.piece import Piece
from kvpage_server.net.transport import HIGH_WATER, SocketReader

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
        """Nothing is to be done: where a piece is, is looked up when it is sent."""

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
        """The next bytes of the queue, copied: the loop may keep them longer than their owner does."""
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
