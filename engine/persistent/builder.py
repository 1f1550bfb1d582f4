"""The builder of graphs in Python.

::

    g = GraphBuilder()
    x = g.dynamic("x", "f32", ["D"])
    t = g.persistent("t", "i32", init=0)
    K = g.persistent("K", "f32", ["D"], indices=["i"], table=True)
    y = g.volatile("y", "f32", [3, "D"])
    with g.block("entry") as b:
        b.write(x, K[t])
        b.increment(t)
        b.read(K["0..3"], y)
        b.stop()
    graph = g.graph()

Sizes, bounds and indices are integers, variables, or strings with an expression in the graph language. A slice is a
Python slice, or a string in the graph language.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from . import graph as nodes
from .parser import parse_expression


@dataclass(frozen=True, slots=True)
class VariableRef:
    """A reference to a declared variable. Brackets make an access to a part of it."""

    name: str

    def __getitem__(
        self, indices: int | str | VariableRef | slice | tuple[int | str | VariableRef | slice, ...]
    ) -> nodes.Access:
        """Return an access to a part, for example ``K[l, 0:t]`` or ``K["l", "0..t"]``. ``K[()]`` is the whole
        variable.
        """
        given = indices if isinstance(indices, tuple) else (indices,)
        return nodes.Access(self.name, tuple(_index(index) for index in given))


class GraphBuilder:
    """Builder of a graph from declarations and blocks."""

    def __init__(self) -> None:
        self._declarations: list[nodes.Declaration] = []
        self._blocks: list[nodes.Block] = []

    def dynamic(self, name: str, dtype: str, dims: Sequence[int | str] = ()) -> VariableRef:
        """Declare a variable whose value the caller inserts before each step."""
        return self._declare(nodes.Declaration("dynamic", name, dtype, _dims(dims)))

    def volatile(
        self,
        name: str,
        dtype: str,
        dims: Sequence[int | str] = (),
        *,
        init: bool | int | float | None = None,
        indices: Sequence[str] = (),
        reference: str | None = None,
    ) -> VariableRef:
        """Declare a variable that each step begins with its initial value: the model's tensor, `init` or zeros.

        `reference` is the name of the model's tensor, as in @ref, or with `indices`, which declare a family of tensors,
        its pattern, as in @pattern.
        """
        return self._declare(
            nodes.Declaration("volatile", name, dtype, _dims(dims), tuple(indices), init=init, reference=reference)
        )

    def constant(
        self,
        name: str,
        dtype: str,
        dims: Sequence[int | str] = (),
        *,
        indices: Sequence[str] = (),
        reference: str | None = None,
    ) -> VariableRef:
        """Declare a tensor of the model, or with `indices` a family of tensors. `reference` is as for `volatile`."""
        return self._declare(
            nodes.Declaration("constant", name, dtype, _dims(dims), tuple(indices), reference=reference)
        )

    def persistent(
        self,
        name: str,
        dtype: str,
        dims: Sequence[int | str] = (),
        *,
        init: bool | int | float | None = None,
        indices: Sequence[str] = (),
        table: bool = False,
        auto_dim: Sequence[str] = (),
        fixed: Mapping[str, int] | None = None,
    ) -> VariableRef:
        """Declare a variable that keeps its value from step to step.

        With `table`, it has a tensor for each value of its `indices`. Indices in `auto_dim` grow the tensor's
        dimensions instead. `fixed` has the limits of indices. Without `init`, its first value is zeros.
        """
        limits = tuple((fixed or {}).items())
        return self._declare(
            nodes.Declaration(
                "persistent", name, dtype, _dims(dims), tuple(indices), table, tuple(auto_dim), limits, init=init
            )
        )

    @contextmanager
    def block(self, name: str) -> Iterator[Body]:
        """Define a block of the graph. Methods of the yielded body append its statements, within the caller's
        ``with``.
        """
        body = Body()
        yield body
        self._blocks.append(nodes.Block(name, body.statements()))

    def graph(self) -> nodes.Graph:
        """Return the graph with the declarations and blocks so far."""
        return nodes.Graph(tuple(self._declarations), tuple(self._blocks))

    def _declare(self, declaration: nodes.Declaration) -> VariableRef:
        self._declarations.append(declaration)
        return VariableRef(declaration.name)


class Body:
    """Statements of a block or a loop. Each method appends one statement."""

    def __init__(self) -> None:
        self._statements: list[nodes.Statement] = []

    def statements(self) -> tuple[nodes.Statement, ...]:
        return tuple(self._statements)

    def assign(self, name: str, dtype: str, dims: Sequence[int | str] = ()) -> VariableRef:
        """Declare a variable of this step."""
        self._statements.append(nodes.Assign(nodes.Declaration("volatile", name, dtype, _dims(dims))))
        return VariableRef(name)

    def op(self, name: str, *arguments: VariableRef | nodes.Access, to: VariableRef, **parameters: _Parameter) -> None:
        """Add ``op name(arguments, parameters) >> to``."""
        given = tuple((key, _value(value)) for key, value in parameters.items())
        self._statements.append(nodes.Operation(name, tuple(map(_access, arguments)), given, to.name))

    def transfer(self, source: VariableRef | nodes.Access, to: VariableRef) -> None:
        self._statements.append(nodes.Transfer(_access(source), to.name))

    @contextmanager
    def loop(
        self, name: str, variable: str, start: int | str | VariableRef, stop: int | str | VariableRef
    ) -> Iterator[Body]:
        """Define a loop over `variable` from `start` up to, but not including, `stop`. Methods of the yielded body
        append its statements.
        """
        body = Body()
        yield body
        self._statements.append(nodes.Loop(name, variable, _expression(start), _expression(stop), body.statements()))

    def branch(self, condition: VariableRef, then: str, otherwise: str) -> None:
        """Add ``branch condition then otherwise``."""
        self._statements.append(nodes.Branch(condition.name, then, otherwise))

    def go(self, block: str) -> None:
        """Add ``branch block``, without a condition."""
        self._statements.append(nodes.Branch(None, block))

    def stop(self) -> None:
        """Add ``return``."""
        self._statements.append(nodes.Return())

    def read(self, source: VariableRef | nodes.Access, to: VariableRef) -> None:
        self._statements.append(nodes.Read(_access(source), to.name))

    def write(self, source: VariableRef | nodes.Access, to: VariableRef | nodes.Access) -> None:
        self._statements.append(nodes.Write(_access(source), _access(to)))

    def increment(self, scalar: VariableRef, amount: int = 1) -> None:
        """Add ``cache.increment amount scalar``."""
        self._statements.append(nodes.Increment(scalar.name, amount))

    def decrement(self, scalar: VariableRef, amount: int = 1) -> None:
        """Add ``cache.decrement amount scalar``."""
        self._statements.append(nodes.Increment(scalar.name, -amount))

    def reset(self, what: VariableRef | nodes.Access) -> None:
        self._statements.append(nodes.Reset(_access(what)))


_Parameter = int | float | str | VariableRef | tuple[int | str | VariableRef, ...] | list[int | str | VariableRef]


def _access(what: VariableRef | nodes.Access) -> nodes.Access:
    return what if isinstance(what, nodes.Access) else nodes.Access(what.name)


def _dims(dims: Sequence[int | str]) -> tuple[nodes.Expression, ...]:
    return tuple(_expression(dim) for dim in dims)


def _expression(given: int | str | VariableRef) -> nodes.Expression:
    if isinstance(given, VariableRef):
        return nodes.Name(given.name)
    return parse_expression(given) if isinstance(given, str) else given


def _index(given: int | str | VariableRef | slice) -> nodes.Index:
    if isinstance(given, str) and ".." in given:
        start, stop = (bound.strip() or None for bound in given.split("..", 1))
        given = slice(start, stop)
    if isinstance(given, slice):
        if given.step is not None:
            raise ValueError(f"slices of persistent memory have no step, got {given.step}")
        first, last = (None if bound is None else _expression(bound) for bound in (given.start, given.stop))
        return nodes.Slice(first, last)
    return _expression(given)


def _value(given: _Parameter) -> nodes.Value:
    if isinstance(given, bool):
        return nodes.Name(str(given).lower())
    if isinstance(given, tuple | list):
        return tuple(_expression(item) for item in given)
    return given if isinstance(given, float) else _expression(given)
