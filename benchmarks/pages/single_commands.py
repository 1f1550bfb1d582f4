"""Commands of one page or value each: KVPAGESET and KVPAGEGET one at a time, their latency, commands without pages, and
LMCache's own benchmark.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.findings import Finding
from benchmarks.pages.batches import OURS, REDIS, VALKEY
from benchmarks.pages.clients import (
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
from benchmarks.pages.rounds import (
    NO_TARGET,
    Contestant,
    Pass,
    Passes,
    Plan,
    Target,
    beside,
    compare,
    cpu_of,
    middle,
    ratio,
    speed_of,
    together,
)
from benchmarks.pages.work import KIB, Batch, pages
from benchmarks.servers import Server, start_kvpage, start_redis, start_valkey, unpin
from kvpage_server.bench import GB

# -- One command outstanding on a socket: KVPAGESET and KVPAGEGET compared with SET and GET ----------------------------
#
# Most clients talk so. With sixteen sockets one command is outstanding on each: the client receives from each in turn,
# and asks again.

Request = list[memoryview]

ALONE_SIZES = {4: 1024, 16: 1024, 64: 512, 256: 256}  # KiB of a page, and pages of a batch
ALONE_TARGETS = {
    1: {4: Target(2.0, 0.75), 16: Target(2.0, 0.75), 64: Target(2.0, 0.75), 256: Target(1.2, 0.75)},
    16: {4: Target(2.2, 0.5), 16: Target(2.2, 0.5), 64: Target(1.6, 0.7), 256: Target(1.2, 0.9)},
}
CPU, RATE = "CPU, µs", "1000/s"


def one_at_a_time_findings(plan: Plan) -> Iterator[Finding]:
    """Yield the server's CPU microseconds for a command, and commands per second."""
    commands = 1000 if plan.quick else 6000
    found: dict[tuple[str, int, int], list[Passes]] = {}
    for _ in range(plan.sets):
        for count in ALONE_TARGETS:
            with ExitStack() as stack:
                ours, valkey = map(stack.enter_context, (start_kvpage(), start_valkey()))
                ours_socks, valkey_socks = (
                    [stack.enter_context(server.connect()) for _ in range(count)] for server in (ours, valkey)
                )
                for size in (4, 64) if plan.quick else ALONE_SIZES:
                    print(f"one page of {size} KiB at a time, {spell_sockets(count)} ...", flush=True)
                    work = pages(ALONE_SIZES[size], size * KIB, "an engine's order")
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
        yield from _alone_findings(op, count, size, together(sets))


def alone_name(op: str, size: int, count: int) -> str:
    """Return the name of the work."""
    return f"{op} a page of {size} KiB at a time, {spell_sockets(count)}"


def spell_sockets(count: int) -> str:
    """Return a number of sockets as text."""
    return "one socket" if count == 1 else "sixteen sockets"


def _alone_findings(op: str, count: int, size: int, passes: Passes) -> Iterator[Finding]:
    target, command = ALONE_TARGETS[count][size], size * KIB / GB
    work = alone_name(op, size, count)
    cpu, seconds = ([middle(passes, server, of) for server in (OURS, VALKEY)] for of in (cpu_of, speed_of))
    figures = " / ".join(f"{value * command * 1e6:.1f}" for value in cpu)
    yield Finding(work, VALKEY, CPU, figures, ratio(passes, OURS, VALKEY, cpu_of), at_most=target.cpu)
    figures = " / ".join(f"{value / command / 1000:.2f}" for value in seconds)
    yield Finding(work, VALKEY, RATE, figures, ratio(passes, OURS, VALKEY, speed_of), at_least=target.speed)


def kvpage_way(sockets: Sequence[socket.socket], batch: Batch) -> Way:
    """Return a `Way` with KVPAGESET and KVPAGEGET."""
    sets = list(map(kvpageset, batch.keys, batch.bodies))
    return _way(sockets, sets, [spell(b"KVPAGEGET", *name_words(key)) for key in batch.keys], batch.bodies)


def value_way(sockets: Sequence[socket.socket], batch: Batch) -> Way:
    """Return a `Way` with SET and GET."""
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
    """Return a step that sends all requests, with at most one outstanding on each socket."""

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


# -- The time until one page of 16 KiB has arrived, one question at a time ---------------------------------------------

_LATENCY_SIZE = 16 * 1024
_LATENCY_CALLS = 500  # a round
_LATENCY_AT_MOST = 1.15
STORED = ("KVPAGESET", "latency", 0, 0, 0, 0, 8, 128, 128, 0)  # a body follows
ASKED = b"*6\r\n$9\r\nKVPAGEGET\r\n$7\r\nlatency\r\n" + 4 * b"$1\r\n0\r\n"


