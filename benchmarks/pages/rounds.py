"""Servers measured in turn, round after round, so that a disturbance affects all of them: ratios are of one round.

Two processes of one server differ by up to a tenth, for as long as they live: it depends on where their memory happens
to lie. So the rounds of a figure are shared among several sets of servers, each started anew.

A *pass* moves every generation of a batch in turn, again and again until it has moved some hundred megabytes: a server
that has slept needs some milliseconds to be as fast as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.findings import Finding
from benchmarks.pages.clients import Way
from benchmarks.servers import Server
from kvpage_server.bench import GB

OPS = ("write", "read")
CPU, SPEED = "CPU s/GB", "GB/s"


@dataclass(frozen=True)
class Plan:
    """The amount of work of a run."""

    quick: bool = False
    against: Path | None = None  # an older checkout, to compare the core's Python twin with

    @property
    def sets(self) -> int:
        """Return the number of sets of new servers."""
        return 1 if self.quick else 3

    @property
    def rounds(self) -> int:
        """Return the number of rounds with each set of servers."""
        return 2 if self.quick else 3

    @property
    def least(self) -> int:
        """Return the bytes of a pass, at least."""
        return (24 if self.quick else 160) * 1024 * 1024


@dataclass(frozen=True)
class Contestant:
    """A server with a client's method of transfer."""

    server: Server
    way: Way


@dataclass(frozen=True)
class Pass:
    """Measurements of one pass: the transfer of all generations, several times."""

    cpu_s_per_gb: float  # of the server, including the kernel's time for it
    gb_per_s: float


Passes = dict[str, list[Pass]]  # of each contestant, one a round


def compare(
    contestants: Mapping[str, Contestant], op: str, nbytes: int, plan: Plan, least: int | None = None
) -> Passes:
    """Passes of everybody; `nbytes` are those of a generation, `least` those of a pass where the plan's are too many.

    Raises Wrong for wrong bytes.
    """
    least = plan.least if least is None else least
    passes: Passes = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(-1, plan.rounds):  # round -1 is a warm-up
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            found = one_pass(contestants[name], op, nbytes, 0 if turn < 0 else least)
            if turn >= 0:
                passes[name].append(found)
    return passes


def one_pass(contestant: Contestant, op: str, nbytes: int, least: int) -> Pass:
    """Transfer at least `least` bytes, and return the measurements. If it is 0, transfer each generation once, and
    check all reads.
    """
    server, way = contestant.server, contestant.way
    steps = way.writes if op == "write" else way.reads
    before, started = server.cpu_seconds(), time.perf_counter()
    moved = 0
    while not moved or moved < least:
        for number, step in enumerate(steps):
            step()
            if not least and op == "read":
                way.check(number)
        moved += len(steps) * nbytes
    seconds, cpu = time.perf_counter() - started, server.cpu_seconds() - before
    if op == "read":
        way.check(len(steps) - 1)
    return Pass(cpu * GB / moved, moved / GB / seconds)


def together(sets: Iterable[Passes]) -> Passes:
    """Return the rounds of all sets of the same contestants in one mapping."""
    found: Passes = {}
    for passes in sets:
        for name, rounds in passes.items():
            found.setdefault(name, []).extend(rounds)
    return found


def cpu_of(found: Pass) -> float:
    """Return the CPU seconds per GB of a pass, for `middle` and `ratio`."""
    return found.cpu_s_per_gb


def speed_of(found: Pass) -> float:
    """Return the GB/s of a pass, for `middle` and `ratio`."""
    return found.gb_per_s


def middle(passes: Passes, name: str, of: Callable[[Pass], float]) -> float:
    """Return the median of a contestant's rounds."""
    return median(map(of, passes[name]))


def ratio(passes: Passes, name: str, other: str, of: Callable[[Pass], float]) -> float:
    """Return the median of the rounds' ratios between two contestants."""
    return median(of(ours) / of(theirs) for ours, theirs in zip(passes[name], passes[other], strict=True))


@dataclass(frozen=True)
class Target:
    """Targets relative to another server: CPU time at most `cpu` times, GB/s at least `speed` times the other's."""

    cpu: float | None = None
    speed: float | None = None


NO_TARGET = Target()


@dataclass
class Trials:
    """Results of several sets of servers, by work."""

    ours: str
    _sets: dict[tuple[str, str], list[Passes]] = field(default_factory=dict)  # by op and work
    _targets: dict[tuple[str, str], Mapping[str, Target]] = field(default_factory=dict)

    def run(
        self,
        work: str,
        contestants: Mapping[str, Contestant],
        nbytes: int,
        plan: Plan,
        targets: Mapping[str, Mapping[str, Target]],
        *,
        ops: Iterable[str] = OPS,
        least: int | None = None,
    ) -> None:
        """Measure writes, then reads, of one set of servers. `targets` has the target by op and other server."""
        print(f"{work} ...", flush=True)
        for op in ops:
            self._sets.setdefault((op, work), []).append(compare(contestants, op, nbytes, plan, least))
            self._targets[op, work] = targets.get(op, {})

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of all sets, for each op and each other server."""
        for (op, work), sets in self._sets.items():
            passes = together(sets)
            for other in passes:
                if other != self.ours:
                    target = self._targets[op, work].get(other, NO_TARGET)
                    yield from beside(f"{op} {work}", passes, self.ours, other, target)


def beside(work: str, passes: Passes, ours: str, other: str, target: Target) -> Iterator[Finding]:
    """Yield the CPU time and the speed of one server relative to another one."""

    def finding(what: str, of: Callable[[Pass], float], at_least: float | None, at_most: float | None) -> Finding:
        measured = " / ".join(f"{middle(passes, name, of):.3f}" for name in (ours, other))
        return Finding(work, other, what, measured, ratio(passes, ours, other, of), at_least, at_most)

    yield finding(CPU, cpu_of, None, target.cpu)
    yield finding(SPEED, speed_of, target.speed, None)
