"""A graph as data: declarations, blocks and the statements in them. The parser and the builder both make these.

Two graphs are equal when they mean the same; where in a text something stands is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.persistent.errors import Place

SECTIONS = ("dynamic", "volatile", "constant", "persistent")


@dataclass(frozen=True, slots=True)
class Name:
    """A name in an expression: a size, a loop variable or an integer scalar."""

    text: str
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Two integers and one of ``+ - * / %``; ``/`` rounds down."""

    operator: str
    left: Expression
    right: Expression
    at: Place | None = field(default=None, compare=False, repr=False)


Expression: TypeAlias = int | Name | Arithmetic


@dataclass(frozen=True, slots=True)
class Slice:
    """``start..stop``: `start` included, `stop` not; None for the ends."""

    start: Expression | None
    stop: Expression | None
    at: Place | None = field(default=None, compare=False, repr=False)


Index: TypeAlias = Expression | Slice


@dataclass(frozen=True, slots=True)
class Access:
    """A variable, or with `indices` some of it. ``K[]`` has indices, none of them; ``K`` has None."""

    name: str
    indices: tuple[Index, ...] | None = None
    at: Place | None = field(default=None, compare=False, repr=False)


Value: TypeAlias = "Expression | float | str | tuple[Value, ...]"


@dataclass(frozen=True, slots=True)
class Declaration:
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
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Assign:
    """``assign x: f32[D]``: a variable of this step."""

    declaration: Declaration
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """``op name(arguments, parameter=value) >> to``"""

    name: str
    arguments: tuple[Access, ...]
    parameters: tuple[tuple[str, Value], ...]
    to: str
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Transfer:
    """``transfer source >> to``"""

    source: Access
    to: str
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Loop:
    """``loop name (variable in start..stop) { body }``"""

    name: str
    variable: str
    start: Expression
    stop: Expression
    body: tuple[Statement, ...]
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Branch:
    """``branch condition then otherwise``, or ``branch then``. When that block returns, it goes on after this."""

    condition: str | None
    then: str
    otherwise: str | None = None
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Return:
    """``return``: the end of the block."""

    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Read:
    """``cache.read access >> to``"""

    access: Access
    to: str
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Write:
    """``cache.write source >> access``"""

    source: Access
    access: Access
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Increment:
    """``cache.increment amount name``; a decrement is an increment by less than 0."""

    name: str
    amount: int = 1
    at: Place | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Reset:
    """``cache.reset access``"""

    access: Access
    at: Place | None = field(default=None, compare=False, repr=False)


Statement: TypeAlias = Assign | Operation | Transfer | Loop | Branch | Return | Read | Write | Increment | Reset


@dataclass(frozen=True, slots=True)
class Block:
    """Statements with a name; ``entry`` is where a step begins."""

    name: str
    body: tuple[Statement, ...]
    at: Place | None = field(default=None, compare=False, repr=False)

    def statements(self) -> Iterator[Statement]:
        """All of them, those within loops too."""
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
