"""Two servers compared with one, on all cores of this machine.

One server and one client, then two servers on two ports with a client each, round after round. Every client transfers
its own pages of 64 KiB for a while; the result is the sum of all clients.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from statistics import median

from benchmarks.findings import Finding
from benchmarks.pages import ordinary
from benchmarks.pages.rounds import OPS, Plan
from benchmarks.pages.work import KIB, pages
from benchmarks.servers import Server, connect, start_kvpage, unpin
from kvpage_server.bench import GB

SECONDS = 1.0


def together(servers: list[Server], op: str) -> float:
    """GB/s of as many clients as there are servers, each a process."""
    rates: SimpleQueue[float] = multiprocessing.SimpleQueue()
    start = multiprocessing.Barrier(len(servers))
    clients = [multiprocessing.Process(target=_move, args=(server.port, op, start, rates)) for server in servers]
    for client in clients:
        client.start()
    found = [rates.get() for _ in clients]
    for client in clients:
        client.join()
    return sum(found)


def _move(port: int, op: str, start: Barrier, rates: SimpleQueue[float]) -> None:
    unpin(0)
    work = pages(256, 64 * KIB, "an engine's order")
    with connect(port) as sock:
        way = ordinary.kvpage_pages(sock, work)
        for write in way.writes:
            write()
        steps = way.writes if op == "write" else way.reads
        start.wait()
        moved, began = 0, time.perf_counter()
        while time.perf_counter() < began + SECONDS:
            for step in steps:
                step()
            moved += len(steps) * work.nbytes
        rates.put(moved / GB / (time.perf_counter() - began))


def findings(plan: Plan) -> Iterator[Finding]:
    """Writes and reads."""
    print("two servers with a client each ...", flush=True)
    with start_kvpage() as one, start_kvpage() as other:
        for server in (one, other):
            unpin(server.process.pid)
        for op in OPS:
            found = [(together([one, other], op), together([one], op)) for _ in range(1 if plan.quick else 5)]
            two, alone = (median(rates) for rates in zip(*found, strict=True))
            yield Finding(
                f"{op} pages of 64 KiB, two servers with a client each",
                f"one with one, on {os.cpu_count()} cores",
                "GB/s",
                f"{two:.2f} / {alone:.2f}",
                median(both / single for both, single in found),
            )
