"""The output queue of the Python client. It takes pieces from an iterator only when they can be sent."""

from __future__ import annotations

import os
from collections.abc import Iterator

from typing_extensions import Buffer

from kvpage_server.core.python.bodies import SEND_BYTES, Chunk, Memory

PIECES = 1024  # pieces in one call: IOV_MAX
RECORD_BYTES = 64 * 1024  # bytes that are joined for one write with TLS


class Outgoing:
    """Queue of output: buffers, and `Chunk`s of pages."""

    def __init__(self, pieces: Iterator[Buffer | Chunk]) -> None:
        self._pieces = pieces  # output that was not taken yet
        self._some: list[memoryview] = []  # the next pieces to send
        self._sent = 0  # bytes of the first piece that were sent
        self.done = False  # whether everything was sent
        self._fill()

    def send(self, fd: int) -> int:
        """Send as many bytes as the kernel accepts in one call. Return their number, -1 if the socket's buffer is
        full.
        """
        count, nbytes = 0, -self._sent
        while count < min(len(self._some), PIECES) and nbytes < SEND_BYTES:
            nbytes += len(self._some[count])
            count += 1
        first, *others = self._some[:count]
        try:
            sent = os.writev(fd, [first[self._sent :], *others])
        except BlockingIOError:
            return -1
        self.sent(sent)
        return sent

    def record(self) -> bytes:
        """Return up to RECORD_BYTES of the next output as one bytes object, for TLS. The caller calls `sent` after it
        was sent.
        """
        some, nbytes = [], -self._sent
        for piece in self._some:
            some.append(piece)
            nbytes += len(piece)
            if nbytes >= RECORD_BYTES:
                break
        some[0] = some[0][self._sent :]
        some[-1] = some[-1][: len(some[-1]) - max(0, nbytes - RECORD_BYTES)]
        return b"".join(some)

    def sent(self, count: int) -> None:
        """Remove `count` bytes that were sent."""
        self._sent += count
        gone = 0
        while gone < len(self._some) and self._sent >= len(self._some[gone]):
            self._sent -= len(self._some[gone])
            gone += 1
        del self._some[:gone]
        if not self._some:
            self._fill()

    def _fill(self) -> None:
        """Take pieces from the iterator, about as many as one call can send. Set `done` if there are none."""
        nbytes = 0
        for piece in self._pieces:
            views = Memory(piece.pieces if isinstance(piece, Chunk) else [piece]).views()
            self._some += filter(None, views)
            nbytes += sum(map(len, views))
            if nbytes >= SEND_BYTES or len(self._some) >= PIECES:
                return
        self.done = not self._some
