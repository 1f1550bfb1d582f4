"""Redis's glob patterns over bytes (`stringmatchlen` in util.c): KEYS, SCAN, PSUBSCRIBE, CONFIG GET, ACL key patterns.

``*`` is any run of bytes, ``?`` one byte, ``[a-z]`` and ``[^ab]`` are classes, ``\\`` quotes the next byte. Malformed
patterns behave as in Redis: an unclosed class ends with the pattern, ``[a-]`` is a range up to ``]``, a last ``\\`` is
itself, and stars alone do not match the empty string, except a single star in the places where Redis compares no
further. A byte above 127 in a range is above 127; in Redis this depends on whether the machine's chars are signed.
"""

from __future__ import annotations

import re
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Generic, TypeVar

from kvpage_server.core import Glob

COMPARED = 1 << 19  # bytes of names that are compared with a pattern in one step
LONGEST_COMPARED = 1 << 13  # bytes of a name that `Patterns` compares with each pattern
_COMPARISON = 64  # bytes that are compared in the time that a comparison costs in addition

Matches = Callable[[bytes], object]  # returns a true value if the bytes match

_SPECIAL = re.compile(rb"[*?[\\]")


class PatternTooLong(ValueError):
    """Error: a pattern has more than `LONGEST_PATTERN` bytes, or a part with wildcards more than `LONGEST_PART`."""


def glob(pattern: bytes, *, ignore_case: bool = False) -> Matches:
    """Compile a pattern: return a function whose result is true if bytes match the whole pattern. Raises
    PatternTooLong.
    """
    return _everything if pattern == b"*" else compiled(pattern, ignore_case=ignore_case).matches


def compiled(pattern: bytes, *, ignore_case: bool = False) -> Glob:
    """Compile a pattern. A single star does not match the empty name. Raises PatternTooLong."""
    try:
        return Glob(pattern, ignore_case)
    except ValueError as error:
        raise PatternTooLong(str(error)) from None


def opening_of(pattern: bytes) -> bytes | None:
    """Return the prefix of a pattern that is a prefix and a star; None for any other pattern."""
    opening = pattern[:-1]
    return opening if pattern[-1:] == b"*" and opening and not _SPECIAL.search(opening) else None


def is_open_ended(pattern: bytes) -> bool:
    """Return whether every name that begins with a match of the pattern is a match, too. False in doubt."""
    return b"\\" not in pattern and pattern.rfind(b"]") >= pattern.rfind(b"[") and pattern.endswith(b"*")


