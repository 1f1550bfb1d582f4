"""Definitions that both parsers share: limits of requests, and Redis's error messages for invalid requests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from kvpage_server.core.regions import IN_PLACE

MAX_LINE = 64 * 1024  # bytes of a line; PROTO_INLINE_MAX_SIZE of Redis
MAX_ARGUMENTS = 0x7FFF_FFFF  # words of a command
KEEP_FROM = 512  # bytes of the shortest word that gets a slot of its own
MOST_LISTED = 64  # a command with up to this number of words is a list; with more, it is a `Words`
WORD = 48  # bytes of memory that a word takes in addition to its content
SCRATCH_SIZE = 128 * 1024  # bytes of the receive buffer
RECEIVE_TURN = 1024 * 1024  # bytes received in one turn, because other clients wait meanwhile
# Bytes that one call must have received for a further call in the same turn. After fewer, the socket is probably empty.
RECEIVE_AGAIN_FROM = 64 * 1024
AHEAD = 4 * 1024  # bytes received after a long word: few, because they have to be copied if the next word is long, too
DIRECT = IN_PLACE - AHEAD  # a word of which as many bytes are missing is received into its slot, without a copy

TOO_LONG = "command exceeds client-query-buffer-limit"
NO_CRLF = "bulk string is not terminated by CRLF"
BAD_COUNT = "invalid multibulk length"
BAD_LENGTH = "invalid bulk length"
LONG_COUNT = "too big mbulk count string"
LONG_LENGTH = "too big bulk count string"
LONG_INLINE = "too big inline request"

UNAUTHENTICATED_ARGUMENTS = 10
UNAUTHENTICATED_BULK = 16384
STRANGERS_COUNT = "unauthenticated multibulk length"
STRANGERS_LENGTH = "unauthenticated bulk length"


class ProtocolError(Exception):
    """Error: the request is not RESP, or exceeds a limit.

    The parser does not know where the next request begins, so the caller has to close the connection.
    """


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the requests of an authenticated client.

    For an unauthenticated client, Redis's smaller limits apply in addition.
    """

    max_bulk: int = 512 * 1024 * 1024  # bytes of one word
    max_arguments: int = MAX_ARGUMENTS  # words of one command
    max_command: int = 1024 * 1024 * 1024  # bytes of all words of one command


def inline_words(line: bytes) -> list[bytes]:
    """Return the words of an inline command. `line` has no newline. Raise ProtocolError for unbalanced quotes."""
    words = split_words(line.removesuffix(b"\r"))
    if words is None:
        raise ProtocolError("unbalanced quotes in request")
    return words


def number(digits: bytes) -> int | None:
    """Return a signed 64-bit integer from decimal digits by the rules of Redis's string2ll; None if it is none.

    A plus sign, spaces and leading zeros are invalid.
    """
    unsigned = digits.removeprefix(b"-")
    if not unsigned.isdigit() or len(unsigned) > 19 or (unsigned[:1] == b"0" and digits != b"0"):
        return None
    value = int(digits)
    return value if -(2**63) <= value < 2**63 else None


def count_of(line: bytes, limits: Limits, trusted: bool) -> int:
    """Return the number of words of a command from its first line, such as "*3"; 0 for a negative number.

    Raise ProtocolError for an invalid number, for one above `limits.max_arguments`, and for one above
    UNAUTHENTICATED_ARGUMENTS if the client is not `trusted`: it has not authenticated.
    """
    count = number(line[1:])
    if count is None or count > limits.max_arguments:
        raise ProtocolError(BAD_COUNT)
    if not trusted and count > UNAUTHENTICATED_ARGUMENTS:
        raise ProtocolError(STRANGERS_COUNT)
    return max(count, 0)


def length_of(line: bytes, limits: Limits, trusted: bool) -> int:
    """Return the length of a word in bytes from the line before it, such as "$5".

    Raise ProtocolError for an invalid length, for one above `limits.max_bulk`, and for one above UNAUTHENTICATED_BULK
    if the client is not `trusted`: it has not authenticated.
    """
    if not line.startswith(b"$"):
        refuse_word(line[:1] or b"\r")
    length = number(line[1:])
    if length is None or not 0 <= length <= limits.max_bulk:
        raise ProtocolError(BAD_LENGTH)
    if not trusted and length > UNAUTHENTICATED_BULK:
        raise ProtocolError(STRANGERS_LENGTH)
    return length


def refuse_word(first: bytes) -> NoReturn:
    """Raise ProtocolError: the line before a word begins with the byte `first` instead of a dollar sign."""
    raise ProtocolError(f"expected '$', got '{first.decode('utf-8', 'surrogateescape')}'")


# -- Words of a line by the rules of Redis: inline commands and configuration files ------------------------------------

# One word: white space, then characters without quotes, then optionally a quoted string. As in Redis, \v and \f are
# skipped before a word, but do not end one.
_WORD = re.compile(
    rb"""[\ \t\n\r\0\v\f]* ([^\ \t\n\r\0"']*) (?: "((?:[^"\\]|\\.)*)" | '((?:[^'\\]|\\'|\\(?!'))*)' )?""",
    re.DOTALL | re.VERBOSE,
)
_SPACE = b" \t\n\r\0\v\f"
_NOT_PLAIN = re.compile(rb"[\"'\v\f]")
_ESCAPED = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}


def split_words(line: bytes) -> list[bytes] | None:
    r"""Return the words of an inline command or a configuration line; None for unbalanced quotes. O(bytes).

    The rules are those of Redis's sdssplitargs: white space separates words; "..." may contain \n \r \t \b \a \\ \" and
    \xHH, '...' only \'.
    """
    if not _NOT_PLAIN.search(line):
        return line.replace(b"\0", b" ").split()
    words: list[bytes] = []
    pos = 0
    while pos < len(line):
        found = _WORD.match(line, pos)
        assert found is not None  # every part of the pattern may be empty
        bare, double, single = found.groups()
        pos = found.end()
        if pos < len(line) and line[pos] not in _SPACE:  # a quote that is not closed, or a character after a closed one
            return None
        quoted = _ESCAPED.sub(_unescaped, double) if double else (single or b"").replace(b"\\'", b"'")
        if bare or double is not None or single is not None:
            words.append(bare + quoted)
    return words


def _unescaped(found: re.Match[bytes]) -> bytes:
    """Return the byte that an escape in double quotes stands for."""
    letter: bytes = found[1]
    return bytes.fromhex(letter[1:].decode()) if len(letter) == 3 else _LETTERS.get(letter, letter)
