"""Text of durations, counts, sizes, log lines and names that may contain any character.

Nobody can set this clock. Leases, idle times and pauses last as long as they should when the wall clock is set. Times
to live, time stamps and all that is written to disk use the wall clock, `page.unix_ms`. To count a duration costs no
more than an addition.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import accumulate

BUCKETS = 64
FIRST, LAST = 12, 34  # the reported powers of two: 4 microseconds to 17 seconds


def monotonic_ms() -> int:
    """Milliseconds since some moment in the past. Another process may count from another moment."""
    return time.monotonic_ns() // 1_000_000


class Durations:
    """Durations of one kind of work. `histogram[i]` counts those of at least 2**(i-1) and below 2**i nanoseconds."""

    __slots__ = ("histogram", "nanoseconds")

    def __init__(self) -> None:
        self.nanoseconds = 0
        self.histogram = [0] * BUCKETS

    def note(self, nanoseconds: int) -> None:
        """Count one that took so long."""
        self.nanoseconds += nanoseconds
        self.histogram[nanoseconds.bit_length()] += 1

    def as_text(self) -> str:
        """The field of INFO."""
        return f"calls={sum(self.histogram)},usec={self.nanoseconds // 1000},within={within(self.histogram)}"


def within(histogram: Sequence[int]) -> str:
    """How many took less than 2**FIRST nanoseconds, and so on up to 2**LAST."""
    return "/".join(map(str, [*accumulate(histogram)][FIRST : LAST + 1]))


# -- Counts and sizes in words, for people -----------------------------------------------------------------------------


def how_many(count: int, noun: str) -> str:
    """Return a count with its noun: "1 block", "12,000 blocks". `noun` takes an s when there are several."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def as_size(nbytes: int) -> str:
    """Bytes in units of 1,024, as a configuration means them, too: "1 byte", "1.5 KiB", "12 GiB"."""
    size, unit = float(nbytes), ""
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return how_many(nbytes, "byte") if not unit else f"{size:.1f} {unit}" if size < 100 else f"{size:.0f} {unit}"


# -- Text of others, such as names that clients chose, made harmless for terminals, logs and formats of l --------------


def printable(text: str) -> str:
    """Return the text with escapes for characters that cannot be printed: control characters, ends of lines, invisible
    characters, characters that reverse the direction of writing, and bytes that are not UTF-8.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    if "\udc80" <= letter <= "\udcff":  # a byte, as `surrogateescape` decodes it
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode()


# -- Lines of a log for people, to which no client can add one ---------------------------------------------------------

_CONTINUES = "    "


class LogLines(logging.Formatter):
    """Formatter that escapes whatever cannot be printed.

    A message may have names that clients chose. An end of line in a name would begin a line that looks like another
    record, and an escape sequence would be a command to the terminal that shows the log. A message takes one line, and
    the lines of a traceback are indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        return "\n".join(_CONTINUES + printable(line) for line in super().formatException(ei).split("\n"))


def log_to_standard_error(layout: str) -> None:
    """Write warnings and errors to standard error in a layout of `logging.Formatter`."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines(layout))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
