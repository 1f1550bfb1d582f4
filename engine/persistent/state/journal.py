"""The undo log of a step: every change to persistent memory records how to undo it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import mlx.core as mx


class Journal:
    """The changes of one step."""

    def __init__(self) -> None:
        self.step = 0
        self._undo: list[Callable[[], None]] = []
        self._seen: set[Hashable] = set()
        self._pending: dict[Hashable, Callable[[], mx.array | None]] = {}

    def begin(self) -> None:
        """Keep all changes, and begin a new step."""
        self.step += 1
        self._undo.clear()
        self._seen.clear()
        self._pending.clear()

    def record(self, undo: Callable[[], None]) -> None:
        """Call `undo` if the step fails. Later ones are called first."""
        self._undo.append(undo)

    def first(self, what: Hashable) -> bool:
        """Whether this is the first change of `what` in this step."""
        if what in self._seen:
            return False
        self._seen.add(what)
        return True

    def pending(self, what: Hashable, array: Callable[[], mx.array | None]) -> None:
        """Compute the array that `array` returns when the step ends."""
        self._pending[what] = array

    def arrays(self) -> list[mx.array]:
        """The arrays to be computed when the step ends."""
        return [found for array in self._pending.values() if (found := array()) is not None]

    def rollback(self) -> None:
        for undo in reversed(self._undo):
            undo()
        arrays = self.arrays()
        self.begin()
        mx.eval(arrays)
