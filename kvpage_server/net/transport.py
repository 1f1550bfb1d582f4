"""Transports: the byte stream of a connection, plain or encrypted.

On a plain socket, the session's parser receives the bytes, and output is sent with gathered writes, without copies. The
transport refers to a piece of output until it is sent, so that its memory is not reused before.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import sys
import termios
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvpage_server.core import Outbox
from kvpage_server.core.pieces import Piece, largest_value
from kvpage_server.net.tls import Encryption

HIGH_WATER = 1024 * 1024  # bytes waiting to be sent, above which a session may stop running commands


class Ends(NamedTuple):
    """Both ends of a connection: addresses as CLIENT LIST shows them, and the socket's descriptor."""

    address: str
    local_address: str
    descriptor: int


class SocketReader(Protocol):
    """The interface of a session, as its transport uses it."""

    def readable(self) -> None:
        """Receive from the plain socket: it has data, or the peer has closed the connection."""

    def received(self, data: bytes) -> None:
        """Process bytes that the transport has received and decrypted."""

    def drained(self) -> None:
        """Continue after the unsent output has fallen to HIGH_WATER bytes, or to nothing."""

    def lost(self) -> None:
        """Close the session after the connection has ended."""


class Transport(Protocol):
    """The byte stream of a connection: a plain socket, or TLS."""

    bytes_out: int  # bytes sent so far, before encryption
    queued: int  # bytes that wait to be sent
    largest: int  # bytes of the largest value of which a part waits, or has waited since `queued` was 0
    ignored: bool  # whether receiving has stopped, see `ignore`

    def write(self, pieces: list[Piece]) -> None:
        """Queue pieces of output. They are sent in order as fast as the peer reads."""

    def pass_descriptors(self, data: bytes, descriptors: Sequence[int]) -> bool:
        """Send bytes and file descriptors. Return False if the peer has not read all output, or on failure; nothing was
        sent then.

        So one connection has at most the descriptors of one call in transit. The kernel limits their number for all
        connections together.
        """

    def renew(self) -> None:
        """Read the addresses of the output's memory again, because the memory has moved."""

    def ignore(self) -> None:
        """Stop receiving. Further bytes stay in the kernel's buffer, so the peer has to wait."""

    def attend(self) -> None:
        """Continue receiving."""

    def peer_has_left(self) -> bool:
        """Return whether the peer has closed its side. Outside of Linux, only if all that it sent was received."""

    def close(self) -> None:
        """Stop receiving, and close the connection when all output is sent."""

    def abort(self) -> None:
        """Close immediately and drop unsent output."""


def _is_unread(sock: socket.socket) -> bool:
    """Return whether the peer of a unix socket has not read all bytes. Only Linux says so."""
    if sys.platform != "linux":
        return False
    unread = array("i", [0])
    fcntl.ioctl(sock, termios.TIOCOUTQ, unread)
    return unread[0] > 0


