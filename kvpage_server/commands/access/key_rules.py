"""Which keys a user may use: glob patterns, each with the right to read, to write, or both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvpage_server.commands.table.keys import READ, WRITE, KeyPrefix
from kvpage_server.glob import Matches
from kvpage_server.patterns import Patterns

_SPELT = {READ: b"%R~", WRITE: b"%W~", READ | WRITE: b"~"}
_ACCESSES = (READ, WRITE, READ | WRITE)


class _Rights(NamedTuple):
    """The rights to the keys of one pattern."""

    open_ended: bool  # whatever begins like a match is one too
    accesses: frozenset[int]

    def cover(self, key: bytes, access: int) -> bool:
        """Whether they allow this for a matching key, or for all keys with a Prefix."""
        if type(key) is KeyPrefix and not self.open_ended:
            return False
        return any(given & access == access for given in self.accesses)


def spelt(access: int, pattern: bytes) -> bytes:
    """The rule that gives access to the keys of a pattern: `%R~news:*`."""
    return _SPELT[access] + pattern


class KeyRules:
    """Patterns and rights in the order in which they were given."""

    def __init__(self) -> None:
        self._given: dict[tuple[bytes, int], None] = {}
        self._rights: Patterns[_Rights] = Patterns()

    def __bool__(self) -> bool:
        return bool(self._given)

    def __bytes__(self) -> bytes:
        return b" ".join(spelt(access, pattern) for pattern, access in self._given)

    def copy(self) -> KeyRules:
        new = KeyRules()
        new._given, new._rights = self._given.copy(), self._rights.copy()
        return new

    def add(self, pattern: bytes, access: int, matches: Matches) -> None:
        """Give a right to the keys of a pattern. `matches` is the compiled pattern."""
        before = self._rights.get(pattern)
        accesses = {access} if before is None else before.accesses | {access}
        self._rights.add(pattern, _Rights(_is_open_ended(pattern), frozenset(accesses)), matches)
        self._given[pattern, access] = None

    def all(self, access: int) -> bool:
        """Whether the rules allow this for every key."""
        return any(given & access == access and (b"*", given) in self._given for given in _ACCESSES)

    def cover(self, key: bytes, access: int) -> bool:
        """Whether the rules allow this for a key, or for all keys with a Prefix."""
        return any(rights.cover(key, access) for rights in self._rights.matching(key))

    def readable(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys among some that may be read."""
        return [key for key in keys if self.cover(key, READ)]

    @property
    def cost(self) -> int:
        """The number of patterns a key is compared with."""
        return self._rights.cost


def _is_open_ended(pattern: bytes) -> bool:
    return b"\\" not in pattern and pattern.rfind(b"]") >= pattern.rfind(b"[") and pattern.endswith(b"*")
