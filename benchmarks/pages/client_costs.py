"""Two clients of one server in turn: GB/s, the client's own CPU time, and the share of waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.findings import Finding
from benchmarks.servers import Server
from kvpage_server.bench import GB, Work

Way = tuple[Callable[[int], Any], Callable[[int, Any], bool]]  # moves a generation, and checks it


@dataclass(frozen=True)
class Pass:
    """All generations, moved once."""

    gb_per_s: float
    cpu_s_per_gb: float  # of this process, the client
    server_busy: float  # of the time, 0 to 1


def compared(
    names: tuple[str, str],
    ways: tuple[Way, Way],
    work: Work,
    server: Server,
    *,
    rounds: int,
    at_least: float | None = None,
) -> Iterator[Finding]:
    """Compare one client's method with another's. `at_least` is the target of the ratio of GB/s. Raises AssertionError
    for wrong bytes.
    """
    passes = [tuple(_pass(way, work, server) for way in ways) for _ in range(rounds + 1)][1:]
    ours, _ = zip(*passes, strict=True)
    client = median(one.gb_per_s * one.cpu_s_per_gb for one in ours)
    busy = f"client busy {client:.0%}, server {median(one.server_busy for one in ours):.0%}"

    def finding(what: str, of: Callable[[Pass], float], at_least: float | None, note: str) -> Finding:
        first, second = (median(map(of, column)) for column in zip(*passes, strict=True))
        ratio = median(of(one) / of(other) for one, other in passes)
        return Finding(*names, what, f"{first:.2f} / {second:.2f}", ratio, at_least=at_least, note=note)

    yield finding("GB/s", lambda one: one.gb_per_s, at_least, busy)
    yield finding("client CPU s/GB", lambda one: one.cpu_s_per_gb, None, "")


def _pass(way: Way, work: Work, server: Server) -> Pass:
    move, right = way
    seconds = used = served = 0.0
    for generation, batch in enumerate(work.batches):
        batch.spoil()
        served_before = server.cpu_seconds()
        started, before = time.perf_counter(), time.process_time()
        answer = move(generation)
        seconds += time.perf_counter() - started
        used += time.process_time() - before
        served += server.cpu_seconds() - served_before
        if not right(generation, answer):
            raise AssertionError("the bytes that were read are not those that were written")
    gigabytes = len(work.batches) * work.total / GB
    return Pass(gigabytes / seconds, used / gigabytes, served / seconds)
