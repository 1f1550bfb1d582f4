"""A connected stream socket, TCP or unix, that moves bytes between the kernel and their final place.

Reading fills the buffers that the session names, so a page's bytes are written once. Writing gathers borrowed pieces of
memory into one `sendmsg`. A piece is kept until it is sent, so that its memory is not reused before.
"""

from __future__ import annotations

import asyncio
import socket
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, islice
from typing import Protocol, cast

from kvpage_server.lowat import PATIENCE, LowWater
from kvpage_server.resp.reply import Piece
from kvpage_server.store.arena import views

READ_TURN = 2 * 1024 * 1024  # bytes taken from one socket before others have their turn
HIGH_WATER = 1024 * 1024  # bytes waiting to be sent above which a session stops answering
_AT_ONCE = 1024 * 1024  # bytes of large pieces handed over: the kernel frees no memory while it copies more
_LARGE = 128 * 1024
_TRICKLE = 16 * 1024  # bytes: more of what is expected is not waited for where fewer come at a time
_VAIN = 3  # rounds of the loop that it may tell in vain: to tell it to be silent, and then not, costs six calls
_GATHER = 512  # pieces a sendmsg; IOV_MAX is 1024


class Reader(Protocol):
    """What a transport needs of a session."""

    def buffers(self) -> list[memoryview]:
        """Where the next bytes belong."""

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
        self._queue: deque[tuple[bytes | memoryview, Piece]] = deque()  # bytes to send, and who owns their memory
        self.queued = 0  # bytes that wait
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
                one = len(buffers) == 1
                count = self._sock.recv_into(buffers[0]) if one else self._sock.recvmsg_into(buffers)[0]
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
    def crowded(self) -> bool:
        """Whether so much waits to be sent that nothing should be added."""
        return self.queued > HIGH_WATER

    def write(self, pieces: list[Piece]) -> None:
        """Send pieces in order, now as far as the kernel takes them, the rest when it does."""
        if self._over:
            return
        pieces = _joined(pieces)
        buffers: list[bytes | memoryview]
        if len(pieces) == 1:
            buffers = [piece if isinstance(piece := pieces[0], bytes) else piece.view]
        else:
            buffers = views(pieces)
        gone = 0 if self._queue else self._send_at_once(buffers)
        if gone < len(buffers):
            waiting = list(zip(buffers[gone:], pieces[gone:], strict=True))
            self._queue.extend(waiting)
            self.queued += sum(len(buffer) for buffer, _ in waiting)
            if not self._writing:
                self._flush()
            self._crowded = self._crowded or self.crowded

    def renew(self) -> None:
        """What waits to be sent has moved: what is left of each piece is the end of where it is now."""
        self._queue = deque(
            (buffer if isinstance(piece, bytes) else piece.view[-len(buffer) :], piece) for buffer, piece in self._queue
        )

    def _send_at_once(self, buffers: list[bytes | memoryview]) -> int:
        """Hand buffers to the kernel while nothing waits; how many are gone. The next one is what is left of it."""
        total = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        try:
            if len(buffers) == 1:
                sent = self._sock.send(buffers[0] if total <= _AT_ONCE else memoryview(buffers[0])[:_AT_ONCE])
            else:
                sent = self._sock.sendmsg(_gathered(buffers[:_GATHER], total))
        except OSError:
            return 0  # the queue will meet it again
        self.bytes_out += sent
        if sent == total:
            return len(buffers)
        ends = [*accumulate(map(len, buffers))]
        gone = bisect_right(ends, sent)
        buffers[gone] = memoryview(buffers[gone])[sent - ends[gone] :]
        return gone

    def _flush(self) -> None:
        try:
            while self._queue:
                self._send()
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._flush)
        except OSError:
            self.abort()
            return
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

    def _send(self) -> None:
        """Hand the kernel the first pieces and drop what it took. Raises OSError as sendmsg does."""
        queue = self._queue
        buffers = [buffer for buffer, _ in islice(queue, _GATHER)]
        sent = self._sock.sendmsg(_gathered(buffers, self.queued))
        self.bytes_out += sent
        self.queued -= sent
        if not self.queued:
            queue.clear()
            return
        while sent:
            buffer, piece = queue[0]
            if sent < len(buffer):
                queue[0] = (memoryview(buffer)[sent:], piece)
                break
            sent -= len(buffer)
            queue.popleft()

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Read no more; close once everything is sent."""
        self._closing = True
        self._ignore_reading()
        if not self._queue:
            self.abort()

    def abort(self) -> None:
        """Close now; what waits to be sent is dropped."""
        if self._over:
            return
        self._over = self._closing = True
        self._ignore_reading()
        if self._writing:
            self._loop.remove_writer(self._sock)
        self._queue.clear()
        self._sock.close()
        self._reader.lost()


def _gathered(buffers: list[bytes | memoryview], waiting: int) -> list[bytes | memoryview]:
    """What is sent at once of buffers, the first of `waiting` bytes: of large ones a megabyte."""
    if waiting <= max(_AT_ONCE, _LARGE * len(buffers)):  # a call more costs small pieces what it saves
        return buffers
    ends = list(accumulate(map(len, buffers)))
    last = bisect_left(ends, _AT_ONCE)
    if last == len(ends):
        return buffers
    stop = len(buffers[last]) - (ends[last] - _AT_ONCE)
    return [*buffers[:last], memoryview(buffers[last])[:stop]]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces as one if none of them lies in the store: short replies cost less so."""
    if len(pieces) == 1:
        return pieces  # perhaps a message that others are sent, too
    try:
        return [b"".join(cast("Iterable[bytes]", pieces))]
    except TypeError:
        return pieces
