"""Reservations of space for batches that are stored in steps.

A batch is admitted once, before its first step. Between its steps, other writers count the space that its next parts
will use as used. A part releases its reservation when it uses the space. Reservations of parts that are not stored are
released when the batch ends or fails, or its client disconnects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Self


class Account:
    """A limited resource, in bytes or another unit. `reserved` is the amount that unfinished batches have reserved."""

    __slots__ = ("reserved",)

    def __init__(self) -> None:
        self.reserved = 0


ReservationParts = Iterable[tuple[Account, int]]  # amounts for one part of a batch; negative if the part frees some


class Reservation:
    """Context manager that reserves space for the parts of a batch, in the order in which they are stored.

    Space that a part frees is not available until the part is stored, so negative amounts are not reserved.
    """

    def __init__(self, parts: Iterable[ReservationParts]) -> None:
        self._parts = deque([(account, max(size, 0)) for account, size in part] for part in parts)

    def __enter__(self) -> Self:
        for account, size in chain.from_iterable(self._parts):
            account.reserved += size
        return self

    def __exit__(self, *_: object) -> None:
        while self._parts:
            self.commit()

    def commit(self) -> None:
        """Release the reservation of the next part, which is stored in the same step."""
        for account, size in self._parts.popleft() if self._parts else ():
            account.reserved -= size
