"""Which keys a command's arguments name, and what it does to them: what ACL checks, WATCH and COMMAND GETKEYS ask.

A command whose keys stand in fixed places says so with `keys=` in its row of the table. The page family's keys are
spelt from arguments; its rows say with `uses=` how, with one of the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvpage_server.commands.arguments import plain, plain_all
from kvpage_server.core import Argument

READ, WRITE = 1, 2  # what is done to a key: bits


class KeyPrefix(bytes):
    """Stands for every key that begins so."""


Use = tuple[bytes, int]  # a key, or a KeyPrefix; and READ, WRITE or both
Uses = Callable[[Sequence[Argument], int], Iterator[Use]]  # of a command's arguments and what its row says it does


def pages(first: int, step: int = 0) -> Uses:
    """Pages named by five arguments each: one at `first`, or one every `step` from there on."""

    def uses(args: Sequence[Argument], access: int) -> Iterator[Use]:
        for start in _starts(args, first, step):
            yield b"kv:%b" % b":".join(plain_all(args[start : start + 5])), access

    return uses


def requests(first: int, step: int = 0) -> Uses:
    """Requests whole: the one named by the argument at `first`, or by one every `step` from there on."""

    def uses(args: Sequence[Argument], access: int) -> Iterator[Use]:
        named = dict.fromkeys(plain(args[start]) for start in _starts(args, first, step))
        for req_id in named:
            yield KeyPrefix(b"kv:%b:" % req_id), access

    return uses


def _starts(args: Sequence[Argument], first: int, step: int) -> range:
    return range(first, len(args), step) if step else range(first, min(first + 1, len(args)))


def key_of_set(args: Sequence[Argument], access: int) -> Iterator[Use]:
    """SET's key. With the option GET it is read as well as written."""
    reads = any(plain(word).upper() == b"GET" for word in args[2:])
    yield plain(args[0]), access | READ if reads else access


def placed(args: Sequence[Argument], first: int, last: int, step: int, access: int) -> Iterator[Use]:
    """Keys in fixed places: from `first` to `last` (negative: counted from the end), every `step`."""
    for place in range(first, last + 1 if last >= 0 else len(args) + last + 1, step):
        yield plain(args[place]), access
