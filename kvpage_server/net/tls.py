"""TLS of connections: bounded handshakes, and encryption between a socket and its transport.

OpenSSL works on two memory buffers (`ssl.MemoryBIO`): this module writes received bytes to one, and sends the bytes
that it reads from the other. So it can limit the bytes of a handshake, and a connection has no buffers of the event
loop.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvpage_server.core.pieces import Piece, copied_parts
from kvpage_server.net.run_queue import RunQueue

HANDSHAKE_BYTES = 256 * 1024  # memory of a handshake at most: OpenSSL reserves 175 KB for the longest message
MOST_INPUT = 32 * 1024  # bytes that a peer may send before its handshake is complete; certificates take a few KB
_MOST_SECONDS = 10.0  # seconds that a handshake may take
_PART = 64 * 1024  # bytes that one call of OpenSSL or the kernel receives or encrypts
_RECORD = 16 * 1024  # bytes of a TLS record at most
_RECORDS = 64  # records that are decrypted in a turn; `_PART` has thousands if each has one byte, or renews a key
_HEADER = 5  # bytes of a record's header, of which the last two are the length of the rest
_PARTS = 16  # parts that are encrypted and sent before other connections have their turn
_NOTHING = memoryview(b"")


class Encryption:
    """TLS on the server's side of a socket. It has the methods of an `Outbox` for the output.

    All connections wait in `queue` for turns of long work: a step of a handshake takes a millisecond, or longer with a
    long RSA key, and a record of one byte takes as long as one of kilobytes. So strangers delay no client by much more
    than the queue's `ROUND`.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, queue: RunQueue) -> None:
        self.sock = sock
        self.queue = queue
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._received = _NOTHING  # received bytes that OpenSSL has not got yet
        self._expected = 0  # bytes from there to the next header of a record
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._encrypted = _NOTHING  # bytes of `_outgoing` that the kernel has not accepted yet
        self._queue: deque[Piece] = deque()  # output that is not encrypted yet
        self._plain = 0  # bytes of the output in the queue
        self._taken = 0  # bytes of the queue's first piece that were encrypted already

    def receive(self, most: int = _PART) -> int:
        """Receive at most `most` encrypted bytes, if all earlier ones are decrypted. Return their number: 0 at the end
        of the connection, -1 if none has arrived.

        Raises OSError.
        """
        try:
            data = self.sock.recv(most)
        except BlockingIOError:
            return -1
        self._received = memoryview(bytes(self._received) + data if self._received else data)
        return len(data)

    def _feed(self) -> None:
        """Pass the next _RECORDS records to OpenSSL, which processes all that it gets in one call."""
        data, end = self._received, self._expected
        for _ in range(_RECORDS):
            if end + _HEADER > len(data):
                break
            end += _HEADER + int.from_bytes(data[end + 3 : end + _HEADER], "big")
        self._incoming.write(data[:end])
        left = data[end:]
        self._received = left if len(left) >= _HEADER else memoryview(bytes(left))  # without the memory of `data`
        self._expected = max(end - len(data), 0)

    def shake_hands(self) -> bool:
        """Continue the handshake with the received bytes. Return whether it is complete. Raises ssl.SSLError."""
        while True:
            self._feed()
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                if not self.has_input:
                    return False
            else:
                return True

    @property
    def has_input(self) -> bool:
        """Whether received bytes are not decrypted yet."""
        return bool(self._incoming.pending or self._tls.pending()) or len(self._received) >= _HEADER

    def decrypt(self) -> tuple[bytes, bool]:
        """Decrypt received bytes, about _RECORDS records at most.

        Return them, and whether the peer has ended the connection or violated the protocol.
        """
        parts: list[bytes] = []
        if not self._incoming.pending:
            self._feed()
        try:
            while part := self._tls.read(_RECORD):
                parts.append(part)
                if not (self._incoming.pending or self._tls.pending()):
                    return b"".join(parts), False
        except ssl.SSLWantReadError:
            return b"".join(parts), False
        except ssl.SSLError:
            pass  # the peer gets an alert from `clear`
        return b"".join(parts), True

    # -- output ----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes that wait to be sent, encrypted and not encrypted."""
        return self._plain + self._waiting

    @property
    def _waiting(self) -> int:
        return len(self._encrypted) + self._outgoing.pending

    @property
    def is_flooded(self) -> bool:
        """Whether OpenSSL has too many answers of its own to send, because the peer renews keys but reads nothing."""
        return self._outgoing.pending > _PART

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in copied_parts(pieces):
            if size := len(piece) if isinstance(piece, bytes) else len(piece.view):
                self._queue.append(piece)
                self._plain += size

    def copy_parts(self) -> None:
        """Do nothing, because `add` has copied small parts of large values."""

    def renew(self) -> None:
        """Do nothing, because a piece's address is read when it is encrypted."""

    def send(self, _descriptor: int = -1) -> int:
        """Encrypt and send output, as much as the kernel accepts. Return the number of bytes before encryption.

        Raises OSError.
        """
        before = self._plain
        for _ in range(_PARTS):
            if not self._waiting:
                if not self._queue:
                    break
                self._tls.write(self._take_part())
            if not self._send_encrypted():
                break
        return before - self._plain

    def _send_encrypted(self) -> bool:
        """Send encrypted bytes. Return whether the kernel has accepted all of them."""
        self._encrypted = self._encrypted or memoryview(self._outgoing.read())
        try:
            sent = self.sock.send(self._encrypted)
        except BlockingIOError:
            return False
        # An empty view would keep the memory of the sent bytes.
        self._encrypted = self._encrypted[sent:] if sent < len(self._encrypted) else _NOTHING
        return not self._waiting

    def _take_part(self) -> bytes | memoryview:
        """Remove the next bytes from the queue, at most `_PART`, and return them."""
        parts: list[bytes | memoryview] = []
        room = _PART
        while self._queue and room:
            piece = self._queue[0]
            view = memoryview(piece) if isinstance(piece, bytes) else piece.view
            part = view[self._taken : self._taken + room]
            parts.append(part)
            room -= len(part)
            self._taken += len(part)
            if self._taken == len(view):
                self._queue.popleft()
                self._taken = 0
        self._plain -= _PART - room
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def clear(self) -> None:
        """Drop unsent output. Send the peer an alert, or the end of the encrypted stream, if the kernel accepts it."""
        self._queue.clear()
        self._plain = 0
        if not self._encrypted:
            with suppress(OSError):  # ssl.SSLError is an OSError; it says that the peer has not ended its stream
                self._tls.unwrap()
            with suppress(OSError):
                self._send_encrypted()


