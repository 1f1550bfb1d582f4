"""Calls of operations: the dtype that comes out, and the parameters that go in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.persistent.counting import Counting, Scope
from engine.persistent.dtypes import DTYPES, WORDS, DType
from engine.persistent.errors import DTypeError, UnknownNameError
from engine.persistent.frame import Frame
from engine.persistent.graph import Arithmetic, Name, Operation, Value
from engine.persistent.ops import Op


def result_dtype(statement: Operation, op: Op, dtypes: list[DType], target: DType) -> DType:
    """The dtype of an operation's result. Raises DTypeError for arguments that it doesn't take."""
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


def parameters_of(
    statement: Operation, op: Op, scope: Scope, counting: Counting
) -> list[tuple[str, Callable[[Frame], Any]]]:
    """How each parameter that is given is had. Raises UnknownNameError or DTypeError for one that is wrong."""
    given = dict(statement.parameters)
    unknown = [name for name in given if name not in op.parameters]
    if unknown or len(given) < len(statement.parameters):
        takes = ", ".join(op.parameters) or "none"
        what = f"has no parameter {unknown[0]}, only {takes}" if unknown else "is given a parameter twice"
        raise UnknownNameError(f"{statement.name} {what}", statement.at)
    if missing := op.required - set(given):
        raise UnknownNameError(f"{statement.name} needs the parameter {', '.join(sorted(missing))}", statement.at)
    return [
        (key, _parameter(statement, key, value, op.parameters[key], scope, counting)) for key, value in given.items()
    ]


def _parameter(
    statement: Operation, key: str, value: Value, kind: type, scope: Scope, counting: Counting
) -> Callable[[Frame], Any]:
    if isinstance(value, Name) and value.text in WORDS:
        value = WORDS[value.text]
    if kind is tuple and isinstance(value, tuple):
        counts = [counting.count(item, scope) for item in value if isinstance(item, int | Name | Arithmetic)]
        if len(counts) == len(value):
            return lambda frame: tuple(count(frame) for count in counts)
    elif type(value) is kind or (kind is float and isinstance(value, int)):
        return lambda frame: value
    elif kind in (int, float) and isinstance(value, Name | Arithmetic):
        return counting.count(value, scope)
    shown = {int: "an integer", float: "a number", bool: "true or false", tuple: "a list of integers"}[kind]
    raise DTypeError(f"the parameter {key} of {statement.name} is {shown}", statement.at)
