"""The room that a batch was promised which is stored in steps.

A batch is admitted once, before its first step. To others that come between its steps, the room that its next parts
will take is used up. A part gives its room back in the moment in which it takes it; what is left, when the batch ends,
breaks off, or its client goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Self


class Account:
    """Something of which there is so much. `promised` is what batches under way will take of it."""

    __slots__ = ("promised",)

    def __init__(self) -> None:
        self.promised = 0


Takings = Iterable[tuple[Account, int]]  # of a part of a batch, below 0 where it frees something


class Promise:
    """Holds as long as its context. `parts` are in the order in which they are stored.

    What a part frees is nobody's until then.
    """

    def __init__(self, parts: Iterable[Takings]) -> None:
        self._parts = deque([(account, max(size, 0)) for account, size in part] for part in parts)

    def __enter__(self) -> Self:
        for account, size in chain.from_iterable(self._parts):
            account.promised += size
        return self

    def __exit__(self, *_: object) -> None:
        while self._parts:
            self.keep()

    def keep(self) -> None:
        """The next part is about to be stored, in the same step."""
        for account, size in self._parts.popleft() if self._parts else ():
            account.promised -= size
