"""Redis's glob patterns over bytes (`stringmatchlen` in util.c): KEYS, SCAN, PSUBSCRIBE, CONFIG GET, ACL key patterns.

``*`` is any run of bytes, ``?`` one byte, ``[a-z]`` and ``[^ab]`` are classes, ``\\`` quotes the next byte. Malformed
patterns behave as in Redis: an unclosed class ends with the pattern, ``[a-]`` is a range up to ``]``, a last ``\\`` is
itself, and stars alone do not match the empty string, except a single star in the places where Redis compares no
further. A byte above 127 in a range is above 127; in Redis this depends on whether the machine's chars are signed.

Stars divide a pattern into parts of a fixed length. The first and the last part are compared at the two ends of a
string, and each part between them at its first occurrence, without backtracking. A part without wildcards is found by
`bytes.find`, another one, of at most `LONGEST_PART` bytes, by `find_classes`, each in O(string). A pattern of short
parts also becomes a regular expression, which is faster for short strings.
"""

from __future__ import annotations

import re
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from kvpage_server.core import find_classes

LONGEST = 1024  # bytes of a pattern; longer ones are refused, because they take long to compile
LONGEST_PART = 64  # bytes that a part between two stars matches, if it has a ? or a class
COMPARED = 1 << 20  # bytes of names that are compared with a pattern in one step
_SHORT = 256  # bytes of a string that is compared with a regular expression, in O(part x string)

Matches = Callable[[bytes], object]  # returns a true value if the bytes match

_STAR = b""  # a star from `_elements`; any other element matches one byte
_EVERY = bytes(range(256))
_SPECIAL = re.compile(rb"[*?[\\]")


class PatternTooLong(ValueError):
    """Error: a pattern has more than `LONGEST` bytes, or a part with wildcards more than `LONGEST_PART`."""


@lru_cache(maxsize=512)
def glob(pattern: bytes, *, ignore_case: bool = False) -> Matches:
    """Compile a pattern: return a function whose result is true if bytes match the whole pattern. Raises
    PatternTooLong.
    """
    if len(pattern) > LONGEST:
        raise PatternTooLong(f"a pattern has at most {LONGEST} bytes, got {len(pattern)}")
    if pattern == b"*":
        return _everything
    if not ignore_case and not _SPECIAL.search(pattern):
        return pattern.__eq__
    if not ignore_case and (opening := opening_of(pattern)) is not None:
        return lambda name: name.startswith(opening)
    parts: list[list[bytes]] = [[]]
    for element in _elements(pattern, ignore_case):
        if element == _STAR:
            parts.append([])
        else:
            parts[-1].append(element)
    if len(parts) > 1 and not any(parts):
        return bool
    first, *middle, last = parts if len(parts) > 1 else (*parts, [])
    middle = [part for part in middle if part]
    by_parts = _ByParts(first, middle, last).matches
    if max(map(len, middle), default=0) > LONGEST_PART:
        return by_parts
    whole = b"".join([*first, *(b"(?>.*?%b)" % b"".join(part) for part in middle)])
    if len(parts) > 1:  # the rest of the string is skipped at once, and its last bytes are compared
        whole += b".{%d,}+(?<=%b)" % (len(last), b"".join(last))
    short = re.compile(whole, re.DOTALL).fullmatch
    return (lambda name: short(name) if len(name) <= _SHORT else by_parts(name)) if middle else short


