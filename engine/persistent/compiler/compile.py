"""A graph made into Python functions, once, so that a step only calls them. All that can be known before a step is
checked here: names, dtypes, the number of indices, what is written to, and that blocks don't go round in circles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import mlx.core as mx

from engine.persistent.compiler.calls import call, parameters_of, result_dtype
from engine.persistent.compiler.counting import Counting, Scope
from engine.persistent.compiler.elastic import elastic_variables, selected_rank
from engine.persistent.compiler.frame import Action, Frame
from engine.persistent.compiler.ops import OPS
from engine.persistent.compiler.tensors import Tensors
from engine.persistent.compiler.variables import Variable
from engine.persistent.dtypes import DType, named
from engine.persistent.errors import (
    AccessError,
    BlockCycleError,
    DTypeError,
    GraphError,
    GrowthError,
    OperationError,
    Place,
    RankError,
    ShapeError,
    SliceResetError,
    SliceWriteError,
    UnknownNameError,
)
from engine.persistent.language import graph as nodes
from engine.persistent.state.lane import MEMORY_BYTES
from engine.persistent.state.table import Layout

Get = Callable[[Frame], mx.array]


def compile_graph(
    graph: nodes.Graph, variables: Mapping[str, Variable], sizes: Mapping[str, int], tensors: Tensors
) -> list[Action]:
    """What a step does, in order. Raises a GraphError with the place of what is wrong."""
    check_cycles(graph)
    return _Compiler(graph, variables, sizes, tensors).block("entry")


def check_cycles(graph: nodes.Graph) -> None:
    """Raise UnknownNameError for a block that is not there, BlockCycleError for those that branch in a circle."""
    blocks = {block.name: block for block in graph.blocks}
    done: set[str] = set()

    def visit(name: str, at: Place | None, path: tuple[str, ...]) -> None:
        if name in path:
            circle = " -> ".join((*path[path.index(name) :], name))
            raise BlockCycleError(f"blocks branch in a circle: {circle}", at)
        if name not in blocks:
            raise UnknownNameError(f"there is no block {name}, only {', '.join(blocks) or 'none'}", at)
        if name not in done:
            for statement in blocks[name].statements():
                if isinstance(statement, nodes.Branch):
                    for to in (statement.then, statement.otherwise):
                        if to is not None:
                            visit(to, statement.at, (*path, name))
            done.add(name)

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
        """The actions of a block and, before them, those of all that it branches to."""
        if name not in self._blocks:
            (block,) = [block for block in self.graph.blocks if block.name == name]
            self._blocks[name] = self._body(block.body, frozenset())
        return self._blocks[name]

    def _body(self, body: Sequence[nodes.Statement], scope: Scope) -> list[Action]:
        return [self._statement(statement, scope) for statement in body]

    def _statement(self, statement: nodes.Statement, scope: Scope) -> Action:
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
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
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
        variable = statement.variable
        if variable in scope:
            raise AccessError(f"the loop variable {variable} is already in use", statement.at)
        start, stop = self._counting.count(statement.start, scope), self._counting.count(statement.stop, scope)
        body = self._body(statement.body, scope | {variable})

        def run(frame: Frame) -> bool:
            outer = dict(frame.loops)  # a block that is branched to may loop with the same name
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
            raise RankError(f"{_spelt(access)} has {rank} dimensions, {to} has {len(target.shape)}", access.at)
        return Action(lambda frame: put(frame, frame.memory.tables[name].read(select(frame))), what, to, access.at)

    def _write(self, statement: nodes.Write, scope: Scope) -> Action:
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
            raise DTypeError(f"increment and decrement need a numeric scalar, {statement.name} is none", statement.at)
        name, amount = statement.name, statement.amount
        return Action(
            lambda frame: frame.memory.scalars[name].increment(amount), f"cache.increment {name}", at=statement.at
        )

    def _reset(self, statement: nodes.Reset, scope: Scope) -> Action:
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

    # -- what statements are made of -----------------------------------------------------------------------------------

    def _variable(self, name: str, at: Place | None) -> Variable:
        variable = self.variables.get(name)
        if variable is None:
            raise UnknownNameError(f"there is no variable {name}, only {', '.join(self.variables) or 'none'}", at)
        return variable

    def _target(self, name: str, at: Place | None) -> Variable:
        """A variable that a value may go to."""
        variable = self._variable(name, at)
        if variable.section == "persistent":
            raise AccessError(f"{name} is persistent: cache.write puts values into it", at)
        if variable.section == "constant" or variable.declaration.indices:
            raise AccessError(f"{name} comes from the model and cannot be written", at)
        return variable

    def _persistent(self, access: nodes.Access, *, bare: bool = False) -> Layout:
        """What cache statements work on; `bare` when they may name a table without brackets."""
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
        """How the value of a variable is had, and its dtype."""
        if access.name in scope:
            raise AccessError(f"{access.name} is a loop variable, which is an index and no value", access.at)
        variable = self._variable(access.name, access.at)
        if variable.section == "persistent":
            raise AccessError(f"{access.name} is persistent: cache.read takes values out of it", access.at)
        wanted, given = variable.declaration.indices, access.indices
        if len(given or ()) != len(wanted) or (given is None) != (not wanted):
            takes = f"takes {len(wanted)} indices ({', '.join(wanted)})" if wanted else "takes no indices"
            raise RankError(f"{access.name} {takes}, got {len(given or ())}", access.at)
        if not wanted:
            return self.tensors.getter(variable), variable.dtype
        counts = []
        for index in given or ():
            if isinstance(index, nodes.Slice):
                raise RankError(f"{access.name} is read one tensor at a time, not by slices", access.at)
            counts.append(self._counting.count(index, scope))
        return self.tensors.entry_getter(variable, counts), variable.dtype

    def _putter(self, target: Variable) -> Callable[[Frame, mx.array], None]:
        """How a value is put into a variable, once it has been found to have its dtype and shape."""
        name, dtype, shape, rank = target.name, target.dtype.mlx, target.shape, len(target.shape)
        elastic = name in self._elastic

        def put(frame: Frame, value: mx.array) -> None:
            if value.dtype != dtype:
                raise DTypeError(f"{name} is {target.dtype.name}, got {named(value.dtype)}")
            if (value.ndim != rank) if elastic else (value.shape != shape):
                if value.ndim != rank:
                    raise RankError(f"{name} has {rank} dimensions, got the shape {list(value.shape)}")
                raise ShapeError(f"{name} has the shape {list(shape)}, got {list(value.shape)}")
            if elastic and value.nbytes > MEMORY_BYTES:  # MLX would take the process down with it
                raise GrowthError(f"{name} would take {value.nbytes} bytes, this machine has {MEMORY_BYTES}")
            frame.values[name] = value

        return put

    def _same_dtype(self, what: str, dtype: DType, target: Variable, at: Place | None) -> None:
        if dtype != target.dtype:
            raise DTypeError(f"{what} gives {dtype.name}, {target.name} is {target.dtype.name}", at)


def _spelt(access: nodes.Access) -> str:
    return access.name if access.indices is None else f"{access.name}[...]" if access.indices else f"{access.name}[]"
