"""Servers with a client each, every client a process that uses all of the servers: one of them, and two side by side.

The clients of two servers begin together, and a pass is over when the last one is done.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from statistics import median

from benchmarks.cluster.clients import ROUNDS, WORKS, Work
from benchmarks.findings import Finding
from benchmarks.servers import Server, start_kvpage, unpin
from kvpage_server.bench import GB
from kvpage_server.client import PageClient

TWO = "two kvpage-servers side by side, a client each"
TWO_CLIENTS = "one kvpage-server, two clients"


def _client(parent: Connection, url: str, work: int, blocks: int, number: int) -> None:
    """Run a client process: write and read all batches for each message of the parent."""
    unpin(0)
    its = Work(list(WORKS)[work], blocks, b"of-%d" % number)
    with PageClient(url, deadline=60) as client:
        while op := parent.recv():
            if op == "write":
                client.mset_blocks(its.names, its.shape, its.bodies)
            else:
                assert all(client.mget_blocks_into(its.names, its.shape, its.into))
            parent.send(op)
            if op == "read":
                its.batch.check()
                its.batch.spoil()
            parent.send("ready")


@contextmanager
def _clients(url: str, work: int, blocks: int, count: int) -> Iterator[list[Connection]]:
    processes = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        ends = []
        for number in range(count):
            end, theirs = processes.Pipe()
            process = processes.Process(target=_client, args=(theirs, url, work, blocks, number), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(end.send, "")
            ends.append(end)
        yield ends


def _pass(clients: Sequence[Connection], op: str, nbytes: int) -> float:
    """Return the sum of the GB/s of all clients, which start at the same time."""
    started = time.perf_counter()
    for client in clients:
        client.send(op)
    for client in clients:
        client.recv()
    seconds = time.perf_counter() - started
    for client in clients:
        client.recv()
    return len(clients) * nbytes / GB / seconds


def measured(quick: bool) -> list[Finding]:
    """Return the findings for blocks of each size."""
    findings: list[Finding] = []
    with start_kvpage() as alone, start_kvpage() as first, start_kvpage() as second:
        servers = (alone, first, second)
        for server in servers:
            unpin(server.process.pid)
        for work, (shape, count) in enumerate(WORKS.items()):
            blocks, rounds = (max(count // 8, 1), 1) if quick else (count, ROUNDS)
            findings += _of_work(servers, work, blocks, rounds, shape.nbytes * blocks)
    return findings


def _of_work(servers: Sequence[Server], work: int, blocks: int, rounds: int, nbytes: int) -> Iterator[Finding]:
    one, both = servers[0].url, ",".join(server.url for server in servers[1:])
    passes: dict[tuple[str, str], list[float]] = {}
    with (
        _clients(one, work, blocks, 1) as alone,
        _clients(one, work, blocks, 2) as crowded,
        _clients(both, work, blocks, 2) as side_by_side,
    ):
        for turn in range(-1, rounds):  # turn -1 is a warm-up
            for name, clients in (("", alone), (TWO_CLIENTS, crowded), (TWO, side_by_side)):
                for op in ("write", "read"):
                    rate = _pass(clients, op, nbytes)
                    if turn >= 0:
                        passes.setdefault((op, name), []).append(rate)
                for server in servers:
                    server.admin.flushall()
    name = Work.name_of(list(WORKS)[work], blocks)
    for op in ("write", "read"):
        theirs = passes[op, ""]
        for who in (TWO_CLIENTS, TWO):
            ours = passes[op, who]
            ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
            figures = f"{median(ours):.2f} / {median(theirs):.2f}"
            yield Finding(f"{op} {name}", who, "GB/s", figures, ratio, at_least=0.95 if who == TWO else None)
