"""The page client compared with redis-py, both with kvpage-server: pages of 32 and of 4 KiB.

Client and server have a core each, so GB/s are limited by the slower of them; an engine's cost is the client's CPU
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import redis
from redis.connection import DefaultParser

from benchmarks.findings import Finding
from benchmarks.pages.client_costs import Way, compared
from benchmarks.pages.work import GENERATIONS
from benchmarks.servers import Server
from kvpage_server.bench import PageWork
from kvpage_server.client import PageClient

_SIZES = (  # pages at once, bytes of each, and how many times redis-py's GB/s
    (256, 32 * 1024, {"write": 3.0, "read": 1.3}),
    (900, 4 * 1024, {"write": 5.0, "read": 3.0}),
)


def findings(server: Server, rounds: int) -> Iterator[Finding]:
    """Writes and reads, and reads with checksums verified. Raises AssertionError for wrong bytes."""
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
