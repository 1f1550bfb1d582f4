"""Durations, counts, sizes, log lines and names from clients as text, and the monotonic clock.

Leases, idle times and pauses use the monotonic clock, so a change of the wall clock does not affect them. TTLs,
timestamps and everything on disk use the wall clock, `page.unix_ms`.
"""

from __future__ import annotations

import codecs
import logging
import os
import re
import time
from collections.abc import Sequence
from itertools import accumulate

BUCKETS = 64  # buckets of a histogram
FIRST, LAST = 12, 34  # powers of two in nanoseconds that `within` reports: 4 microseconds to 17 seconds


def monotonic_ms() -> int:
    """Return milliseconds of the monotonic clock. Its start is arbitrary, and may differ between processes."""
    return time.monotonic_ns() // 1_000_000


class Durations:
    """Histogram of the durations of one kind of work.

    `histogram[i]` is the number of durations from 2**(i-1) to below 2**i nanoseconds.
    """

    __slots__ = ("histogram", "nanoseconds")

    def __init__(self) -> None:
        self.nanoseconds = 0
        self.histogram = [0] * BUCKETS

    def note(self, nanoseconds: int) -> None:
        """Count a duration."""
        self.nanoseconds += nanoseconds
        self.histogram[nanoseconds.bit_length()] += 1

    def as_text(self) -> str:
        """Return the value of a field of INFO: the number of durations, their sum in microseconds, and `within`."""
        return f"calls={sum(self.histogram)},usec={self.nanoseconds // 1000},within={within(self.histogram)}"


def within(histogram: Sequence[int]) -> str:
    """Return cumulative counts as text, separated by "/".

    The first is the number of durations below 2**FIRST nanoseconds, the next one below twice that, up to 2**LAST.
    """
    return "/".join(map(str, [*accumulate(histogram)][FIRST : LAST + 1]))


# -- Counts and sizes in words, for people -----------------------------------------------------------------------------


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 block", "12,000 blocks". `noun` is singular, and gets an s for other counts."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def as_size(nbytes: int) -> str:
    """Return bytes in units of 1,024, as in a configuration: "1 byte", "1.5 KiB", "12 GiB"."""
    size, unit = float(nbytes), ""
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return plural(nbytes, "byte") if not unit else f"{size:.1f} {unit}" if size < 100 else f"{size:.0f} {unit}"


# -- Text from clients, such as names, made harmless for terminals, logs and line formats ------------------------------


_LONGEST = 8192  # characters of an error message: more than a path has


def name_as_text(name: bytes) -> str:
    """Return a name from a client as text, another one for each name: ``\\\\`` for a backslash, ``\\xNN`` for a byte
    that is not UTF-8.
    """
    return name.replace(b"\\", rb"\\").decode("utf-8", "backslashreplace")


def cut(text: str) -> str:
    """Return a text for an error message, cut after `_LONGEST` characters: it may quote a word of any length."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text) - _LONGEST:,} more characters)"


def printable(text: str) -> str:
    """Return text with escapes for unprintable characters.

    Unprintable are control and invisible characters, line ends, characters that reverse the direction of writing, and
    bytes that are not UTF-8.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


_escape = codecs.getencoder("unicode_escape")  # loaded now: later, the process may have no file descriptor


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    if "\udc80" <= letter <= "\udcff":  # a byte, as `surrogateescape` decodes it
        return f"\\x{ord(letter) - 0xDC00:02x}"
    if "\x80" <= letter <= "\xff":  # two bytes of UTF-8, and not the byte with this number
        return f"\\u{ord(letter):04x}"
    return _escape(letter)[0].decode()


def name_shown(name: bytes) -> str:
    """Return a name as `kvpage` prints it: `name_as_text`, with escapes for unprintable characters."""
    return printable(name_as_text(name))


def text_of_field(name: bytes) -> str:
    """Return `name_as_text` for a field of a line `a=1,b=2` of INFO, with escapes for the separators."""
    return name_as_text(name).replace(",", "\\x2c").replace("=", "\\x3d")


_ESCAPE = re.compile(r"\\(?:[\\nrt]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|)")


def name_of_text(text: str) -> bytes:
    """Return the name that has this text; the inverse of `name_shown` and of `text_of_field`.

    The text may also have JSON's escapes, as a terminal that is not UTF-8 shows them, and bytes that are not UTF-8, as
    `surrogateescape` decodes them. Raises ValueError for a backslash that begins no escape.
    """
    raw = (
        _ESCAPE.sub(_unescaped, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    )  # joins pairs
    return os.fsencode(raw)


def _unescaped(escape: re.Match[str]) -> str:
    if escape[0] == "\\":
        raise ValueError("a backslash in a name is written \\\\, and a byte \\xNN, as kvpage ls prints them")
    letter = escape[0].encode().decode("unicode_escape")
    return chr(0xDC00 + ord(letter)) if escape[0].startswith("\\x") and letter >= "\x80" else letter


# -- Log lines that clients cannot forge -------------------------------------------------------------------------------

_CONTINUES = "    "
_SELDOM_SECONDS = 60.0  # seconds between two lines of a kind
_MOST_KINDS = 256  # above this number, all further kinds count as one


def milliseconds_of(record: logging.LogRecord) -> int:
    """Return the milliseconds of a record's time, after its second. The field `msecs` is negative before 1970."""
    return int(record.created % 1 * 1000)


class LogLines(logging.Formatter):
    """Log formatter that escapes unprintable characters.

    A message may contain names that clients chose. A line end in a name could forge a record, and an escape sequence
    could control the terminal that shows the log. A message takes one line, and the lines of a traceback are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        record.msecs = milliseconds_of(record)
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        return "\n".join(_CONTINUES + printable(line) for line in super().formatException(ei).split("\n"))


class LogRateLimit:
    """Rate limit of log lines that any client can cause: one line a minute of each kind, with the number of omitted
    ones.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        # By kind: the time of the next line, and the number of omitted ones.
        self._kinds: dict[str, tuple[float, int]] = {}

    def log(self, level: int, message: str, *args: object, kind: str = "") -> None:
        """Log a line, unless one with the same message and `kind` was logged in the last minute."""
        kind = message + kind
        if kind not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            kind = ""
        now = time.monotonic()
        until, left_out = self._kinds.get(kind, (now, 0))
        if now < until:
            self._kinds[kind] = until, left_out + 1
            return
        self._kinds[kind] = now + _SELDOM_SECONDS, 0
        more = f" ({plural(left_out, 'more line')} like this left out)" if left_out else ""
        self._logger.log(level, message + more, *args)


def log_to_standard_error(layout: str) -> None:
    """Write log records of warnings and errors to standard error, in a format of `logging.Formatter`."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines(layout))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
