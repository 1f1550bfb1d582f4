"""The last minutes, second by second: the differences between overviews."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvpage_server.observe.overview import Overview, hit_ratio

MINUTES = 10


@dataclass(frozen=True, slots=True)
class Moment:
    """What happened between two overviews, as rates a second, and the state at the end."""

    at: float  # unix seconds of the first overview, and the seconds since then, whatever is done to the wall clock
    seconds: float  # between the two
    commands: float
    bytes_in: float
    bytes_out: float
    hits: float
    misses: float
    evicted: float  # keys
    expired: float  # keys
    page_misses: Mapping[str, float]  # by reason, without zeros
    p99: Mapping[str, float]  # seconds that 99 of 100 calls took at most, by family of commands, without idle families
    used: int  # bytes of memory
    disk: int  # bytes on disk
    waiting: int  # bytes that wait to be written to disk
    clients: int

    @property
    def hit_ratio(self) -> float | None:
        """The share of reads that found something; None if there were no reads."""
        return hit_ratio(self.hits, self.misses)


class History:
    """Moments, the oldest first. At one a second, it holds the last ten minutes."""

    def __init__(self) -> None:
        self.moments: deque[Moment] = deque(maxlen=60 * MINUTES)
        self._last: Overview | None = None
        self._at = 0.0  # of the last overview, as `Moment.at` counts

    def add(self, now: Overview) -> Moment | None:
        """Adds an overview, and returns the moment that it ends. None for the first one, and after a restart."""
        before, self._last = self._last, now
        if before is None:
            self._at = now.at
            return None
        seconds = now.read - before.read
        self._at += seconds
        if seconds <= 0:
            return None
        if before.server.pid != now.server.pid or now.traffic.commands < before.traffic.commands:
            return None
        moment = _between(before, now, self._at)
        self.moments.append(moment)
        return moment


def _between(before: Overview, now: Overview, at: float) -> Moment:
    seconds = now.read - before.read
    old, new = before.traffic, now.traffic

    def rate(was: int, count: int) -> float:
        return max(count - was, 0) / seconds

    missed = {reason: rate(before.misses.get(reason, 0), count) for reason, count in now.misses.items()}
    return Moment(
        at=at,
        seconds=seconds,
        commands=rate(old.commands, new.commands),
        bytes_in=rate(old.bytes_in, new.bytes_in),
        bytes_out=rate(old.bytes_out, new.bytes_out),
        hits=rate(old.hits, new.hits),
        misses=rate(old.misses, new.misses),
        evicted=rate(old.evicted, new.evicted),
        expired=rate(old.expired, new.expired),
        page_misses={reason: each for reason, each in missed.items() if each},
        p99=_slowest(before, now),
        used=now.memory.used,
        disk=now.disk.bytes if now.disk is not None else 0,
        waiting=now.disk.waiting_bytes if now.disk is not None else 0,
        clients=now.connections.now,
    )


def _slowest(before: Overview, now: Overview) -> dict[str, float]:
    """The 99th percentile of the calls between two overviews, in seconds, by family of commands."""
    found = {}
    for name, calls in now.families.items():
        was = before.families.get(name)
        since = calls.since(was) if was is not None else calls
        if since.count:
            found[name] = since.percentile(0.99)
    return found
