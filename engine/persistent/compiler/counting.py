"""Integers of a step: indices, bounds of slices and loops, and what operations are told by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.persistent.compiler.frame import Frame
from engine.persistent.compiler.tensors import Tensors
from engine.persistent.compiler.variables import Variable, arithmetic
from engine.persistent.errors import DTypeError, NegativeIndexError, Place, RankError, UnknownNameError
from engine.persistent.language.graph import Access, Expression, Name, Slice
from engine.persistent.state.table import Layout

Count = Callable[[Frame], int]
Scope = frozenset[str]  # the loop variables that can be used


@dataclass(frozen=True, slots=True)
class Counting:
    """How integers are had. A name is a loop variable, else an integer scalar, else a size of the model."""

    variables: Mapping[str, Variable]
    sizes: Mapping[str, int]
    tensors: Tensors

    def selection(self, access: Access, layout: Layout, scope: Scope) -> Callable[[Frame], tuple[int | slice, ...]]:
        """The indices of an access to persistent memory, as numbers."""
        given, names = access.indices or (), layout.names
        if len(given) > len(names):
            takes = f"takes at most {len(names)} ({', '.join(names)})" if names else "takes no indices"
            raise RankError(f"{layout.name} {takes}, got {len(given)}", access.at)
        parts: list[Callable[[Frame], int | slice]] = []
        for index in given:
            if isinstance(index, Slice):
                parts.append(self._slice(index, layout, scope, access.at))
            elif isinstance(index, int) and index < 0:
                raise NegativeIndexError(f"an index of {layout.name} is 0 or more, got {index}", access.at)
            else:
                parts.append(self.count(index, scope))
        return lambda frame: tuple([part(frame) for part in parts])

    def _slice(self, index: Slice, layout: Layout, scope: Scope, at: Place | None) -> Callable[[Frame], slice]:
        if isinstance(index.start, int) and index.start < 0:
            raise NegativeIndexError(f"a slice of {layout.name} starts at 0 or more, got {index.start}", index.at or at)
        start, stop = (
            None if bound is None else self.count(bound, scope, layout) for bound in (index.start, index.stop)
        )
        return lambda frame: slice(start and start(frame), stop and stop(frame))

    def count(self, expression: Expression, scope: Scope, layout: Layout | None = None) -> Count:
        """How an integer is had. Within the slices of `layout`, its indices stand for their lengths and counts."""
        if isinstance(expression, int):
            return lambda frame: expression
        if isinstance(expression, Name):
            return self._named(expression, scope, layout)
        operation = expression
        left = self.count(operation.left, scope, layout)
        right = self.count(operation.right, scope, layout)
        return lambda frame: arithmetic(operation, left(frame), right(frame))

    def is_known(self, expression: Expression, scope: Scope) -> bool:
        """Whether it is the same in every step: made of numbers and sizes."""
        if isinstance(expression, Name):
            variable = self.variables.get(expression.text)
            hidden = expression.text in scope or (variable is not None and variable.is_index)
            return expression.text in self.sizes and not hidden
        if isinstance(expression, int):
            return True
        return self.is_known(expression.left, scope) and self.is_known(expression.right, scope)

    def _named(self, name: Name, scope: Scope, layout: Layout | None) -> Count:
        text = name.text
        if text in scope:
            return lambda frame: frame.loops[text]
        variable = self.variables.get(text)
        if variable is not None and variable.is_index:
            if variable.section == "persistent":
                return lambda frame: frame.memory.scalars[text].index()
            get = self.tensors.getter(variable)
            return lambda frame: int(get(frame).item())  # type: ignore[arg-type]
        if layout is not None and text in layout.names:
            table = layout.name
            return lambda frame: frame.memory.tables[table].size(text)
        if text in self.sizes:
            size = self.sizes[text]
            return lambda frame: size
        if variable is not None:
            raise DTypeError(f"{text} is no integer without dimensions, it can't be an index", name.at)
        raise UnknownNameError(f"{text} is no loop variable, integer scalar or size", name.at)