def latency_findings(plan: Plan) -> list[Finding]:
    """Compare KVPAGEGET with redis-server's GET. Raises Wrong for wrong bytes."""
    print("KVPAGEGET of 16 KiB ...", flush=True)
    found: list[tuple[float, float]] = []
    for _ in range(plan.sets):
        with start_kvpage() as ours, start_redis() as redis:
            found += _latency_rounds(ours, redis, plan.rounds)
    fast, slow = (median(times) for times in zip(*found, strict=True))
    return [
        Finding(
            "KVPAGEGET of 16 KiB",
            "redis-server, GET",
            "p50, µs",
            f"{fast * 1e6:.0f} / {slow * 1e6:.0f}",
            median(ours / theirs for ours, theirs in found),
            at_most=_LATENCY_AT_MOST,
        )
    ]


def _latency_rounds(ours: Server, redis: Server, count: int) -> list[tuple[float, float]]:
    """Return for each round the median seconds of KVPAGEGET and of GET."""
    body = Random(0).randbytes(_LATENCY_SIZE)
    ours.admin.execute_command(*STORED, body)
    redis.admin.set("latency", body)
    with ours.connect() as our_sock, redis.connect() as their_sock:
        our_get = getter(our_sock, ASKED, body)
        their_get = getter(their_sock, b"*2\r\n$3\r\nGET\r\n$7\r\nlatency\r\n", body)
        return [(_latency_round(our_get), _latency_round(their_get)) for _ in range(count + 1)][1:]


def getter(sock: socket.socket, question: bytes, body: bytes) -> Callable[[], None]:
    """Return a function that sends a request and receives its reply, after a check of the first reply."""
    answer = b"$%d\r\n%b\r\n" % (len(body), body)
    view = memoryview(bytearray(len(answer)))

    def get() -> None:
        sock.sendall(question)
        receive(sock, view)

    get()
    must_be(view, answer)
    return get


def _latency_round(get: Callable[[], None]) -> float:
    """Return the median seconds of a round's calls."""
    times = []
    for _ in range(_LATENCY_CALLS):
        started = time.perf_counter()
        get()
        times.append(time.perf_counter() - started)
    return median(times)


# -- A command without pages: redis-benchmark on kvpage-server compared with redis-server ------------------------------
#
# 50 clients, values of 3 bytes; 16 commands in a pipeline, and one at a time.

SMALL_COMMANDS = {"PING_MBULK": "PING", "SET": "SET", "GET": "GET"}
SMALL_AT_LEAST = {16: 0.35, 1: None}  # by pipeline

Rates = dict[str, float]  # requests a second by command


def run_redis_benchmark(server: Server, *, pipeline: int, requests: int) -> Rates:
    """Run redis-benchmark, and return its rates. Raises CalledProcessError if it fails."""
    command = ["redis-benchmark", "-p", str(server.port), "--csv", "-t", "ping_mbulk,set,get", "-c", "50", "-d", "3"]
    command += ["-P", str(pipeline), "-n", str(requests)]
    output = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    return {SMALL_COMMANDS[row["test"]]: float(row["rps"]) for row in csv.DictReader(output.splitlines())}


