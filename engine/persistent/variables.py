"""The variables of a graph: checked declarations with resolved sizes, and their values during a step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from .errors import DeclarationError, DeviceError, DimError, DTypeError, GraphError, ModelError, Place, UnknownNameError
from .graph import DTYPES, Arithmetic, Assign, Declaration, DType, Expression, Graph, Name, named
from .state import MAX_DIM, MEMORY_BYTES, Layout, Memory, Shape


@dataclass(frozen=True, slots=True)
class Variable:
    """A declaration whose dtype and dimensions are known."""

    declaration: Declaration
    dtype: DType
    shape: Shape

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def section(self) -> str:
        return self.declaration.section

    @property
    def is_index(self) -> bool:
        """Whether it is a single integer, which can be an index."""
        return self.dtype.range is not None and not self.shape and not self.declaration.indices

    @property
    def reference(self) -> str:
        """The name of the model's tensor; with ``{index}`` in place of each index."""
        return self.declaration.reference or self.name

    @property
    def layout(self) -> Layout:
        declared = self.declaration
        indices = tuple(index for index in declared.indices if index not in declared.auto_dim)
        return Layout(self.name, self.dtype, self.shape, declared.init, indices, declared.auto_dim, declared.fixed)


def resolve(graph: Graph, sizes: Mapping[str, int], *, on_gpu: bool = False) -> dict[str, Variable]:
    """Return all variables of a graph by name, including the variables of `assign`. `sizes` are those of the model.

    Raises DeclarationError, UnknownNameError, DTypeError or DimError with the position of the declaration, and
    DeviceError for f64 on a GPU.
    """
    variables: dict[str, Variable] = {}
    for declaration in _declarations(graph):
        at = declaration.at
        if declaration.name in variables:
            raise DeclarationError(f"{declaration.name} is declared twice", at)
        dtype = DTYPES.get(declaration.dtype)
        if dtype is None:
            raise UnknownNameError(f"there is no dtype {declaration.dtype}, only {', '.join(DTYPES)}", at)
        if dtype.name == "f64" and on_gpu:
            raise DeviceError(f"{declaration.name} is f64, which MLX computes only on the CPU; use Device.CPU")
        _check_attributes(declaration)
        shape = tuple(_dim(dim, declaration, sizes) for dim in declaration.dims)
        if (nbytes := math.prod(shape) * dtype.itemsize) > MEMORY_BYTES:
            raise DimError(f"{declaration.name} would take {nbytes} bytes, this machine has {MEMORY_BYTES}", at)
        if len(declaration.auto_dim) > len(shape):
            raise DeclarationError(
                f"@auto_dim names {len(declaration.auto_dim)} dimensions, {declaration.name} has {len(shape)}", at
            )
        variables[declaration.name] = Variable(_with_init(declaration, dtype), dtype, shape)
    return variables


def constant(expression: Expression, sizes: Mapping[str, int]) -> int:
    """Return the value of an expression of numbers and model sizes. Raises UnknownNameError or DimError."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, Name):
        if expression.text not in sizes:
            known = ", ".join(sorted(sizes)) or "none"
            raise UnknownNameError(f"the model has no size {expression.text}, only {known}", expression.at)
        return sizes[expression.text]
    left, right = constant(expression.left, sizes), constant(expression.right, sizes)
    return arithmetic(expression, left, right)


def arithmetic(expression: Arithmetic, left: int, right: int) -> int:
    """Return the result of an expression's operator for two integers. Raises DimError for a division by zero."""
    match expression.operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    if right == 0:
        raise DimError("division by zero", expression.at)
    return left // right if expression.operator == "/" else left % right


def _declarations(graph: Graph) -> Iterator[Declaration]:
    yield from graph.declarations
    for block in graph.blocks:
        for statement in block.statements():
            if isinstance(statement, Assign):
                yield statement.declaration


def _dim(dim: Expression, declaration: Declaration, sizes: Mapping[str, int]) -> int:
    size = constant(dim, sizes)
    at: Place | None = declaration.at if isinstance(dim, int) else dim.at
    if not 0 <= size <= MAX_DIM:
        raise DimError(f"a dimension is between 0 and {MAX_DIM}, {declaration.name} would have one of {size}", at)
    return size


def _with_init(declaration: Declaration, dtype: DType) -> Declaration:
    """Return a declaration with its @init converted to `dtype`. Raises DTypeError."""
    if declaration.init is None:
        return declaration
    init = dtype.literal(declaration.init)
    if init is None:
        allowed = (
            f"an integer from {dtype.range[0]} to {dtype.range[1]}"
            if dtype.range
            else "true, false, 0 or 1"
            if dtype.name == "bool"
            else "a float, such as 5.0"
        )
        given = str(declaration.init).lower()
        raise DTypeError(f"@init of {declaration.name} must be {allowed} for {dtype.name}, got {given}", declaration.at)
    return replace(declaration, init=init)


