"""Reservations of space for batches that are stored in steps.

A batch is admitted once, before its first step. Space that the next parts will use counts as used for other writers
between its steps. A part releases its reservation when it uses the space; the rest is released when the batch ends or
fails, or its client disconnects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Self


class Account:
    """A limited resource. `promised` is the amount that unfinished batches have reserved."""

    __slots__ = ("promised",)

    def __init__(self) -> None:
        self.promised = 0


ReservationParts = Iterable[tuple[Account, int]]  # of a part of a batch, below 0 where it frees something


class Reservation:
    """Holds as long as its context. `parts` are in the order in which they are stored.

    Space that a part frees is not available until then.
    """

    def __init__(self, parts: Iterable[ReservationParts]) -> None:
        self._parts = deque([(account, max(size, 0)) for account, size in part] for part in parts)

    def __enter__(self) -> Self:
        for account, size in chain.from_iterable(self._parts):
            account.promised += size
        return self

    def __exit__(self, *_: object) -> None:
        while self._parts:
            self.commit()

    def commit(self) -> None:
        """Release the reservation of the next part, which is stored in the same step."""
        for account, size in self._parts.popleft() if self._parts else ():
            account.promised -= size
