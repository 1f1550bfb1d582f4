"""The compiler: it converts the statements of a graph to Python functions, once before the first step.

In order: the operations, their calls, the integers of a step, variables that may change in size, and the statements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

import mlx.core as mx

from . import graph as nodes
from .errors import (
    AccessError,
    BlockCycleError,
    DeclarationError,
    DTypeError,
    GraphError,
    GrowthError,
    NegativeIndexError,
    OperationError,
    Place,
    RankError,
    ShapeError,
    SliceResetError,
    SliceWriteError,
    UnknownNameError,
)
from .graph import (
    DTYPES,
    WORDS,
    Access,
    Arithmetic,
    DType,
    Expression,
    Graph,
    Index,
    Name,
    Operation,
    Read,
    Slice,
    Transfer,
    Value,
    named,
)
from .parser import MAX_DEPTH
from .state import MEMORY_BYTES, Layout
from .variables import Action, Frame, Tensors, Variable, arithmetic, constant

# -- The operations: their computation, number of arguments, and result dtype ------------------------------------------


@dataclass(frozen=True, slots=True)
class Op:
    """An operation that a graph calls with ``op``. ``result`` states the dtype of the result:

    * ``same``: the dtype of the arguments, which must be the same for all;
    * ``float``: as ``same``, and it must be a float type;
    * ``first``: the dtype of the first argument;
    * ``target``: the dtype of the target variable;
    * otherwise the dtype with this name.

    ``compute`` is the function. ``arity`` has the permitted numbers of arguments, ``parameters`` the types of named
    parameters. Parameters in ``required`` have no default.
    """

    compute: Callable[..., mx.array]
    arity: range
    result: str
    parameters: Mapping[str, type] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


def relu(x: mx.array, *, alpha: float = 0.0, clamp_max: float = math.inf) -> mx.array:
    """Return `x` where it is above 0, otherwise ``alpha * x``, and at most `clamp_max`; element by element."""
    zero = mx.array(0, dtype=x.dtype)
    rectified = mx.maximum(x, zero) if alpha == 0 else mx.where(x > zero, x, x * mx.array(alpha, dtype=x.dtype))
    return rectified if clamp_max == math.inf else mx.minimum(rectified, mx.array(clamp_max, dtype=x.dtype))


def mod(x: mx.array, y: mx.array) -> mx.array:
    """Return the remainder, with the sign of `y`. A divisor of -1 is replaced by 1, which has the same remainder: the
    processor cannot divide the least integer by -1, and ends the process.
    """
    signed = mx.issubdtype(y.dtype, mx.signedinteger)
    return mx.remainder(x, mx.where(y == -1, mx.array(1, y.dtype), y) if signed else y)


def fill(x: mx.array, *, value: float) -> mx.array:
    return mx.full(x.shape, value, dtype=x.dtype)


def softmax(x: mx.array, *, axis: int = -1) -> mx.array:
    return mx.softmax(x, axis=axis)


def rms_norm(x: mx.array, weight: mx.array, *, eps: float = 1e-5) -> mx.array:
    """Divide the last axis of `x` by its root mean square, and multiply it by `weight`."""
    return mx.fast.rms_norm(x, weight, eps)


def rope(x: mx.array, *, offset: int = 0, dims: int = 0, base: float = 10000.0, traditional: bool = False) -> mx.array:
    """Apply the rotary position embedding to ``[heads, dim]`` at position `offset`, or to ``[tokens, heads, dim]`` from
    position `offset` on.

    `dims` elements of each head are rotated; 0 stands for all.
    """
    by_head = mx.expand_dims(x, 1) if x.ndim == 2 else x.swapaxes(0, 1)  # [heads, tokens, dim]
    rotated = mx.fast.rope(by_head, dims or x.shape[-1], traditional=traditional, base=base, scale=1.0, offset=offset)
    return mx.squeeze(rotated, 1) if x.ndim == 2 else rotated.swapaxes(0, 1)


def concat(*arrays: mx.array, axis: int = 0) -> mx.array:
    return mx.concatenate(list(arrays), axis=axis)


def transpose(x: mx.array, *, axes: tuple[int, ...] = ()) -> mx.array:
    """Return `x` with its axes in the order of `axes`, or in reverse order if `axes` is empty."""
    return mx.transpose(x, axes or None)


def reshape(x: mx.array, *, shape: tuple[int, ...]) -> mx.array:
    return mx.reshape(x, shape)


def take(table: mx.array, indices: mx.array) -> mx.array:
    """Return the rows of `table` at `indices`, as in the lookup of an embedding.

    The shape of the result is the shape of `indices`, followed by the shape of a row. Raises NegativeIndexError or
    OperationError for an index without a row: MLX would read other memory of the process.
    """
    if indices.size and mx.issubdtype(indices.dtype, mx.integer):
        least, most = (int(found.item()) for found in (mx.min(indices), mx.max(indices)))  # type: ignore[arg-type]
        if least < 0:
            raise NegativeIndexError(f"an index of take is 0 or more, got {least}")
        if most >= table.shape[0]:
            raise OperationError(f"take of {table.shape[0]} rows has no row {most}")
    return mx.take(table, indices, axis=0)


def argmax(x: mx.array, *, axis: int = -1) -> mx.array:
    """Return the index of the largest element along an axis; of equal elements, the first one."""
    return mx.argmax(x, axis=axis)


def is_finite(x: mx.array) -> mx.array:
    return mx.all(mx.isfinite(x))


def attn(
    q: mx.array, k: mx.array, v: mx.array, wq: mx.array | None = None, *, scale: float = 0.0, causal: bool = False
) -> mx.array:
    """Return the attention of queries `q` to keys `k` and values `v`, with the shape and dtype of `q`.

    `q` is ``[heads, dim]`` for one query, or ``[n, heads, dim]``; with `wq`, it is ``[n, heads * dim]`` and is
    multiplied by `wq` first. `k` and `v` are ``[tokens, kv heads, dim]``, or ``[kv heads, dim]`` for one token. ``heads
    / kv heads`` query heads share a key head, as in grouped-query attention. A `scale` of 0 stands for ``1 /
    sqrt(dim)``. With `causal`, the last query has the position of the last key, and no query sees later keys.
    """
    if k.ndim == 2:
        k, v = mx.expand_dims(k, 0), mx.expand_dims(v, 0)
    *_, heads, dim = k.shape
    if not heads or not dim:
        raise ValueError("keys have at least one head and one dimension")  # MLX divides by the number of heads
    queries = q if wq is None else (q @ wq).reshape(q.shape[0], -1, dim)
    one = queries.ndim == 2
    by_head = (
        mx.expand_dims(queries, (0, 2)) if one else mx.expand_dims(queries.swapaxes(0, 1), 0)
    )  # [1, heads, n, dim]
    keys, values = [mx.expand_dims(array.astype(q.dtype).swapaxes(0, 1), 0) for array in (k, v)]
    mask = "causal" if causal else None
    attended = mx.fast.scaled_dot_product_attention(by_head, keys, values, scale=scale or dim**-0.5, mask=mask)
    return (attended if one else attended.swapaxes(1, 2)).reshape(q.shape)


_ONE, _TWO = range(1, 2), range(2, 3)

OPS: dict[str, Op] = {
    "add": Op(mx.add, _TWO, "same"),
    "sub": Op(mx.subtract, _TWO, "same"),
    "mul": Op(mx.multiply, _TWO, "same"),
    "div": Op(mx.divide, _TWO, "float"),
    "min": Op(mx.minimum, _TWO, "same"),
    "max": Op(mx.maximum, _TWO, "same"),
    "mod": Op(mod, _TWO, "same"),
    "abs": Op(mx.abs, _ONE, "same"),
    "neg": Op(mx.negative, _ONE, "same"),
    "exp": Op(mx.exp, _ONE, "float"),
    "tanh": Op(mx.tanh, _ONE, "float"),
    "sigmoid": Op(mx.sigmoid, _ONE, "float"),
    "matmul": Op(mx.matmul, _TWO, "float"),
    "relu": Op(relu, _ONE, "same", {"alpha": float, "clamp_max": float}),
    "fill": Op(fill, _ONE, "same", {"value": float}, frozenset({"value"})),
    "is_finite": Op(is_finite, _ONE, "bool"),
    "cast": Op(lambda x: x, _ONE, "target"),
    "softmax": Op(softmax, _ONE, "float", {"axis": int}),
    "rms_norm": Op(rms_norm, _TWO, "float", {"eps": float}),
    "rope": Op(rope, _ONE, "float", {"offset": int, "dims": int, "base": float, "traditional": bool}),
    "concat": Op(concat, range(1, 65), "same", {"axis": int}),
    "transpose": Op(transpose, _ONE, "same", {"axes": tuple}),
    "reshape": Op(reshape, _ONE, "same", {"shape": tuple}, frozenset({"shape"})),
    "take": Op(take, _TWO, "first"),
    "argmax": Op(argmax, _ONE, "u32", {"axis": int}),
    "attn": Op(attn, range(3, 5), "first", {"scale": float, "causal": bool}),
}


# -- Calls of operations: their result dtypes and parameters -----------------------------------------------------------


def result_dtype(statement: Operation, op: Op, dtypes: list[DType], target: DType) -> DType:
    """Return the dtype of an operation's result, from the dtypes of its arguments and of its `target` variable.

    Raises DTypeError for arguments that the operation does not accept.
    """
    if op.result == "target":
        return target
    if op.result in DTYPES:
        return DTYPES[op.result]
    if op.result == "first":
        return dtypes[0]
    if len(set(dtypes)) > 1:
        given = ", ".join(dtype.name for dtype in dtypes)
        raise DTypeError(f"{statement.name} takes arguments of one dtype, got {given}", statement.at)
    if op.result == "float" and not dtypes[0].is_float:
        raise DTypeError(f"{statement.name} takes floats, got {dtypes[0].name}", statement.at)
    return dtypes[0]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Named parameters of one call of an operation: values that are the same in every step are in `fixed`, functions
    that return a step's value in `counted`.
    """

    fixed: dict[str, Any]
    counted: dict[str, Callable[[Frame], Any]]


