"""The replies of the Redis protocol: values in, pieces of bytes out, without sockets. `core` parses the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass
from typing import Any

from kvpage_server.core.pieces import Piece

# -- reply -------------------------------------------------------------------------------------------------------------
#
# Values in, buffers out: the reply half of RESP2 and RESP3, without I/O.
#
# A command answers with Python values: None, int, bytes, str (a bulk string too), bool, float, list, dict, set (or a
# dict's keys, in their order), and the few classes below where RESP knows more than Python. A tuple is a reply in
# pieces that are already as they go over the wire: bytes, and for a value in the store its slot, borrowed, never
# copied.

Reply = Any  # one of the values named above; the types of nested values are not worth their spelling


class Raw(bytes):
    """A reply that is already encoded."""


OK = Raw(b"+OK\r\n")
PONG = Raw(b"+PONG\r\n")
QUEUED = Raw(b"+QUEUED\r\n")


def simple(text: str) -> Raw:
    """Return a simple string."""
    return Raw(b"+%b\r\n" % text.encode())


class ReplyError(Exception):
    """Error reply; its first word is the code that clients evaluate."""

    @property
    def line(self) -> bytes:
        """Return the error as one line of RESP; line breaks become spaces."""
        text = str(self).encode("utf-8", "surrogateescape")
        return b"-%b\r\n" % text.replace(b"\r", b" ").replace(b"\n", b" ")


def bare(error: ReplyError) -> ReplyError:
    """Return the error without its traceback, whose frames keep the command and the error itself alive."""
    error.__traceback__ = error.__context__ = None
    return error


class NullArray:
    """Reply of EXEC after a change of a watched key: a null array in RESP2."""


NULL_ARRAY = NullArray()


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text for people: RESP3 says so, RESP2 sends a bulk string."""

    text: bytes
    format: bytes = b"txt"


@dataclass(frozen=True, slots=True)
class Push:
    """An out-of-band message: RESP3's push type, an array in RESP2."""

    items: list[Reply]


@dataclass(frozen=True, slots=True)
class Wait:
    """Postponed continuation: `start` receives the function to call when the wait is over.

    `now`, if given, performs the awaited action synchronously: within a transaction, which does not wait.
    """

    start: Callable[[Callable[[], None]], object]
    now: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """An array whose items are made while it is being sent; without a length, one reply that takes a while to make.

    Each step of `items` is a bounded piece of work, after which other clients may have their turn. An empty tuple is a
    step with nothing to say yet, a `Wait` one that cannot go on yet.
    """

    length: int | None
    items: Iterator[Reply]
    whole: bool = False  # it changes something, and is done to its end even when nobody waits for the reply any more
    aside: bool = False  # the client's next commands run meanwhile; their replies follow this one


def encode(value: Reply, protocol: int, out: list[Piece]) -> None:
    """Append the pieces of `value` in RESP `protocol` (2 or 3) to `out`."""
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
    elif isinstance(value, KeysView):  # a set in its order
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
