"""Work in steps, so that other clients have their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from kvpage_server.commands.context import Server, Totals
from kvpage_server.resp import Reply, Stream, Wait

T = TypeVar("T")
U = TypeVar("U")

STEP = 64  # things that are looked at in a step

_FREED = 4096  # things at a time

Steps = Generator[Reply, None, T]  # they yield no reply, and return their result


def stepwise(steps: Steps[Reply], *, small: bool) -> Reply:
    """Return the reply that some steps return. A few steps run at once; more take turns with other clients."""
    if not small:
        return Stream(None, _told(steps))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _told(steps: Steps[Reply]) -> Iterator[Reply]:
    yield (yield from steps)


def each(
    things: Sequence[T], meaning: Callable[[Sequence[T]], Sequence[U]], width: int = 1, at_once: int = STEP
) -> Steps[list[U]]:
    """Read all things, `width` words each, `at_once` things a step."""
    found: list[U] = []
    for start in range(0, len(things), at_once * width):
        found += meaning(things[start : start + at_once * width])
        yield ()
    return found


def in_thread(work: Callable[[], T]) -> Steps[T]:
    """Run some work in a thread, and return its result or raise its exception. For files and certificates.

    The work must not touch anything that the loop's thread changes.
    """
    result: list[Callable[[], T]] = []

    def start(then: Callable[[], None]) -> None:
        doing = asyncio.get_running_loop().run_in_executor(None, work)
        result.append(doing.result)
        doing.add_done_callback(lambda _: then())

    yield Wait(start, now=lambda: result.append(work))
    return result.pop()()  # an error has this frame


def freed(things: list[T]) -> Iterator[Reply]:
    """Free things in steps, since freeing a million takes a while."""
    while things:
        del things[-_FREED:]
        yield ()


# -- Sums of all connections' memory and output, computed in steps, because there may be very many ---------------------


def counted(server: Server) -> Steps[None]:
    """Steps until every connection is counted in `server.totals`."""
    totals, clients = Totals(), list(server.clients.values())
    for start in range(0, len(clients), STEP):
        for client in clients[start : start + STEP]:
            if not client.gone:
                totals.add(client)
        yield ()
    server.totals = totals
