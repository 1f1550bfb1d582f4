"""The clock for durations, and counts of durations by powers of two of nanoseconds.

Nobody can set this clock. Leases, idle times and pauses last as long as they should when the wall clock is set. Times
to live, time stamps and all that is written to disk use the wall clock, `page.unix_ms`. To count a duration costs no
more than an addition.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

BUCKETS = 64
FIRST, LAST = 12, 34  # the powers that are told: 4 microseconds to 17 seconds


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

    def told(self) -> str:
        """The field of INFO."""
        return f"calls={sum(self.histogram)},usec={self.nanoseconds // 1000},within={within(self.histogram)}"


def within(histogram: Sequence[int]) -> str:
    """How many took less than 2**FIRST nanoseconds, and so on up to 2**LAST."""
    return "/".join(map(str, [*accumulate(histogram)][FIRST : LAST + 1]))
