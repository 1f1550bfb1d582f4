"""A graph as data: declarations, blocks and their statements. The parser and the builder make graphs.

The comparison of two graphs ignores the positions in their texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from .errors import Place


@dataclass(frozen=True, slots=True)
class _Placed:
    """Base of all nodes. `at` is the position in the text, None without a text."""

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
    """``start..stop``, with `start` and without `stop`. None is the beginning or the end."""

    start: Expression | None
    stop: Expression | None


Index: TypeAlias = Expression | Slice


@dataclass(frozen=True, slots=True)
class Access(_Placed):
    """A variable or, with `indices`, a part of it. `indices` is empty for ``K[]``, and None for ``K``."""

    name: str
    indices: tuple[Index, ...] | None = None


Value: TypeAlias = "Expression | float | str | tuple[Value, ...]"


@dataclass(frozen=True, slots=True)
class Declaration(_Placed):
    """A variable of a section, or one that `assign` declares, which is volatile.

    ``indices`` are the names in parentheses. Indices in ``auto_dim`` grow the tensor's own dimensions, the others
    belong to a table. ``reference`` is the name of the model's tensor, with ``{index}`` in place of each index.
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
    """``branch condition then otherwise``, or ``branch then``. When that block returns, the step continues after the
    branch."""

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
    """Statements with a name. A step begins in the block ``entry``."""

    name: str
    body: tuple[Statement, ...]

    def statements(self) -> Iterator[Statement]:
        """Yield all statements, also the statements within loops."""
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