class _ByParts:
    """Comparison with the parts of a pattern, one after another. Each part is a list of elements."""

    def __init__(self, first: list[bytes], middle: list[list[bytes]], last: list[bytes]) -> None:
        """Compile the parts. Raises PatternTooLong for a long part with wildcards."""
        self._ends = re.compile(b"".join(first), re.DOTALL), re.compile(b"".join(last), re.DOTALL)
        self._sizes = len(first), len(last)
        self._middle: list[bytes | _Classes] = []
        sharing: list[_Classes] = []  # parts whose classes have bits of the same masks
        for part in middle:
            plain = _plain(part)
            if plain is None and len(part) > LONGEST_PART:
                raise PatternTooLong(
                    f"a part of a pattern between two stars that has a ? or [ matches at most {LONGEST_PART} bytes, "
                    f"got {len(part)}"
                )
            if plain is not None:
                self._middle.append(plain)
                continue
            bit = sharing[-1].bit + len(sharing[-1].elements) if sharing else 0
            if bit + len(part) > LONGEST_PART:
                _fill(sharing)
                sharing, bit = [], 0
            sharing.append(_Classes(part, bit))
            self._middle.append(sharing[-1])
        _fill(sharing)

    def matches(self, string: bytes) -> bool:
        """Return whether a string matches the whole pattern."""
        start, end = self._sizes[0], len(string) - self._sizes[1]
        first, last = self._ends
        if start > end or not first.match(string) or not last.match(string, end):
            return False
        for part in self._middle:
            if isinstance(part, bytes):
                at, size = string.find(part, start, end), len(part)
            else:
                size = len(part.elements)
                at = find_classes(part.masks, part.bit, size, string, start, end)
            if at < 0:
                return False
            start = at + size
        return True


def _plain(part: list[bytes]) -> bytes | None:
    """Return the bytes that a part matches; None if it has a wildcard."""
    plain = [element[-1:] for element in part]
    return b"".join(plain) if part == [re.escape(byte) for byte in plain] else None


@dataclass(slots=True)
class _Classes:
    """A part with wildcards: its elements, and their masks for `find_classes`."""

    elements: list[bytes]
    bit: int  # of the first element
    masks: bytes = b""