def _check_attributes(declaration: Declaration) -> None:
    """Raise DeclarationError if the attributes of a declaration contradict each other or the section."""
    name, section, at = declaration.name, declaration.section, declaration.at
    persistent, indices, auto = section == "persistent", declaration.indices, declaration.auto_dim
    fixed = [index for index, _ in declaration.fixed]
    table_indices = tuple(index for index in indices if index not in auto)
    unknown = [index for index in (*auto, *fixed) if index not in indices]
    named_in_pattern = set(re.findall(r"\{(\w+)\}", declaration.reference or ""))
    complaints = {
        f"{name} has an index twice": len(set(indices)) < len(indices) or len(set(auto)) < len(auto),
        f"only persistent memory has @table, @auto_dim and @fixed, not {section}": not persistent
        and (declaration.table or bool(auto) or bool(fixed)),
        f"{', '.join(unknown)} is no index of {name}": bool(unknown),
        f"the indices of {name} need @table or @auto_dim": persistent and bool(table_indices) and not declaration.table,
        f"{name} has @table, but no index in parentheses that is not of @auto_dim": declaration.table
        and not table_indices,
        f"the indices of @auto_dim come last and in its order: {name}({', '.join((*table_indices, *auto))})": indices
        != (*table_indices, *auto),
        f"only volatile and constant memory comes from the model, not {section}": declaration.reference is not None
        and section not in ("volatile", "constant"),
        f"{name} has no @init: {section} memory comes from outside": declaration.init is not None
        and section in ("dynamic", "constant"),
        f"the indices of {name} need a @pattern that names each: {{{'}, {'.join(indices)}}}": not persistent
        and set(indices) != named_in_pattern,
        f"@fixed allows at least 1 for a table's index and 0 for a count, {name} has less": any(
            limit < (index not in auto) or limit > MAX_DIM for index, limit in declaration.fixed
        ),
    }
    for complaint, applies in complaints.items():
        if applies:
            raise DeclarationError(complaint, at)


# -- The state of a running step: its values, its loop variables, and its events ---------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """Record of one executed statement. `to` is the target variable, `shape` the shape of its new value."""

    step: int
    what: str
    line: int | None
    loops: dict[str, int]
    to: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(slots=True)
class Frame:
    """The state of one step."""

    step: int
    memory: Memory
    values: dict[str, mx.array] = field(default_factory=dict)
    loops: dict[str, int] = field(default_factory=dict)
    trace: list[Event] | None = None

    def run(self, actions: Sequence[Action]) -> bool:
        """Run actions in order until one ends the block (`return`). Return whether one has ended it."""
        trace = self.trace
        action = None
        try:
            for action in actions:
                over = action.do(self)
                if trace is not None:
                    trace.append(self._event(action))
                if over:
                    return True
        except GraphError as error:
            error.at = error.at or (action.at if action else None)
            raise
        return False

    def _event(self, action: Action) -> Event:
        value = self.values.get(action.to) if action.to else None
        line = action.at.line if action.at else None
        return Event(
            self.step, action.what, line, dict(self.loops), action.to, value.shape if value is not None else None
        )


@dataclass(frozen=True, slots=True)
class Action:
    """A compiled statement. `do` executes it in a step, and returns True if it ends the block."""

    do: Callable[[Frame], bool | None]
    what: str
    to: str | None = None
    at: Place | None = None


# -- Initial values of variables in a step: the model's tensors, @init, or zeros ---------------------------------------


class Tensors:
    """Initial values of variables: tensors of the model, @init, or zeros.

    Raises ModelError for a tensor that is missing or does not match its declaration.
    """

    def __init__(self, variables: Mapping[str, Variable], tensors: Mapping[str, mx.array]) -> None:
        self._tensors = tensors
        self._values = {
            name: self._beginning(variable)
            for name, variable in variables.items()
            if variable.section in ("volatile", "constant") and not variable.declaration.indices
        }

    def getter(self, variable: Variable) -> Callable[[Frame], mx.array]:
        """Return a function that returns the present value of a variable in a step."""
        name, begins = variable.name, self._values.get(variable.name)
        if variable.section == "constant":
            assert begins is not None
            return lambda frame: begins

        def get(frame: Frame) -> mx.array:
            value = frame.values.get(name)
            if value is not None:
                return value
            assert begins is not None, "dynamic variables are inserted before a step begins"
            return begins

        return get

    def beginning(self, name: str) -> mx.array | None:
        """Return the value of a volatile or constant variable at the beginning of a step; None for other variables."""
        return self._values.get(name)

    def entry_getter(self, variable: Variable, counts: Sequence[Callable[[Frame], int]]) -> Callable[[Frame], mx.array]:
        """Return a function that returns one tensor of a family, such as ``W[l]``, in a step. `counts` return the
        indices.
        """
        known: dict[tuple[int, ...], mx.array] = {}

        def get(frame: Frame) -> mx.array:
            indices = tuple([count(frame) for count in counts])
            found = known.get(indices)
            if found is None:
                name = variable.reference
                for index, value in zip(variable.declaration.indices, indices, strict=True):
                    name = name.replace(f"{{{index}}}", str(value))
                found = known[indices] = self._tensor(name, variable)
            return found

        return get

    def _beginning(self, variable: Variable) -> mx.array:
        declared = variable.declaration
        needed = variable.section == "constant" or declared.reference is not None
        if needed or (variable.reference in self._tensors and declared.init is None):
            return self._tensor(variable.reference, variable)
        return variable.dtype.full(variable.shape, declared.init)

    def _tensor(self, name: str, variable: Variable) -> mx.array:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"the model has no tensor {name}, which {variable.name} names")
        if tensor.dtype != variable.dtype.mlx or tensor.shape != variable.shape:
            raise ModelError(
                f"{variable.name} is {variable.dtype.name}{list(variable.shape)}, "
                f"the model's {name} is {named(tensor.dtype)}{list(tensor.shape)}"
            )
        return tensor
