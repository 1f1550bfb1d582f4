"""What it costs to be watched: a server that nobody watches, one that is scraped, and one with dashboards open.

All three are the same but for `metrics-port`. Who watches does so during the server's own passes alone. The process
that answers HTTP has the server's core, as it has where there is but one; its time is told by itself.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.findings import Finding
from benchmarks.pages import ordinary
from benchmarks.pages.latency import ASKED, STORED, getter
from benchmarks.pages.rounds import OPS, Contestant, Pass, Passes, Plan, Target, beside, one_pass, together
from benchmarks.pages.work import KIB, pages
from benchmarks.servers import Server, cpu_seconds, start_kvpage
from benchmarks.watchers import DASHBOARDS, watching

ALONE, SCRAPED, WATCHED = "nobody", "a scrape a second", f"a scrape a second, {DASHBOARDS} dashboards"
WATCHERS = {ALONE: None, SCRAPED: 0, WATCHED: DASHBOARDS}
TARGETS = {SCRAPED: Target(cpu=1.01, speed=0.99), WATCHED: Target()}
MOST_SLOWER = 1.1
PASS_BYTES = 4 << 30  # some seconds
READ_SECONDS = 6.0  # what dashboards ask for every five seconds is in them


@dataclass(frozen=True)
class Side:
    """A server, and who watches it."""

    contestant: Contestant
    nbytes: int  # of a generation
    get: Callable[[], None]  # one page
    watch: Callable[[], AbstractContextManager[None]]

    def one_pass(self, op: str, least: int) -> Pass:
        """Writes or reads of 16 KiB, while it is watched."""
        with self.watch():
            return one_pass(self.contestant, op, self.nbytes, least)

    def slow_reads(self, seconds: float) -> tuple[float, float]:
        """Seconds that 99 of 100 single reads do not exceed, and that the process beside it computes in one."""
        times = []
        with self.watch():
            before, began = _time_beside(self.contestant.server), time.perf_counter()
            while (start := time.perf_counter()) < began + seconds:
                self.get()
                times.append(time.perf_counter() - start)
            used = (_time_beside(self.contestant.server) - before) / (time.perf_counter() - began)
        return sorted(times)[99 * len(times) // 100], used


@contextmanager
def _side(watchers: int | None) -> Iterator[Side]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = () if watchers is None else ("--metrics-port", str(port))
    with start_kvpage(*options) as server, server.connect() as sock, server.connect() as single:
        work, body = pages(256, 16 * KIB, "an engine's order"), Random(0).randbytes(16 * KIB)
        server.admin.execute_command(*STORED, body)
        watch = nullcontext if watchers is None else partial(watching, port, watchers)
        yield Side(
            Contestant(server, ordinary.kvpage_pages(sock, work)), work.nbytes, getter(single, ASKED, body), watch
        )


def _time_beside(server: Server) -> float:
    """CPU seconds of the process that answers HTTP; 0 without one."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return sum(cpu_seconds(int(pid)) for pid in children.read_text().split()) if children.exists() else 0.0


def findings(plan: Plan) -> Iterator[Finding]:
    """GB/s and CPU time of the server, single reads, and the time of the process beside it."""
    passes: dict[str, list[Passes]] = {op: [] for op in OPS}
    slow: list[dict[str, tuple[float, float]]] = []
    for _ in range(plan.sets):
        for op, found in _a_set(plan, slow).items():
            passes[op].append(found)
    for op, sets in passes.items():
        for watched, target in TARGETS.items():
            for finding in beside(f"{op} 256 pages of 16 KiB", together(sets), watched, ALONE, target):
                yield replace(finding, against=f"{watched}, beside {ALONE}")
    for watched in TARGETS:
        ratio = median(each[watched][0] / each[ALONE][0] for each in slow)
        told = " / ".join(f"{1e6 * median(each[who][0] for each in slow):.0f}" for who in (watched, ALONE))
        against = f"{watched}, beside {ALONE}"
        yield Finding("one page of 16 KiB at a time", against, "p99, µs", told, ratio, at_most=MOST_SLOWER)
        used = median(each[watched][1] for each in slow)
        yield Finding("the process that answers HTTP", watched, "CPU s/s", f"{used:.3f}", used)


def _a_set(plan: Plan, slow: list[dict[str, tuple[float, float]]]) -> dict[str, Passes]:
    """Of servers that were started anew, one after the other in each round."""
    least, seconds = (plan.least, 1.0) if plan.quick else (PASS_BYTES, READ_SECONDS)
    found: dict[str, Passes] = {op: {who: [] for who in WATCHERS} for op in OPS}
    with ExitStack() as stack:
        sides = {who: stack.enter_context(_side(watchers)) for who, watchers in WATCHERS.items()}
        for turn in range(-1, plan.rounds):  # the first round warms up
            print("16 KiB, watched and not ...", flush=True)
            order = [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]
            for op in OPS:
                for who in order:
                    done = sides[who].one_pass(op, 0 if turn < 0 else least)
                    found[op][who] += [done] if turn >= 0 else []
            if turn >= 0:
                slow.append({who: sides[who].slow_reads(seconds) for who in order})
    return found
