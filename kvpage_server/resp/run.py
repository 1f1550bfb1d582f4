"""The arguments of a batch, received many at a time: some short ones and a long one, again and again.

A command of many pages has the same number of short arguments before each body, and bodies of one length. What comes of
it is received into one piece of memory, as much as the socket has, and taken apart there: a body stays where it is,
between its own length and its CRLF, so that it is a bulk string as it lies. Anything that is not like what came before
ends the run, and is left to the parser.

Costs: O(1) and no copy a body; what the run leaves is at most one group, or what is not like the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvpage_server.resp.parser import Argument, Bulk

CRLF = b"\r\n"
DECLARED = {b"$%d" % length: length for length in range(1000)}
LEAST_BEFORE = 64  # bytes of short arguments before a body's length: what a slab wants of them for itself
_HEAD = 192  # bytes that are looked at for what stands before a body; longer ones end the run


class Slab(Protocol):
    """Memory for a run."""

    view: memoryview

    def cut(self, start: int, size: int) -> Bulk:
        """The bulk whose body lies there: `LEAST_BEFORE` bytes, its length and its CRLF around it are its own, too."""

    def close(self) -> None:
        """Nothing more is cut from it."""


class BrokenRun(Exception):
    """A body without its CRLF."""


class Run:
    """Groups of `short` short arguments and a body of `length` bytes, in a slab."""

    def __init__(self, slab: Slab, short: int, length: int, begun: bytes) -> None:
        """`begun` is what has arrived of it already."""
        self._slab = slab
        self._view = slab.view
        self.short = short
        self.length = length
        self._frame = b"\r\n$%d\r\n" % length
        self._view[: len(begun)] = begun
        self._filled = len(begun)
        self._lengths: list[bytes] = []  # what the last group declared of its short arguments
        self._sizes: list[int] = []  # and what they were
        self._pos = 0  # what is before it was taken
        self.is_over = False  # what comes next is not like the others

    @property
    def room(self) -> memoryview:
        """Where the next bytes belong."""
        return self._view[self._filled :]

    @property
    def pending(self) -> int:
        """Bytes that have arrived and were not taken."""
        return self._filled - self._pos

    def received(self, count: int) -> None:
        """`count` bytes were written into the room."""
        self._filled += count

    def take(self, most: int) -> list[Argument]:
        """The arguments of up to `most` groups that have arrived whole. Raises BrokenRun."""
        view, slab, filled, pos = self._view, self._slab, self._filled, self._pos
        frame, length, short, declared = self._frame, self.length, self.short, DECLARED.get
        taken: list[Argument] = []
        while most:
            head = bytes(view[pos : min(pos + _HEAD, filled)])
            end = head.find(frame)
            if end < 0:
                self.is_over = len(head) == _HEAD or head.count(CRLF) > 2 * short  # another length is there
                break
            lines = head[:end].split(CRLF)
            lengths, words = lines[::2], lines[1::2]
            sizes = list(map(len, words))
            if lengths != self._lengths or sizes != self._sizes:
                if len(words) != short or list(map(declared, lengths)) != sizes or end + 2 < LEAST_BEFORE:
                    self.is_over = True
                    break
                self._lengths, self._sizes = lengths, sizes
            start = pos + end + len(frame)
            stop = start + length
            if stop + 2 > filled:
                break
            if view[stop : stop + 2] != CRLF:
                raise BrokenRun
            taken += words
            taken.append(slab.cut(start, length))
            pos = stop + 2
            most -= 1
        self._pos = pos
        return taken

    @property
    def is_full(self) -> bool:
        """Whether another group may not have room."""
        return self._pos + _HEAD + self.length + 2 > len(self._view)

    def leave(self) -> bytes:
        """End the run; what has arrived and was not taken."""
        self._slab.close()
        return bytes(self._view[self._pos : self._filled])
