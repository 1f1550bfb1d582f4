"""Blocks that a client reads in memory that it maps, compared with a connection over TCP.

256 blocks of 2 MiB, in turns: over TCP, copied out of the map with digests, read in place with digests.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.findings import Finding, show, write
from benchmarks.servers import Server, pin_client, start_kvpage
from kvpage_server.client import PageClient
from kvpage_server.page import BlockShape, DType, KVType, Plane

SHAPE = BlockShape(16, 8, 64, (Plane(KVType.K, DType.FLOAT16, 64), Plane(KVType.V, DType.FLOAT16, 64)))  # 2 MiB
COUNT, QUICK = 256, 32
_AT_ONCE = 64  # blocks in place
TARGETS = {  # times the GB/s over TCP, and seconds of the server's processor for a GB
    "copied": ("read over TCP", 1.6, 0.02),
    "in place": ("read over TCP", 2.5, 0.02),
}
INTRO = "Blocks of 2 MiB over TCP and in mapped memory, read with digests. Client and server have one core each."


def main(words: list[str]) -> None:
    """Measure, print the findings and, without --quick, write them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks mapped", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer blocks, and nothing is written")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(words)
    with TemporaryDirectory() as directory, start_kvpage("--unixsocket", f"{directory}/socket") as server:
        pin_client()
        count, rounds = (QUICK, 3) if options.quick else (COUNT, options.rounds)
        found = measure(server, f"unix://{directory}/socket", count, rounds)
        name = server.name
    show(found, INTRO)
    if not options.quick:
        write(found, "mapped", {"server": name, "rounds": rounds}, intro=INTRO)


def measure(server: Server, local: str, count: int, rounds: int) -> list[Finding]:
    """Return the findings for `count` blocks: medians of `rounds`, after one that is not counted."""
    names = [(b"context", page) for page in range(count)]
    body = np.random.default_rng(0).integers(0, 255, SHAPE.nbytes, np.uint8)
    memory = [np.zeros(SHAPE.nbytes, np.uint8) for _ in names]
    seconds, cpu = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with PageClient(server.url, deadline=60, mapped=False) as wire, PageClient(local, deadline=60) as mapped:
        wire.mset_blocks(names, SHAPE, [body] * count)

        def in_place() -> None:
            for start in range(0, count, _AT_ONCE):
                with mapped.blocks_in_place(names[start : start + _AT_ONCE]) as blocks:
                    assert all(blocks)

        ways: dict[str, Callable[[], object]] = {
            "read over TCP": lambda: wire.fetch_blocks_into(names, SHAPE, memory),
            "copied": lambda: mapped.fetch_blocks_into(names, SHAPE, memory),
            "in place": in_place,
        }
        for _ in range(rounds + 1):
            for way, read in ways.items():
                used, begin = server.cpu_seconds(), time.perf_counter()
                read()
                seconds[way].append(time.perf_counter() - begin)
                cpu[way].append(server.cpu_seconds() - used)
        assert not wire.misses
        assert not mapped.misses
    gigabytes = count * SHAPE.nbytes / 1e9
    rates = {way: gigabytes / median(some[1:]) for way, some in seconds.items()}
    used = {way: median(some[1:]) / gigabytes for way, some in cpu.items()}
    found = []
    for way, (other, least, most) in TARGETS.items():
        work, measured = f"{count} blocks, {way}", f"{rates[way]:.2f} / {rates[other]:.2f}"
        found.append(Finding(work, other, "GB/s", measured, rates[way] / rates[other], at_least=least))
        measured = f"{used[way]:.4f} / {used[other]:.4f}"
        found.append(Finding(work, other, "CPU s/GB of the server", measured, used[way], at_most=most))
    return found