def parameters_of(statement: Operation, op: Op, scope: Scope, counting: Counting) -> Parameters:
    """Return the named parameters of a statement. `scope` are the variables of the enclosing loops.

    Raises UnknownNameError for an unknown, repeated or missing parameter, and DTypeError for a value of another type.
    """
    given = dict(statement.parameters)
    unknown = [name for name in given if name not in op.parameters]
    if unknown or len(given) < len(statement.parameters):
        takes = ", ".join(op.parameters) or "none"
        what = f"has no parameter {unknown[0]}, only {takes}" if unknown else "is given a parameter twice"
        raise UnknownNameError(f"{statement.name} {what}", statement.at)
    if missing := op.required - set(given):
        raise UnknownNameError(f"{statement.name} needs the parameter {', '.join(sorted(missing))}", statement.at)
    parameters = Parameters({}, {})
    for key, value in given.items():
        _add(parameters, statement, key, value, op.parameters[key], scope, counting)
    return parameters


def call(
    compute: Callable[..., mx.array], gets: Sequence[Callable[[Frame], mx.array]], parameters: Parameters
) -> Callable[[Frame], mx.array]:
    """Return a function that computes an operation in a step. The functions `gets` return its arguments.

    With fixed parameters only, and up to two arguments, the function has no loops, so that a step is faster.
    """
    counted = parameters.counted
    computed = partial(compute, **parameters.fixed) if parameters.fixed else compute
    if counted:
        return lambda frame: computed(
            *[get(frame) for get in gets], **{key: count(frame) for key, count in counted.items()}
        )
    match gets:
        case [only]:
            return lambda frame: computed(only(frame))
        case [first, second]:
            return lambda frame: computed(first(frame), second(frame))
    return lambda frame: computed(*[get(frame) for get in gets])


