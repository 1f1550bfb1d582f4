"""Counts durations by powers of two of nanoseconds. Counting one costs no more than an addition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

BUCKETS = 64
FIRST, LAST = 12, 34  # the powers that are told: 4 microseconds to 17 seconds


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
