"""TLS: the certificates of the configuration, and a transport like `SocketTransport` that encrypts.

The event loop does the TLS, so what is received passes through its buffers, and what is sent is handed to it in parts
that it has taken before the next ones follow.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from kvpage_server.config import Config
from kvpage_server.net.transport import HIGH_WATER, Reader
from kvpage_server.resp.reply import Piece

_PART = 256 * 1024  # bytes handed to the loop at a time


class CertificateError(ValueError):
    """The configuration's certificates do not serve; the message says which."""


def context(config: Config) -> ssl.SSLContext:
    """What the configuration's certificates allow. Raises CertificateError."""
    if not config.tls_cert_file or not config.tls_key_file:
        raise CertificateError("tls-port needs tls-cert-file and tls-key-file")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        made.load_cert_chain(config.tls_cert_file, config.tls_key_file, lambda: config.tls_key_file_pass)
    except (OSError, ssl.SSLError) as error:
        files = f"tls-cert-file {config.tls_cert_file}, tls-key-file {config.tls_key_file}"
        raise CertificateError(f"{files}: {error.strerror or error}") from error
    if config.tls_auth_clients == "no":
        return made
    if not config.tls_ca_cert_file:
        raise CertificateError(f"tls-auth-clients {config.tls_auth_clients} needs tls-ca-cert-file")
    try:
        made.load_verify_locations(config.tls_ca_cert_file)
    except (OSError, ssl.SSLError) as error:
        raise CertificateError(f"tls-ca-cert-file {config.tls_ca_cert_file}: {error.strerror or error}") from error
    made.verify_mode = ssl.CERT_REQUIRED if config.tls_auth_clients == "yes" else ssl.CERT_OPTIONAL
    return made


class TLSTransport(asyncio.BufferedProtocol):
    """An encrypted connection, once the handshake is over: then `start` gives it the session that reads it."""

    def __init__(self, start: Callable[[], Reader]) -> None:
        self._start = start
        self._queue: deque[Piece] = deque()
        self._sent = 0  # bytes of the first piece that are gone
        self._full = False  # the loop takes no more for now
        self._closing = False
        self._crowded = False
        self.queued = 0
        self.bytes_out = 0

    # -- the loop's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is over."""
        self._transport = cast(asyncio.Transport, transport)  # which uvloop's is without saying so
        self._transport.set_write_buffer_limits(high=_PART)
        self._reader = self._start()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes belong."""
        return self._reader.buffers()[0]

    def buffer_updated(self, count: int) -> None:
        """They are there."""
        self._reader.received(count)

    def pause_writing(self) -> None:
        """The loop has enough."""
        self._full = True

    def resume_writing(self) -> None:
        """It takes more."""
        self._full = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        self._closing = True
        self._queue.clear()
        self.queued = 0
        self._reader.lost()
        del self._reader, self._start

    # -- the session's side ----------------------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be sent that nothing should be added."""
        return self.queued > HIGH_WATER

    def resume_reading(self) -> None:
        """Go on reading."""
        if not self._closing and not self._transport.is_reading():
            self._transport.resume_reading()

    def pause_reading(self) -> None:
        """Leave what comes in the kernel: the peer will feel it."""
        if not self._closing and self._transport.is_reading():
            self._transport.pause_reading()

    def write(self, pieces: Iterable[Piece]) -> None:
        """Send pieces in order."""
        for piece in pieces:
            self._queue.append(piece)
            self.queued += len(piece) if isinstance(piece, bytes) else len(piece.view)
        self._flush()
        self._crowded = self._crowded or self.crowded

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
        elif self._crowded and not self.crowded:
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
        """Read no more; close once everything is sent."""
        self.pause_reading()
        self._closing = True
        self._flush()

    def abort(self) -> None:
        """Close now; what waits to be sent is dropped."""
        self._closing = True
        self._transport.abort()
