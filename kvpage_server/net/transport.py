"""A plain socket. What comes is received by the session's parser; what is told is gathered and sent from where it lies.

A piece is kept until it is sent, so that its memory is not used again before.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Protocol, cast

from kvpage_server.net.outbox import AT_ONCE, Outbox
from kvpage_server.resp.reply import Piece

HIGH_WATER = 1024 * 1024  # bytes waiting to be sent above which a session stops answering


class Reader(Protocol):
    """What a transport needs of a session."""

    def readable(self) -> None:
        """There is something on the socket, or its end."""

    def received(self, data: bytes) -> None:
        """This has come, encrypted."""

    def drained(self) -> None:
        """What waited to be sent is below the high-water mark again."""

    def lost(self) -> None:
        """The connection is gone, whoever ended it."""


class SocketTransport:
    """Owns the socket. Every method is to be called in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, reader: Reader) -> None:
        self._loop = loop
        self._sock = sock
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
        """Have the loop tell the session of what comes."""
        if self.ignored and not self._closing:
            self.ignored = False
            self._loop.add_reader(self._sock, self._reader.readable)

    def ignore(self) -> None:
        """Leave what comes in the kernel: the peer will feel it."""
        if not self.ignored:
            self.ignored = True
            self._loop.remove_reader(self._sock)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, pieces: list[Piece]) -> None:
        """Send pieces in order, now as far as the kernel takes them, the rest when it does."""
        if self._over:
            return
        pieces = _joined(pieces)
        sent = self._send_alone(pieces[0]) if len(pieces) == 1 and not self.queued else 0
        if sent is None:
            return
        self._outbox.add(pieces)
        self._outbox.sent(sent)
        self.queued = self._outbox.nbytes
        if not self._writing:
            self._flush()
        self._crowded = self._crowded or self.queued > HIGH_WATER

    def renew(self) -> None:
        """What waits to be sent has moved."""
        self._outbox.renew()

    def _send_alone(self, piece: Piece) -> int | None:
        """Send a piece while nothing waits, without queueing it; None when it is gone, else how much of it is."""
        buffer = piece if isinstance(piece, bytes) else piece.view
        if len(buffer) > AT_ONCE:
            return 0
        try:
            sent = self._sock.send(buffer)
        except OSError:
            return 0  # as it will be met again
        self.bytes_out += sent
        return None if sent == len(buffer) else sent

    def _flush(self) -> None:
        try:
            while self.queued:
                self._send()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.abort()
            return
        if self.queued:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._flush)
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

    def _send(self) -> None:
        """Hand the kernel what is next. Raises OSError as sendmsg does."""
        buffers = self._outbox.next()
        sent = self._sock.send(buffers[0]) if len(buffers) == 1 else self._sock.sendmsg(buffers)
        self.bytes_out += sent
        self._outbox.sent(sent)
        self.queued = self._outbox.nbytes

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Read no more; close once everything is sent."""
        self._closing = True
        self.ignore()
        if not self.queued:
            self.abort()

    def abort(self) -> None:
        """Close now; what waits to be sent is dropped."""
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


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces as one if none of them lies in the store: short replies cost less so."""
    if len(pieces) == 1:
        return pieces  # perhaps a message that others are sent, too
    try:
        return [b"".join(cast("Iterable[bytes]", pieces))]
    except TypeError:
        return pieces
