"""One page of 16 KiB, one question at a time: how long until it is there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from random import Random
from statistics import median

from benchmarks.findings import Finding
from benchmarks.pages.ordinary import must_be, receive
from benchmarks.pages.rounds import Plan
from benchmarks.servers import Server, start_kvpage, start_redis

_SIZE = 16 * 1024
_CALLS = 500  # a round
_AT_MOST = 1.15
STORED = ("KVPAGESET", "latency", 0, 0, 0, 0, 8, 128, 128, 0)  # and a body
ASKED = b"*6\r\n$9\r\nKVPAGEGET\r\n$7\r\nlatency\r\n" + 4 * b"$1\r\n0\r\n"


def findings(plan: Plan) -> list[Finding]:
    """Compare KVPAGEGET with redis-server's GET. Raises Wrong for wrong bytes."""
    print("KVPAGEGET of 16 KiB ...", flush=True)
    found: list[tuple[float, float]] = []
    for _ in range(plan.sets):
        with start_kvpage() as ours, start_redis() as redis:
            found += _rounds(ours, redis, plan.rounds)
    fast, slow = (median(times) for times in zip(*found, strict=True))
    return [
        Finding(
            "KVPAGEGET of 16 KiB",
            "redis-server, GET",
            "p50, µs",
            f"{fast * 1e6:.0f} / {slow * 1e6:.0f}",
            median(ours / theirs for ours, theirs in found),
            at_most=_AT_MOST,
        )
    ]


def _rounds(ours: Server, redis: Server, count: int) -> list[tuple[float, float]]:
    """Seconds of KVPAGEGET and of GET, each the median of a round."""
    body = Random(0).randbytes(_SIZE)
    ours.admin.execute_command(*STORED, body)
    redis.admin.set("latency", body)
    with ours.connect() as our_sock, redis.connect() as their_sock:
        our_get = getter(our_sock, ASKED, body)
        their_get = getter(their_sock, b"*2\r\n$3\r\nGET\r\n$7\r\nlatency\r\n", body)
        return [(_round(our_get), _round(their_get)) for _ in range(count + 1)][1:]


def getter(sock: socket.socket, question: bytes, body: bytes) -> Callable[[], None]:
    """Asks, and receives the answer, which is right the first time."""
    answer = b"$%d\r\n%b\r\n" % (len(body), body)
    view = memoryview(bytearray(len(answer)))

    def get() -> None:
        sock.sendall(question)
        receive(sock, view)

    get()
    must_be(view, answer)
    return get


def _round(get: Callable[[], None]) -> float:
    """Seconds of the call in the middle."""
    times = []
    for _ in range(_CALLS):
        started = time.perf_counter()
        get()
        times.append(time.perf_counter() - started)
    return median(times)
