"""The moment by which a call has to be over."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from kvpage_server.client.errors import DeadlineExceeded


class Deadline:
    """`seconds` from now, for everything a call does: connecting, every send and every receive."""

    def __init__(self, seconds: float, error: Callable[[], DeadlineExceeded] | None = None) -> None:
        if not seconds > 0:
            raise ValueError(f"a deadline is a positive number of seconds, got {seconds}")
        self._seconds, self._error = seconds, error
        self._end = time.monotonic() + seconds

    def part(self, node: Hashable, seconds: float) -> Deadline:
        """The time that one of several servers may take of it."""
        seconds = min(seconds, self.left())
        return Deadline(seconds, lambda: self.late(node, f"did not answer within {seconds:.3g} s"))

    def left(self) -> float:
        """The seconds left, more than 0. Raises DeadlineExceeded."""
        left = self.seconds_left()
        if left <= 0:
            raise self.exceeded()
        return left

    def seconds_left(self) -> float:
        """The same without an error: 0 or less after the deadline."""
        return self._end - time.monotonic()

    def exceeded(self) -> DeadlineExceeded:
        """The error for an exceeded deadline."""
        return self._error() if self._error else DeadlineExceeded(f"not done within {self._seconds:g} s")

    def late(self, node: Hashable, why: str) -> DeadlineExceeded:
        """The error for one of several servers that is late."""
        left = max(self.seconds_left(), 0)
        return DeadlineExceeded(f"{node} {why}; {left:.3g} of the call's {self._seconds:g} s left")

    def spent(self) -> str:
        """How much of it is over, for people."""
        return f"{self._seconds - max(self.seconds_left(), 0):.3g} of {self._seconds:g} s"
