"""One command outstanding on a socket, which is how most clients talk: KVPAGESET and KVPAGEGET compared with SET and
GET.

With sixteen sockets one command is outstanding on each: the client receives from each in turn, and asks again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle, islice

from benchmarks.findings import Finding
from benchmarks.pages.batches import OURS, VALKEY
from benchmarks.pages.ordinary import (
    OK,
    Step,
    Way,
    Wrong,
    kvpageset,
    must_be,
    name_words,
    receive,
    send,
    set_value,
    spell,
)
from benchmarks.pages.rounds import Contestant, Passes, Plan, Target, compare, cpu_of, middle, ratio, speed_of, together
from benchmarks.pages.work import KIB, Batch, pages
from benchmarks.servers import start_kvpage, start_valkey
from kvpage_server.bench import GB

Request = list[memoryview]

SIZES = {4: 1024, 16: 1024, 64: 512, 256: 256}  # KiB, and how many pages
TARGETS = {
    1: {4: Target(2.0, 0.75), 16: Target(2.0, 0.75), 64: Target(2.0, 0.75), 256: Target(1.2, 0.75)},
    16: {4: Target(2.2, 0.5), 16: Target(2.2, 0.5), 64: Target(1.6, 0.7), 256: Target(1.2, 0.9)},
}
CPU, RATE = "CPU, µs", "1000/s"


def findings(plan: Plan) -> Iterator[Finding]:
    """Microseconds of the server a command, and commands a second."""
    commands = 1000 if plan.quick else 6000
    found: dict[tuple[str, int, int], list[Passes]] = {}
    for _ in range(plan.sets):
        for count in TARGETS:
            with ExitStack() as stack:
                ours, valkey = map(stack.enter_context, (start_kvpage(), start_valkey()))
                ours_socks, valkey_socks = (
                    [stack.enter_context(server.connect()) for _ in range(count)] for server in (ours, valkey)
                )
                for size in (4, 64) if plan.quick else SIZES:
                    print(f"one page of {size} KiB at a time, {spell_sockets(count)} ...", flush=True)
                    work = pages(SIZES[size], size * KIB, "an engine's order")
                    (batch, *_) = work.batches
                    contestants = {
                        OURS: Contestant(ours, kvpage_way(ours_socks, batch)),
                        VALKEY: Contestant(valkey, value_way(valkey_socks, batch)),
                    }
                    for op in ("write", "read"):
                        passes = compare(contestants, op, work.nbytes, plan, commands * size * KIB)
                        found.setdefault((op, count, size), []).append(passes)
                    for server in (ours, valkey):
                        server.admin.flushall()
    for (op, count, size), sets in found.items():
        yield from _findings(op, count, size, together(sets))


def name(op: str, size: int, count: int) -> str:
    """Return the name of the work."""
    return f"{op} a page of {size} KiB at a time, {spell_sockets(count)}"


def spell_sockets(count: int) -> str:
    """For people."""
    return "one socket" if count == 1 else "sixteen sockets"


def _findings(op: str, count: int, size: int, passes: Passes) -> Iterator[Finding]:
    target, command = TARGETS[count][size], size * KIB / GB
    work = name(op, size, count)
    cpu, seconds = ([middle(passes, server, of) for server in (OURS, VALKEY)] for of in (cpu_of, speed_of))
    received = " / ".join(f"{value * command * 1e6:.1f}" for value in cpu)
    yield Finding(work, VALKEY, CPU, received, ratio(passes, OURS, VALKEY, cpu_of), at_most=target.cpu)
    received = " / ".join(f"{value / command / 1000:.2f}" for value in seconds)
    yield Finding(work, VALKEY, RATE, received, ratio(passes, OURS, VALKEY, speed_of), at_least=target.speed)


def kvpage_way(sockets: Sequence[socket.socket], batch: Batch) -> Way:
    """KVPAGESET and KVPAGEGET."""
    sets = list(map(kvpageset, batch.keys, batch.bodies))
    return _way(sockets, sets, [spell(b"KVPAGEGET", *name_words(key)) for key in batch.keys], batch.bodies)


def value_way(sockets: Sequence[socket.socket], batch: Batch) -> Way:
    """SET and GET."""
    keys = list(map(bytes, batch.keys))
    return _way(sockets, list(map(set_value, keys, batch.bodies)), [spell(b"GET", key) for key in keys], batch.bodies)


def _way(sockets: Sequence[socket.socket], sets: list[Request], gets: list[bytes], bodies: list[memoryview]) -> Way:
    questions = [[memoryview(text)] for text in gets]
    before = b"$%d\r\n" % len(bodies[0])
    answer = memoryview(bytearray(len(before) + len(bodies[0]) + 2))
    ok = memoryview(bytearray(len(OK)))

    def stored(sock: socket.socket) -> None:
        receive(sock, ok)
        if ok != OK:
            raise Wrong(f"a write was answered with {bytes(ok)!r}")

    def found(sock: socket.socket) -> None:
        receive(sock, answer)

    def check(_: int) -> None:
        for question, body in zip(questions, bodies, strict=True):
            send(sockets[0], question)
            found(sockets[0])
            must_be(answer, b"".join((before, body, b"\r\n")))

    return Way([_in_turn(sockets, sets, stored)], [_in_turn(sockets, questions, found)], check)


def _in_turn(sockets: Sequence[socket.socket], requests: list[Request], read: Callable[[socket.socket], None]) -> Step:
    """All requests, at most one outstanding on each socket."""

    def step() -> None:
        asked = islice(cycle(sockets), len(requests))
        answered = cycle(sockets)
        for number, (sock, request) in enumerate(zip(asked, requests, strict=True)):
            if number >= len(sockets):
                read(next(answered))
            send(sock, request)
        for _ in sockets:
            read(next(answered))

    return step
