"""Which keys a command's arguments name, and what it does to them. ACL checks, WATCH and COMMAND GETKEYS need this.

If the keys are at fixed positions, the row of the table says so with `keys=`. The page family's keys are made from
several arguments: `uses=` says how, with one of the classes here. Cluster clients are told the positions of the
requests, because a request with braces in its name has the same slot as all its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvpage_server.commands.arguments import plain, plain_all
from kvpage_server.core import Argument

READ, WRITE = 1, 2  # what is done to a key: bits


class KeyPrefix(bytes):
    """Stands for every key with this prefix."""


Use = tuple[bytes, int]  # a key, or a KeyPrefix; and READ, WRITE or both
Uses = Callable[[Sequence[Argument], int], Iterator[Use]]  # of a command's arguments and what its row says it does


@dataclass(frozen=True)
class Naming:
    """The requests: the argument at `first`, or every `step`-th from there on."""

    first: int
    step: int = 0

    @property
    def places(self) -> tuple[int, int, int]:
        """The positions of the requests among a command's words: first, last, step."""
        at = self.first + 1
        return (at, -1, self.step) if self.step else (at, at, 1)

    def _starts(self, args: Sequence[Argument]) -> range:
        return range(self.first, len(args) if self.step else min(self.first + 1, len(args)), self.step or 1)


class pages(Naming):
    """Pages named by five arguments each."""

    def __call__(self, args: Sequence[Argument], access: int) -> Iterator[Use]:
        for start in self._starts(args):
            yield b"kv:%b" % b":".join(plain_all(args[start : start + 5])), access


class requests(Naming):
    """Whole requests."""

    def __call__(self, args: Sequence[Argument], access: int) -> Iterator[Use]:
        for req_id in dict.fromkeys(plain(args[start]) for start in self._starts(args)):
            yield KeyPrefix(b"kv:%b:" % req_id), access


def key_of_set(args: Sequence[Argument], access: int) -> Iterator[Use]:
    """SET's key. With the option GET it is read as well as written."""
    reads = any(plain(word).upper() == b"GET" for word in args[2:])
    yield plain(args[0]), access | READ if reads else access


def placed(args: Sequence[Argument], first: int, last: int, step: int, access: int) -> Iterator[Use]:
    """Keys at fixed positions: from `first` to `last` (negative: counted from the end), every `step`."""
    for place in range(first, last + 1 if last >= 0 else len(args) + last + 1, step):
        yield plain(args[place]), access
