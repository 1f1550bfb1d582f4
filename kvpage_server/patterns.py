"""Very many glob patterns, and which of them a name matches: rights to keys and channels, listeners to patterns.

Most patterns are a beginning and a star. These are looked up by the beginnings that a name has; a name is held against
each of the others. Cost of a name: O(different lengths of beginnings + other patterns).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvpage_server.glob import Matches, opening_of

T = TypeVar("T")


class Patterns(Generic[T]):
    """Patterns in the order in which they came, each with something that it stands for."""

    def __init__(self) -> None:
        self._all: dict[bytes, T] = {}
        self._openings: dict[bytes, T] = {}  # by what a name has to begin with
        self._lengths: Counter[int] = Counter()  # of these
        self._others: dict[bytes, tuple[Matches, T]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all)

    def __contains__(self, pattern: bytes) -> bool:
        return pattern in self._all

    def get(self, pattern: bytes) -> T | None:
        """What a pattern stands for, if it is one of these."""
        return self._all.get(pattern)

    def add(self, pattern: bytes, value: T, matches: Matches) -> None:
        """Have a pattern stand for something, and no longer for what it did. `matches` is what `glob` makes of it."""
        if pattern in self._all:
            self._forget(pattern)
        opening = opening_of(pattern)
        if opening is None:
            self._others[pattern] = matches, value
        else:
            self._openings[opening] = value
            self._lengths[len(opening)] += 1
        self._all[pattern] = value

    def remove(self, pattern: bytes) -> None:
        """A pattern is no longer one of these."""
        del self._all[pattern]
        self._forget(pattern)

    def _forget(self, pattern: bytes) -> None:
        if self._others.pop(pattern, None) is None:
            opening = pattern[:-1]
            del self._openings[opening]
            self._lengths[len(opening)] -= 1
            if not self._lengths[len(opening)]:
                del self._lengths[len(opening)]

    def matching(self, name: bytes) -> Iterator[T]:
        """What those patterns stand for that match a name."""
        for length in self._lengths:
            found = self._openings.get(name[:length])
            if found is not None and length <= len(name):
                yield found
        for matches, value in self._others.values():
            if matches(name):
                yield value

    @property
    def cost(self) -> int:
        """How many patterns a name is held against."""
        return len(self._lengths) + len(self._others)

    def copy(self) -> Patterns[T]:
        """The same patterns, to be changed by themselves."""
        new = Patterns[T]()
        new._all, new._openings = self._all.copy(), self._openings.copy()
        new._lengths, new._others = self._lengths.copy(), self._others.copy()
        return new
