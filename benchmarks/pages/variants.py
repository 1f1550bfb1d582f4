"""kvpage-server compared with itself: the default store with memory, many pages with few, the Python core with an older
checkout, a server with monitoring with one without, two servers with one.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.findings import Finding
from benchmarks.pages.clients import kvpage_pages
from benchmarks.pages.rounds import (
    OPS,
    Contestant,
    Pass,
    Passes,
    Plan,
    Target,
    Trials,
    beside,
    compare,
    one_pass,
    together,
)
from benchmarks.pages.single_commands import ASKED, STORED, getter
from benchmarks.pages.work import KIB, ORDERS, pages
from benchmarks.ports import free_port
from benchmarks.servers import Server, connect, cpu_seconds, start_kvpage, unpin
from benchmarks.watchers import DASHBOARDS, TOKEN, watching
from kvpage_server.bench import GB
from kvpage_server.client import Page, PageClient
from kvpage_server.page import HEADER_SIZE, BlockShape, DType, PageKey, Plane

# -- The default store, memory and disk with `everysec`, compared with memory, if memory suffices for both -------------

TIERED, MEMORY = "tiered", "memory"
STORE_TARGETS = {"write": {MEMORY: Target(speed=0.75)}, "read": {MEMORY: Target(speed=0.9)}}
STORE_SIZES = {4: 900, 16: 256, 64: 256, 256: 256}  # KiB of a page, and pages of a batch


def default_store_findings(plan: Plan) -> list[Finding]:
    """Return the findings of the default store. All writes are on disk before the first read."""
    trials = Trials(TIERED)
    for _ in range(plan.sets):
        with ExitStack() as stack:
            tiered, memory = map(stack.enter_context, (start_kvpage("--store", "tiered"), start_kvpage()))
            sockets = [stack.enter_context(server.connect()) for server in (tiered, memory)]
            for size in (16,) if plan.quick else STORE_SIZES:
                work = pages(STORE_SIZES[size], size * KIB, "an engine's order")
                contestants = {
                    store: Contestant(server, kvpage_pages(sock, work))
                    for store, server, sock in zip((TIERED, MEMORY), (tiered, memory), sockets, strict=True)
                }
                name = f"{work.name}, memory and disk"
                trials.run(name, contestants, work.nbytes, plan, STORE_TARGETS, ops=["write"])
                tiered.admin.execute_command("SAVE")
                trials.run(name, contestants, work.nbytes, plan, STORE_TARGETS, ops=["read"])
                for server in (tiered, memory):
                    server.admin.flushall()
    return list(trials.findings())


# -- The cost of very many pages in a store: memory in addition to bodies, and speed -----------------------------------

_FEW = 10_000
_PAGES_PER_CALL = 2000
PAGES_A_REQUEST, PAGES_A_BLOCK = 5000, 512
_ROWS, _COLUMNS = 2, 128  # rows and bytes of a row of the pages that fill the store
_BODY = _ROWS * _COLUMNS
_SHAPE = BlockShape(32, 8, _ROWS, (Plane(0, DType.UINT8, _COLUMNS), Plane(1, DType.UINT8, _COLUMNS)))  # 512 pages


def growth_findings(plan: Plan) -> Iterator[Finding]:
    """Yield bytes per page, for single pages and in blocks; GB/s relative to a store with few pages."""
    count = 100_000 if plan.quick else 1_000_000
    print(f"{count:,} pages ...", flush=True)
    with start_kvpage() as large:
        single = _bytes_a_page(large, fill_with_pages, count) - HEADER_SIZE
        with start_kvpage() as small:
            fill_with_pages(small, _FEW)
            yield from _slower(small, large, count, plan)
    with start_kvpage() as other:
        in_blocks = _bytes_a_page(other, _fill_with_blocks, count)
    for how, found, at_most in (
        ("single pages", single, 200.0),
        ("pages in blocks, which need no headers,", in_blocks, 8.0),
    ):
        yield Finding(
            f"memory beside what was stored, {count:,} {how}",
            "",
            "bytes a page",
            f"resident, pages of {_BODY} bytes",
            found,
            at_most=at_most,
        )


def _bytes_a_page(server: Server, fill: Callable[[Server, int], int], pages: int) -> float:
    """Return the resident bytes per page, without its body."""
    fill(server, 1)
    before = server.resident()
    filled = fill(server, pages)
    return (server.resident() - before) / filled - _BODY


def fill_with_pages(server: Server, count: int) -> int:
    """Store `count` pages one by one, 512 for each block. Return their number."""
    body = bytes(_BODY)
    with PageClient(server.url, deadline=60) as client:
        for start in range(0, count, _PAGES_PER_CALL):
            ids = range(start, min(start + _PAGES_PER_CALL, count))
            keys = (
                PageKey(b"request%d" % (i // PAGES_A_REQUEST), i // 16 % 32, i // 2 % 8, i // PAGES_A_BLOCK, i % 2)
                for i in ids
            )
            client.mset([Page(key, body, DType.UINT8, _ROWS, _COLUMNS) for key in keys])
    return count


def _fill_with_blocks(server: Server, count: int) -> int:
    body = bytes(_SHAPE.nbytes)
    blocks = -(-count // _SHAPE.pages)
    with PageClient(server.url, deadline=60) as client:
        for block in range(blocks):
            client.set_block((b"request%d" % (block // 10), block), _SHAPE, body)
    return blocks * _SHAPE.pages


def _slower(small: Server, large: Server, count: int, plan: Plan) -> Iterator[Finding]:
    work = pages(256, 16 * KIB, "an engine's order")
    few, many = f"{_FEW:,} pages held", f"{count:,} pages held"
    with small.connect() as small_sock, large.connect() as large_sock:
        contestants = {
            many: Contestant(large, kvpage_pages(large_sock, work)),
            few: Contestant(small, kvpage_pages(small_sock, work)),
        }
        for op in OPS:
            passes = compare(contestants, op, work.nbytes, plan)
            yield from beside(f"{op} {work.name}, {many}", passes, many, few, Target(speed=0.9))


# -- The core's reference implementation compared with an older checkout, for pages that are not small -----------------

TWIN, OLDER = "the Python twin", "the older checkout"
SLOWER = 1.3  # target: times as slow, at most
TWIN_TARGETS = {op: {OLDER: Target(cpu=SLOWER, speed=1 / SLOWER)} for op in ("write", "read")}


def twin_findings(plan: Plan) -> list[Finding]:
    """Return the findings of the reference implementation. Without an older checkout, print that, and return none."""
    if plan.against is None:
        print("no Python twin beside an older checkout: --against TREE names one")
        return []
    trials = Trials(TWIN)
    for _ in range(plan.sets):
        with ExitStack() as stack:
            twin, older = map(stack.enter_context, (start_kvpage(core="python"), start_kvpage(tree=plan.against)))
            sockets = [stack.enter_context(server.connect()) for server in (twin, older)]
            for size in (64,) if plan.quick else (64, 256):
                for order in list(ORDERS)[: 1 if plan.quick else 2]:
                    work = pages(256, size * KIB, order)
                    contestants = {
                        name: Contestant(server, kvpage_pages(sock, work))
                        for name, server, sock in zip((TWIN, OLDER), (twin, older), sockets, strict=True)
                    }
                    trials.run(f"{work.name}, {TWIN}", contestants, work.nbytes, plan, TWIN_TARGETS)
                    for server in (twin, older):
                        server.admin.flushall()
    return list(trials.findings())


# -- The cost of monitoring for a server: none, a scrape a second, a scrape with open dashboards -----------------------
#
# Every pass uses the same server: two processes of it differ by more than the measured effect, and `metrics-port` alone
# only adds an idle process. The HTTP process shares the server's core, as on a machine with one core; its time is
# reported separately.
#
# The measured effect, one percent, is smaller than the difference of two passes in a row: many short passes, in turns.
# The processes' time without requests for pages is reported as well, and is exact.

ALONE, SCRAPED, WATCHED = "nobody", "a scrape a second", f"a scrape a second, {DASHBOARDS} dashboards"
DASHBOARDS_OF = {SCRAPED: 0, WATCHED: DASHBOARDS}
WATCHED_TARGETS = {SCRAPED: Target(cpu=1.01, speed=0.99), WATCHED: Target()}
MOST_SLOWER = 1.1
MOST_OF_A_CORE = 0.01
WATCHED_ROUNDS = 14  # rounds with each of three sets of servers
PASS_BYTES = 2 << 30  # bytes of a pass; it takes a second
READ_SECONDS = 1.0
IDLE_SECONDS = 20.0  # long enough for requests that dashboards send every five seconds


@dataclass(frozen=True)
class WatchedWork:
    """A server, and its measurements with and without monitoring."""

    contestant: Contestant
    nbytes: int  # of a generation
    get: Callable[[], None]  # reads one page
    watched: Callable[[str], AbstractContextManager[None]]

    def one_pass(self, op: str, who: str, least: int) -> Pass:
        """Return the measurements of a pass of 16 KiB pages while `who` watches."""
        with self.watched(who):
            return one_pass(self.contestant, op, self.nbytes, least)

    def slow_read(self, who: str, seconds: float) -> float:
        """Return the 99th percentile of single reads in seconds, while `who` watches."""
        times = []
        with self.watched(who):
            end = time.perf_counter() + seconds
            while (start := time.perf_counter()) < end:
                self.get()
                times.append(time.perf_counter() - start)
        return sorted(times)[99 * len(times) // 100]

    def idle(self, who: str, seconds: float) -> tuple[float, float]:
        """Return the CPU seconds per second of the server and of its HTTP process, without requests for pages."""
        with self.watched(who):
            before, began = self._cpu(), time.perf_counter()
            time.sleep(seconds)
            after, took = self._cpu(), time.perf_counter() - began
        return (after[0] - before[0]) / took, (after[1] - before[1]) / took

    def _cpu(self) -> tuple[float, float]:
        server = self.contestant.server
        return server.cpu_seconds(), _time_beside(server)


@dataclass
class WatchedFound:
    """Measurements of all sets of rounds."""

    passes: dict[str, list[Passes]]  # by op
    slow: list[dict[str, float]]  # 99th percentile of reads in seconds, for each round
    idle: list[dict[str, tuple[float, float]]]  # CPU seconds per second of server and HTTP process, for each set


@contextmanager
def _working() -> Iterator[WatchedWork]:
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
        contestant = Contestant(server, kvpage_pages(sock, work))
        yield WatchedWork(contestant, work.nbytes, getter(single, ASKED, body), watched)


def _time_beside(server: Server) -> float:
    """Return the CPU seconds of the server's HTTP process."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return sum(cpu_seconds(int(pid)) for pid in children.read_text(encoding="utf-8").split())