def _add(
    parameters: Parameters,
    statement: Operation,
    key: str,
    value: Value,
    kind: type,
    scope: Scope,
    counting: Counting,
) -> None:
    """Add the parameter `key` of a statement to `parameters`: a fixed value, or a function if it depends on the
    step. Raises DTypeError for a value of another type than `kind`.
    """
    if isinstance(value, Name) and value.text in WORDS:
        value = WORDS[value.text]
    if kind is tuple and isinstance(value, tuple):
        items = [item for item in value if isinstance(item, int | Name | Arithmetic)]
        if len(items) == len(value):
            counts = [counting.count(item, scope) for item in items]
            if all(counting.is_known(item, scope) for item in items):
                parameters.fixed[key] = tuple(constant(item, counting.sizes) for item in items)
            else:
                parameters.counted[key] = lambda frame: tuple([count(frame) for count in counts])
            return
    elif type(value) is kind or (kind is float and isinstance(value, int)):
        parameters.fixed[key] = value
        return
    elif kind in (int, float) and isinstance(value, Name | Arithmetic):
        parameters.counted[key] = counting.count(value, scope)
        return
    shown = {int: "an integer", float: "a number", bool: "true or false", tuple: "a list of integers"}[kind]
    raise DTypeError(f"the parameter {key} of {statement.name} is {shown}", statement.at)


