"""Long work in steps, so that other clients have their turn in between.

A step is the work between two `yield`s of a generator. A yielded `Wait` ends a step until an event has happened.
"""

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
IN_THREAD_FROM = 1024 * 1024  # bytes that a command copies or hashes, from which a thread does it

Steps = Generator[Reply, None, T]  # yield empty replies, or a Wait, and return their result


def stepwise(steps: Steps[Reply], *, small: bool, whole: bool | None = None) -> Reply:
    """Return the reply that the generator `steps` returns. If the work is `small`, run all steps now, without other
    clients in between; otherwise return a Stream that runs them, with `whole` as in `Stream`.
    """
    if not small:
        return Stream(None, _in_steps(steps), whole)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _in_steps(steps: Steps[Reply]) -> Iterator[Reply]:
    """Yield the steps, and then the value that they return, as the only item of the reply."""
    yield (yield from steps)


def each(
    things: Sequence[T], meaning: Callable[[Sequence[T]], Sequence[U]], width: int = 1, at_once: int = STEP
) -> Steps[list[U]]:
    """Call `meaning` with `at_once` items at a time, one call in each step, and return all results in one list.

    `things` has `width` consecutive elements for each item. `meaning` gets a slice of `things` and returns a list.
    """
    found: list[U] = []
    for start in range(0, len(things), at_once * width):
        found += meaning(things[start : start + at_once * width])
        yield ()
    return found


def another_step() -> Wait:
    """Return a Wait for the command's next step. Other clients get their turn before, unless it runs in EXEC."""
    return Wait(lambda then: asyncio.get_running_loop().call_soon(then), now=lambda: None)


def in_thread(work: Callable[[], T]) -> Steps[T]:
    """Run `work` on a thread, and return its result or raise its exception. It is used for files and certificates.

    The caller's step ends until the thread is done. `work` must not use objects that the loop's thread changes.
    """
    result: list[Callable[[], T]] = []
    doing: list[asyncio.Future[T]] = []

    def start(then: Callable[[], None]) -> None:
        """Start the thread, if it has not started, and call `then` on the loop when it is done."""
        if not doing:
            doing.append(asyncio.get_running_loop().run_in_executor(None, work))
            result.append(doing[0].result)
        doing[0].add_done_callback(lambda _: then())

    yield Wait(start, now=lambda: result.append(work))
    while doing and not doing[0].done():  # the client has disconnected, and the rest of its write runs
        yield Wait(start)
    doing.clear()
    return result.pop()()  # removed first, as an error refers to this frame


def wait_for_thread(work: Callable[[], None], done: Callable[[], None]) -> Wait:
    """Return a Wait that runs `work` on a thread, and then calls `done` on the loop. `work` must not raise."""

    def start(then: Callable[[], None]) -> None:
        """Start the work, and call `then` after it."""

        def end(_: asyncio.Future[None]) -> None:
            done()
            then()

        asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(end)

    def now() -> None:
        """Do the work in this step, for a transaction."""
        work()
        done()

    return Wait(start, now)


def freed(things: list[T]) -> Iterator[Reply]:
    """Empty a list in steps of 4096 items, because freeing a million items takes long."""
    while things:
        del things[-_FREED:]
        yield ()


# -- Sums over all connections, in steps because there may be very many ------------------------------------------------


def counted(server: Server) -> Steps[None]:
    """Compute the sums over all connections in steps, and set `server.totals` to them at the end."""
    totals, clients = Totals(), list(server.clients.values())
    for start in range(0, len(clients), STEP):
        for client in clients[start : start + STEP]:
            if not client.gone:
                totals.add(client)
        yield ()
    server.totals = totals