def _fill(parts: list[_Classes]) -> None:
    """Give parts the masks that they share."""
    bits = {part.bit + i: _members(element) for part in parts for i, element in enumerate(part.elements)}
    most = sum(1 << bit for bit, members in bits.items() if len(members) > len(_EVERY) // 2)
    masks = array("Q", [most] * len(_EVERY))
    for bit, members in bits.items():
        for byte in _EVERY.translate(None, members) if most >> bit & 1 else members:
            masks[byte] ^= 1 << bit
    shared = masks.tobytes()
    for part in parts:
        part.masks = shared


@lru_cache(maxsize=1024)
def _members(element: bytes) -> bytes:
    """Return all bytes that an element matches."""
    return b"".join(re.findall(element, _EVERY, re.DOTALL))


def literal(pattern: bytes) -> bytes | None:
    """Return the only name that a pattern matches; None if it has wildcards. A backslash quotes the next byte."""
    plain = re.sub(rb"\\(.)", b"", pattern, flags=re.DOTALL)
    return None if _SPECIAL.search(plain) else re.sub(rb"\\(.)", rb"\1", pattern, flags=re.DOTALL)


def opening_of(pattern: bytes) -> bytes | None:
    """Return the prefix of a pattern that is a prefix and a star; None for any other pattern."""
    opening = pattern[:-1]
    return opening if pattern[-1:] == b"*" and opening and not _SPECIAL.search(opening) else None


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


def channel_glob(pattern: bytes) -> Matches:
    """Compile a pattern for channel names. As in Redis, a single star does not match the empty name."""
    return bool if pattern == b"*" else glob(pattern)


def _everything(_: bytes) -> bool:
    return True


def _elements(pattern: bytes, ignore_case: bool) -> Iterator[bytes]:
    """Yield the elements of a pattern in order: `_STAR`, or the regular expression of one byte."""
    pos, size = 0, len(pattern)
    while pos < size:
        char = pattern[pos : pos + 1]
        if char == b"*":
            yield _STAR
        elif char == b"?":
            yield b"."
        elif char == b"[":
            element, pos = _class(pattern, pos + 1, ignore_case)
            yield element
            continue
        else:
            if char == b"\\" and pos + 1 < size:
                pos += 1
                char = pattern[pos : pos + 1]
            yield _one_of({char[0]} if not ignore_case else {char.lower()[0], char.upper()[0]})
        pos += 1


def _class(pattern: bytes, pos: int, ignore_case: bool) -> tuple[bytes, int]:
    """Return the regular expression of the class, such as [a-z], whose members begin at `pos`, and the position after
    it.
    """
    size = len(pattern)
    negated = pattern[pos : pos + 1] == b"^"
    pos += negated
    members: set[int] = set()
    while pos < size and pattern[pos] != 0x5D:  # ']'
        if pattern[pos] == 0x5C and size - pos >= 2:  # '\'
            members.add(pattern[pos + 1])
            pos += 2
        elif size - pos >= 3 and pattern[pos + 1] == 0x2D:  # '-'
            members |= _range(pattern[pos], pattern[pos + 2], ignore_case)
            pos += 3
        else:
            members |= _range(pattern[pos], pattern[pos], ignore_case)
            pos += 1
    if negated:
        members = set(_EVERY) - members
    return _one_of(members), pos + 1


def _range(start: int, end: int, ignore_case: bool) -> set[int]:
    low, high = min(start, end), max(start, end)
    if not ignore_case:
        return set(range(low, high + 1))
    folded = _EVERY.lower()
    return {byte for byte in _EVERY if folded[low] <= folded[byte] <= folded[high]}


def _one_of(members: set[int]) -> bytes:
    if len(members) == 1:
        return re.escape(bytes(members))
    if not members:
        return b"(?!)"
    negated = len(members) > len(_EVERY) // 2
    ranges: list[list[int]] = []
    for byte in sorted(set(_EVERY) - members if negated else members):
        if ranges and ranges[-1][1] == byte - 1:
            ranges[-1][1] = byte
        else:
            ranges.append([byte, byte])
    text = b"".join(b"\\x%02x-\\x%02x" % (first, last) for first, last in ranges)
    return b"[^%b]" % text if negated and text else b"[%b]" % text if text else b"."


# -- Sets of many glob patterns, for rights to keys and channels, and for subscriptions --------------------------------
#
# Most patterns are a prefix and a star. These are looked up by the prefixes of a name. All other patterns are compared
# one by one. The cost for a name is O(different lengths of prefixes, up to the name's + other patterns).

T = TypeVar("T")


class Patterns(Generic[T]):
    """Glob patterns in the order of adding, each with a value. `matching` finds all patterns that match a name."""

    def __init__(self) -> None:
        self._all: dict[bytes, T] = {}  # in the order of adding
        self._openings: dict[bytes, T] = {}  # patterns of a prefix and a star, by prefix
        self._lengths: Counter[int] = Counter()  # number of prefixes of each length
        self._in_order: list[int] = []  # the lengths, ascending
        self._others: dict[bytes, tuple[Matches, T]] = {}  # all other patterns, compiled

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
        """Yield the values of the patterns that match a name."""
        return (value for value in self.compared(name) if value is not None)

    def compared(self, name: bytes) -> Iterator[T | None]:
        """Yield the value of each pattern that matches a name, and None for others. Patterns may be added and removed
        meanwhile.
        """
        for length in [*self._in_order]:
            if length > len(name):
                break
            yield self._openings.get(name[:length])
        for matches, value in [*self._others.values()]:
            yield value if matches(name) else None

    def may_match_some(self, prefix: bytes) -> Iterator[T]:
        """Yield the values of the patterns that may match a name with a prefix, judged by the patterns' first bytes up
        to a wildcard. O(patterns).
        """
        for pattern, value in self._all.items():
            special = _SPECIAL.search(pattern)
            opening = pattern[: special.start()] if special is not None else pattern
            if opening.startswith(prefix) or (special is not None and prefix.startswith(opening)):
                yield value

    @property
    def cost(self) -> int:
        """Number of comparisons for a name."""
        return len(self._lengths) + len(self._others)

    def copy(self) -> Patterns[T]:
        new = Patterns[T]()
        new._all, new._openings = self._all.copy(), self._openings.copy()
        new._lengths, new._in_order, new._others = self._lengths.copy(), self._in_order.copy(), self._others.copy()
        return new