# -- Integers of a step: indices, bounds of slices and loops, and integer parameters of operations ---------------------

Count = Callable[[Frame], int]
Scope = frozenset[str]  # the variables of the enclosing loops


@dataclass(frozen=True, slots=True)
class Counting:
    """Compiler of integer expressions, such as indices and bounds, to functions that return their values in a step.

    A name in an expression is a loop variable; if there is none, an integer scalar; otherwise a size of the model.
    """

    variables: Mapping[str, Variable]
    sizes: Mapping[str, int]
    tensors: Tensors

    def selection(self, access: Access, layout: Layout, scope: Scope) -> Callable[[Frame], tuple[int | slice, ...]]:
        """Return a function that returns the indices and slices of an access to persistent memory in a step.

        `layout` is the variable's layout, `scope` are the variables of the enclosing loops. Raises RankError or
        NegativeIndexError.
        """
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
        """Return a function that returns the value of an expression in a step.

        Within a slice of the persistent variable `layout`, the name of one of its indices stands for the present length
        along this index. Raises DTypeError or UnknownNameError for a name that is no integer.
        """
        if isinstance(expression, int):
            return lambda frame: expression
        if isinstance(expression, Name):
            return self._named(expression, scope, layout)
        operation = expression
        left = self.count(operation.left, scope, layout)
        right = self.count(operation.right, scope, layout)
        return lambda frame: arithmetic(operation, left(frame), right(frame))

    def is_known(self, expression: Expression, scope: Scope) -> bool:
        """Return whether an expression has the same value in every step, because it consists of numbers and sizes of
        the model.
        """
        if isinstance(expression, Name):
            variable = self.variables.get(expression.text)
            hidden = expression.text in scope or (variable is not None and variable.is_index)
            return expression.text in self.sizes and not hidden
        if isinstance(expression, int):
            return True
        return self.is_known(expression.left, scope) and self.is_known(expression.right, scope)

    def _named(self, name: Name, scope: Scope, layout: Layout | None) -> Count:
        """Return a function that returns the value of a name in a step, as described for the class."""
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


# -- Elastic variables: their values may differ in size ----------------------------------------------------------------
#
# Some sizes are unknown before a step: of a slice with variable ends, of an auto_dim tensor, and of a growing table. A
# variable that is assigned such a value, or a value computed from one, is *elastic*: only its rank and dtype are those
# of the declaration, and its sizes may change. All other variables always have their declared sizes.


def elastic_variables(graph: Graph, variables: Mapping[str, Variable]) -> frozenset[str]:
    """Return the names of the elastic variables: targets of reads with unknown sizes, and targets of operations and
    transfers that have an elastic argument.
    """
    flows: list[tuple[set[str], str]] = []  # sources, and target
    elastic: set[str] = set()
    for block in graph.blocks:
        for statement in block.statements():
            match statement:
                case Read(access, to):
                    source = variables.get(access.name)
                    if source and source.section == "persistent" and not _is_known(access, source.layout):
                        elastic.add(to)
                case Transfer(source=source_access, to=to):
                    flows.append(({source_access.name}, to))
                case Operation(arguments=arguments, to=to):
                    flows.append(({argument.name for argument in arguments}, to))
    found = True
    while found:
        more = {to for sources, to in flows if sources & elastic} - elastic
        elastic |= more
        found = bool(more)
    return frozenset(elastic)


