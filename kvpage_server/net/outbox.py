"""What waits to be sent: borrowed memory, piece by piece, each kept until the kernel has all of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from kvpage_server.resp.reply import Piece

AT_ONCE = 1024 * 1024  # bytes handed over: the kernel frees no memory of a socket while it copies into it
_GATHER = 512  # pieces handed over; IOV_MAX is 1024


class Outbox:
    """Pieces in their order. Costs: O(1) a piece, and no copy."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []  # the owners of the memory, which is not reused before
        self._buffers: list[bytes | memoryview] = []
        self._ends: list[int] = []  # of each, in bytes from where the first that ever waited began
        self._sent = 0  # likewise
        self._gone = 0  # so many of the first are sent, and nothing but their places is left

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        return self._ends[-1] - self._sent if self._ends else 0

    def add(self, pieces: list[Piece]) -> None:
        """Pieces that are to be sent after those that wait."""
        buffers = _views(pieces)
        ends = accumulate(map(len, buffers), initial=self._ends[-1] if self._ends else self._sent)
        next(ends)
        self._ends += ends
        self._buffers += buffers
        self._pieces += pieces

    def next(self) -> list[bytes | memoryview]:
        """What to hand over next."""
        first, ends = self._gone, self._ends
        buffers = self._buffers[first : first + _GATHER]
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
        if self._pieces:
            self._buffers = _views(self._pieces)

    def clear(self) -> None:
        """Drop what waits."""
        self.sent(self.nbytes)


def _views(pieces: list[Piece]) -> list[bytes | memoryview]:
    return [piece if isinstance(piece, bytes) else piece.view for piece in pieces]
