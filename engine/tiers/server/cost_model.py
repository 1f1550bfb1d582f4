"""Load or recompute: what is on the server is fetched when that is sooner than computing it once more."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

DECAY = 0.5  # how much of what was measured before still counts at the next measurement
VALID_SECONDS = 30.0  # a link may be another one after that
LEAST_BYTES = 1 << 20  # of a transfer that says something about a link


class Rate:
    """So much a second, of what was seen lately: the younger, and the longer it took, the more it counts."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Take in that `amount` took `seconds`."""
        self._amount = self._amount * DECAY + amount
        self._seconds = self._seconds * DECAY + seconds

    @property
    def value(self) -> float | None:
        """The rate; None before the first observation."""
        return self._amount / self._seconds if self._seconds else None


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to fetch, and all that it was decided from. Times are in seconds, None where nothing was measured."""

    fetch: bool
    tokens: int  # that would not have to be computed
    nbytes: int  # that would have to be fetched
    load_seconds: float | None
    compute_seconds: float | None
    link_rate: float | None  # bytes a second
    latency: float | None  # of a question to the server
    prefill_rate: float | None  # tokens a second


class Rates:
    """How fast the link to the server and the model's prefill have been. The link is one thread's to observe, the
    prefill another's."""

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
        """`nbytes` have come, of `wanted`. Little of it says nothing of the link, only of its latency."""
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
        """Bytes a second. None when it was not measured lately: then something is fetched, and it is."""
        return self._connection.value if self._clock() - self._link_seen < VALID_SECONDS else None

    def decide(self, tokens: int, nbytes: int, link: float | None = None) -> Decision:
        """Whether to fetch `nbytes`, at `link` bytes a second or as fast as it was lately, rather than to compute
        `tokens`. Before both rates are known: yes."""
        link, latency, prefill = link or self.link_rate, self.latency, self.prefill_rate
        load = compute = None
        if link is not None:
            load = (latency or 0.0) + (nbytes / link if link else float("inf"))
        if prefill:
            compute = tokens / prefill
        fetch = load is None or compute is None or load < compute
        return Decision(fetch, tokens, nbytes, load, compute, link, latency, prefill)