class SocketTransport:
    """Transport over a socket, which it closes at its end. Only the event loop's thread may call its methods."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        reader: SocketReader,
        encryption: Encryption | None = None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._descriptor = sock.fileno()
        self._reader = reader
        self._encryption = encryption
        self._outbox = Outbox() if encryption is None else encryption
        self.bytes_out = 0
        self.queued = self.largest = 0
        self.ignored = True
        self._writing = False
        self._closing = False
        self._is_closed = False
        self._crowded = False
        self._in_queue = False  # whether the connection waits for a turn of TLS
        if encryption is not None:
            self._join(encryption)  # bytes may have followed the handshake directly
        self.attend()

    # -- reading ---------------------------------------------------------------------------------------------------

    def attend(self) -> None:
        if self.ignored and not self._closing:
            self.ignored = False
            if self._encryption is None:
                self._loop.add_reader(self._sock, self._reader.readable)
            else:
                self._await_input(self._encryption)

    def _await_input(self, encryption: Encryption) -> None:
        """Wait for bytes of the socket, or for a turn if received bytes are left to decrypt."""
        if not encryption.has_input:
            self._loop.add_reader(self._sock, self._receive, encryption)
            return
        self._loop.remove_reader(self._sock)
        if not self._in_queue:
            self._join(encryption)

    def _join(self, encryption: Encryption) -> None:
        self._in_queue = True
        encryption.queue.join(self)

    def take_turn(self) -> None:
        """Decrypt received bytes, unless receiving has stopped since the call of `_join`, and wait for more."""
        self._in_queue = False
        if self._encryption is not None and not self.ignored:
            self._decrypt(self._encryption)
            if not self.ignored:
                self._await_input(self._encryption)

    def _receive(self, encryption: Encryption) -> None:
        """Receive encrypted bytes from the socket, which has data or was closed by the peer."""
        try:
            count = encryption.receive()
        except OSError:
            count = 0
        if count > 0:
            self._decrypt(encryption)
            if encryption.has_input and not self.ignored:
                self._await_input(encryption)
        elif not count:
            self.abort()

    def _decrypt(self, encryption: Encryption) -> None:
        """Pass decrypted bytes to the reader, and send OpenSSL's own answers, such as confirmations of new keys."""
        if self._is_closed:
            return
        data, ended = encryption.decrypt()
        if data:
            self._reader.received(data)
        if ended or encryption.is_flooded:
            self.abort()
        elif encryption.nbytes:
            self.write([])

    def ignore(self) -> None:
        if not self.ignored:
            self.ignored = True
            self._loop.remove_reader(self._sock)

    def peer_has_left(self) -> bool:
        if sys.platform == "linux":
            poll = select.poll()
            poll.register(self._descriptor, select.POLLRDHUP)
            return bool(poll.poll(0))
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, pieces: list[Piece]) -> None:
        """Send pieces in order. Bytes that the kernel does not accept yet are sent when the socket is writable."""
        if self._is_closed:
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
        if self.queued:
            outbox.copy_parts()
        if self.queued or self._closing:
            self.largest = max(self.largest, largest_value(pieces))
            self._settle()
            self._crowded = self._crowded or self.queued > HIGH_WATER

    def pass_descriptors(self, data: bytes, descriptors: Sequence[int]) -> bool:
        if self.queued or self._is_closed or self._encryption is not None or _is_unread(self._sock):
            return False
        try:
            sent = socket.send_fds(self._sock, [data], descriptors)
        except OSError:  # also if the client has not received too many descriptors yet
            return False
        self.bytes_out += sent
        self.write([data[sent:]])
        return True

    def renew(self) -> None:
        self._outbox.renew()

    def _advance(self) -> None:
        """Send more output, because the socket is writable."""
        try:
            self.bytes_out += self._outbox.send(self._descriptor)
        except OSError:
            self.abort()
            return
        self.queued = self._outbox.nbytes
        self._settle()

    def _settle(self) -> None:
        """Watch the socket until it is writable, if output is unsent. Otherwise complete a close, if there was one.

        Call the reader's `drained` if the unsent output has fallen from above HIGH_WATER to at most HIGH_WATER bytes,
        or if the last of it was sent now.
        """
        drained = self._crowded and self.queued <= HIGH_WATER
        if self.queued:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._advance)
        else:
            self.largest = 0
            if self._writing:
                self._writing = False
                self._loop.remove_writer(self._sock)
                drained = True
            if self._closing:
                self.abort()
                return
        if drained:
            self._crowded = False
            self._loop.call_soon(self._reader.drained)

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closing = True
        self.ignore()
        if not self.queued:
            self.abort()

    def abort(self) -> None:
        if self._is_closed:
            return
        self._is_closed = self._closing = True
        self.ignore()
        if self._writing:
            self._loop.remove_writer(self._sock)
        self._outbox.clear()
        self.queued = 0
        self._sock.close()
        self._reader.lost()
