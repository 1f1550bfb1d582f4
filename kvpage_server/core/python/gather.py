"""What waits to be sent: borrowed memory, piece by piece, each kept until the kernel has all of it."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from kvpage_server.core.python.slots import Slot

# Bytes in one call, which frees no memory of the socket, however much the peer reads meanwhile. Found by trying: less
# costs more calls, and a megabyte a tenth to a third more time (docs/performance.md).
AT_ONCE = 768 << 10
SEND_TURN = 4 << 20  # bytes sent in one call: others wait meanwhile
MOST_PIECES = 1024  # in one call: IOV_MAX


class Lent(Protocol):
    """Memory that is not reused while the object lives."""

    @property
    def view(self) -> memoryview:
        """Where it is now."""


class Outbox:
    """Pieces in their order. Costs: O(1) a piece, and no copy of what is lent."""

    def __init__(self) -> None:
        self._pieces: list[bytes | Lent] = []  # the owners of the memory, which is not reused before
        self._buffers: list[bytes | memoryview] = []
        self._ends: list[int] = []  # of each, in bytes from where the first that ever waited began
        self._sent = 0  # likewise
        self._gone = 0  # so many of the first are sent, and nothing but their places is left

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        return self._ends[-1] - self._sent if self._ends else 0

    def add(self, pieces: Sequence[bytes | Lent]) -> None:
        """Pieces that are to be sent after those that wait: bytes, and whatever has a `view`."""
        buffers = _views(pieces)
        if not all(buffers):
            pieces = [piece for piece, buffer in zip(pieces, buffers, strict=True) if buffer]
            buffers = list(filter(None, buffers))
        ends = accumulate(map(len, buffers), initial=self._ends[-1] if self._ends else self._sent)
        next(ends)
        self._ends += ends
        self._buffers += buffers
        self._pieces += pieces

    def send(self, descriptor: int) -> int:
        """Send what waits, until the kernel takes no more or a turn is over: how many bytes. Raises OSError."""
        sent = 0
        while self.nbytes and sent < SEND_TURN:
            buffers = self.next()
            try:
                count = os.writev(descriptor, buffers)
            except BlockingIOError:
                break
            except OSError:
                if sent:
                    break  # it will be met again
                raise
            self.sent(count)
            sent += count
            if count < sum(map(len, buffers)):
                break  # it has no room for more
        return sent

    def next(self) -> list[bytes | memoryview]:
        """What to hand over next."""
        if not self._ends:
            return []
        first, ends = self._gone, self._ends
        buffers = self._buffers[first : first + MOST_PIECES]
        if begun := self._sent - (ends[first] - len(buffers[0])):
            buffers[0] = memoryview(buffers[0])[begun:]
        if self.nbytes <= AT_ONCE:
            return buffers
        last = bisect_left(ends, self._sent + AT_ONCE, first, first + len(buffers)) - first
        if last < len(buffers):
            beyond = ends[first + last] - self._sent - AT_ONCE
            buffers[last:] = [memoryview(buffers[last])[: len(buffers[last]) - beyond]]
        return buffers

    def sent(self, count: int) -> None:
        """The kernel took so many bytes."""
        if not 0 <= count <= self.nbytes:
            raise ValueError(f"{self.nbytes} bytes wait to be sent, got {count}")
        self._sent += count
        before, gone = self._gone, bisect_right(self._ends, self._sent, self._gone)
        if 2 * gone >= len(self._ends):  # no earlier: what is left moves up
            del self._pieces[:gone], self._buffers[:gone], self._ends[:gone]
            self._gone = 0
        else:
            self._pieces[before:gone] = [b""] * (gone - before)
            self._buffers[before:gone] = [b""] * (gone - before)
            self._gone = gone

    def renew(self) -> None:
        """The memory has moved: look at each piece where it is now."""
        self._buffers = _views(self._pieces)

    def clear(self) -> None:
        """Drop what waits."""
        self.sent(self.nbytes)


def _views(pieces: Sequence[bytes | Lent]) -> list[bytes | memoryview]:
    return [
        piece if isinstance(piece, bytes) else piece.borrowed if type(piece) is Slot else piece.view for piece in pieces
    ]
