"""Rules that both parsers share: limits of a request, and Redis's error messages for invalid ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from kvpage_server.core.regions import IN_PLACE

MAX_LINE = 64 * 1024  # PROTO_INLINE_MAX_SIZE
MAX_ARGUMENTS = 0x7FFF_FFFF
KEEP_FROM = 512  # a word of so many bytes gets a slot of its own
MOST_LISTED = 64  # words of a command that is a list; longer ones are `Words`
WORD = 48  # bytes of a word's overhead
SCRATCH_SIZE = 128 * 1024
RECEIVE_TURN = 1024 * 1024  # bytes received in one call: others wait meanwhile
MUCH = 64 * 1024  # bytes received at once: more may be there already
AHEAD = 4 * 1024  # bytes received behind a long word: the next may be as long, and these of it have to be copied
DIRECT = IN_PLACE - AHEAD  # bytes missing of a word that are received into its slot: AHEAD of it may be there already

TOO_LONG = "command exceeds the query buffer limit"
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
    """The stream is not RESP, or breaks a limit; nothing after this point can be understood."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a client's requests. Unauthenticated clients have Redis's smaller limits."""

    max_bulk: int = 512 * 1024 * 1024
    max_arguments: int = MAX_ARGUMENTS
    max_command: int = 1024 * 1024 * 1024  # bytes of one command's words


def inline_words(line: bytes) -> list[bytes]:
    """Return the words of an inline command; `line` is without its newline."""
    words = split_words(line.removesuffix(b"\r"))
    if words is None:
        raise ProtocolError("unbalanced quotes in request")
    return words


def number(digits: bytes) -> int | None:
    """Return the number as Redis's string2ll reads it: no plus sign, spaces or leading zeros; None when it is none."""
    unsigned = digits.removeprefix(b"-")
    if not unsigned.isdigit() or len(unsigned) > 19 or (unsigned[:1] == b"0" and digits != b"0"):
        return None
    value = int(digits)
    return value if -(2**63) <= value < 2**63 else None


def count_of(line: bytes, limits: Limits, trusted: bool) -> int:
    """Return how many words a command has whose first line is that; none for a negative number."""
    count = number(line[1:])
    if count is None or count > limits.max_arguments:
        raise ProtocolError(BAD_COUNT)
    if not trusted and count > UNAUTHENTICATED_ARGUMENTS:
        raise ProtocolError(STRANGERS_COUNT)
    return max(count, 0)


def length_of(line: bytes, limits: Limits, trusted: bool) -> int:
    """Return the length of a word that a line announces."""
    if not line.startswith(b"$"):
        refuse_word(line[:1] or b"\r")
    length = number(line[1:])
    if length is None or not 0 <= length <= limits.max_bulk:
        raise ProtocolError(BAD_LENGTH)
    if not trusted and length > UNAUTHENTICATED_BULK:
        raise ProtocolError(STRANGERS_LENGTH)
    return length


def refuse_word(first: bytes) -> NoReturn:
    """Raise the error for a word's line that does not begin with a dollar sign."""
    raise ProtocolError(f"expected '$', got '{first.decode('utf-8', 'surrogateescape')}'")


# -- Words of a line as Redis splits them: inline commands and configuration files -------------------------------------

# White space, then bare letters, then optionally a string in quotes. Redis skips \v and \f before a word, but they do
# not end one.
_WORD = re.compile(
    rb"""[\ \t\n\r\0\v\f]* ([^\ \t\n\r\0"']*) (?: "((?:[^"\\]|\\.)*)" | '((?:[^'\\]|\\'|\\(?!'))*)' )?""",
    re.DOTALL | re.VERBOSE,
)
_SPACE = b" \t\n\r\0\v\f"
_NOT_PLAIN = re.compile(rb"[\"'\v\f]")
_ESCAPED = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}


def split_words(line: bytes) -> list[bytes] | None:
    r"""Words of an inline command or a configuration line; None for unbalanced quotes. O(bytes).

    As Redis's sdssplitargs: white space separates words; "..." knows \n \r \t \b \a \\ \" and \xHH, '...' only \'.
    """
    if not _NOT_PLAIN.search(line):
        return line.replace(b"\0", b" ").split()
    words: list[bytes] = []
    pos = 0
    while pos < len(line):
        found = _WORD.match(line, pos)
        assert found is not None  # it may match nothing, but it does match
        bare, double, single = found.groups()
        pos = found.end()
        if pos < len(line) and line[pos] not in _SPACE:  # a quote that never closes, or a letter behind one that does
            return None
        quoted = _ESCAPED.sub(_meant, double) if double else (single or b"").replace(b"\\'", b"'")
        if bare or double is not None or single is not None:
            words.append(bare + quoted)
    return words


def _meant(found: re.Match[bytes]) -> bytes:
    """Return the byte of an escape in double quotes."""
    letter: bytes = found[1]
    return bytes.fromhex(letter[1:].decode()) if len(letter) == 3 else _LETTERS.get(letter, letter)
