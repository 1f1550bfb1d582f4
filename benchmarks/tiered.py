"""Speed of the disk of the tiered store: reads of values on disk only, and stop and start with very many pages.

Servers have one core, the client the other. Ratios are medians of the ratios of each round. `python -m benchmarks pages
--only default_store` measures the disk's cost if memory suffices.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.findings import Finding, show, write
from benchmarks.pages.clients import kvpage_way
from benchmarks.pages.rounds import Contestant, Plan, Target, Trials
from benchmarks.pages.variants import PAGES_A_BLOCK, PAGES_A_REQUEST, fill_with_pages
from benchmarks.pages.work import KIB, blocks, pages
from benchmarks.pages.work import bodies as block_bodies
from benchmarks.servers import Server, pin_client, start_kvpage
from kvpage_server.bench import GB, LLAMA3_16
from kvpage_server.client import PageClient

ALMOST_NOTHING = "1mb"  # maxmemory, so that values are read from disk
INTRO = "on disk alone / in memory; ratios are medians of the ratios of each round"
MEMORY, DISK = "memory", "disk"
TARGETS = {"read": {MEMORY: Target(speed=0.5)}}


def _from_disk(plan: Plan) -> Iterator[Finding]:
    """Yield the GB/s of reads from disk, relative to a store in memory."""
    trials = Trials(DISK)
    works = (pages(256, 64 * KIB, "an engine's order"), blocks(8, LLAMA3_16))
    for _ in range(plan.sets):
        with ExitStack() as stack:
            memory = stack.enter_context(start_kvpage())
            disk = stack.enter_context(start_kvpage("--store", "tiered", "--maxmemory", ALMOST_NOTHING))
            sockets = [stack.enter_context(server.connect()) for server in (memory, disk)]
            for work in works:
                ways = [kvpage_way(sock, work) for sock in sockets]
                for way in ways:
                    for write in way.writes:
                        write()
                disk.admin.execute_command("SAVE")
                before = _read_and_fetched(disk)
                contestants = {
                    name: Contestant(server, way)
                    for name, server, way in zip((MEMORY, DISK), (memory, disk), ways, strict=True)
                }
                trials.run(f"{work.name} from disk", contestants, work.nbytes, plan, TARGETS, ops=["read"])
                read, fetched = _read_and_fetched(disk) - before
                assert fetched > 0.95 * read, f"of {read} values only {fetched} were read from disk"
                for server in (memory, disk):
                    server.admin.flushall()
    yield from trials.findings()


def _read_and_fetched(server: Server) -> np.ndarray[Any, Any]:
    """Return the numbers of values that were read, and that were fetched from disk."""
    info = server.admin.info("everything")
    return np.array([info["keyspace_hits"], info["disk_fetched"]])


def _end(size: int) -> Finding:
    """Measure SIGTERM with all values unwritten, compared with a file of the same size."""
    with start_kvpage("--store", "tiered", "--appendfsync", "no") as server:
        with PageClient(server.url, deadline=60) as client:
            count = size // LLAMA3_16.nbytes
            bodies = block_bodies([LLAMA3_16.nbytes] * count, generation=0)
            client.mset_blocks([(b"end", number) for number in range(count)], LLAMA3_16, bodies)
        sequential = [_sequential(server.directory / "sequential", size)]
        began = time.perf_counter()
        server.process.terminate()
        server.process.wait()
        took = time.perf_counter() - began
        sequential.append(_sequential(server.directory / "sequential", size))
        stored = (server.directory / "kvpage.lmdb").stat().st_size
    assert stored >= size, "not everything was written"
    ours, disks = size / took / GB, size / median(sequential) / GB
    return Finding(
        f"SIGTERM with {size // KIB**2} MiB to write", "a file", "GB/s", f"{ours:.2f} / {disks:.2f}", ours / disks, 0.5
    )


def _sequential(path: Path, size: int) -> float:
    """Return the seconds to write a file of `size` bytes and to synchronise it."""
    piece = os.urandom(4 * KIB**2)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return took


def _restarts(pages: int) -> Iterator[Finding]:
    """Yield the findings of a start with very many pages, which were stored one by one."""
    with TemporaryDirectory() as place:
        options = ("--store", "tiered", "--dir", place)
        with start_kvpage(*options) as server:
            fill_with_pages(server, pages)
            server.admin.execute_command("SAVE")
        for ended in (signal.SIGTERM, signal.SIGKILL):
            began = time.perf_counter()
            with start_kvpage(*options) as server:
                answered = time.perf_counter() - began
                _use_index(server, pages)
                usable = time.perf_counter() - began
                note = f"server's CPU time {server.cpu_seconds():.2f} s"
                server.process.send_signal(signal.SIGKILL)
            work, measured = f"start with {pages:,} pages after {ended.name}", f"first answer after {answered:.2f}"
            yield Finding(work, "", "s", measured, usable, at_most=3.0, note=note)


def _use_index(server: Server, pages: int) -> None:
    """Query the index alone: the number of pages, and whether a block of each request is complete."""
    assert server.admin.dbsize() == pages
    for request in range(pages // PAGES_A_REQUEST):
        block = request * PAGES_A_REQUEST // PAGES_A_BLOCK + 1  # the block before it has pages of the request before
        assert server.admin.execute_command("KVPAGEPREFIX", PAGES_A_BLOCK, 0, 1, f"request{request}", block) == 1


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/tiered.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tiered")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    plan = Plan(quick)
    pin_client()
    findings = [
        *_from_disk(plan),
        _end((256 if quick else 768) * KIB**2),
        *_restarts(PAGES_A_REQUEST * (20 if quick else 200)),
    ]
    show(findings, INTRO)
    if not quick:
        write(findings, "tiered", {"sets": plan.sets, "rounds": plan.rounds}, intro=INTRO)


if __name__ == "__main__":
    main()
