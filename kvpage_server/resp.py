"""The encoder of replies in RESP2 and RESP3: it turns Python values into pieces of bytes, without I/O.

`core` parses requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass
from typing import Any

from kvpage_server.core.pieces import Piece

# -- Replies -----------------------------------------------------------------------------------------------------------
#
# A command returns Python values: None, int, bytes, str (sent as a bulk string, too), bool, float, list, dict, set (or
# the keys of a dict, in their order), and the classes below for types that Python lacks. A tuple is an encoded reply in
# pieces: bytes, and borrowed parts of slots for values in the store, which are not copied.

Reply = Any  # one of these values; the precise type of nested values would be too long


class Raw(bytes):
    """A reply that is already encoded."""


OK = Raw(b"+OK\r\n")
PONG = Raw(b"+PONG\r\n")
QUEUED = Raw(b"+QUEUED\r\n")


def simple(text: str) -> Raw:
    """Return a RESP simple string. `text` must have no line breaks."""
    return Raw(b"+%b\r\n" % text.encode())


class ReplyError(Exception):
    """Error reply of a command. The first word of its message is the code that clients evaluate, for example ERR."""

    @property
    def line(self) -> bytes:
        """The error as one line of RESP; line breaks become spaces."""
        text = str(self).encode("utf-8", "surrogateescape")
        return b"-%b\r\n" % text.replace(b"\r", b" ").replace(b"\n", b" ")


def bare(error: ReplyError) -> ReplyError:
    """Remove the traceback and context of an error reply, and return it.

    The frames of a traceback would keep the arguments of the command in memory.
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
    """An event that a command or a reply waits for. `start(then)` begins the wait, and calls `then()` after the event.

    `now()`, if given, does the awaited work synchronously. Transactions call it, because they do not wait.
    """

    start: Callable[[Callable[[], None]], object]
    now: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """A reply that is created in steps while it is sent: an array of `length` items, or a single reply if that is None.

    Each item of `items` is the output of one step, a limited piece of work, after which other clients may have their
    turn. An empty tuple is a step without output, and a `Wait` is a step that has to wait for an event.
    """

    length: int | None
    items: Iterator[Reply]
    # Whether all steps run even if the client disconnects; None means: if the command writes. When the client has
    # disconnected, the next step begins at once, also after a `Wait` whose event has not happened.
    whole: bool | None = None
    aside: bool = False  # whether the client's next commands run before the end; their replies are sent after this one


def encode(value: Reply, protocol: int, out: list[Piece]) -> None:
    """Append the pieces of a reply in RESP `protocol` (2 or 3) to `out`.

    Raises TypeError if RESP has no type for the value.
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
    elif isinstance(value, KeysView):  # a set that keeps its order
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
