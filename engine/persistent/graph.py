"""The syntax tree of a graph: declarations, blocks and their statements. The parser and the builder create it.

Two graphs are equal if they differ only in the positions of their nodes in the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from .errors import Place


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
