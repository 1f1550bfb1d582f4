"""Reading arguments: numbers in their ranges, words, options; each failure says which argument and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvpage_server.core import Argument
from kvpage_server.page import MAX_U32
from kvpage_server.resp.reply import ReplyError

_INTEGER = re.compile(rb"-?(?:0|[1-9]\d{0,18})\Z")
I64 = (-(2**63), 2**63 - 1)

LONGEST_WORD = 4 * 1024 * 1024  # bytes of what is no value to be stored: a key, a message

SYNTAX_ERROR = "ERR syntax error"
NOT_AN_INTEGER = "ERR value is not an integer or out of range"
OUT_OF_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."


def plain(argument: Argument) -> bytes:
    """The argument's bytes, copied out of the arena when it is a long one. Raises ReplyError for one that is too long.

    Only values are longer than that, and these stay where they are.
    """
    if isinstance(argument, bytes):
        return argument
    if argument.size > LONGEST_WORD:
        raise ReplyError(f"ERR only a value may be longer than {LONGEST_WORD} bytes, got {argument.size}")
    return bytes(argument.body)


def plain_all(arguments: Sequence[Argument]) -> list[bytes]:
    """Every argument's bytes."""
    return [plain(argument) for argument in arguments]


def integer(raw: Argument) -> int:
    """A 64-bit integer, as Redis reads and refuses it."""
    found = as_integer(raw)
    if found is None:
        raise ReplyError(NOT_AN_INTEGER)
    return found


def as_integer(raw: Argument) -> int | None:
    """A 64-bit integer, or None for anything else ('+1', ' 1', '01' and '-0' are something else)."""
    if type(raw) is not bytes:
        return None
    if raw.isdigit() and len(raw) < 19 and (raw[0] != 0x30 or len(raw) == 1):  # the usual ones, sooner
        return int(raw)
    if not _INTEGER.match(raw) or raw == b"-0":
        return None
    value = int(raw)
    return value if I64[0] <= value <= I64[1] else None


def integer_in(name: str, raw: Argument, low: int, high: int) -> int:
    """An integer in a range; the error names the argument and the range."""
    value = as_integer(raw)
    if value is None or not low <= value <= high:
        shown = shorten(plain(raw))
        raise ReplyError(f"ERR {name} must be an integer between {low} and {high}, got '{shown}'")
    return value


def check_batch(name: str, args: Sequence[Argument], width: int, unit: str) -> int:
    """The N that opens a batch's arguments, when N things (called `unit`) of `width` follow. Raises ReplyError."""
    count = integer_in("N", args[0], 1, MAX_U32)
    if len(args) - 1 != count * width:
        raise ReplyError(
            f"ERR {name} with N = {count} takes {count * width} arguments after N, {width} a {unit}, "
            f"got {len(args) - 1}"
        )
    return count


def batch(name: str, args: list[Argument], width: int, unit: str) -> list[list[Argument]]:
    """The `width` arguments of each of the N things (called `unit`) that N says follow. Raises ReplyError."""
    check_batch(name, args, width, unit)
    return [args[start : start + width] for start in range(1, len(args), width)]


def shorten(raw: bytes, most: int = 32) -> str:
    """Client bytes for an error message, cut to so many or at a NUL; those that are not UTF-8 go back as they came."""
    return raw[:most].split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
