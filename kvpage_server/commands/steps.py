"""Long work in steps, so that other clients have their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from kvpage_server.commands.context import Server, Totals
from kvpage_server.resp import Reply, Stream, Wait

T = TypeVar("T")
U = TypeVar("U")

STEP = 64  # items that a step handles

_FREED = 4096  # items that a step frees

Steps = Generator[Reply, None, T]  # yield empty replies, or a Wait, and return their result


def stepwise(steps: Steps[Reply], *, small: bool) -> Reply:
    """Return the reply that `steps` return. If they are `small`, run them at once; otherwise return a Stream, which
    gives other clients their turn after each step.
    """
    if not small:
        return Stream(None, _in_steps(steps))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _in_steps(steps: Steps[Reply]) -> Iterator[Reply]:
    yield (yield from steps)


def each(
    things: Sequence[T], meaning: Callable[[Sequence[T]], Sequence[U]], width: int = 1, at_once: int = STEP
) -> Steps[list[U]]:
    """Apply `meaning` to items of `width` words each, `at_once` items in each step. Return all results."""
    found: list[U] = []
    for start in range(0, len(things), at_once * width):
        found += meaning(things[start : start + at_once * width])
        yield ()
    return found


def in_thread(work: Callable[[], T]) -> Steps[T]:
    """Run a function on a thread, and return its result or raise its exception. For files and certificates.

    The function must not use anything that the loop's thread changes.
    """
    result: list[Callable[[], T]] = []

    def start(then: Callable[[], None]) -> None:
        doing = asyncio.get_running_loop().run_in_executor(None, work)
        result.append(doing.result)
        doing.add_done_callback(lambda _: then())

    yield Wait(start, now=lambda: result.append(work))
    return result.pop()()  # removed first, as an error refers to this frame


def freed(things: list[T]) -> Iterator[Reply]:
    """Empty a list in steps, since freeing a million items takes a while."""
    while things:
        del things[-_FREED:]
        yield ()


# -- Sums over all connections, in steps because there may be very many ------------------------------------------------


def counted(server: Server) -> Steps[None]:
    """Count all connections in steps, then set `server.totals`."""
    totals, clients = Totals(), list(server.clients.values())
    for start in range(0, len(clients), STEP):
        for client in clients[start : start + STEP]:
            if not client.gone:
                totals.add(client)
        yield ()
    server.totals = totals
