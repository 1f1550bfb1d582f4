"""Conversion of clients' commands to commands for the cluster, and of its replies, without copies of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpage_server.client.cluster.commands import Command, around_value
from kvpage_server.client.cluster.plan import Failed
from kvpage_server.client.wire.exchange import Piece, word
from kvpage_server.client.wire.reply import Answer
from kvpage_server.commands.arguments import WRONG_TYPE, plain
from kvpage_server.core import Argument, Slot
from kvpage_server.gateway.upstream import NO_PAGE, Value
from kvpage_server.page import FIELD_AT, HEADER_SIZE
from kvpage_server.resp import Reply, ReplyError, simple

_TTL = slice(FIELD_AT["ttl"], FIELD_AT["ttl"] + 8)  # of a header


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Memory from which a reply is sent."""

    view: memoryview

    @property
    def size(self) -> int:
        return len(self.view)


def bulk_reply(value: Value | None) -> Reply:
    """Return a value as a bulk string."""
    if value is None:
        return None
    if value is NO_PAGE:
        return ReplyError(WRONG_TYPE)
    return b"$%d\r\n" % sum(map(len, value)), *map(Borrowed, value), b"\r\n"


def reply_of(answer: Answer | Failed) -> Reply:
    """Return the reply of a node as a reply to the client; null for a read that no node answered."""
    if isinstance(answer, memoryview):
        return bulk_reply((answer,))
    if isinstance(answer, bytes):
        return simple(answer.decode("utf-8", "replace"))
    return None if isinstance(answer, Failed) else answer


def passed(words: Sequence[Argument], *, writes: bool) -> Command:
    """Return the client's command, unchanged. Its second word is its key."""

    def pieces() -> Iterator[Piece]:
        yield b"*%d\r\n" % len(words)
        for one in words:
            if isinstance(one, Slot):
                yield b"$%d\r\n" % one.size
                yield one.body
                yield b"\r\n"
            else:
                yield word(one)

    return Command(plain(words[1]), pieces, writes=writes)


def set_page(key: bytes, slot: Slot) -> Command:
    """Return SET of a page with its header, which are in a slot."""
    ttl = int.from_bytes(slot.header[_TTL], "little")
    opening, ending = around_value(key, HEADER_SIZE + slot.size, ttl)

    def pieces() -> Iterator[Piece]:
        yield opening + bytes(slot.header)
        yield slot.body
        yield ending

    return Command(key, pieces, writes=True)
