"""All persistent memory of one instance: its scalars, its tensors and its tables."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from engine.persistent.errors import ShapeError
from engine.persistent.state.journal import Journal
from engine.persistent.state.table import Layout, Table


class Scalar:
    """One number. Integers and bools live on the host, where they are counted with and used as indices."""

    def __init__(self, layout: Layout, journal: Journal) -> None:
        self.layout = layout
        self._journal = journal
        self._value: mx.array | int = self._initial()

    def read(self) -> mx.array:
        """The number, an array without dimensions."""
        return self._value if isinstance(self._value, mx.array) else self.layout.dtype.number(self._value)

    def index(self) -> int:
        assert isinstance(self._value, int)
        return self._value

    def write(self, value: mx.array) -> None:
        """The value has its dtype. Raises ShapeError for one with dimensions."""
        if value.shape:
            raise ShapeError(f"{self.layout.name} is a scalar, got the shape {list(value.shape)}")
        self._set(value if self.layout.dtype.is_float else value.item())  # type: ignore[arg-type]

    def increment(self, amount: int) -> None:
        """Add; integers wrap."""
        dtype = self.layout.dtype
        if isinstance(self._value, mx.array):
            self._set(self._value + mx.array(float(amount), dtype=dtype.mlx))
        else:
            self._set(dtype.wrap(self._value + amount))

    def reset(self) -> None:
        """Set it to the value of @init, or to zero."""
        self._set(self._initial())

    def load(self, value: mx.array | int) -> None:
        """Take the number from a store."""
        self._value = value

    def _initial(self) -> mx.array | int:
        if self.layout.dtype.is_float:
            return self.layout.dtype.full((), self.layout.init)
        return self.layout.init or 0  # type: ignore[return-value]

    def _set(self, value: mx.array | int) -> None:
        before = self._value
        self._journal.record(lambda: self.load(before))
        self._value = value
        if isinstance(value, mx.array):
            self._journal.pending(self, lambda: self._value if isinstance(self._value, mx.array) else None)


class Memory:
    """Scalars and tables by name. What is done to them between `begin` and `rollback` is undone."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.journal = Journal()
        self.scalars: dict[str, Scalar] = {}
        self.tables: dict[str, Table] = {}
        for layout in layouts:
            if layout.is_scalar:
                self.scalars[layout.name] = Scalar(layout, self.journal)
            else:
                self.tables[layout.name] = Table(layout, self.journal)

    def read(self, name: str) -> mx.array:
        """The whole variable."""
        return self.scalars[name].read() if name in self.scalars else self.tables[name].read(())
