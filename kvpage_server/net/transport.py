"""A plain socket. What comes is received by the session's parser; what is told is gathered and sent from where it lies.

A piece is kept until it is sent, so that its memory is not used again before.
"""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple, Protocol

from kvpage_server.core import Outbox
from kvpage_server.core.piece import Piece

HIGH_WATER = 1024 * 1024  # bytes waiting to be sent above which a session stops answering


class Ends(NamedTuple):
    """Both ends of a connection: addresses as CLIENT LIST shows them, and the socket's descriptor."""

    address: str
    local_address: str
    descriptor: int


class SocketReader(Protocol):
    """What a transport needs of a session."""

    def readable(self) -> None:
        """There is something on the socket, or its end."""

    def received(self, data: bytes) -> None:
        """This has come; it is decrypted."""

    def drained(self) -> None:
        """What waited to be sent is below the high-water mark again."""

    def lost(self) -> None:
        """The connection is gone, whoever ended it."""


class Transport(Protocol):
    """What moves the bytes: a socket as it is, or with TLS."""

    bytes_out: int
    queued: int  # bytes that wait to be sent
    ignored: bool  # since `ignore`

    def write(self, pieces: list[Piece]) -> None:
        """Send pieces in order, when the peer takes them."""

    def renew(self) -> None:
        """What waits to be sent may have moved in memory: send it from where it is now."""

    def ignore(self) -> None:
        """Tell of nothing that comes: it stays in the kernel, so the peer is slowed down."""

    def attend(self) -> None:
        """Tell of what comes again."""

    def close(self) -> None:
        """Read no more; close once everything is sent."""

    def abort(self) -> None:
        """Close now; what waits to be sent is dropped."""


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

    def _go_on(self) -> None:
        """The kernel takes more."""
        try:
            self.bytes_out += self._outbox.send(self._descriptor)
        except OSError:
            self.abort()
            return
        self.queued = self._outbox.nbytes
        self._settle()

    def _settle(self) -> None:
        """Have the loop tell when the kernel takes more, as long as something waits to be sent."""
        if self.queued:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._go_on)
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
