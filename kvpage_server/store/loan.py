"""What a reply is lent: values side by side, laid out as they are sent, in memory that is theirs for the moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvpage_server.store.arena import Arena, Part
from kvpage_server.store.cold import Cold

_END = b"\r\n"


class Loan:
    """`values` as bulk strings. `is_intact` once all of them were read.

    The memory goes back with the last reference to the loan and to what it was asked for. Raises MemoryError.
    """

    __slots__ = ("_memory", "_starts", "is_intact", "values")

    def __init__(self, arena: Arena, values: Sequence[Cold]) -> None:
        frames = [b"\r\n$%d\r\n" % value.size for value in values]  # after the end of the one before
        size = sum(map(len, frames)) + sum(value.size for value in values) + len(_END)
        self._memory = arena.allocate(size)
        self.values = list(values)
        self.is_intact = False
        view, start = self._memory.body, 0
        self._starts: list[int] = []  # of the bodies
        for frame, value in zip(frames, values, strict=True):
            view[start : start + len(frame)] = frame
            start += len(frame)
            self._starts.append(start)
            start += value.size
        view[start:] = _END

    @property
    def bodies(self) -> list[memoryview]:
        """Writable: where the bytes of each value belong."""
        view = self._memory.body
        return [view[start : start + value.size] for start, value in zip(self._starts, self.values, strict=True)]

    def part(self, values: Sequence[object]) -> Part | None:
        """Values that lie there side by side and are intact, in one piece; None when they are something else."""
        try:
            at = self.values.index(cast(Cold, values[0]))
        except ValueError:
            return None
        if not self.is_intact or self.values[at : at + len(values)] != values:
            return None
        last = at + len(values) - 1
        return self._memory.part(self._start(at), self._starts[last] + self.values[last].size + len(_END))

    def part_of(self, value: Cold) -> Part:
        """One of them, which is intact."""
        at = self.values.index(value)
        return self._memory.part(self._start(at), self._starts[at] + value.size + len(_END))

    def _start(self, at: int) -> int:
        """Where a value's frame begins."""
        return self._starts[at - 1] + self.values[at - 1].size + len(_END) if at else len(_END)
