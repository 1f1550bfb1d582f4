"""Permitted replies. A plain value permits exactly that reply; other objects are predicates."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hiredis
import xxhash

from kvpage_server.page import HEADER_SIZE

OK = b"OK"
QUEUED = b"QUEUED"
CHECKSUM = slice(56, 64)
CREATED = slice(32, 40)  # of a page's header: when it was written, which no client knows to the millisecond


class May:
    """A reply with a predicate; `text` describes it, for the reader of a failed run."""

    def __init__(self, text: str, holds: Callable[[Any], bool]) -> None:
        self.text = text
        self.holds = holds
        self.options: list[Any] = [self]  # replies that it may be, one of which it is
        self.members: frozenset[bytes] | None = None  # of a set

    def __repr__(self) -> str:
        return f"<{self.text}>"


class Err(May):
    """An error that begins with one of some words. That the server itself is to blame is never an answer."""

    def __init__(self, *beginnings: str) -> None:
        super().__init__(f"error {' or '.join(beginnings)}", lambda reply: is_error(reply, *beginnings))


def is_error(reply: Any, *beginnings: str) -> bool:
    """Whether a reply is an error that begins so."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(beginnings or ("",))


ANYTHING = May("anything", lambda reply: not is_error(reply, "ERR internal"))
SOME_KEYS = May(
    "a cursor and some keys", lambda reply: isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], list)
)
A_NUMBER = May("a number", lambda reply: isinstance(reply, int))


def agrees(expected: Any, reply: Any) -> bool:
    """Whether a reply is one that it may be."""
    if isinstance(expected, May):
        return expected.holds(reply)
    if isinstance(expected, list):
        return isinstance(reply, list) and len(reply) == len(expected) and all(map(agrees, expected, reply))
    return type(expected) is type(reply) and bool(expected == reply)


def one_of(options: Iterable[Any]) -> Any:
    """Any of some replies."""
    several: list[Any] = []
    for option in options:
        if not any(type(option) is type(one) and option == one for one in several):
            several.append(option)
    if len(several) == 1:
        return several[0]
    found = May(f"one of {several!r:.400}", lambda reply: any(agrees(option, reply) for option in several))
    found.options = several
    return found


def any_order(expected: Iterable[bytes]) -> May:
    """An array, or a set, of these."""
    these = sorted(expected)
    found = May(f"in any order {these!r:.400}", lambda reply: isinstance(reply, list | set) and sorted(reply) == these)
    found.members = frozenset(these)
    return found


def gathered(sets: Sequence[frozenset[bytes]], reply: Any) -> bool:
    """Whether a set, or its size, may have been gathered while it changed, from one of `sets` to another.

    Return whether the reply contains the members of all moments, and only members of some moment.
    """
    if isinstance(reply, int):
        return len(frozenset.intersection(*sets)) <= reply <= len(frozenset.union(*sets))
    if not isinstance(reply, list | set) or len(set(reply)) < len(reply):
        return False
    return frozenset.intersection(*sets) <= set(reply) <= frozenset.union(*sets)


def some_of(these: Iterable[bytes], allowed: Callable[[], bool]) -> May:
    """Return a predicate: an array of some of these if allowed at that time, and an empty one otherwise."""
    known = set(these)

    def holds(reply: Any) -> bool:
        return isinstance(reply, list) and known.issuperset(reply) and (not reply or allowed())

    return May(f"some of {sorted(known)!r:.400}", holds)


def between(low: int, high: int) -> May:
    """A number from `low` to `high`."""
    return May(f"a number from {low} to {high}", lambda reply: type(reply) is int and low <= reply <= high)


def blob(header: bytes, body: bytes) -> May:
    """A page as a string: its header but for the time, and its body.

    If the header needs no checksum, it may have the right one: the disk tier computes the checksums of a block.
    """
    masked = bytearray(header)
    masked[CREATED] = bytes(8)
    right = struct.pack("<Q", xxhash.xxh3_64_intdigest(body))

    def holds(reply: Any) -> bool:
        if not isinstance(reply, bytes) or reply[HEADER_SIZE:] != body:
            return False
        head = bytearray(reply[:HEADER_SIZE])
        head[CREATED] = bytes(8)
        if head[CHECKSUM] == right and masked[CHECKSUM] == bytes(8):
            head[CHECKSUM] = bytes(8)
        return head == masked

    return May(f"the blob of a page, {len(body)} bytes {body[:20]!r}", holds)


def part_of_blob(header: bytes, body: bytes, first: int, last: int) -> May:
    """Some bytes of a page as a string; those of `CREATED` are unknown."""
    known = (header + body)[first : last + 1]
    before, after = (max(at - first, 0) for at in (CREATED.start, CREATED.stop))

    def holds(reply: Any) -> bool:
        same = isinstance(reply, bytes) and len(reply) == len(known)
        return same and reply[:before] == known[:before] and reply[after:] == known[after:]

    return May(f"bytes {first} to {last} of a page", holds)


def fields(expected: dict[bytes, Any]) -> May:
    """A map with at least these fields, as RESP3 has it or as an array of RESP2."""

    def holds(reply: Any) -> bool:
        if isinstance(reply, list) and all(isinstance(name, bytes) for name in reply[::2]):
            reply = dict(zip(reply[::2], reply[1::2], strict=False))
        return isinstance(reply, dict) and all(agrees(value, reply.get(name)) for name, value in expected.items())

    return May(f"a map with {expected!r:.400}", holds)
