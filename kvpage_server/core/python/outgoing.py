"""Output pieces of a client, taken from an iterator when they can be sent."""

from __future__ import annotations

import os
from collections.abc import Iterator

from typing_extensions import Buffer

from kvpage_server.core.python.bodies import SEND_BYTES, Chunk, Memory

PIECES = 1024  # in one call: IOV_MAX
RECORD_BYTES = 64 * 1024  # bytes that are joined for TLS


class Outgoing:
    """`done` once everything was sent."""

    def __init__(self, pieces: Iterator[Buffer | Chunk]) -> None:
        self._pieces = pieces
        self._some: list[memoryview] = []  # that are next, `_sent` bytes of the first are sent
        self._sent = 0
        self.done = False
        self._fill()

    def send(self, fd: int) -> int:
        """Send the bytes that the kernel takes in one call; return their number, -1 if it takes none now."""
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
        """Return the next output as one bytes object."""
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
        """So many bytes of it were sent."""
        self._sent += count
        gone = 0
        while gone < len(self._some) and self._sent >= len(self._some[gone]):
            self._sent -= len(self._some[gone])
            gone += 1
        del self._some[:gone]
        if not self._some:
            self._fill()

    def _fill(self) -> None:
        """Take the next pieces, as many as one call can send."""
        nbytes = 0
        for piece in self._pieces:
            views = Memory(piece.pieces if isinstance(piece, Chunk) else [piece]).views()
            self._some += filter(None, views)
            nbytes += sum(map(len, views))
            if nbytes >= SEND_BYTES or len(self._some) >= PIECES:
                return
        self.done = not self._some
