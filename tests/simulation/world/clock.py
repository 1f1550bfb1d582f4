"""Time that passes when the world says so."""

from __future__ import annotations

import time
from collections.abc import Callable

EPOCH = 1_800_000_000 * 10**9  # unix nanoseconds at which every world begins
BEGIN = 1000 * 10**9  # its monotonic clock at the start

real_monotonic, real_monotonic_ns = time.monotonic, time.monotonic_ns


class Clock:
    """Nanoseconds. During execution time does not advance, except for the cost of reading the clock.

    The wall clock does not advance then, so a command sees one millisecond.
    """

    def __init__(self) -> None:
        self.now = BEGIN
        self.wall = EPOCH  # as of the last time that anything waited
        self.offset = EPOCH - BEGIN  # of the wall clock, which can be set
        self.cost: Callable[[], int] = lambda: 0  # of a look at the monotonic clock

    def advance(self, to: int) -> None:
        """Advance the clock; it never runs backwards."""
        self.now = max(self.now, to)
        self.wall = self.now + self.offset

    def set_wall(self, by: int) -> None:
        """Somebody sets the wall clock."""
        self.offset += by
        self.wall = self.now + self.offset

    @property
    def unix_ms(self) -> int:
        """Return the server's `unix_ms`."""
        return self.wall // 1_000_000

    def monotonic_ns(self) -> int:
        """Return `time.monotonic_ns`."""
        self.now += self.cost()
        return self.now

    def install(self) -> None:
        """Be the clock of everything that is imported from now on."""
        time.monotonic_ns = self.monotonic_ns
        time.monotonic = time.perf_counter = lambda: self.monotonic_ns() / 1e9
        time.time_ns = lambda: self.wall
        time.time = lambda: self.wall / 1e9
