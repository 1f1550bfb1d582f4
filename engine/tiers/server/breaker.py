"""The circuit breaker: a server that fails repeatedly is not asked for a while, so that nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import StrEnum

FAILURES = 3  # in a row, before it opens
SHORTEST, LONGEST = 0.5, 30.0  # seconds for which it stays open; doubled by each failed probe


class State(StrEnum):
    """`CLOSED`: all requests pass. `OPEN`: none does. `HALF_OPEN`: one does, the probe, which decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """Says whether to ask a server, from the results so far. Thread-safe.

    Whoever was let through reports `succeeded` or `failed`. If a probe reports nothing within a pause, because it was
    cancelled, another one is made.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self.opened = 0  # how often it has opened
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._pause = SHORTEST
        self._until: float | None = None  # when the next probe may be made; None if it is closed
        self._probing = False

    @property
    def state(self) -> State:
        if self._until is None:
            return State.CLOSED
        return State.HALF_OPEN if self._probing or self._clock() >= self._until else State.OPEN

    def allows(self) -> bool:
        """Whether the server may be asked. If it is open, the first question after the pause is the probe."""
        with self._lock:
            if self._until is None:
                return True
            if self._clock() < self._until:
                return False
            self._probing = True
            self._until = self._clock() + self._pause
            return True

    def retry(self) -> None:
        """Let the next question pass as the probe, without the rest of the pause."""
        with self._lock:
            if self._until is not None:
                self._until = self._clock()

    def succeeded(self) -> None:
        """The server answered as it should."""
        with self._lock:
            self._failures = 0
            self._pause = SHORTEST
            self._until = None
            self._probing = False

    def failed(self) -> None:
        """The server did not answer, or not in time."""
        with self._lock:
            self._failures += 1
            if self._probing:
                self._pause = min(2 * self._pause, LONGEST)
            elif self._until is not None or self._failures < FAILURES:
                return  # it was under way when the breaker opened, or there were too few failures
            else:
                self.opened += 1
            self._probing = False
            self._until = self._clock() + self._pause
