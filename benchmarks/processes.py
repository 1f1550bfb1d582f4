"""Two servers beside one, on all cores of this machine: `python -m benchmarks.processes`.

One server and one client, then two servers on two ports with a client each, round after round. Every client moves its
own pages of 64 KiB for a while; what counts is what all of them moved together.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from statistics import median

from benchmarks.findings import Finding, show
from benchmarks.pairs import GENERATIONS
from benchmarks.servers import Server, start_kvpage, unpin
from benchmarks.stores import PageStore
from kvpage_server.bench.measure import GB
from kvpage_server.bench.work import Pages

SECONDS = 1.0
SIZE = 64 * 1024


def together(servers: list[Server], op: str) -> float:
    """GB/s of as many clients as there are servers, each a process."""
    rates: SimpleQueue[float] = multiprocessing.SimpleQueue()
    start = multiprocessing.Barrier(len(servers))
    clients = [multiprocessing.Process(target=_move, args=(server.url, op, start, rates)) for server in servers]
    for client in clients:
        client.start()
    found = [rates.get() for _ in clients]
    for client in clients:
        client.join()
    return sum(found)


def _move(url: str, op: str, start: Barrier, rates: SimpleQueue[float]) -> None:
    unpin(0)
    work = Pages(256, SIZE, GENERATIONS)
    store = PageStore(url)
    for write in store.writes(work):
        write()
    steps = store.writes(work) if op == "write" else store.reads(work)
    start.wait()
    moved, began = 0, time.perf_counter()
    while time.perf_counter() < began + SECONDS:
        for step in steps:
            step()
        moved += len(steps) * work.total
    rates.put(moved / GB / (time.perf_counter() - began))


def findings(*, rounds: int) -> Iterator[Finding]:
    """Writes and reads."""
    with start_kvpage() as one, start_kvpage() as other:
        for server in (one, other):
            unpin(server.process.pid)
        for op in ("write", "read"):
            found = [(together([one, other], op), together([one], op)) for _ in range(rounds)]
            two, alone = (median(rates) for rates in zip(*found, strict=True))
            yield Finding(
                f"{op} pages of 64 KiB, two servers with a client each",
                f"one with one, on {os.cpu_count()} cores",
                "GB/s",
                f"{two:.2f} / {alone:.2f}",
                median(both / single for both, single in found),
            )


if __name__ == "__main__":
    show(list(findings(rounds=5)), "two servers / one")
