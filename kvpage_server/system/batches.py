"""Batches of items, limited in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(sized: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Group items into lists of at most `most` bytes, in order. `sized` yields pairs of an item and its bytes.

    An item of more than `most` bytes is in a list of its own.
    """
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
