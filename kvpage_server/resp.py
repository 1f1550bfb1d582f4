"""The encoder of replies in RESP2 and RESP3: Python values become pieces of bytes, without I/O. `core` parses
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass
from typing import Any

from kvpage_server.core.pieces import Piece

# -- Replies -----------------------------------------------------------------------------------------------------------
#
# A command returns Python values: None, int, bytes, str (sent as a bulk string, too), bool, float, list, dict, set (or
# a dict's keys, in their order), and the classes below for types that Python lacks. A tuple is an encoded reply in
# pieces: bytes, and borrowed parts of slots for values in the store, which are never copied.

Reply = Any  # one of these values; a precise type of nested values would be too long


class Raw(bytes):
    """A reply that is already encoded."""


OK = Raw(b"+OK\r\n")
PONG = Raw(b"+PONG\r\n")
QUEUED = Raw(b"+QUEUED\r\n")


def simple(text: str) -> Raw:
    """Return a simple string. `text` has no line breaks."""
    return Raw(b"+%b\r\n" % text.encode())


class ReplyError(Exception):
    """Error reply of a command. The first word of its message is the code that clients evaluate, for example ERR."""

    @property
    def line(self) -> bytes:
        """The error as one line of RESP; line breaks become spaces."""
        text = str(self).encode("utf-8", "surrogateescape")
        return b"-%b\r\n" % text.replace(b"\r", b" ").replace(b"\n", b" ")


def bare(error: ReplyError) -> ReplyError:
    """Remove the traceback and context of an error reply, and return it. The frames of a traceback keep the command in
    memory.
    """
    error.__traceback__ = error.__context__ = None
    return error


class NullArray:
    """Reply of EXEC after a change of a watched key: a null array in RESP2, null in RESP3."""


NULL_ARRAY = NullArray()


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text for people: a verbatim string in RESP3, a bulk string in RESP2."""

    text: bytes
    format: bytes = b"txt"


@dataclass(frozen=True, slots=True)
class Push:
    """Out-of-band message: a push in RESP3, an array in RESP2."""

    items: list[Reply]


@dataclass(frozen=True, slots=True)
class Wait:
    """A reply that is not available yet. `start` is called with a function, which it calls when the reply is available.

    `now`, if given, does the awaited work synchronously. It is called within a transaction, which does not wait.
    """

    start: Callable[[Callable[[], None]], object]
    now: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """A reply that takes long: an array of `length` items that are made while it is sent; with `length` None, a single
    reply.

    Each step of `items` is a limited piece of work, after which other clients have their turn. An empty tuple is a step
    without output, and a `Wait` a step that has to wait for an event.
    """

    length: int | None
    items: Iterator[Reply]
    whole: bool = False  # whether it changes data, and is completed even if the client has disconnected
    aside: bool = False  # whether the client's next commands run meanwhile; their replies follow this one


def encode(value: Reply, protocol: int, out: list[Piece]) -> None:
    """Append the pieces of a reply in RESP `protocol` (2 or 3) to `out`. Raises TypeError if RESP has no type for the
    value.
    """
    kind = type(value)
    if kind is Raw:
        out.append(value)
    elif kind is bytes:
        out.append(b"$%d\r\n%b\r\n" % (len(value), value))
    elif value is None:
        out.append(b"_\r\n" if protocol == 3 else b"$-1\r\n")
    elif kind is int:
        out.append(b":%d\r\n" % value)
    elif kind is tuple:
        out += value
    elif kind is list:
        out.append(b"*%d\r\n" % len(value))
        for item in value:
            encode(item, protocol, out)
    else:
        _encode_rare(value, protocol, out)


def _encode_rare(value: Reply, protocol: int, out: list[Piece]) -> None:
    if isinstance(value, str):
        encode(value.encode("utf-8", "surrogateescape"), protocol, out)
    elif isinstance(value, ReplyError):
        out.append(value.line)
    elif isinstance(value, bool):
        out.append((b"#t\r\n" if value else b"#f\r\n") if protocol == 3 else b":%d\r\n" % value)
    elif isinstance(value, int):  # an IntEnum
        out.append(b":%d\r\n" % value)
    elif isinstance(value, dict):
        out.append(b"%%%d\r\n" % len(value) if protocol == 3 else b"*%d\r\n" % (2 * len(value)))
        for pair in value.items():
            for item in pair:
                encode(item, protocol, out)
    elif isinstance(value, float):
        digits = b"%.17g" % value
        encode(Raw(b",%b\r\n" % digits) if protocol == 3 else digits, protocol, out)
    elif isinstance(value, set | frozenset):
        _encode_items(b"~" if protocol == 3 else b"*", sorted(value), protocol, out)
    elif isinstance(value, KeysView):  # a set in a given order
        _encode_items(b"~" if protocol == 3 else b"*", list(value), protocol, out)
    elif isinstance(value, Push):
        _encode_items(b">" if protocol == 3 else b"*", value.items, protocol, out)
    elif isinstance(value, Verbatim):
        text = value.format + b":" + value.text
        encode(Raw(b"=%d\r\n%b\r\n" % (len(text), text)) if protocol == 3 else value.text, protocol, out)
    elif isinstance(value, Stream):
        if value.length is not None:
            out.append(b"*%d\r\n" % value.length)
        for item in value.items:
            encode(item, protocol, out)
    elif value is NULL_ARRAY:
        out.append(b"_\r\n" if protocol == 3 else b"*-1\r\n")
    else:
        raise TypeError(f"no RESP type for {value!r}")


def _encode_items(sigil: bytes, items: list[Reply], protocol: int, out: list[Piece]) -> None:
    out.append(b"%b%d\r\n" % (sigil, len(items)))
    for item in items:
        encode(item, protocol, out)
