"""Questions to a store, written once and asked by a client for threads or by one for an event loop.

A `Reading` yields lists of commands and is sent their answers: bytes, integers, lists and maps as RESP3 has them, or
the `ResponseError` of a command that was refused. What it returns is what was read.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import redis
import redis.asyncio

T = TypeVar("T")
Command: TypeAlias = Sequence[bytes | int]  # names are bytes: redis-py leaves the answers to them as they came
Reading: TypeAlias = Generator[list[Command], list[Any], T]

AT_ONCE = 256  # commands in one go: the server runs as many before others have their turn


class AskedStore(Protocol):
    """Who is asked by a client for threads: a server, or several as one."""

    def execute_command(self, *words: Any) -> Any:
        """The answer to a command. Raises RedisError."""

    def pipeline(self, transaction: bool) -> Any:
        """Takes commands, and sends them together."""


def ask(store: AskedStore, reading: Reading[T]) -> T:
    """What a reading finds out. `store` speaks RESP3. Raises RedisError when the store cannot be reached."""
    try:
        commands = next(reading)
        while True:
            answers: list[Any] = []
            for start in range(0, len(commands), AT_ONCE):
                pipeline = store.pipeline(transaction=False)
                for command in commands[start : start + AT_ONCE]:
                    pipeline.execute_command(*command)
                answers += pipeline.execute(raise_on_error=False)
            commands = reading.send(answers)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def ask_async(store: redis.asyncio.Redis, reading: Reading[T]) -> T:
    """The same, in an event loop."""
    try:
        commands = next(reading)
        while True:
            answers: list[Any] = []
            for start in range(0, len(commands), AT_ONCE):
                pipeline = store.pipeline(transaction=False)
                for command in commands[start : start + AT_ONCE]:
                    pipeline.execute_command(*command)
                answers += await pipeline.execute(raise_on_error=False)
            commands = reading.send(answers)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def refused(answer: Any) -> bool:
    """Whether a command was answered with an error: not allowed to this user, or not known to this server."""
    return isinstance(answer, redis.ResponseError)


def named(answer: dict[Any, Any]) -> dict[str, Any]:
    """A map with its keys as text."""
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in answer.items()}


def text(raw: Any) -> str:
    """A bulk or verbatim string as text; bytes that are none stay visible."""
    return raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else str(raw)
