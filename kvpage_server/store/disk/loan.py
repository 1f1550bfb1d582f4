"""Loans: values that are sent by one reply, and are not brought into memory for anybody else.

Small values are copied side by side into memory of their own, in the form in which they are sent. So many of them are
one piece of the reply. Large ones are sent from where they lie, see `mapped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add, attrgetter
from typing import Protocol, cast

from kvpage_server.core import Arena
from kvpage_server.core.piece import END, Piece, frame
from kvpage_server.store.memory.cold import Cold

_SIZE = attrgetter("size")


class Loan(Protocol):
    """Values for a reply. They last as long as the loan or a piece of it."""

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Values as bulk strings in a row; None if not all of them were lent here, side by side."""


class Copies:
    """Memory for `values` as bulk strings, to be filled.

    It is freed with the last reference to this and its pieces. Raises MemoryError.
    """

    __slots__ = ("_intact", "_memory", "_starts", "_values")

    def __init__(self, arena: Arena, values: Sequence[Cold]) -> None:
        self._values = list(values)
        self._intact: frozenset[object] = frozenset()
        sizes = [*map(_SIZE, values)]
        spelt = {size: END + frame(size) for size in set(sizes)}  # the end of the value before, and its frame
        frames = [*map(spelt.__getitem__, sizes)]
        self._starts = [*accumulate(map(add, map(len, frames), sizes), initial=0)]  # where frames start, and the end
        self._memory = arena.allocate(self._starts[-1] + len(END))
        view = self._memory.body
        for start, text in zip(self._starts, frames, strict=False):
            view[start : start + len(text)] = text
        view[-len(END) :] = END

    @property
    def bodies(self) -> list[memoryview]:
        """The memory for each value's bytes."""
        view = self._memory.body
        return [view[end - value.size : end] for value, end in zip(self._values, self._starts[1:], strict=True)]

    def filled(self, intact: Sequence[Cold]) -> None:
        """Say which of them were filled. There will be no more."""
        self._intact = frozenset(intact)

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """See `Loan`. They are one piece."""
        if values[0] not in self._intact:
            return None
        at = self._values.index(cast(Cold, values[0]))
        end = at + len(values)
        if self._values[at:end] != values or not self._intact.issuperset(values):
            return None
        return (self._memory.part(self._starts[at] + len(END), self._starts[end] + len(END)),)