def selected_rank(access: Access, layout: Layout) -> int:
    """Return the number of dimensions of the result of a read of persistent memory.

    Each scalar index removes an axis. The exception: if all auto_dim indices are scalars, they select the whole tensor,
    and remove no axis.
    """
    given = access.indices or ()
    table, auto = given[: len(layout.indices)], given[len(layout.indices) :]
    dropped = sum(not isinstance(index, Slice) for index in table)
    if any(isinstance(index, Slice) for index in auto):
        dropped += sum(not isinstance(index, Slice) for index in auto)
    return len(layout.indices) + len(layout.shape) - dropped


def _is_known(access: Access, layout: Layout) -> bool:
    """Return whether the sizes of the result of a read are known before the step."""
    given = [*(access.indices or ()), *[Slice(None, None)] * len(layout.indices)][: len(layout.indices)]
    lengths = [_is_fixed(index, layout.limit(name)) for name, index in zip(layout.indices, given, strict=True)]
    return not layout.auto and all(lengths)


def _is_fixed(index: Index, limit: int | None) -> bool:
    if not isinstance(index, Slice):
        return True
    stop = limit if index.stop is None else index.stop
    return isinstance(index.start, int | None) and isinstance(stop, int) and (stop >= 0 or limit is not None)


# -- The compiler: statements as actions -------------------------------------------------------------------------------
#
# A graph is compiled once, and each step only calls the resulting functions. The compiler checks everything that is
# known before a step: names, dtypes, the number of indices, targets of writes, and that blocks have no cycle.

Get = Callable[[Frame], mx.array]


def compile_graph(
    graph: nodes.Graph, variables: Mapping[str, Variable], sizes: Mapping[str, int], tensors: Tensors
) -> list[Action]:
    """Compile a graph. Return the actions of the block ``entry``, which a step runs in order.

    `sizes` and `tensors` are from the model. Raises a GraphError with the position of the error in the text.
    """
    check_blocks(graph)
    return _Compiler(graph, variables, sizes, tensors).block("entry")


def check_blocks(graph: nodes.Graph) -> None:
    """Raise DeclarationError for two blocks of one name, UnknownNameError for a branch to an undefined block, and
    BlockCycleError for blocks that branch to each other in a cycle, or whose branches and loops are nested deeper than
    MAX_DEPTH.
    """
    blocks: dict[str, nodes.Block] = {}
    for block in graph.blocks:
        if block.name in blocks:
            raise DeclarationError(f"the block {block.name} is declared twice", block.at)
        blocks[block.name] = block
    depths: dict[str, int] = {}  # of the statements of a block, including those of its loops and branches

    def visit(name: str, at: Place | None, path: tuple[str, ...]) -> int:
        if name in path:
            circle = " -> ".join((*path[path.index(name) :], name))
            raise BlockCycleError(f"blocks branch in a circle: {circle}", at)
        if name not in blocks:
            raise UnknownNameError(f"there is no block {name}, only {', '.join(blocks) or 'none'}", at)
        if name not in depths and len(path) <= MAX_DEPTH:
            deepest = 0
            for statement, level in blocks[name].levels():
                branches = (statement.then, statement.otherwise) if isinstance(statement, nodes.Branch) else ()
                below = (visit(to, statement.at, (*path, name)) for to in branches if to is not None)
                deepest = max(deepest, level + max(below, default=0))
            depths[name] = deepest
        if max(len(path), depths.get(name, 0)) > MAX_DEPTH:
            raise BlockCycleError(f"branches and loops are nested too deeply, at most {MAX_DEPTH} deep is allowed", at)
        return depths[name]

    visit("entry", None, ())


