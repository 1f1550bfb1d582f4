"""The page client beside redis-py, both talking to kvpage-server: 256 pages of 32 KiB.

Client and server have a core each, so GB/s are what the slower of them can do, and the other one waits; what an engine
pays is the client's CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import redis
from redis.connection import DefaultParser

from benchmarks.findings import Finding
from benchmarks.pairs import GENERATIONS
from benchmarks.servers import Server
from kvpage_server.bench.measure import GB
from kvpage_server.bench.work import Pages
from kvpage_server.client import PageClient

_TARGETS = {"write": 4.0, "read": 1.5}


Way = tuple[Callable[[int], Any], Callable[[int, Any], bool]]  # what moves a generation, and whether it is right


@dataclass(frozen=True)
class Pass:
    """All generations, moved once."""

    gb_per_s: float
    cpu_s_per_gb: float  # of this process, the client
    server_busy: float  # of the time, 0 to 1


def findings(server: Server, *, rounds: int) -> Iterator[Finding]:
    """Writes and reads, and reads with checksums verified. Raises AssertionError for wrong bytes."""
    work = Pages(256, 32 * 1024, GENERATIONS)
    parser = "hiredis" if "Hiredis" in DefaultParser.__name__ else "its Python parser"
    with PageClient(server.url, verify=False) as ours, PageClient(server.url) as verified:
        theirs = redis.Redis(port=server.port)
        ways = {"write": _writes(ours, work), "read": _reads(ours, work), "verified read": _reads(verified, work)}
        their_ways = {"write": _redis_py_writes(theirs, work), "read": _redis_py_reads(theirs, work)}
        for op, way in ways.items():
            their_way = their_ways[op.removeprefix("verified ")]
            found = [(_pass(way, work, server), _pass(their_way, work, server)) for _ in range(rounds + 1)][1:]
            name, against = f"PageClient, {op} {work.name}", f"redis-py with {parser}"
            yield _finding(name, against, "GB/s", found, lambda one: one.gb_per_s, _TARGETS.get(op), note=_busy(found))
            yield _finding(name, against, "client CPU s/GB", found, lambda one: one.cpu_s_per_gb)
        theirs.flushall()
        theirs.close()


def _finding(
    name: str,
    against: str,
    what: str,
    found: list[tuple[Pass, Pass]],
    of: Callable[[Pass], float],
    at_least: float | None = None,
    note: str = "",
) -> Finding:
    ours, theirs = (median(map(of, passes)) for passes in zip(*found, strict=True))
    ratio = median(of(one) / of(other) for one, other in found)
    return Finding(name, against, what, f"{ours:.2f} / {theirs:.2f}", ratio, at_least=at_least, note=note)


def _busy(found: list[tuple[Pass, Pass]]) -> str:
    """Who waits for whom when it is PageClient that asks."""
    client = median(ours.gb_per_s * ours.cpu_s_per_gb for ours, _ in found)
    return f"client busy {client:.0%}, server {median(ours.server_busy for ours, _ in found):.0%}"


def _pass(way: Way, work: Pages, server: Server) -> Pass:
    move, right = way
    seconds = used = served = 0.0
    for generation in range(GENERATIONS):
        work.batches[generation].spoil()
        served_before = server.cpu_seconds()
        started, before = time.perf_counter(), time.process_time()
        answer = move(generation)
        seconds += time.perf_counter() - started
        used += time.process_time() - before
        served += server.cpu_seconds() - served_before
        if not right(generation, answer):
            raise AssertionError("the bytes that were read are not those that were written")
    gigabytes = GENERATIONS * work.total / GB
    return Pass(gigabytes / seconds, used / gigabytes, served / seconds)


def _writes(client: PageClient, work: Pages) -> Way:
    return lambda generation: client.mset(work.pages[generation]), lambda _, answer: answer is None


def _reads(client: PageClient, work: Pages) -> Way:
    def move(generation: int) -> list[bool]:
        return client.mget_into(work.keys[generation], list(work.batches[generation].read))

    def right(generation: int, found: list[bool]) -> bool:
        work.batches[generation].check()
        return all(found)

    return move, right


def _redis_py_writes(client: Any, work: Pages) -> Way:
    commands = [
        [
            len(pages),
            *chain.from_iterable(
                (*_name(page.key), int(page.dtype), page.page_size, page.head_dim, 0, memoryview(page.body))
                for page in pages
            ),
        ]
        for pages in work.pages
    ]
    return lambda generation: client.execute_command("KVPAGEMSET", *commands[generation]), lambda _, answer: bool(
        answer
    )


def _redis_py_reads(client: Any, work: Pages) -> Way:
    commands = [[len(keys), *chain.from_iterable(map(_name, keys))] for keys in work.keys]

    def right(generation: int, bodies: list[bytes]) -> bool:
        return b"".join(bodies) == work.batches[generation].written.tobytes()

    return lambda generation: client.execute_command("KVPAGEMGET", *commands[generation]), right


def _name(key: Any) -> tuple[bytes, int, int, int, int]:
    return key.req_id, key.layer, key.head, key.page, key.kv_type
