"""The element types of the graph language, and the syntax tree of a graph, which the parser and the builder create.

Two graphs are equal if they differ only in the positions of their nodes in the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from kvpage_server.page import DType as PageDType

from .errors import Place

# -- Element types -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DType:
    """An element type."""

    name: str
    mlx: mx.Dtype
    range: tuple[int, int] | None = None  # of an integer type, both ends included
    page: PageDType = PageDType.UINT8  # other types are stored as bytes, as before the header had numbers for them

    @property
    def is_float(self) -> bool:
        return self.range is None and self.name != "bool"

    @property
    def itemsize(self) -> int:
        return int(self.mlx.size)

    def wrap(self, value: int) -> int:
        """Return `value` modulo the number of values of this integer type, within the range of the type."""
        assert self.range
        low, high = self.range
        return (value - low) % (high - low + 1) + low

    def literal(self, value: bool | int | float) -> bool | int | float | None:
        """Convert a literal of the graph's text to this type. Return None if the type does not permit it, or it is out
        of range.

        A literal with a point or an exponent, inf and nan are floats, other numbers integers. 0 and 1 are also bools.
        """
        if self.name == "bool":
            return bool(value) if value in (0, 1) and not isinstance(value, float) else None
        if self.range is None:
            return value if isinstance(value, float) else None
        fits = isinstance(value, int) and not isinstance(value, bool) and self.range[0] <= value <= self.range[1]
        return value if fits else None

    def full(self, shape: tuple[int, ...], value: bool | int | float | None) -> mx.array:
        """Return an array of `shape` in which every element is `value`, or zero if `value` is None."""
        if value is None:
            return mx.zeros(shape, dtype=self.mlx)
        return mx.full(shape, self.number(value), dtype=self.mlx)

    def number(self, value: bool | int | float) -> mx.array:
        """Return `value` as an array without dimensions."""
        if self.range and not -(2**31) <= value < 2**31:  # mx.array accepts such integers only from numpy
            return mx.array(np.array(value, dtype=str(self.mlx).removeprefix("mlx.core.")))
        return mx.array(value, dtype=self.mlx)


def _integer(bits: int, mlx: mx.Dtype, signed: bool, page: PageDType = PageDType.UINT8) -> DType:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return DType(f"{'i' if signed else 'u'}{bits}", mlx, (low, high), page)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("f16", mx.float16, page=PageDType.FLOAT16),
        DType("bf16", mx.bfloat16, page=PageDType.BFLOAT16),
        DType("f32", mx.float32, page=PageDType.FLOAT32),
        DType("f64", mx.float64),  # only on the CPU
        _integer(8, mx.int8, True, PageDType.INT8),
        _integer(16, mx.int16, True),
        _integer(32, mx.int32, True),
        _integer(64, mx.int64, True),
        _integer(8, mx.uint8, False),
        _integer(16, mx.uint16, False),
        _integer(32, mx.uint32, False, PageDType.UINT32),
        _integer(64, mx.uint64, False),
        DType("bool", mx.bool_),
    )
}
WORDS: dict[str, Any] = {"true": True, "false": False, "inf": math.inf, "nan": math.nan}


def named(mlx: mx.Dtype) -> str:
    """Return the graph language's name of an MLX dtype, or MLX's name if the language has none."""
    return next((dtype.name for dtype in DTYPES.values() if dtype.mlx == mlx), str(mlx).removeprefix("mlx.core."))


# -- Declarations, blocks and their statements -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Placed:
    """Base class of all nodes of a graph. `at` is the position in the graph's text, None without a text."""

    at: Place | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Name(_Placed):
    """A name in an expression: a size, a loop variable or an integer scalar."""

    text: str


@dataclass(frozen=True, slots=True)
class Arithmetic(_Placed):
    """An arithmetic expression: two integers and one of the operators ``+ - * / %``. ``/`` rounds down."""

    operator: str
    left: Expression
    right: Expression