@dataclass
class _Compiler:
    graph: nodes.Graph
    variables: Mapping[str, Variable]
    sizes: Mapping[str, int]
    tensors: Tensors

    def __post_init__(self) -> None:
        self._blocks: dict[str, list[Action]] = {}
        self._elastic = elastic_variables(self.graph, self.variables)
        self._counting = Counting(self.variables, self.sizes, self.tensors)

    def block(self, name: str) -> list[Action]:
        """Return the actions of a block, compiled at the first call. The blocks of its branches are compiled before."""
        if name not in self._blocks:
            (block,) = [block for block in self.graph.blocks if block.name == name]
            self._blocks[name] = self._body(block.body, frozenset())
        return self._blocks[name]

    def _body(self, body: Sequence[nodes.Statement], scope: Scope) -> list[Action]:
        return [self._statement(statement, scope) for statement in body]

    def _statement(self, statement: nodes.Statement, scope: Scope) -> Action:
        """Compile one statement to an action."""
        match statement:
            case nodes.Assign():
                return self._assign(statement)
            case nodes.Operation():
                return self._operation(statement, scope)
            case nodes.Transfer():
                return self._transfer(statement, scope)
            case nodes.Loop():
                return self._loop(statement, scope)
            case nodes.Branch():
                return self._branch(statement)
            case nodes.Return():
                return Action(lambda frame: True, "return", at=statement.at)
            case nodes.Read():
                return self._read(statement, scope)
            case nodes.Write():
                return self._write(statement, scope)
            case nodes.Increment():
                return self._increment(statement)
            case nodes.Reset():
                return self._reset(statement, scope)
            case _:
                assert_never(statement)

    # -- statements ----------------------------------------------------------------------------------------------------

    def _assign(self, statement: nodes.Assign) -> Action:
        name = statement.declaration.name

        def run(frame: Frame) -> None:
            frame.values.pop(name, None)

        return Action(run, f"assign {name}", at=statement.at)

    def _operation(self, statement: nodes.Operation, scope: Scope) -> Action:
        """Compile `op`: check the number and the dtypes of its arguments, and assign the result to the target."""
        op = OPS.get(statement.name)
        if op is None:
            raise UnknownNameError(f"there is no operation {statement.name}, only {', '.join(OPS)}", statement.at)
        if len(statement.arguments) not in op.arity:
            takes = str(op.arity[0]) if len(op.arity) == 1 else f"{op.arity[0]} to {op.arity[-1]}"
            raise RankError(f"{statement.name} takes {takes} arguments, got {len(statement.arguments)}", statement.at)
        target = self._target(statement.to, statement.at)
        getters = [self._getter(argument, scope) for argument in statement.arguments]
        dtypes = [dtype for _, dtype in getters]
        result = result_dtype(statement, op, dtypes, target.dtype)
        self._same_dtype(statement.name, result, target, statement.at)
        parameters = parameters_of(statement, op, scope, self._counting)
        gets = [get for get, _ in getters]
        compute, put, name = call(op.compute, gets, parameters), self._putter(target), statement.name
        casts = target.dtype.mlx if op.result == "target" else None

        def run(frame: Frame) -> None:
            try:
                value = compute(frame)
                put(frame, value if casts is None else value.astype(casts))
            except (ValueError, TypeError, IndexError, ArithmeticError, RuntimeError) as error:
                if isinstance(error, GraphError):
                    raise
                shapes = ", ".join(str(list(get(frame).shape)) for get in gets)
                raise OperationError(f"{name} of {shapes}: {error}") from None

        return Action(run, f"op {name}", statement.to, statement.at)

    def _transfer(self, statement: nodes.Transfer, scope: Scope) -> Action:
        target = self._target(statement.to, statement.at)
        get, dtype = self._getter(statement.source, scope)
        self._same_dtype(statement.source.name, dtype, target, statement.at)
        put = self._putter(target)
        return Action(lambda frame: put(frame, get(frame)), "transfer", statement.to, statement.at)

    def _loop(self, statement: nodes.Loop, scope: Scope) -> Action:
        """Compile `loop`. The action sets the loop variable, and ends the block if the body does."""
        variable = statement.variable
        if variable in scope:
            raise AccessError(f"the loop variable {variable} is already in use", statement.at)
        start, stop = self._counting.count(statement.start, scope), self._counting.count(statement.stop, scope)
        body = self._body(statement.body, scope | {variable})

        def run(frame: Frame) -> bool:
            outer = dict(frame.loops)  # a block after a branch may have a loop with the same variable
            over = False
            for i in range(start(frame), stop(frame)):
                frame.loops[variable] = i
                over = frame.run(body)
                if over:
                    break
            frame.loops = outer
            return over

        return Action(run, f"loop {statement.name}", at=statement.at)

    def _branch(self, statement: nodes.Branch) -> Action:
        """Compile `branch`: the action runs one of two blocks by the condition's value, or a single block."""
        then = self.block(statement.then)
        if statement.condition is None or statement.otherwise is None:

            def go(frame: Frame) -> None:
                frame.run(then)

            return Action(go, f"branch {statement.then}", at=statement.at)
        otherwise = self.block(statement.otherwise)
        get, dtype = self._getter(nodes.Access(statement.condition, at=statement.at), frozenset())
        variable = self.variables[statement.condition]
        if dtype.name != "bool" or variable.shape:
            shown = f"{dtype.name}{list(variable.shape)}"
            raise DTypeError(f"a branch takes one bool, {statement.condition} is {shown}", statement.at)

        def run(frame: Frame) -> None:
            frame.run(then if get(frame).item() else otherwise)

        return Action(run, f"branch {statement.condition}", at=statement.at)

    def _read(self, statement: nodes.Read, scope: Scope) -> Action:
        """Compile `cache.read`: a read of persistent memory into a variable."""
        access, to = statement.access, statement.to
        layout = self._persistent(access)
        target = self._target(to, statement.at)
        self._same_dtype(access.name, layout.dtype, target, access.at)
        put, name = self._putter(target), layout.name
        what = f"cache.read {name}"
        if layout.is_scalar:
            return Action(lambda frame: put(frame, frame.memory.scalars[name].read()), what, to, access.at)
        select = self._counting.selection(access, layout, scope)
        rank = selected_rank(access, layout)
        if rank != len(target.shape):
            raise RankError(f"{_as_text(access)} has {rank} dimensions, {to} has {len(target.shape)}", access.at)
        return Action(lambda frame: put(frame, frame.memory.tables[name].read(select(frame))), what, to, access.at)

    def _write(self, statement: nodes.Write, scope: Scope) -> Action:
        """Compile `cache.write`: a write of one entry of persistent memory."""
        access, source = statement.access, statement.source
        layout = self._persistent(access)
        get, dtype = self._getter(source, scope)
        name, what = layout.name, f"cache.write {layout.name}"
        if dtype != layout.dtype:
            raise DTypeError(f"{name} holds {layout.dtype.name}, {source.name} is {dtype.name}", source.at)
        if layout.is_scalar:
            return Action(lambda frame: frame.memory.scalars[name].write(get(frame)), what, at=access.at)
        given = access.indices or ()
        if any(isinstance(index, nodes.Slice) for index in given) or len(given) < len(layout.indices):
            whole = f"{name}[{', '.join(layout.indices)}]" if layout.indices else name
            raise SliceWriteError(f"a write takes one entry, {whole}, no slice of {name}", access.at)
        select = self._counting.selection(access, layout, scope)
        return Action(lambda frame: frame.memory.tables[name].write(select(frame), get(frame)), what, at=access.at)

    def _increment(self, statement: nodes.Increment) -> Action:
        layout = self._persistent(nodes.Access(statement.name, at=statement.at), bare=True)
        if not layout.is_scalar or layout.dtype.name == "bool":
            shown = f"{layout.dtype.name}{list(layout.shape) or ''}"
            message = f"increment and decrement need a numeric scalar, {statement.name} is {shown}"
            raise DTypeError(message, statement.at)
        name, amount = statement.name, statement.amount
        return Action(
            lambda frame: frame.memory.scalars[name].increment(amount), f"cache.increment {name}", at=statement.at
        )

    def _reset(self, statement: nodes.Reset, scope: Scope) -> Action:
        """Compile `cache.reset`."""
        access = statement.access
        layout = self._persistent(access, bare=True)
        what = f"cache.reset {layout.name}"
        if layout.is_scalar:
            return Action(lambda frame: frame.memory.scalars[layout.name].reset(), what, at=access.at)
        given = access.indices or ()
        if any(isinstance(index, nodes.Slice) for index in given):
            raise SliceResetError(f"a reset takes {layout.name}, an entry or its first indices, no slice", access.at)
        if len(given) > len(layout.indices) and len(given) <= len(layout.names):
            raise RankError(f"the dimensions of {layout.name} can't be reset alone", access.at)
        select = self._counting.selection(access, layout, scope)
        return Action(lambda frame: frame.memory.tables[layout.name].reset(select(frame)), what, at=access.at)

    # -- parts of statements -------------------------------------------------------------------------------------------

    def _variable(self, name: str, at: Place | None) -> Variable:
        variable = self.variables.get(name)
        if variable is None:
            raise UnknownNameError(f"there is no variable {name}, only {', '.join(self.variables) or 'none'}", at)
        return variable

    def _target(self, name: str, at: Place | None) -> Variable:
        """Return the variable `name`, to which a statement assigns a value.

        Raises UnknownNameError if it does not exist, AccessError if it is persistent or from the model.
        """
        variable = self._variable(name, at)
        if variable.section == "persistent":
            raise AccessError(f"{name} is persistent: cache.write puts values into it", at)
        if variable.section == "constant" or variable.declaration.indices:
            raise AccessError(f"{name} comes from the model and cannot be written", at)
        return variable

    def _persistent(self, access: nodes.Access, *, bare: bool = False) -> Layout:
        """Return the layout of the persistent variable that a cache statement accesses. With `bare`, the name of a
        table may have no brackets.

        Raises UnknownNameError, AccessError or RankError.
        """
        variable = self._variable(access.name, access.at)
        if variable.section != "persistent":
            raise AccessError(
                f"{access.name} is {variable.section}, cache statements take persistent memory", access.at
            )
        layout = variable.layout
        if access.indices is not None and not layout.names:
            raise RankError(f"{access.name} takes no indices", access.at)
        if access.indices is None and layout.indices and not bare:
            raise RankError(f"{access.name} is a table: {access.name}[] is all of it", access.at)
        return layout

    def _getter(self, access: nodes.Access, scope: Scope) -> tuple[Get, DType]:
        """Return a function that returns the value of an access in a step, and the dtype of this value.

        Raises UnknownNameError, AccessError or RankError.
        """
        if access.name in scope:
            raise AccessError(f"{access.name} is a loop variable, which is an index and no value", access.at)
        variable = self._variable(access.name, access.at)
        if variable.section == "persistent":
            raise AccessError(f"{access.name} is persistent: cache.read takes values out of it", access.at)
        declared, given = variable.declaration.indices, access.indices
        if len(given or ()) != len(declared) or (given is None) != (not declared):
            takes = f"takes {len(declared)} indices ({', '.join(declared)})" if declared else "takes no indices"
            raise RankError(f"{access.name} {takes}, got {len(given or ())}", access.at)
        if not declared:
            return self.tensors.getter(variable), variable.dtype
        counts = []
        for index in given or ():
            if isinstance(index, nodes.Slice):
                raise RankError(f"{access.name} is read one tensor at a time, not by slices", access.at)
            counts.append(self._counting.count(index, scope))
        return self.tensors.entry_getter(variable, counts), variable.dtype

    def _putter(self, target: Variable) -> Callable[[Frame, mx.array], None]:
        """Return a function that checks the dtype and shape of a value, and assigns it to a variable, in a step."""
        name, dtype, shape, rank = target.name, target.dtype.mlx, target.shape, len(target.shape)
        elastic = name in self._elastic

        def put(frame: Frame, value: mx.array) -> None:
            if value.dtype != dtype:
                raise DTypeError(f"{name} is {target.dtype.name}, got {named(value.dtype)}")
            if (value.ndim != rank) if elastic else (value.shape != shape):
                if value.ndim != rank:
                    raise RankError(f"{name} has {rank} dimensions, got the shape {list(value.shape)}")
                raise ShapeError(f"{name} has the shape {list(shape)}, got {list(value.shape)}")
            if elastic and value.nbytes > MEMORY_BYTES:  # in MLX, its allocation would end the process
                raise GrowthError(f"{name} would take {value.nbytes} bytes, this machine has {MEMORY_BYTES}")
            frame.values[name] = value

        return put

    def _same_dtype(self, what: str, dtype: DType, target: Variable, at: Place | None) -> None:
        if dtype != target.dtype:
            raise DTypeError(f"{what} gives {dtype.name}, {target.name} is {target.dtype.name}", at)


def _as_text(access: nodes.Access) -> str:
    return access.name if access.indices is None else f"{access.name}[...]" if access.indices else f"{access.name}[]"