def small_command_findings(plan: Plan) -> list[Finding]:
    """Return the findings of redis-benchmark. If it is not installed, print that, and return none."""
    if shutil.which("redis-benchmark") is None:
        print("no small commands: redis-benchmark is missing. On Debian or Ubuntu: sudo apt-get install redis-tools")
        return []
    print("small commands ...", flush=True)
    rounds, requests = (2, 40_000) if plan.quick else (5, 200_000)
    with start_kvpage() as ours, start_redis() as theirs:
        return [
            *_small_commands_compared(ours, theirs, pipeline=16, rounds=rounds, requests=requests),
            *_small_commands_compared(ours, theirs, pipeline=1, rounds=rounds, requests=requests // 10),
        ]


def _small_commands_compared(
    ours: Server, theirs: Server, *, pipeline: int, rounds: int, requests: int
) -> list[Finding]:
    """Return the findings of both servers, measured in turns with an alternating order."""
    pairs: list[tuple[Rates, Rates]] = []
    for turn in range(rounds + 1):  # round 0 is a warm-up
        order = (ours, theirs) if turn % 2 else (theirs, ours)
        rates = {server.name: run_redis_benchmark(server, pipeline=pipeline, requests=requests) for server in order}
        pairs.append((rates[ours.name], rates[theirs.name]))
    del pairs[0]
    return [
        Finding(
            f"{name}, pipeline {pipeline}",
            theirs.name,
            "1000/s",
            " / ".join(f"{median(rates[name] for rates in side) / 1000:.0f}" for side in zip(*pairs, strict=True)),
            median(one[name] / other[name] for one, other in pairs),
            at_least=SMALL_AT_LEAST[pipeline],
        )
        for name in SMALL_COMMANDS.values()
    ]


# -- LMCache's own benchmark of a store, `lmcache bench l2` ------------------------------------------------------------
#
# By its native client, which nobody here wrote: single SET and GET, four sockets with one command outstanding each. And
# by the plugin of this project, over TCP, and with loads from the server's memory where the server has a unix socket.
# Both are compared with the native client and valkey-glide on Valkey. Every client has four threads, and all cores.

LMCACHE_KEYS = 64  # a round
LMCACHE_SIZES = {64: 31, 256: 15, 2048: 3}  # KiB of a value, and rounds
LMCACHE_TARGETS = {  # relative to Valkey
    (64, "store"): Target(1.8, 0.7),
    (64, "load"): Target(1.8, 0.85),
    **{(256, op): Target(1.3, 0.9) for op in ("store", "load")},
    **{(2048, op): Target(1.05, 1.0) for op in ("store", "load")},
}
PLUGIN_TARGETS = {size: Target(speed=1.3) for size in (256, 2048)}  # relative to the native client with Valkey
PLUGIN, PLUGIN_TCP, GLIDE = "the plugin", "the plugin over TCP", "Valkey by valkey-glide"
_LMCACHE_TIMEOUT = 120  # seconds of a run, at most
_ROOT = Path(__file__).parents[2]


def lmcache_findings(plan: Plan) -> Iterator[Finding]:
    """Yield the findings of LMCache's benchmark. If LMCache is not installed, print that, and yield none."""
    command = os.environ.get("LMCACHE") or shutil.which("lmcache")
    if not command:
        print("nothing of LMCache, which is several GB with torch: LMCACHE=... says where its command is")
        return
    found: dict[tuple[int, str], Passes] = {}
    with ExitStack() as stack:
        socket_file = f"{stack.enter_context(tempfile.TemporaryDirectory())}/socket"
        starts = start_kvpage("--unixsocket", socket_file), start_valkey(), start_redis()
        ours, valkey, redis = map(stack.enter_context, starts)
        runs = {name: (server, _native(server)) for name, server in ((OURS, ours), (VALKEY, valkey), (REDIS, redis))}
        runs[PLUGIN], runs[PLUGIN_TCP] = (ours, _plugin(ours)), (ours, _plugin(ours, mapped=False))
        runs[GLIDE] = valkey, {"type": "valkey", "startup_nodes": f"127.0.0.1:{valkey.port}", "num_workers": 4}
        for size in (64,) if plan.quick else LMCACHE_SIZES:
            for turn in range(2 * plan.sets):  # twice, because two runs may differ by a third
                print(f"LMCache, values of {size} KB, round {turn + 1} ...", flush=True)
                for name, (server, adapter) in runs.items():
                    for op in ("store", "load"):
                        passes = found.setdefault((size, op), {each: [] for each in runs})
                        passes[name].append(_run_lmcache(command, server, adapter, op, size))
                    server.admin.flushall()
    for (size, op), passes in found.items():
        work = f"LMCache, {op} values of {size} KB"
        for other in (VALKEY, REDIS):
            target = LMCACHE_TARGETS[size, op] if other == VALKEY else NO_TARGET
            yield from beside(work, passes, OURS, other, target)
        for plugin, target in ((PLUGIN, PLUGIN_TARGETS.get(size, NO_TARGET)), (PLUGIN_TCP, NO_TARGET)):
            for other in (VALKEY, GLIDE):
                yield from beside(
                    f"{work} by {plugin}", passes, plugin, other, target if other == VALKEY else NO_TARGET
                )


def _native(server: Server) -> dict[str, Any]:
    return {"type": "resp", "host": "127.0.0.1", "port": server.port, "num_workers": 4}


def _plugin(server: Server, *, mapped: bool = True) -> dict[str, Any]:
    module = {"module_path": "kvpage_connectors.lmcache_l2", "class_name": "KvpageL2Adapter"}
    parameters = {"url": server.url, "lookup_seconds": 60, "transfer_seconds": 60, "mapped": mapped}
    return {"type": "plugin", **module, "adapter_params": parameters}


def _run_lmcache(command: str, server: Server, adapter: dict[str, Any], op: str, size: int) -> Pass:
    """Run LMCache's benchmark once. Raises CalledProcessError if it fails, AssertionError if an operation failed."""
    rounds = LMCACHE_SIZES[size]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "result.json")
        words = ["bench", "l2", "--l2-adapter", json.dumps(adapter), "--only", op, "--num-keys", str(LMCACHE_KEYS)]
        options = [
            "--data-size-kb",
            str(size),
            "--rounds",
            str(rounds),
            "--format",
            "json",
            "--output",
            str(file),
        ]
        paths = os.pathsep.join([str(_ROOT), str(_ROOT / "connectors")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}  # others of torch would only wait
        before = server.cpu_seconds()
        subprocess.run(
            [command, *words, *options],
            check=True,
            capture_output=True,
            timeout=_LMCACHE_TIMEOUT,
            cwd=directory,
            env=environment,
            preexec_fn=partial(unpin, 0),
        )
        cpu = server.cpu_seconds() - before
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["metrics"]["op_0"]
    assert result["total_success"] == rounds * LMCACHE_KEYS, (
        f"{server.name} answered {result['total_success']} of them well"
    )
    moved = (rounds + 1) * LMCACHE_KEYS * size * 1024 / GB  # with one warm-up round
    return Pass(cpu / moved, rounds * LMCACHE_KEYS * size * 1024 / GB / (result["duration_avg_ms"] * rounds / 1000))
