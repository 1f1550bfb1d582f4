"""Fetch or compute: what is on the server is fetched if that is faster than computing it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

DECAY = 0.5  # how much earlier measurements still count at the next one
VALID_SECONDS = 30.0  # after that, the link may have changed
LEAST_BYTES = 1 << 20  # smaller transfers do not tell how fast a link is


class Rate:
    """A rate from recent measurements. Later and longer ones count more."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Note that `amount` took `seconds`."""
        self._amount = self._amount * DECAY + amount
        self._seconds = self._seconds * DECAY + seconds

    @property
    def value(self) -> float | None:
        """The rate; None before the first observation."""
        return self._amount / self._seconds if self._seconds else None


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to fetch, and the figures for this. Times are in seconds, None if unknown."""

    fetch: bool
    tokens: int  # that need not be computed
    nbytes: int  # to be fetched
    load_seconds: float | None
    compute_seconds: float | None
    link_rate: float | None  # bytes a second
    latency: float | None  # of a question
    prefill_rate: float | None  # tokens a second


class Rates:
    """The speed of the link and of the model's prefill. One thread measures the link, another one the prefill."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._connection = Rate()
        self._questions = Rate()
        self._prefill = Rate()
        self._link_seen = 0.0  # when it was last observed

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The model has computed `tokens` tokens of prompts."""
        self._prefill.observe(tokens, seconds)

    def asked(self, seconds: float) -> None:
        """The server has answered a question without a body."""
        self._questions.observe(1, seconds)

    def received(self, nbytes: int, seconds: float, wanted: int) -> None:
        """`nbytes` of `wanted` have arrived. A small transfer tells only the latency of a link."""
        if wanted >= LEAST_BYTES:
            self._connection.observe(nbytes, seconds)
            self._link_seen = self._clock()

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second."""
        return self._prefill.value

    @property
    def latency(self) -> float | None:
        """Seconds."""
        return 1 / rate if (rate := self._questions.value) else None

    @property
    def link_rate(self) -> float | None:
        """Bytes a second; None if not measured lately. Then the next context is fetched, which measures it."""
        return self._connection.value if self._clock() - self._link_seen < VALID_SECONDS else None

    def decide(self, tokens: int, nbytes: int, link: float | None = None) -> Decision:
        """Whether to fetch `nbytes` rather than compute `tokens`; at `link` bytes a second, or the rate measured
        lately. Yes if one of the rates is unknown."""
        link, latency, prefill = link or self.link_rate, self.latency, self.prefill_rate
        load = compute = None
        if link is not None:
            load = (latency or 0.0) + (nbytes / link if link else float("inf"))
        if prefill:
            compute = tokens / prefill
        fetch = load is None or compute is None or load < compute
        return Decision(fetch, tokens, nbytes, load, compute, link, latency, prefill)
