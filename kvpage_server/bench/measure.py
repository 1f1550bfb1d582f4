"""A store under load: GB/s, the server's CPU seconds a GB, and how long a call takes. Every byte is checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvpage_server.bench.work import Blocks, PageWork, Work
from kvpage_server.client import PageClient

GB = 1e9
_DEADLINE = 60.0  # seconds


class Store(Protocol):
    """Whatever batches are written to and read from."""

    def write(self, work: Work, generation: int) -> None:
        """Store a batch."""

    def read(self, work: Work, generation: int) -> None:
        """Read it into its memory."""


class ClientStore:
    """A server through PageClient."""

    def __init__(self, client: PageClient) -> None:
        self._client = client

    def write(self, work: Work, generation: int) -> None:
        if isinstance(work, PageWork):
            self._client.mset(work.pages[generation], deadline=_DEADLINE)
        elif isinstance(work, Blocks):
            bodies = list(work.batches[generation].written)
            self._client.mset_blocks(work.names[generation], work.shape, bodies, deadline=_DEADLINE)

    def read(self, work: Work, generation: int) -> None:
        """Receive them into their memory."""
        into = list(work.batches[generation].read)
        if isinstance(work, PageWork):
            found = self._client.mget_into(work.keys[generation], into, deadline=_DEADLINE)
        elif isinstance(work, Blocks):
            found = self._client.mget_blocks_into(work.names[generation], work.shape, into, deadline=_DEADLINE)
        if not all(found):
            raise AssertionError(f"{found.count(False)} of {len(found)} are not there: the store has no room for them")


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one kind of call."""

    gb_per_s: float
    cpu_s_per_gb: float | None  # of the server; None where it does not tell
    p50_ms: float  # of a call
    p99_ms: float
    calls: int


def measure_writes(store: Store, work: Work, seconds: float, cpu: Callable[[], float] | None = None) -> Figures:
    """Write generation after generation for a while."""
    return _measure(store.write, work, seconds, cpu)


def measure_reads(store: Store, work: Work, seconds: float, cpu: Callable[[], float] | None = None) -> Figures:
    """Read them likewise, as they have been written. Raises AssertionError for wrong bytes."""
    return _measure(store.read, work, seconds, cpu, check=True)


def _measure(
    move: Callable[[Work, int], None],
    work: Work,
    seconds: float,
    cpu: Callable[[], float] | None,
    *,
    check: bool = False,
) -> Figures:
    times: list[float] = []
    before = 0.0
    for call in range(-len(work.batches), 1_000_000):  # the first round is for warming up
        if call == 0:
            before, times = cpu() if cpu else 0.0, []
        generation = call % len(work.batches)
        if check:
            work.batches[generation].spoil()
        started = time.perf_counter()
        move(work, generation)
        times.append(time.perf_counter() - started)
        if check:
            work.batches[generation].check()
        if call >= 2 and sum(times) >= seconds:
            break
    gigabytes = len(times) * work.total / GB
    used = cpu() - before if cpu else None
    p50, p99 = np.percentile(times, [50, 99]) * 1000
    return Figures(gigabytes / sum(times), None if used is None else used / gigabytes, p50, p99, len(times))