def watched_findings(plan: Plan) -> Iterator[Finding]:
    """Yield GB/s and CPU time of the server, single reads, and the cost of monitoring for an idle server."""
    found = WatchedFound({op: [] for op in OPS}, [], [])
    for _ in range(plan.sets):
        with _working() as work:
            _measure_watched(work, plan, found)
    for op, sets in found.passes.items():
        for who, target in WATCHED_TARGETS.items():
            for finding in beside(f"{op} 256 pages of 16 KiB", together(sets), who, ALONE, target):
                yield replace(finding, against=f"{who}, beside {ALONE}")
    for who in WATCHED_TARGETS:
        ratio = median(each[who] / each[ALONE] for each in found.slow)
        figures = " / ".join(f"{1e6 * median(each[name] for each in found.slow):.0f}" for name in (who, ALONE))
        against = f"{who}, beside {ALONE}"
        yield Finding("one page of 16 KiB at a time", against, "p99, µs", figures, ratio, at_most=MOST_SLOWER)
    for who in WATCHED_TARGETS:
        store = median(each[who][0] - each[ALONE][0] for each in found.idle)
        both = store + median(each[who][1] for each in found.idle)
        yield Finding("the store, which nobody asks for pages", who, "CPU s/s", f"{store:.4f}", store, at_most=0.01)
        limit = MOST_OF_A_CORE if who == SCRAPED else None
        yield Finding("the store and what answers HTTP", who, "CPU s/s", f"{both:.4f}", both, at_most=limit)


