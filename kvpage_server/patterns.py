"""Very many glob patterns, and which of them match a name. Used for rights to keys and channels, and for listeners.

Most patterns are a prefix and a star. These are looked up by the prefixes of a name. All other patterns are tried one
by one. Cost for a name: O(different lengths of prefixes that are not longer than the name + other patterns).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvpage_server.glob import Matches, opening_of

T = TypeVar("T")


class Patterns(Generic[T]):
    """Patterns in the order of adding, each with a value."""

    def __init__(self) -> None:
        self._all: dict[bytes, T] = {}
        self._openings: dict[bytes, T] = {}  # by what a name has to begin with
        self._lengths: Counter[int] = Counter()  # of these
        self._in_order: list[int] = []  # the lengths, each once
        self._others: dict[bytes, tuple[Matches, T]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all)

    def __contains__(self, pattern: bytes) -> bool:
        return pattern in self._all

    def get(self, pattern: bytes) -> T | None:
        """The value of a pattern, or None."""
        return self._all.get(pattern)

    def add(self, pattern: bytes, value: T, matches: Matches) -> None:
        """Set the value of a pattern. `matches` is the compiled pattern."""
        if pattern in self._all:
            self._forget(pattern)
        opening = opening_of(pattern)
        if opening is None:
            self._others[pattern] = matches, value
        else:
            self._openings[opening] = value
            self._lengths[len(opening)] += 1
            if self._lengths[len(opening)] == 1:
                insort(self._in_order, len(opening))
        self._all[pattern] = value

    def remove(self, pattern: bytes) -> None:
        del self._all[pattern]
        self._forget(pattern)

    def _forget(self, pattern: bytes) -> None:
        if self._others.pop(pattern, None) is None:
            opening = pattern[:-1]
            del self._openings[opening]
            self._lengths[len(opening)] -= 1
            if not self._lengths[len(opening)]:
                del self._lengths[len(opening)]
                self._in_order.remove(len(opening))

    def matching(self, name: bytes) -> Iterator[T]:
        """The values of the patterns that match a name."""
        for length in self._in_order:
            if length > len(name):
                break
            found = self._openings.get(name[:length])
            if found is not None:
                yield found
        for matches, value in self._others.values():
            if matches(name):
                yield value

    @property
    def cost(self) -> int:
        """The number of patterns that a name is compared with."""
        return len(self._lengths) + len(self._others)

    def copy(self) -> Patterns[T]:
        new = Patterns[T]()
        new._all, new._openings = self._all.copy(), self._openings.copy()
        new._lengths, new._in_order, new._others = self._lengths.copy(), self._in_order.copy(), self._others.copy()
        return new
