"""An engine's costs: the page clients compared with redis-py, and with a bare loop of `recv_into`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import redis
import uvloop
from redis.connection import DefaultParser

from benchmarks.findings import Finding
from benchmarks.pages.clients import receive, spell
from benchmarks.pages.rounds import Plan
from benchmarks.pages.work import GENERATIONS
from benchmarks.servers import Server, start_kvpage
from kvpage_server.bench import GB, Blocks, PageWork, Work
from kvpage_server.client import AsyncPageClient, PageClient
from kvpage_server.page import BlockShape, DType, KVType, Plane

# -- Two clients of one server in turn: GB/s, the client's own CPU time, and the share of waiting ----------------------

Way = tuple[Callable[[int], Any], Callable[[int, Any], bool]]  # transfers a generation, and checks the result


@dataclass(frozen=True)
class Pass:
    """Measurements of one transfer of all generations."""

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


# -- The page client compared with redis-py, both with kvpage-server: pages of 32 and of 4 KiB -------------------------
#
# Client and server have a core each, so GB/s are limited by the slower of them; an engine's cost is the client's CPU
# time.

_SIZES = (  # pages at once, bytes of each, and how many times redis-py's GB/s
    (256, 32 * 1024, {"write": 3.0, "read": 1.3}),
    (900, 4 * 1024, {"write": 5.0, "read": 3.0}),
)


def _redis_py_findings(server: Server, rounds: int) -> Iterator[Finding]:
    """Yield the findings of writes, reads, and reads that verify checksums. Raises AssertionError for wrong bytes."""
    for count, nbytes, targets in _SIZES:
        yield from _of_size(server, PageWork(count, nbytes, GENERATIONS), targets, rounds)


def _of_size(server: Server, work: PageWork, targets: dict[str, float], rounds: int) -> Iterator[Finding]:
    parser = "hiredis" if "Hiredis" in DefaultParser.__name__ else "its Python parser"
    with PageClient(server.url, verify=False) as ours, PageClient(server.url) as verified:
        theirs = redis.Redis(port=server.port)
        ways = {"write": _writes(ours, work), "read": _reads(ours, work), "verified read": _reads(verified, work)}
        their_ways = {"write": _redis_py_writes(theirs, work), "read": _redis_py_reads(theirs, work)}
        for op, way in ways.items():
            their_way = their_ways[op.removeprefix("verified ")]
            names = f"PageClient, {op} {work.name}", f"redis-py with {parser}"
            yield from compared(names, (way, their_way), work, server, rounds=rounds, at_least=targets.get(op))
        theirs.flushall()
        theirs.close()


def _writes(client: PageClient, work: PageWork) -> Way:
    return lambda generation: client.mset(work.pages[generation]), lambda _, answer: answer is None


def _reads(client: PageClient, work: PageWork) -> Way:
    places = [list(batch.read) for batch in work.batches]  # readers of pages have allocated buffers

    def move(generation: int) -> list[bool]:
        return client.mget_into(work.keys[generation], places[generation])

    def right(generation: int, found: list[bool]) -> bool:
        work.batches[generation].check()
        return all(found)

    return move, right


def _redis_py_writes(client: Any, work: PageWork) -> Way:
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


def _redis_py_reads(client: Any, work: PageWork) -> Way:
    commands = [[len(keys), *chain.from_iterable(map(_name, keys))] for keys in work.keys]

    def right(generation: int, bodies: list[bytes]) -> bool:
        return b"".join(bodies) == work.batches[generation].written.tobytes()

    return lambda generation: client.execute_command("KVPAGEMGET", *commands[generation]), right


def _name(key: Any) -> tuple[bytes, int, int, int, int]:
    return key.req_id, key.layer, key.head, key.page, key.kv_type


# -- A context's blocks through the page clients, compared with a bare loop of `recv_into` -----------------------------
#
# From the same server. The buffers have been touched before: the first touch of fresh memory is not the client's cost.

_BLOCK = BlockShape(30, 3, 256, tuple(Plane(plane, DType.FLOAT32, 64) for plane in (KVType.K, KVType.V)))
_BLOCKS = 4  # a thousand tokens of SmolLM2-135M in float32
_BLOCK_GENERATIONS = 2


def _receiving_findings(server: Server, rounds: int) -> Iterator[Finding]:
    """Yield the findings of PageClient, and of AsyncPageClient on uvloop. Raises AssertionError for wrong bytes."""
    work = Blocks(_BLOCKS, _BLOCK, _BLOCK_GENERATIONS)
    loop = uvloop.new_event_loop()
    with closing(loop), PageClient(server.url) as client, server.connect() as sock:
        asynchronous = AsyncPageClient(server.url)
        for names, batch in zip(work.names, work.batches, strict=True):
            client.mset_blocks(names, _BLOCK, list(batch.written))

        def blocking(generation: int) -> list[bool]:
            return client.mget_blocks_into(work.names[generation], _BLOCK, list(work.batches[generation].read))

        def awaited(generation: int) -> list[bool]:
            into = list(work.batches[generation].read)
            return loop.run_until_complete(asynchronous.mget_blocks_into(work.names[generation], _BLOCK, into))

        def right(generation: int, found: list[bool]) -> bool:
            work.batches[generation].check()
            return all(found)

        for name, move in (("PageClient", blocking), ("AsyncPageClient", awaited)):
            against = f"{name}, read {work.name}", "a loop of recv_into"
            yield from compared(against, ((move, right), _bare(sock, work)), work, server, rounds=rounds)
        loop.run_until_complete(asynchronous.close())
    server.admin.flushall()


def _bare(sock: socket.socket, work: Blocks) -> Way:
    """Return a loop that receives bodies in place, and ignores the bytes between them."""
    between = bytearray(b"\r\n$%d\r\n" % work.nbytes)
    before, after = bytearray(len(b"*%d\r\n" % work.count) + len(between) - 2), bytearray(2)

    def fill(buffer: bytearray | memoryview) -> None:
        receive(sock, memoryview(buffer))

    def move(generation: int) -> None:
        names = [part for name in work.names[generation] for part in (name[0], b"%d" % name[1])]
        sock.sendall(spell(b"KVBLOCKMGET", b"%d" % work.count, *names))
        first, *others = work.batches[generation].read
        fill(before)
        fill(memoryview(first))
        for body in others:
            fill(between)
            fill(memoryview(body))
        fill(after)

    def right(generation: int, _: None) -> bool:
        work.batches[generation].check()
        return True

    return move, right


# -- All of them -------------------------------------------------------------------------------------------------------


def client_findings(plan: Plan) -> Iterator[Finding]:
    """Yield the findings of all clients with one server."""
    rounds = plan.sets * plan.rounds
    print("page clients ...", flush=True)
    with start_kvpage() as server:
        yield from _redis_py_findings(server, rounds)
        yield from _receiving_findings(server, rounds)