def _measure_watched(work: WatchedWork, plan: Plan, found: WatchedFound) -> None:
    """Measure the rounds of one server. In each round, each kind of monitoring watches it in turn."""
    rounds, least, seconds, idle = (
        (1, plan.least, 1.0, 2.0) if plan.quick else (WATCHED_ROUNDS, PASS_BYTES, READ_SECONDS, IDLE_SECONDS)
    )
    names = [ALONE, *WATCHED_TARGETS]
    for op in OPS:
        work.one_pass(op, ALONE, 0)  # a warm-up, whose reads are checked
        found.passes[op].append({who: [] for who in names})
    for turn in range(rounds):
        print("16 KiB, watched and not ...", flush=True)
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for op in OPS:
            for who in order:
                found.passes[op][-1][who].append(work.one_pass(op, who, least))
        found.slow.append({who: work.slow_read(who, seconds) for who in order})
    found.idle.append({who: work.idle(who, idle) for who in names})


# -- Two servers compared with one, on all cores of this machine -------------------------------------------------------
#
# One server and one client, then two servers on two ports with a client each, round after round. Every client transfers
# its own pages of 64 KiB for a while; the result is the sum of all clients.

CLIENT_SECONDS = 1.0


def rate_together(servers: list[Server], op: str) -> float:
    """Return the sum of the GB/s of one client process for each server."""
    rates: SimpleQueue[float] = multiprocessing.SimpleQueue()
    start = multiprocessing.Barrier(len(servers))
    clients = [multiprocessing.Process(target=_move_pages, args=(server.port, op, start, rates)) for server in servers]
    for client in clients:
        client.start()
    found = [rates.get() for _ in clients]
    for client in clients:
        client.join()
    return sum(found)


