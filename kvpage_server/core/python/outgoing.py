"""The output queue of the Python client. It takes the next pieces from an iterator when the ones before are sent."""

from __future__ import annotations

import os
from collections.abc import Iterator

from typing_extensions import Buffer

from kvpage_server.core.python.bodies import SEND_BYTES, Chunk, Memory

PIECES = 1024  # pieces in one call: IOV_MAX
RECORD_BYTES = 64 * 1024  # bytes of output that one write with TLS gets


class Outgoing:
    """Queue of output. `pieces` yields buffers and `Chunk`s of pages."""

    def __init__(self, pieces: Iterator[Buffer | Chunk]) -> None:
        self._pieces = pieces  # output that was not taken yet
        self._next: list[memoryview] = []  # the next buffers to send
        self._sent = 0  # bytes of the first buffer that were sent
        self.done = False  # whether everything was sent
        self._fill()

    def send(self, fd: int) -> int:
        """Send as many bytes as the kernel accepts in one call.

        Return their number; -1 if the socket's buffer is full.
        """
        count, nbytes = 0, -self._sent
        while count < min(len(self._next), PIECES) and nbytes < SEND_BYTES:
            nbytes += len(self._next[count])
            count += 1
        first, *others = self._next[:count]
        try:
            sent = os.writev(fd, [first[self._sent :], *others])
        except BlockingIOError:
            return -1
        self.sent(sent)
        return sent

    def record(self) -> bytes:
        """Return up to RECORD_BYTES of the next output as one bytes object, for TLS.

        The caller calls `sent` with the number of bytes that were sent.
        """
        some, nbytes = [], -self._sent
        for piece in self._next:
            some.append(piece)
            nbytes += len(piece)
            if nbytes >= RECORD_BYTES:
                break
        some[0] = some[0][self._sent :]
        some[-1] = some[-1][: len(some[-1]) - max(0, nbytes - RECORD_BYTES)]
        return b"".join(some)

    def sent(self, count: int) -> None:
        """Remove `count` bytes, which were sent, from the queue."""
        self._sent += count
        complete = 0
        while complete < len(self._next) and self._sent >= len(self._next[complete]):
            self._sent -= len(self._next[complete])
            complete += 1
        del self._next[:complete]
        if not self._next:
            self._fill()

    def _fill(self) -> None:
        """Take about as many pieces from the iterator as one call can send. Set `done` if there are none."""
        nbytes = 0
        for piece in self._pieces:
            views = Memory(piece.pieces if isinstance(piece, Chunk) else [piece]).views()
            self._next += filter(None, views)
            nbytes += sum(map(len, views))
            if nbytes >= SEND_BYTES or len(self._next) >= PIECES:
                return
        self.done = not self._next
