"""How a step that fails is taken back: every change to persistent memory says how it is undone."""

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
        """What was changed is here to stay; a new step begins."""
        self.step += 1
        self._undo.clear()
        self._seen.clear()
        self._pending.clear()

    def record(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the step fails, after those that are recorded later."""
        self._undo.append(undo)

    def first(self, what: Hashable) -> bool:
        """Whether `what` has not been changed in this step before."""
        if what in self._seen:
            return False
        self._seen.add(what)
        return True

    def pending(self, what: Hashable, array: Callable[[], mx.array | None]) -> None:
        """What `array` gives is to be computed when the step ends."""
        self._pending[what] = array

    def arrays(self) -> list[mx.array]:
        """What is to be computed when the step ends."""
        return [found for array in self._pending.values() if (found := array()) is not None]

    def rollback(self) -> None:
        """Undo the step."""
        for undo in reversed(self._undo):
            undo()
        arrays = self.arrays()
        self.begin()
        mx.eval(arrays)
