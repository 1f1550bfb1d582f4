"""The moment by which a call has to be over."""

from __future__ import annotations

import time

from kvpage_server.client.errors import DeadlineExceeded


class Deadline:
    """`seconds` from now, for everything a call does: connecting, every send and every receive."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"a deadline is a positive number of seconds, got {seconds}")
        self._seconds = seconds
        self._end = time.monotonic() + seconds

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
        return DeadlineExceeded(f"not done within {self._seconds:g} s")
