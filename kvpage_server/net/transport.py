"""A connected stream socket, TCP or unix, that moves bytes between the kernel and their final place.

Reading fills the buffers that the session names, so a page's bytes are written once. Writing gathers borrowed pieces of
memory into one `sendmsg`. A piece is kept until it is sent, so that its memory is not reused before.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from kvpage_server.core import Outbox
from kvpage_server.lowat import PATIENCE, LowWater
from kvpage_server.resp.reply import Piece

READ_TURN = 2 * 1024 * 1024  # bytes taken from one socket before others have their turn
HIGH_WATER = 1024 * 1024  # bytes waiting to be sent above which a session stops answering
_PIECE = 256 * 1024  # bytes received with one call: the next ones come in meanwhile, and these stay in the cache
_TRICKLE = 16 * 1024  # bytes: more of what is expected is not waited for where fewer come at a time
_VAIN = 3  # rounds of the loop that it may tell in vain: to tell it to be silent, and then not, costs six calls


class Reader(Protocol):
    """What a transport needs of a session."""

    def buffers(self) -> list[memoryview]:
        """Where the next bytes belong."""

    def arriving(self, count: int) -> None:
        """So many of them are there, more are being received, and then all will have been."""

    def received(self, count: int) -> None:
        """They are there."""

    @property
    def expected(self) -> int:
        """So many bytes are to come yet of what has begun, it seems."""

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
        self._reading = False
        self._watched = False  # whether the loop tells when there is something to read
        self._told_in_vain = 0  # so many times since reading was paused
        self._writing = False
        self._closing = False
        self._over = False
        self._crowded = False
        self._mark = LowWater(sock)
        self._patience: asyncio.TimerHandle | None = None  # that more comes; None when none is expected
        self.resume_reading()

    # -- reading ---------------------------------------------------------------------------------------------------

    def resume_reading(self) -> None:
        """Go on reading."""
        if not self._closing:
            self._reading = True
            self._told_in_vain = 0
            if not self._watched:
                self._watched = True
                self._loop.add_reader(self._sock, self._readable)

    def pause_reading(self) -> None:
        """Leave what comes in the kernel: the peer will feel it. The loop is told when something does come."""
        self._reading = False

    def _ignore_reading(self) -> None:
        self._reading = False
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._sock)

    def _readable(self) -> None:
        if not self._reading:
            self._told_in_vain += 1
            if self._told_in_vain > _VAIN:
                self._ignore_reading()
            return
        taken = 0
        while taken < READ_TURN and self._reading:
            buffers = self._reader.buffers()
            try:
                count = self._receive(buffers)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.abort()
                return
            if not count:
                self.abort()
                return
            short = count < len(buffers[0])
            self._reader.received(count)
            taken += count
            if short:
                break
        if taken > _TRICKLE:
            self._expect(self._reader.expected)
        elif self._patience is not None:
            self._expect(0)

    def _receive(self, buffers: list[memoryview]) -> int:
        """Receive what is there, in pieces until a turn is over; how many bytes. Raises OSError when nothing was."""
        count = 0
        while len(buffers[0]) - count > _PIECE:
            if count >= READ_TURN:
                return count
            try:
                piece = self._sock.recv_into(buffers[0][count:], _PIECE)
            except OSError:
                if not count:
                    raise
                return count  # what it was will be met again
            count += piece
            if piece < _PIECE:
                return count
            self._reader.arriving(count)
        if count:
            buffers = [buffers[0][count:], *buffers[1:]]
        try:
            one = len(buffers) == 1
            return count + (self._sock.recv_into(buffers[0]) if one else self._sock.recvmsg_into(buffers)[0])
        except OSError:
            if not count:
                raise
            return count

    def _expect(self, count: int) -> None:
        """Have the loop tell when `count` bytes more are there, and what is there when they have not come in time."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if not self._closing:
            self._mark.expect(count)
            if self._mark.at > 1:
                self._patience = self._loop.call_later(PATIENCE, self._expect, 0)

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return self._outbox.nbytes

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be sent that nothing should be added."""
        return self.queued > HIGH_WATER

    def write(self, pieces: list[Piece]) -> None:
        """Send pieces in order, now as far as the kernel takes them, the rest when it does."""
        if self._over:
            return
        self._outbox.add(pieces)
        if not self._writing:
            self._flush()
        self._crowded = self._crowded or self.crowded

    def renew(self) -> None:
        """What waits to be sent has moved."""
        self._outbox.renew()

    def _flush(self) -> None:
        try:
            self.bytes_out += self._outbox.send(self._sock.fileno())
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
        if self._crowded and not self.crowded:
            self._crowded = False
            self._loop.call_soon(self._reader.drained)

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Read no more; close once everything is sent."""
        self._closing = True
        self._ignore_reading()
        if not self.queued:
            self.abort()

    def abort(self) -> None:
        """Close now; what waits to be sent is dropped."""
        if self._over:
            return
        self._over = self._closing = True
        self._ignore_reading()
        if self._writing:
            self._loop.remove_writer(self._sock)
        self._outbox.clear()
        self._sock.close()
        self._reader.lost()
