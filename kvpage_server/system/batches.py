"""Things sent or read together, as many as are worth one question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(sized: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Things, each given with its bytes, in lists of at most so many bytes; a larger thing comes alone."""
    some: list[T] = []
    total = 0
    for thing, nbytes in sized:
        if some and total + nbytes > most:
            yield some
            some, total = [], 0
        some.append(thing)
        total += nbytes
    if some:
        yield some
