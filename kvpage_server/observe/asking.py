"""Readings: queries of a store, written once for both of redis-py's clients, the synchronous and the asynchronous one.

A `Reading` is a generator that does no I/O. It yields a list of commands, and `ask` or `ask_async` sends it the list of
their replies: bytes, integers, lists and maps as RESP3 has them, or the `ResponseError` of a refused command. Its
return value is the result of the query. `ask_async` runs its steps in a thread, so a step may take long, unless a
single call in it holds the interpreter's lock for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import redis
import redis.asyncio

T = TypeVar("T")
Command: TypeAlias = Sequence[bytes | int]  # its name is bytes, so that redis-py does not convert the reply
Reading: TypeAlias = Generator[list[Command], list[Any], T]

COMMANDS_PER_PIPELINE = 256  # commands that the server runs before other clients have their turn
COMMANDS_PER_ASYNC_PIPELINE = 32  # fewer, because other tasks share the event loop


class QueriedStore(Protocol):
    """The interface of redis-py's synchronous client, for one server or for several servers together."""

    def execute_command(self, *words: Any) -> Any:
        """Return the reply to a command. Raises RedisError."""

    def pipeline(self, transaction: bool) -> Any:
        """Return a pipeline, which collects commands and sends them together."""


def ask(store: QueriedStore, reading: Reading[T]) -> T:
    """Execute a reading with a synchronous client, and return its result. `store` must use RESP3.

    Raises RedisError when the store cannot be reached, and the exceptions of the reading.
    """
    try:
        commands = next(reading)
        while True:
            answers: list[Any] = []
            for pipeline in _pipelines(store, commands, COMMANDS_PER_PIPELINE):
                answers += pipeline.execute(raise_on_error=False)
            commands = reading.send(answers)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def ask_async(store: redis.asyncio.Redis, reading: Reading[T]) -> T:
    """Execute a reading in an event loop with an asynchronous client, and return its result.

    Raises the errors of `ask`.
    """
    answers: list[Any] | None = None
    while True:
        commands, ended, result = await asyncio.to_thread(_step, reading, answers)
        if ended:
            return result  # type: ignore[no-any-return]
        answers = []
        for pipeline in _pipelines(store, commands, COMMANDS_PER_ASYNC_PIPELINE):
            answers += await pipeline.execute(raise_on_error=False)


def _step(reading: Reading[Any], answers: list[Any] | None) -> tuple[list[Command], bool, Any]:
    """Send `answers` to a reading; None starts it. Return (next commands, whether it has ended, its result).

    The end is a value, because a future cannot raise StopIteration.
    """
    try:
        return reading.send(answers), False, None  # type: ignore[arg-type]  # None starts it
    except StopIteration as end:
        return [], True, end.value


def _pipelines(store: Any, commands: list[Command], size: int) -> Iterator[Any]:
    for start in range(0, len(commands), size):
        pipeline = store.pipeline(transaction=False)
        for command in commands[start : start + size]:
            pipeline.execute_command(*command)
        yield pipeline


def refused(answer: Any) -> bool:
    """Return whether a reply is an error, because the user may not run the command, or the server does not have it."""
    return isinstance(answer, redis.ResponseError)


class Fields(dict[str, Any]):
    """The fields of a reply. Raises InvalidResponse for one that the reply lacks."""

    def __missing__(self, name: str) -> Any:
        raise redis.InvalidResponse(f"a reply has no field {name}")


def named(answer: dict[Any, Any]) -> Fields:
    """Return the map of a reply with its keys decoded as text."""
    return Fields({key.decode() if isinstance(key, bytes) else key: value for key, value in answer.items()})


def parts_of(answer: Any) -> list[Fields]:
    """Return the maps in a reply to KVPAGEINDEX, with text keys: one for each block, or a single one with TOTAL.

    The list is empty if the command was refused.
    """
    return [] if refused(answer) else [named(part) for part in answer]


def text(raw: Any) -> str:
    """Return a string of a reply as text. Bytes that are not UTF-8 are shown as escapes."""
    return raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else str(raw)
