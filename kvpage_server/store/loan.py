"""What a reply is lent: values that it sends and that nobody else finds in memory.

Small ones are copied side by side, as they are sent, to memory that is theirs for the moment: then one piece of a reply
has many. Large ones are sent from where they lie, see `mapped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from kvpage_server.resp.reply import Piece
from kvpage_server.store.arena import Arena
from kvpage_server.store.cold import Cold

_END = b"\r\n"


class Loan(Protocol):
    """Values for a reply. They last as long as the loan, or a piece of it, is referred to."""

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Values as bulk strings, one after the other; None when they are not all lent here side by side."""


class Copies:
    """Memory for `values` as bulk strings, to be filled.

    It goes back with the last reference to this and to the pieces of it. Raises MemoryError.
    """

    __slots__ = ("_intact", "_memory", "_starts", "_values")

    def __init__(self, arena: Arena, values: Sequence[Cold]) -> None:
        self._values = list(values)
        self._intact: frozenset[object] = frozenset()
        frames = {size: b"\r\n$%d\r\n" % size for size in {value.size for value in values}}  # after the one before
        self._starts: list[int] = []  # of the bodies
        start = 0
        for value in values:
            start += len(frames[value.size])
            self._starts.append(start)
            start += value.size
        self._memory = arena.allocate(start + len(_END))
        view = self._memory.body
        for start, value in zip(self._starts, values, strict=True):
            frame = frames[value.size]
            view[start - len(frame) : start] = frame
        view[-len(_END) :] = _END

    @property
    def bodies(self) -> list[memoryview]:
        """Writable: where the bytes of each value belong."""
        view = self._memory.body
        return [view[start : start + value.size] for start, value in zip(self._starts, self._values, strict=True)]

    def filled(self, intact: Sequence[Cold]) -> None:
        """These are there, and nothing else will be."""
        self._intact = frozenset(intact)

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """See `Loan`. They are one piece."""
        if values[0] not in self._intact:
            return None
        at = self._values.index(cast(Cold, values[0]))
        last = at + len(values) - 1
        if self._values[at : last + 1] != values or not self._intact.issuperset(values):
            return None
        return (self._memory.part(self._start(at), self._starts[last] + self._values[last].size + len(_END)),)

    def _start(self, at: int) -> int:
        """Where a value's frame begins."""
        return self._starts[at - 1] + self._values[at - 1].size + len(_END) if at else len(_END)
