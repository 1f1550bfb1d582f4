"""Cost of commands: counts and times of each, the slow log, and latency events."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

_SLOW_WORDS = 32
SLOW_WORD = 128  # bytes of a word that the slow log keeps
_SAMPLES = 160  # samples that are kept of a latency event
_BUCKETS = 64


@dataclass(slots=True)
class CallCounts:
    """Calls of one command since the start, or since CONFIG RESETSTAT.

    `histogram[i]` is the number of calls that took at least 2**(i-1) and less than 2**i nanoseconds.
    """

    nanoseconds: int = 0
    failed: int = 0
    rejected: int = 0  # refused before they ran
    histogram: list[int] = field(default_factory=lambda: [0] * _BUCKETS)

    @property
    def count(self) -> int:
        """Number of calls that ran."""
        return sum(self.histogram)

    def percentile(self, share: float) -> float:
        """Return an upper bound, in microseconds, of the time within which a share (0 to 1) of the calls ended; 0
        without calls. It is a power of two in nanoseconds.
        """
        rank, seen = share * self.count, 0
        for bucket, calls in enumerate(self.histogram):
            seen += calls
            if calls and seen >= rank:
                return float(1 << bucket) / 1000
        return 0.0

    def cumulative(self) -> Iterator[tuple[int, int]]:
        """Yield, for each bucket with calls, its upper limit in microseconds (at least 1), and the number of calls up
        to it. LATENCY HISTOGRAM shows them.
        """
        seen = 0
        for bucket, calls in enumerate(self.histogram):
            seen += calls
            if calls:
                yield max(1, (1 << bucket) // 1000), seen


class Stats:
    """Counters since the start, or since CONFIG RESETSTAT."""

    connections = 0
    rejected = 0  # connections above maxclients, or from other machines in protected mode
    errors = 0
    bytes_in = 0
    bytes_out = 0
    evicted_clients = 0
    overflown_inputs = 0  # connections closed because a command was too long
    overflown_outputs = 0  # connections closed because the client did not read its replies
    idle_closed = 0

    def __init__(self) -> None:
        self.calls: defaultdict[str, CallCounts] = defaultdict(CallCounts)  # by command name
        self.error_codes: Counter[str] = Counter()

    @property
    def commands(self) -> int:
        """Number of calls of all commands."""
        return sum(calls.count for calls in self.calls.values())

    def note_error(self, message: str) -> None:
        """Count an error reply by its code: its first word, at most 32 characters."""
        self.errors += 1
        self.error_codes[message.split(" ", 1)[0][:32]] += 1


@dataclass(frozen=True, slots=True)
class SlowCall:
    """An entry of the slow log: one call."""

    id: int
    unix_time: int  # seconds
    microseconds: int
    words: list[bytes]
    address: str
    name: bytes


class SlowLog:
    """The last slow calls, newest first. `limit()` returns the number of entries to keep."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self.entries: deque[SlowCall] = deque()
        self._limit = limit
        self._ids = count()

    def note(self, words: list[bytes], nanoseconds: int, address: str, name: bytes) -> None:
        """Add a call that took `nanoseconds`. `words` are its words, `address` and `name` those of the client.

        Of more than 32 words the first 31 are kept, and a text with the number of the others.
        """
        kept = words[:_SLOW_WORDS]
        if len(words) > _SLOW_WORDS:
            kept[-1] = b"... (%d more arguments)" % (len(words) - _SLOW_WORDS + 1)
        self.entries.appendleft(SlowCall(next(self._ids), int(time.time()), nanoseconds // 1000, kept, address, name))
        while len(self.entries) > self._limit():
            self.entries.pop()


@dataclass(slots=True)
class LatencyEvent:
    """The last samples of an event, as (unix time in seconds, milliseconds), and the longest time since the start."""

    samples: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    longest: int = 0


class Latency:
    """The slow events by name, `command` and `fast-command`, for LATENCY."""

    def __init__(self) -> None:
        self.events: dict[str, LatencyEvent] = {}

    def note(self, event: str, milliseconds: int) -> None:
        """Add a sample to an event. Of several samples with the same unix second, only the longest is kept."""
        found = self.events.setdefault(event, LatencyEvent())
        found.longest = max(found.longest, milliseconds)
        now = int(time.time())
        if found.samples and found.samples[-1][0] == now:
            milliseconds = max(milliseconds, found.samples.pop()[1])
        found.samples.append((now, milliseconds))
