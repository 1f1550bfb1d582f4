"""Calls of operations: the dtype that comes out, and the parameters that go in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from engine.persistent.compiler.counting import Counting, Scope
from engine.persistent.compiler.frame import Frame
from engine.persistent.compiler.ops import Op
from engine.persistent.compiler.variables import constant
from engine.persistent.dtypes import DTYPES, WORDS, DType
from engine.persistent.errors import DTypeError, UnknownNameError
from engine.persistent.language.graph import Arithmetic, Name, Operation, Value


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


@dataclass(frozen=True, slots=True)
class Parameters:
    """Those that are the same in every step, and how the others are had."""

    fixed: dict[str, Any]
    counted: dict[str, Callable[[Frame], Any]]


def parameters_of(statement: Operation, op: Op, scope: Scope, counting: Counting) -> Parameters:
    """The parameters that are given. Raises UnknownNameError or DTypeError for one that is wrong."""
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
    """The operation as a function of the step alone, and the usual ones a short one."""
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
