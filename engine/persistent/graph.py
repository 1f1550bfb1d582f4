"""A graph as data: declarations, blocks and the statements in them. The parser and the builder both make these.

Two graphs are equal when they mean the same; where in a text something stands is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from .errors import Place


@dataclass(frozen=True, slots=True)
class _Placed:
    """`at` is its place in the text, if there is one."""

    at: Place | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Name(_Placed):
    """A name in an expression: a size, a loop variable or an integer scalar."""

    text: str


@dataclass(frozen=True, slots=True)
class Arithmetic(_Placed):
    """Two integers and one of ``+ - * / %``; ``/`` rounds down."""

    operator: str
    left: Expression
    right: Expression


Expression: TypeAlias = int | Name | Arithmetic


@dataclass(frozen=True, slots=True)
class Slice(_Placed):
    """``start..stop``: `start` included, `stop` not; None for the ends."""

    start: Expression | None
    stop: Expression | None


Index: TypeAlias = Expression | Slice


@dataclass(frozen=True, slots=True)
class Access(_Placed):
    """A variable, or with `indices` some of it. ``K[]`` has indices, none of them; ``K`` has None."""

    name: str
    indices: tuple[Index, ...] | None = None


Value: TypeAlias = "Expression | float | str | tuple[Value, ...]"


@dataclass(frozen=True, slots=True)
class Declaration(_Placed):
    """A variable of a section, or one that `assign` declares, which is volatile.

    ``indices`` are the names in parentheses; those in ``auto_dim`` grow the tensor's own dimensions, the others are a
    table's. ``reference`` is the name of the model's tensor, with ``{index}`` where there are indices.
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
    """``branch condition then otherwise``, or ``branch then``. When that block returns, it goes on after this."""

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
    """``cache.increment amount name``; a decrement is an increment by less than 0."""

    name: str
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Reset(_Placed):
    """``cache.reset access``"""

    access: Access


Statement: TypeAlias = Assign | Operation | Transfer | Loop | Branch | Return | Read | Write | Increment | Reset


@dataclass(frozen=True, slots=True)
class Block(_Placed):
    """Statements with a name; ``entry`` is where a step begins."""

    name: str
    body: tuple[Statement, ...]

    def statements(self) -> Iterator[Statement]:
        """Yield all statements, including those within loops."""
        yield from _flat(self.body)


def _flat(body: tuple[Statement, ...]) -> Iterator[Statement]:
    for statement in body:
        yield statement
        if isinstance(statement, Loop):
            yield from _flat(statement.body)


@dataclass(frozen=True, slots=True)
class Graph:
    """Declarations and blocks, in the order of the text."""

    declarations: tuple[Declaration, ...]
    blocks: tuple[Block, ...]