class Handshake:
    """Handshake of a connection, with limits of its time and its bytes. At its end it calls `done(self, error)` once.

    The error is empty after a complete handshake.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        encryption: Encryption,
        address: str,
        done: Callable[[Handshake, str], None],
    ) -> None:
        self.encryption = encryption
        self.address = address
        self.began = loop.time()
        self._loop = loop
        self._sock = encryption.sock
        self._done = done
        self._received = 0  # bytes received so far
        self._has_ended = False
        self._timer = loop.call_later(_MOST_SECONDS, self.end, f"no handshake within {_MOST_SECONDS:.0f} s")
        loop.add_reader(self._sock, self._readable)

    def _readable(self) -> None:
        """Wait for a turn, because the peer has sent bytes or has disconnected."""
        self._loop.remove_reader(self._sock)
        self.encryption.queue.join(self)

    def take_turn(self) -> None:
        """Receive a part of the handshake, continue it, and send the server's part.

        End it if it is complete or fails.
        """
        if self._has_ended:
            return
        self._loop.add_reader(self._sock, self._readable)
        try:
            count = self.encryption.receive(MOST_INPUT - self._received)
            if count < 0:
                return
            self._received += count
            complete = self.encryption.shake_hands()
            self._send()
        except OSError as error:  # ssl.SSLError is one
            self.end(str(error))
            return
        if complete:
            self.end("")
        elif not count:
            self.end("the peer has disconnected")
        elif self._received >= MOST_INPUT:
            self.end(f"more than {MOST_INPUT} bytes before the end of the handshake")

    def _send(self) -> None:
        """Send the server's part as far as the kernel accepts it. Raises OSError."""
        self.encryption.send()
        if self.encryption.nbytes:
            self._loop.add_writer(self._sock, self._send_rest)
        else:
            self._loop.remove_writer(self._sock)

    def _send_rest(self) -> None:
        try:
            self._send()
        except OSError as error:
            self.end(str(error))

    def end(self, error: str) -> None:
        """End the handshake, and call `done`. With an error, the peer gets OpenSSL's alert, if there is one."""
        self._has_ended = True
        self._timer.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        if error:
            self.encryption.clear()
        self._done(self, error)
