"""The entries along a table's last index, side by side in one array.

A lane's array has room for more entries than it holds, and doubles when it is full, so n appends cost O(n). A slice of
it is a view. MLX updates an array in place when nobody else refers to it: that is the case when a step writes an entry
and then reads slices, whose views are dropped when the next step begins. Where a view of an array is still held when an
entry is written, MLX copies the array once, and the view keeps what it has shown.
"""

from __future__ import annotations

import math
import os

import mlx.core as mx

from engine.persistent.dtypes import DType
from engine.persistent.errors import GrowthError
from engine.persistent.state.journal import Journal

Literal = bool | int | float | None
MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Lane:
    """Entries of one shape, some of them written."""

    def __init__(self, dtype: DType, shape: tuple[int, ...], init: Literal, journal: Journal) -> None:
        self._dtype = dtype
        self._shape = shape
        self._init = init
        self._journal = journal
        self._array = self._fill(0)  # [capacity, *shape]; what was not written is init
        self._written = bytearray()  # a byte an entry, as many as the array has room for
        self._changed_in = -1  # the journal's step

    def written(self, index: int) -> bool:
        return index < len(self._written) and bool(self._written[index])

    def indices(self) -> list[int]:
        """The indices of the written entries."""
        return [index for index, written in enumerate(self._written) if written]

    def entry(self, index: int) -> mx.array:
        """One entry, as an array of its own."""
        if not self.written(index):
            return self._dtype.full(self._shape, self._init)
        return self._array[index] if self._changed_in == self._journal.step else self._copy(index)

    def slice(self, start: int, stop: int) -> mx.array:
        """``[stop - start, *shape]``, a view where the array reaches so far."""
        room = len(self._written)
        if stop <= room:
            return self._array[start:stop]
        if start >= room:
            return self._fill(stop - start)
        return mx.concatenate([self._array[start:], self._fill(stop - room)])

    def put(self, index: int, value: mx.array) -> None:
        self._reserve(index + 1)
        journal = self._journal
        if journal.first((self, index)):
            before = self._copy(index) if self.written(index) else None
            journal.record(lambda: self._restore(index, before))
        self._changed_in = journal.step
        self._set(index, value)
        self._written[index] = 1
        journal.pending(self, lambda: self._array)

    def clear(self, index: int) -> None:
        if self.written(index):
            self.put(index, self._dtype.full(self._shape, self._init))
            self._written[index] = 0

    def load(self, start: int, values: mx.array) -> None:
        """Load entries from a store, ``[n, *shape]``, into a new lane."""
        self._reserve(start + len(values))
        self._array[start : start + len(values)] = values
        self._written[start : start + len(values)] = b"\1" * len(values)

    def _fill(self, count: int) -> mx.array:
        return self._dtype.full((count, *self._shape), self._init)

    def _copy(self, index: int) -> mx.array:
        """An entry that does not share the array's memory, computed now, so that the array can change in place."""
        copy = self._array[index]  # a gather, which copies
        mx.eval(copy)
        return copy

    def _set(self, index: int, value: mx.array) -> None:
        self._array[index : index + 1] = mx.expand_dims(value, 0)

    def _restore(self, index: int, before: mx.array | None) -> None:
        self._set(index, self._dtype.full(self._shape, self._init) if before is None else before)
        self._written[index] = before is not None

    def _reserve(self, count: int) -> None:
        room = len(self._written)
        if count > room:
            more = max(count, 2 * room) - room
            if (nbytes := (room + more) * math.prod(self._shape) * self._dtype.itemsize) > MEMORY_BYTES:
                raise GrowthError(f"{count} entries would take {nbytes} bytes, this machine has {MEMORY_BYTES}")
            self._array = mx.concatenate([self._array, self._fill(more)])
            self._written.extend(bytes(more))
