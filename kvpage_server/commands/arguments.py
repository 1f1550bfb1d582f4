"""Parsers of a command's arguments. They raise ReplyError with a text that names the argument and the allowed values,
or with Redis's text.

An argument is `bytes`, or a `Slot` of the arena if the word is longer than 511 bytes.
"""

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
    "SYNTAX_ERROR",
    "WRONG_TYPE",
    "as_integer",
    "check_batch",
    "escaped",
    "integer",
    "integer_in",
    "plain",
    "plain_all",
    "shorten",
]

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
SYNTAX_ERROR = "ERR syntax error"
NOT_AN_INTEGER = "ERR value is not an integer or out of range"


def escaped(word: bytes) -> str:
    """Return the first 1024 bytes of a word as text for an error message. Bytes that are no UTF-8 are escaped, which
    takes 0.1 us each.
    """
    return word[:1024].decode("utf-8", "backslashreplace")


def plain(argument: Argument) -> bytes:
    """Return the argument's bytes, copied if the argument is a `Slot`.

    Raises ReplyError if it has more than `LONGEST_WORD` bytes: only values, which stay in the arena, may be longer.
    """
    if isinstance(argument, bytes):
        return argument
    try:
        return core.plain(argument)
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


def plain_all(arguments: Sequence[Argument]) -> list[bytes]:
    """Return the bytes of each argument, in order. Raises ReplyError as `plain`, and if several arguments have more
    than LONGEST_TOGETHER bytes, because it takes long to copy and compare them.
    """
    long = [argument.size for argument in arguments if not isinstance(argument, bytes)]
    if len(long) > 1 and sum(long) > core.LONGEST_TOGETHER:
        raise ReplyError(f"ERR the names of a command have at most {core.LONGEST_TOGETHER} bytes, got {sum(long)}")
    return [argument if isinstance(argument, bytes) else plain(argument) for argument in arguments]


def integer(raw: Argument) -> int:
    """Return an argument as a signed 64-bit integer, parsed as in Redis. Raises ReplyError (NOT_AN_INTEGER)
    otherwise.
    """
    found = as_integer(raw)
    if found is None:
        raise ReplyError(NOT_AN_INTEGER)
    return found


def integer_in(name: str, raw: Argument, low: int, high: int) -> int:
    """Return an argument as an integer from `low` to `high`, both included. Raises ReplyError, which has `name` and the
    range.
    """
    try:
        return core.integer_in(name, raw, low, high)
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


def check_batch(name: str, args: Sequence[Argument], width: int, unit: str, counted: str = "N") -> int:
    """Return N, the number of items of a batch. `args` are N and then exactly N items of `width` arguments each.

    Raises ReplyError if N is not an integer from 1 on, or if the number of arguments differs. `name` is the command's,
    `unit` names an item in the error, and `counted` is the name of N.
    """
    given = (len(args) - 1) // width
    if args[0] == b"%d" % given and len(args) - 1 == given * width and given:
        return given  # the common case; the general code below has the same result
    count = integer_in(counted, args[0], 1, MAX_U32)
    if len(args) - 1 != count * width:
        raise ReplyError(
            f"ERR {name} with {counted} = {count} takes {count * width} arguments after {counted}, {width} a {unit}, "
            f"got {len(args) - 1}"
        )
    return count