Expression: TypeAlias = int | Name | Arithmetic


@dataclass(frozen=True, slots=True)
class Slice(_Placed):
    """The slice ``start..stop``: it includes `start` and excludes `stop`. None stands for the beginning or the end."""

    start: Expression | None
    stop: Expression | None


Index: TypeAlias = Expression | Slice


@dataclass(frozen=True, slots=True)
class Access(_Placed):
    """An access to a variable, or with `indices` to a part of it. `indices` is empty for ``K[]``, and None for
    ``K``.
    """

    name: str
    indices: tuple[Index, ...] | None = None


Value: TypeAlias = "Expression | float | str | tuple[Value, ...]"


@dataclass(frozen=True, slots=True)
class Declaration(_Placed):
    """Declaration of a variable in a section, or by `assign`, which declares a volatile variable.

    ``indices`` are the names in parentheses. Indices in ``auto_dim`` grow the tensor's dimensions, all others select a
    tensor of a table. ``fixed`` has pairs of an index and its limit. ``reference`` is the name of the model's tensor,
    with ``{index}`` in place of each index.
    """

    section: str
    name: str
    dtype: str
    dims: tuple[Expression, ...] = ()
    indices: tuple[str, ...] = ()
    table: bool = False
    auto_dim: tuple[str, ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()
    init: bool | int | float | None = None
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Assign(_Placed):
    """``assign x: f32[D]``: a variable of this step."""

    declaration: Declaration


@dataclass(frozen=True, slots=True)
class Operation(_Placed):
    """``op name(arguments, parameter=value) >> to``"""

    name: str
    arguments: tuple[Access, ...]
    parameters: tuple[tuple[str, Value], ...]
    to: str


@dataclass(frozen=True, slots=True)
class Transfer(_Placed):
    """``transfer source >> to``"""

    source: Access
    to: str


@dataclass(frozen=True, slots=True)
class Loop(_Placed):
    """``loop name (variable in start..stop) { body }``"""

    name: str
    variable: str
    start: Expression
    stop: Expression
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Branch(_Placed):
    """The statement ``branch condition then otherwise``, or ``branch then`` without a condition.

    It calls a block: when the block has returned, the step continues after the branch.
    """

    condition: str | None
    then: str
    otherwise: str | None = None


@dataclass(frozen=True, slots=True)
class Return(_Placed):
    """``return``: the end of the block."""


@dataclass(frozen=True, slots=True)
class Read(_Placed):
    """``cache.read access >> to``"""

    access: Access
    to: str


@dataclass(frozen=True, slots=True)
class Write(_Placed):
    """``cache.write source >> access``"""

    source: Access
    access: Access


@dataclass(frozen=True, slots=True)
class Increment(_Placed):
    """The statement ``cache.increment amount name``. A decrement has a negative amount."""

    name: str
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Reset(_Placed):
    """``cache.reset access``"""

    access: Access


Statement: TypeAlias = Assign | Operation | Transfer | Loop | Branch | Return | Read | Write | Increment | Reset


@dataclass(frozen=True, slots=True)
class Block(_Placed):
    """A named list of statements. A step begins in the block ``entry``."""

    name: str
    body: tuple[Statement, ...]

    def statements(self) -> Iterator[Statement]:
        """Yield all statements of the block, including the statements of its loops."""
        return (statement for statement, _ in self.levels())

    def levels(self) -> Iterator[tuple[Statement, int]]:
        """Yield all statements of the block in order, each with its level: 1, or more in a loop."""
        rest = [(statement, 1) for statement in reversed(self.body)]
        while rest:
            statement, level = rest.pop()
            yield statement, level
            if isinstance(statement, Loop):
                rest += [(inner, level + 1) for inner in reversed(statement.body)]


@dataclass(frozen=True, slots=True)
class Graph:
    """Declarations and blocks, in the order of the text."""

    declarations: tuple[Declaration, ...]
    blocks: tuple[Block, ...]