def portions(names: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Divide names into lists that each can be compared with a pattern in some milliseconds."""
    some, size = list[bytes](), 0
    for name in names:
        some.append(name)
        size += len(name)
        if size > COMPARED:
            yield some
            some, size = [], 0
    yield some


def _everything(_: bytes) -> bool:
    return True


# -- Sets of many glob patterns, for rights to keys and channels, and for subscriptions --------------------------------
#
# A pattern's opening is its bytes before the first wildcard or backslash. A name is looked up by its own beginnings, of
# all lengths that openings have. Most patterns are an opening and a star, and match without a comparison. Others are
# compared if their opening fits. The cost for a name is O(different lengths of openings, up to the name's + patterns
# that have the opening in common with other patterns). A comparison costs O(bytes of the name), of which there may be
# millions. So only the beginning of a name of more than LONGEST_COMPARED bytes is compared, and the name matches only
# patterns that end with a star, which stands for the rest.

T = TypeVar("T")
V = TypeVar("V")


def compared_bytes(name: Sized) -> int:
    """Return the bytes that `Patterns` compares in the time that a comparison of a name with one pattern takes."""
    return _COMPARISON + min(len(name), LONGEST_COMPARED)


class _Openings(Generic[V]):
    """Values by opening, and the lengths of all openings."""

    def __init__(self) -> None:
        self.values: dict[bytes, V] = {}
        self.lengths: list[int] = []  # different ones, ascending
        self._counts: Counter[int] = Counter()  # number of openings of each length

    def set(self, opening: bytes, value: V) -> None:
        if opening not in self.values:
            self._counts[len(opening)] += 1
            if self._counts[len(opening)] == 1:
                insort(self.lengths, len(opening))
        self.values[opening] = value

    def remove(self, opening: bytes) -> None:
        del self.values[opening]
        self._counts[len(opening)] -= 1
        if not self._counts[len(opening)]:
            del self._counts[len(opening)]
            self.lengths.remove(len(opening))

    def copy(self) -> _Openings[V]:
        """Return a copy, with the same values."""
        new = _Openings[V]()
        new.values, new.lengths, new._counts = self.values.copy(), self.lengths.copy(), self._counts.copy()
        return new


class Patterns(Generic[T]):
    """Glob patterns in the order of adding, each with a value. `matching` finds all patterns that match a name, those
    that end with a star if the name has more than LONGEST_COMPARED bytes.
    """

    def __init__(self) -> None:
        self._all: dict[bytes, T] = {}  # in the order of adding
        self._open_ended: _Openings[T] = _Openings()  # patterns of an opening and a star
        self._others: _Openings[tuple[object, dict[bytes, tuple[Matches, T]]]] = _Openings()  # compiled, with an owner
        self._owner = object()  # of those dictionaries that copies of this object do not share

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all)

    def __contains__(self, pattern: bytes) -> bool:
        return pattern in self._all

    def get(self, pattern: bytes) -> T | None:
        """Return the value of a pattern, or None."""
        return self._all.get(pattern)

    def add(self, pattern: bytes, value: T, matches: Matches) -> None:
        """Set the value of a pattern, which is added if necessary. `matches` is the compiled pattern."""
        opening = opening_of(pattern)
        if opening is not None:
            self._open_ended.set(opening, value)
        else:
            self._of_opening(_bytes_before_wildcards(pattern))[pattern] = matches, value
        self._all[pattern] = value

    def remove(self, pattern: bytes) -> None:
        del self._all[pattern]
        opening = opening_of(pattern)
        if opening is not None:
            self._open_ended.remove(opening)
            return
        opening = _bytes_before_wildcards(pattern)
        same = self._of_opening(opening)
        del same[pattern]
        if not same:
            self._others.remove(opening)

    def _of_opening(self, opening: bytes) -> dict[bytes, tuple[Matches, T]]:
        """Return the dictionary of all patterns of `_others` that have an opening. No copy of this object shares it."""
        owner, same = self._others.values.get(opening, (None, {}))
        if owner is not self._owner:
            same = same.copy()
            self._others.set(opening, (self._owner, same))
        return same

    def matching(self, name: bytes) -> Iterator[T]:
        """Yield the values of the patterns that match a name."""
        return (value for value in self.compared(name) if value is not None)

    def compared(self, name: bytes) -> Iterator[T | None]:
        """Yield the value of each pattern that matches a name, and None for others that cost a comparison or a lookup.
        Patterns may be added and removed meanwhile.
        """
        for length in [*self._open_ended.lengths]:
            if length > len(name):
                break
            yield self._open_ended.values.get(name[:length])
        beginning, is_whole = name[:LONGEST_COMPARED], len(name) <= LONGEST_COMPARED
        for length in [*self._others.lengths]:
            if length > len(name):
                break
            found = self._others.values.get(name[:length])
            if found is None:
                yield None
                continue
            for pattern, (matches, value) in [*found[1].items()]:
                yield value if matches(beginning) and (is_whole or is_open_ended(pattern)) else None

    def may_match_some(self, prefix: bytes) -> Iterator[T]:
        """Yield the values of the patterns that may match a name with a prefix, judged by the patterns' first bytes up
        to a wildcard. O(patterns).
        """
        for pattern, value in self._all.items():
            opening = _bytes_before_wildcards(pattern)
            if opening.startswith(prefix) or (opening != pattern and prefix.startswith(opening)):
                yield value

    @property
    def cost(self) -> int:
        """Number of comparisons and lookups for a name, at most."""
        lookups = len(self._open_ended.lengths) + len(self._others.lengths)
        return lookups + len(self) - len(self._open_ended.values) - len(self._others.values)

    def copy(self) -> Patterns[T]:
        new = Patterns[T]()
        new._all, new._open_ended, new._others = self._all.copy(), self._open_ended.copy(), self._others.copy()
        self._owner = object()  # neither changes the dictionaries that both have
        return new


def _bytes_before_wildcards(pattern: bytes) -> bytes:
    """Return the bytes of a pattern before the first wildcard or backslash."""
    special = _SPECIAL.search(pattern)
    return pattern if special is None else pattern[: special.start()]
