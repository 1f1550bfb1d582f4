"""Parsers of arguments. Their errors name the argument and the allowed values, or have Redis's words."""

from __future__ import annotations

from collections.abc import Sequence

from kvpage_server.core import Argument
from kvpage_server.core import arguments as core
from kvpage_server.core.arguments import I64, as_integer, shorten
from kvpage_server.page import MAX_U32, PageError
from kvpage_server.resp import ReplyError

__all__ = [
    "I64",
    "NOT_AN_INTEGER",
    "OUT_OF_MEMORY",
    "SYNTAX_ERROR",
    "WRONG_TYPE",
    "as_integer",
    "check_batch",
    "integer",
    "integer_in",
    "plain",
    "plain_all",
    "shorten",
]

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
SYNTAX_ERROR = "ERR syntax error"
NOT_AN_INTEGER = "ERR value is not an integer or out of range"
OUT_OF_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."


def plain(argument: Argument) -> bytes:
    """Return the argument's bytes. A long argument is copied out of the arena.

    Raises ReplyError if it is too long for anything but a value, since values stay in the arena.
    """
    if isinstance(argument, bytes):
        return argument
    try:
        return core.plain(argument)
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


def plain_all(arguments: Sequence[Argument]) -> list[bytes]:
    """Return the bytes of each argument. Raises ReplyError."""
    return [argument if isinstance(argument, bytes) else plain(argument) for argument in arguments]


def integer(raw: Argument) -> int:
    """Return a 64-bit integer, parsed as in Redis. Raises ReplyError."""
    found = as_integer(raw)
    if found is None:
        raise ReplyError(NOT_AN_INTEGER)
    return found


def integer_in(name: str, raw: Argument, low: int, high: int) -> int:
    """Return an integer from `low` to `high`. Raises ReplyError, which names the argument and the range."""
    try:
        return core.integer_in(name, raw, low, high)
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


def check_batch(name: str, args: Sequence[Argument], width: int, unit: str) -> int:
    """Return the number of items N at the start of a batch. N items of `width` arguments must follow it.

    Raises ReplyError. `name` is the command's, and `unit` the item's name in the error.
    """
    given = (len(args) - 1) // width
    if args[0] == b"%d" % given and len(args) - 1 == given * width and given:
        return given  # the common case; the general code below has the same result
    count = integer_in("N", args[0], 1, MAX_U32)
    if len(args) - 1 != count * width:
        raise ReplyError(
            f"ERR {name} with N = {count} takes {count * width} arguments after N, {width} a {unit}, "
            f"got {len(args) - 1}"
        )
    return count
