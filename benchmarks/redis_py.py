"""The page client beside redis-py, both talking to kvpage-server: 256 pages of 32 KiB."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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


def findings(server: Server, *, rounds: int) -> Iterator[Finding]:
    """Writes and reads, verified reads in the last column. Raises AssertionError for wrong bytes."""
    work = Pages(256, 32 * 1024, GENERATIONS)
    parser = "hiredis" if "Hiredis" in DefaultParser.__name__ else "its Python parser"
    with PageClient(server.url, verify=False) as ours, PageClient(server.url) as verified:
        theirs = redis.Redis(port=server.port)
        ways = {
            "write": (_writes(ours, work), _redis_py_writes(theirs, work), None),
            "read": (_reads(ours, work), _redis_py_reads(theirs, work), _reads(verified, work)),
        }
        for op, (our_way, their_way, verified_way) in ways.items():
            found = [[_pass(way, work) for way in (our_way, their_way)] for _ in range(rounds + 1)][1:]
            fast, slow = (median(speeds) for speeds in zip(*found, strict=True))
            note = ""
            if verified_way:
                note = f"verified: {median(_pass(verified_way, work) for _ in range(rounds)):.2f} GB/s"
            yield Finding(
                f"PageClient, {op} {work.name}",
                f"redis-py with {parser}",
                "GB/s",
                f"{fast:.2f} / {slow:.2f}",
                median(ours / theirs for ours, theirs in found),
                at_least=_TARGETS[op],
                note=note,
            )
        theirs.flushall()
        theirs.close()


Way = tuple[Callable[[int], Any], Callable[[int, Any], bool]]  # what moves a generation, and whether it is right


def _pass(way: Way, work: Pages) -> float:
    """GB/s of all generations."""
    move, right = way
    seconds = 0.0
    for generation in range(GENERATIONS):
        work.batches[generation].spoil()
        started = time.perf_counter()
        answer = move(generation)
        seconds += time.perf_counter() - started
        if not right(generation, answer):
            raise AssertionError("the bytes that were read are not those that were written")
    return GENERATIONS * work.total / GB / seconds


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
