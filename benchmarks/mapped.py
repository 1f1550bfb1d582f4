"""Reads of blocks from mapped memory, compared with connections, and reads of small pages, compared with Valkey.

256 blocks of 2 MiB, in turns: over TCP and over the unix socket, copied out of the map with digests, read in place with
digests, and copied by the server for a user with limited rights. 4,096 pages of 4 KiB in a call: with PageClient
over the unix socket, and from Valkey.
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
from benchmarks.servers import Server, pin_client, start_kvpage, start_valkey
from kvpage_server.client import Page, PageClient
from kvpage_server.page import BlockShape, DType, KVType, PageKey, Plane

SHAPE = BlockShape(16, 8, 64, (Plane(KVType.K, DType.FLOAT16, 64), Plane(KVType.V, DType.FLOAT16, 64)))  # 2 MiB
COUNT, QUICK = 256, 32
PAGES, PAGE = 4096, 4096  # pages in a call, bytes of each
_AT_ONCE = 64  # blocks in place
TARGETS = {  # times the GB/s of another way, and seconds of the server's processor for a GB
    "copied": ("read over TCP", 1.6, 0.02),
    "in place": ("read over TCP", 2.5, 0.02),
    "copied by the server": ("read over the unix socket", 1.1, 0.2),
    f"{PAGES} pages of {PAGE} bytes": ("read from Valkey", 3.0, None),
}
INTRO = (
    "Blocks of 2 MiB over connections and in mapped memory, read with digests, and small pages. "
    "Client and server have one core each."
)
_TENANT = ("--user", "tenant", "on", "nopass", "~kv:context:*", "+@all")


def main(words: list[str]) -> None:
    """Measure, print the findings and, without --quick, write them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks mapped", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer blocks, and nothing is written")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(words)
    with (
        TemporaryDirectory() as directory,
        start_kvpage("--unixsocket", f"{directory}/socket", *_TENANT) as server,
        start_valkey() as valkey,
    ):
        pin_client()
        count, rounds = (QUICK, 3) if options.quick else (COUNT, options.rounds)
        found = measure(server, valkey, f"{directory}/socket", count, rounds)
        name = f"{server.name}, {valkey.name}"
    show(found, INTRO)
    if not options.quick:
        write(found, "mapped", {"server": name, "rounds": rounds}, intro=INTRO)


def measure(server: Server, valkey: Server, path: str, count: int, rounds: int) -> list[Finding]:
    """Return the findings for `count` blocks and for pages: medians of `rounds`, after one that is not counted."""
    names = [(b"context", page) for page in range(count)]
    body = np.random.default_rng(0).integers(0, 255, SHAPE.nbytes, np.uint8)
    memory = [np.zeros(SHAPE.nbytes, np.uint8) for _ in names]
    keys = [PageKey(b"pages", 0, at % 8, at // 8, KVType.K) for at in range(PAGES)]
    places = [np.zeros(PAGE, np.uint8) for _ in keys]
    seconds, cpu = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with (
        PageClient(server.url, deadline=60, mapped=False) as tcp,
        PageClient(f"unix://{path}", deadline=60, mapped=False) as wire,
        PageClient(f"unix://{path}", deadline=60) as mapped,
        PageClient(f"unix://tenant:x@{path}", deadline=60) as tenant,
        PageClient(valkey.url, deadline=60) as other,
    ):
        tcp.mset_blocks(names, SHAPE, [body] * count)
        for client in (wire, other):
            client.mset([Page(key, body[:PAGE], DType.UINT8, 1, PAGE) for key in keys])

        def in_place() -> None:
            for start in range(0, count, _AT_ONCE):
                with mapped.blocks_in_place(names[start : start + _AT_ONCE], SHAPE) as blocks:
                    assert all(blocks)

        ways: dict[str, Callable[[], object]] = {
            "read over TCP": lambda: tcp.fetch_blocks_into(names, SHAPE, memory),
            "read over the unix socket": lambda: wire.fetch_blocks_into(names, SHAPE, memory),
            "copied": lambda: mapped.fetch_blocks_into(names, SHAPE, memory),
            "in place": in_place,
            "copied by the server": lambda: tenant.fetch_blocks_into(names, SHAPE, memory),
            f"{PAGES} pages of {PAGE} bytes": lambda: mapped.mget_into(keys, places),
            "read from Valkey": lambda: other.mget_into(keys, places),
        }
        for _ in range(rounds + 1):
            for way, read in ways.items():
                used, begin = server.cpu_seconds(), time.perf_counter()
                read()
                seconds[way].append(time.perf_counter() - begin)
                cpu[way].append(server.cpu_seconds() - used)
        for client in (tcp, wire, mapped, tenant, other):
            assert not client.misses
        assert tenant.mapped_bytes == (rounds + 1) * count * SHAPE.nbytes
    return _compared(count, seconds, cpu)


def _compared(count: int, seconds: dict[str, list[float]], cpu: dict[str, list[float]]) -> list[Finding]:
    """Return the findings for the seconds, and for the server's seconds of the processor, that each way took."""
    of_pages = {"read from Valkey", f"{PAGES} pages of {PAGE} bytes"}
    gigabytes = {way: (PAGES * PAGE if way in of_pages else count * SHAPE.nbytes) / 1e9 for way in seconds}
    rates = {way: gigabytes[way] / median(some[1:]) for way, some in seconds.items()}
    used = {way: median(some[1:]) / gigabytes[way] for way, some in cpu.items()}
    found = []
    for way, (other, least, most) in TARGETS.items():
        work, measured = way if way in of_pages else f"{count} blocks, {way}", f"{rates[way]:.2f} / {rates[other]:.2f}"
        found.append(Finding(work, other, "GB/s", measured, rates[way] / rates[other], at_least=least))
        if most is not None:
            measured = f"{used[way]:.4f} / {used[other]:.4f}"
            found.append(Finding(work, other, "CPU s/GB of the server", measured, used[way], at_most=most))
    return found
