"""The cost of monitoring for a server: none, a scrape a second, a scrape with open dashboards.

Every pass uses the same server: two processes of it differ by more than the measured effect, and `metrics-port` alone
only adds an idle process. The HTTP process shares the server's core, as on a machine with one core; its time is
reported separately.

The measured effect, one percent, is smaller than the difference of two passes in a row: many short passes, in turns.
The processes' time without requests for pages is reported as well, and is exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.findings import Finding
from benchmarks.pages import ordinary
from benchmarks.pages.latency import ASKED, STORED, getter
from benchmarks.pages.rounds import OPS, Contestant, Pass, Passes, Plan, Target, beside, one_pass, together
from benchmarks.pages.work import KIB, pages
from benchmarks.ports import free_port
from benchmarks.servers import Server, cpu_seconds, start_kvpage
from benchmarks.watchers import DASHBOARDS, TOKEN, watching

ALONE, SCRAPED, WATCHED = "nobody", "a scrape a second", f"a scrape a second, {DASHBOARDS} dashboards"
DASHBOARDS_OF = {SCRAPED: 0, WATCHED: DASHBOARDS}
TARGETS = {SCRAPED: Target(cpu=1.01, speed=0.99), WATCHED: Target()}
MOST_SLOWER = 1.1
MOST_OF_A_CORE = 0.01
ROUNDS = 14  # with each set of three
PASS_BYTES = 2 << 30  # a second
READ_SECONDS = 1.0
IDLE_SECONDS = 20.0  # includes requests that dashboards send every five seconds


@dataclass(frozen=True)
class Work:
    """Work of a server with and without monitoring."""

    contestant: Contestant
    nbytes: int  # of a generation
    get: Callable[[], None]  # one page
    watched: Callable[[str], AbstractContextManager[None]]

    def one_pass(self, op: str, who: str, least: int) -> Pass:
        """Writes or reads of 16 KiB."""
        with self.watched(who):
            return one_pass(self.contestant, op, self.nbytes, least)

    def slow_read(self, who: str, seconds: float) -> float:
        """Seconds that 99 of 100 single reads do not exceed."""
        times = []
        with self.watched(who):
            end = time.perf_counter() + seconds
            while (start := time.perf_counter()) < end:
                self.get()
                times.append(time.perf_counter() - start)
        return sorted(times)[99 * len(times) // 100]

    def idle(self, who: str, seconds: float) -> tuple[float, float]:
        """CPU seconds a second of the store and of the process that answers HTTP, while nobody asks for pages."""
        with self.watched(who):
            before, began = self._cpu(), time.perf_counter()
            time.sleep(seconds)
            after, took = self._cpu(), time.perf_counter() - began
        return (after[0] - before[0]) / took, (after[1] - before[1]) / took

    def _cpu(self) -> tuple[float, float]:
        server = self.contestant.server
        return server.cpu_seconds(), _time_beside(server)


@dataclass
class Found:
    """Findings of each set of rounds."""

    passes: dict[str, list[Passes]]  # by op
    slow: list[dict[str, float]]  # seconds of the slow reads, a round each
    idle: list[dict[str, tuple[float, float]]]  # CPU seconds a second of store and HTTP, a set each


@contextmanager
def _working() -> Iterator[Work]:
    port = free_port()

    def watched(who: str) -> AbstractContextManager[None]:
        return nullcontext() if who == ALONE else watching(port, DASHBOARDS_OF[who])

    with (
        start_kvpage("--metrics-port", str(port), "--web-token", TOKEN) as server,
        server.connect() as sock,
        server.connect() as single,
    ):
        work, body = pages(256, 16 * KIB, "an engine's order"), Random(0).randbytes(16 * KIB)
        server.admin.execute_command(*STORED, body)
        contestant = Contestant(server, ordinary.kvpage_pages(sock, work))
        yield Work(contestant, work.nbytes, getter(single, ASKED, body), watched)


def _time_beside(server: Server) -> float:
    """CPU seconds of the process that answers HTTP."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return sum(cpu_seconds(int(pid)) for pid in children.read_text(encoding="utf-8").split())


def findings(plan: Plan) -> Iterator[Finding]:
    """Yield GB/s and CPU time of the server, single reads, and the cost of monitoring for an idle server."""
    found = Found({op: [] for op in OPS}, [], [])
    for _ in range(plan.sets):
        with _working() as work:
            _measure(work, plan, found)
    for op, sets in found.passes.items():
        for who, target in TARGETS.items():
            for finding in beside(f"{op} 256 pages of 16 KiB", together(sets), who, ALONE, target):
                yield replace(finding, against=f"{who}, beside {ALONE}")
    for who in TARGETS:
        ratio = median(each[who] / each[ALONE] for each in found.slow)
        received = " / ".join(f"{1e6 * median(each[name] for each in found.slow):.0f}" for name in (who, ALONE))
        against = f"{who}, beside {ALONE}"
        yield Finding("one page of 16 KiB at a time", against, "p99, µs", received, ratio, at_most=MOST_SLOWER)
    for who in TARGETS:
        store = median(each[who][0] - each[ALONE][0] for each in found.idle)
        both = store + median(each[who][1] for each in found.idle)
        yield Finding("the store, which nobody asks for pages", who, "CPU s/s", f"{store:.4f}", store, at_most=0.01)
        limit = MOST_OF_A_CORE if who == SCRAPED else None
        yield Finding("the store and what answers HTTP", who, "CPU s/s", f"{both:.4f}", both, at_most=limit)


def _measure(work: Work, plan: Plan, found: Found) -> None:
    """Rounds of one server, in each of which everybody watches it in turn."""
    rounds, least, seconds, idle = (
        (1, plan.least, 1.0, 2.0) if plan.quick else (ROUNDS, PASS_BYTES, READ_SECONDS, IDLE_SECONDS)
    )
    names = [ALONE, *TARGETS]
    for op in OPS:
        work.one_pass(op, ALONE, 0)  # warms up, and is looked at
        found.passes[op].append({who: [] for who in names})
    for turn in range(rounds):
        print("16 KiB, watched and not ...", flush=True)
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for op in OPS:
            for who in order:
                found.passes[op][-1][who].append(work.one_pass(op, who, least))
        found.slow.append({who: work.slow_read(who, seconds) for who in order})
    found.idle.append({who: work.idle(who, idle) for who in names})