def _move_pages(port: int, op: str, start: Barrier, rates: SimpleQueue[float]) -> None:
    unpin(0)
    work = pages(256, 64 * KIB, "an engine's order")
    with connect(port) as sock:
        way = kvpage_pages(sock, work)
        for write in way.writes:
            write()
        steps = way.writes if op == "write" else way.reads
        start.wait()
        moved, began = 0, time.perf_counter()
        while time.perf_counter() < began + CLIENT_SECONDS:
            for step in steps:
                step()
            moved += len(steps) * work.nbytes
        rates.put(moved / GB / (time.perf_counter() - began))


def process_findings(plan: Plan) -> Iterator[Finding]:
    """Yield the findings of writes and reads with one and two servers."""
    print("two servers with a client each ...", flush=True)
    with start_kvpage() as one, start_kvpage() as other:
        for server in (one, other):
            unpin(server.process.pid)
        for op in OPS:
            found = [(rate_together([one, other], op), rate_together([one], op)) for _ in range(1 if plan.quick else 5)]
            two, alone = (median(rates) for rates in zip(*found, strict=True))
            yield Finding(
                f"{op} pages of 64 KiB, two servers with a client each",
                f"one with one, on {os.cpu_count()} cores",
                "GB/s",
                f"{two:.2f} / {alone:.2f}",
                median(both / single for both, single in found),
            )
