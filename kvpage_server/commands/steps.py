"""Work in steps: what a command with very much to look at does between the turns of others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from kvpage_server.resp.reply import Reply, Stream

T = TypeVar("T")
U = TypeVar("U")

STEP = 64  # things that are looked at in a step

_FREED = 4096  # things at a time

Steps = Generator[Reply, None, T]  # of a reply that is not told anything yet; what they find is returned


def stepwise(steps: Steps[Reply], *, small: bool) -> Reply:
    """The reply that some steps return: found at once when there are few of them, else while others have their turn."""
    if not small:
        return Stream(None, _told(steps))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _told(steps: Steps[Reply]) -> Iterator[Reply]:
    yield (yield from steps)


def each(things: Sequence[T], meaning: Callable[[Sequence[T]], Sequence[U]], width: int = 1) -> Steps[list[U]]:
    """What things mean, `width` of them together, some in every step."""
    found: list[U] = []
    for start in range(0, len(things), STEP * width):
        found += meaning(things[start : start + STEP * width])
        yield ()
    return found


def freed(things: list[T]) -> Iterator[Reply]:
    """Steps that free things: to free a million takes a while."""
    while things:
        del things[-_FREED:]
        yield ()
