"""Servers measured in turn, round after round, so that what disturbs one disturbs the others: ratios are of one round.

Two processes of one server differ by up to a tenth, for as long as they live: it depends on where their memory happens
to lie. So the rounds of a figure are shared among several sets of servers, `SETS`, each started anew.

A *pass* moves every generation of a batch in turn, again and again until it has moved a quarter of a gigabyte: a server
that has slept needs some milliseconds to be as fast as it is. With eight generations of some megabytes nothing is found
in the CPU's cache; the cache-hot case moves one generation as often.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.servers import Server
from benchmarks.stores import Step, Store
from kvpage_server.bench.measure import GB
from kvpage_server.bench.work import Work

GENERATIONS = 8
LEAST = 256 * 1024 * 1024  # bytes of a pass
SETS = 5


@dataclass(frozen=True)
class Contestant:
    """What is measured."""

    name: str
    store: Store
    server: Server | None  # that tells its CPU time; None for bare sockets


@dataclass(frozen=True)
class Pass:
    """All generations of a batch, moved some times."""

    gb_per_s: float
    cpu_s_per_gb: float  # of the server, 0 where it is not known
    own_s_per_gb: float  # of that, what is not the kernel's


Passes = dict[str, list[Pass]]  # of each contestant, one a round


def compare(contestants: list[Contestant], op: str, work: Work, *, rounds: int, hot: bool = False) -> Passes:
    """`rounds` passes of everybody; `op` is write or read. Raises AssertionError for wrong bytes."""
    used = range(1) if hot else range(len(work.batches))
    steps = {}
    for contestant in contestants:
        all_steps = contestant.store.writes(work) if op == "write" else contestant.store.reads(work)
        steps[contestant.name] = [all_steps[generation] for generation in used]
    repeats = max(GENERATIONS // len(used), LEAST // (len(used) * work.total))
    passes: Passes = {contestant.name: [] for contestant in contestants}
    for turn in range(-1, rounds):  # the first round warms up
        shift = turn % len(contestants)
        for contestant in contestants[shift:] + contestants[:shift]:
            for generation in used:
                work.batches[generation].spoil()
            found = _pass(steps[contestant.name] * repeats, contestant.server, work.total)
            if op == "read":
                for generation in used:
                    work.batches[generation].check()
            if turn >= 0:
                passes[contestant.name].append(found)
    return passes


def together(sets: Iterable[Passes]) -> Passes:
    """The rounds of all sets of the same contestants."""
    found: defaultdict[str, list[Pass]] = defaultdict(list)
    for passes in sets:
        for name, rounds in passes.items():
            found[name] += rounds
    return dict(found)


def _pass(steps: list[Step], server: Server | None, total: int) -> Pass:
    before = server.cpu_times() if server else (0.0, 0.0)
    started = time.perf_counter()
    for step in steps:
        step()
    seconds = time.perf_counter() - started
    after = server.cpu_times() if server else before
    own, kernel = (b - a for a, b in zip(before, after, strict=True))
    gigabytes = len(steps) * total / GB
    return Pass(gigabytes / seconds, (own + kernel) / gigabytes, own / gigabytes)


def speed(passes: Passes, name: str) -> float:
    """GB/s, the median of all rounds."""
    return median(found.gb_per_s for found in passes[name])


def cpu(passes: Passes, name: str) -> float:
    """The server's CPU seconds a GB, likewise."""
    return median(found.cpu_s_per_gb for found in passes[name])


def own_cpu(passes: Passes, name: str) -> float:
    """What of that is not the kernel's, the mean: of a single pass it is known to some hundredths alone."""
    return fmean(found.own_s_per_gb for found in passes[name])


def speed_ratio(passes: Passes, name: str, other: str) -> float:
    """How many times as fast as the other, the median of the ratios of each round."""
    return _ratio(passes, name, other, lambda found: found.gb_per_s)


def cpu_ratio(passes: Passes, name: str, other: str) -> float:
    """How many times the other's CPU time a GB, likewise."""
    return _ratio(passes, name, other, lambda found: found.cpu_s_per_gb)


def _ratio(passes: Passes, name: str, other: str, of: Callable[[Pass], float]) -> float:
    return median(of(ours) / of(theirs) for ours, theirs in zip(passes[name], passes[other], strict=True))
