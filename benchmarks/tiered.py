"""The tiered store beside the one in memory: what the disk costs when it is not needed, and what it gives when it is.

Servers have one core, the client the other. Ratios are medians of the ratios of each round.
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
from typing import Any, NamedTuple

import numpy as np

from benchmarks.findings import Finding, show, write
from benchmarks.growth import PAGES_A_BLOCK, PAGES_A_REQUEST, fill_with_pages
from benchmarks.pairs import SETS, Contestant, Passes, compare, cpu_ratio, speed, speed_ratio, together
from benchmarks.servers import Server, pin_client, start_kvpage
from benchmarks.stores import PageStore
from kvpage_server.bench.measure import GB
from kvpage_server.bench.work import LLAMA3_16, Blocks, Pages, Work

KIB = 1024
GENERATIONS = 4
ALMOST_NOTHING = "1mb"  # of memory: what is read is on disk alone
INTRO = "tiered / memory; ratios are medians of the ratios of each round"
MEMORY, TIERED, DISK = "memory", "tiered", "disk"


class Row(NamedTuple):
    """What is done, by whom beside the one in memory, and how many times as fast at least."""

    work: str
    name: str
    target: float


def _paths(sets: int, rounds: int) -> list[Finding]:
    """Reads and writes with the working set in memory, and reads of what is on disk alone."""
    found = [dict(_compared(rounds)) for _ in range(sets)]
    return [_finding(row, together(passes[row] for passes in found)) for row in found[0]]


def _compared(rounds: int) -> Iterator[tuple[Row, Passes]]:
    """What servers do that are started for it."""
    with ExitStack() as stack:
        memory, tiered, disk = (
            stack.enter_context(start_kvpage(*options))
            for options in ((), ("--store", "tiered"), ("--store", "tiered", "--maxmemory", ALMOST_NOTHING))
        )
        contestants = {
            name: Contestant(name, PageStore(server.url), server)
            for name, server in ((MEMORY, memory), (TIERED, tiered), (DISK, disk))
        }
        works: list[tuple[str, Work]] = [
            ("pages of 64 KiB", Pages(256, 64 * KIB, GENERATIONS)),
            ("blocks of 2 MiB", Blocks(8, LLAMA3_16, GENERATIONS)),
        ]
        for name, work in works:
            print(f"{name} ...", flush=True)
            pair = [contestants[MEMORY], contestants[TIERED]]
            yield Row(f"write {name}", TIERED, 0.7), compare(pair, "write", work, rounds=rounds)
            tiered.admin.execute_command("SAVE")  # what reads cost, without the writes before them
            yield Row(f"read {name}", TIERED, 0.9), compare(pair, "read", work, rounds=rounds)
            for step in contestants[DISK].store.writes(work):
                step()
            disk.admin.execute_command("SAVE")
            pair = [contestants[MEMORY], contestants[DISK]]
            before = _read_and_fetched(disk)
            yield Row(f"read {name} from disk", DISK, 0.5), compare(pair, "read", work, rounds=rounds)
            read, fetched = _read_and_fetched(disk) - before
            assert fetched > 0.95 * read, f"of {read} values only {fetched} were read from disk"
            for server in (memory, tiered, disk):
                server.admin.flushall()


def _read_and_fetched(server: Server) -> np.ndarray[Any, Any]:
    """How many values were read so far, and how many of them had to be fetched from disk."""
    info = server.admin.info("everything")
    return np.array([info["keyspace_hits"], info["disk_fetched"]])


def _finding(row: Row, passes: Passes) -> Finding:
    measured = f"{speed(passes, row.name):.2f} / {speed(passes, MEMORY):.2f}"
    ratio = speed_ratio(passes, row.name, MEMORY)
    note = f"server's CPU time {cpu_ratio(passes, row.name, MEMORY):.2f}"
    return Finding(row.work, MEMORY, "GB/s", measured, ratio, at_least=row.target, note=note)


def _end(size: int) -> Finding:
    """What SIGTERM takes, when everything has yet to be written, beside a file of as many bytes."""
    with start_kvpage("--store", "tiered", "--appendfsync", "no") as server:
        work = Blocks(8, LLAMA3_16, size // (8 * LLAMA3_16.nbytes))
        for step in PageStore(server.url).writes(work):
            step()
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
    """Seconds that a file of `size` bytes takes until it is on disk."""
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
    """What a start takes that finds very many pages, which were stored one by one."""
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
    """Ask for what the index alone knows: how many pages there are, and whether a block of each request is complete."""
    assert server.admin.dbsize() == pages
    for request in range(pages // PAGES_A_REQUEST):
        block = request * PAGES_A_REQUEST // PAGES_A_BLOCK + 1  # in the one before it, another request's pages end
        assert server.admin.execute_command("KVPAGEPREFIX", PAGES_A_BLOCK, 0, 1, f"request{request}", block) == 1


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/tiered.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tiered")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    sets, rounds = (1, 3) if quick else (SETS, 5)
    pin_client()
    findings = [
        *_paths(sets, rounds),
        _end((256 if quick else 768) * KIB**2),
        *_restarts(PAGES_A_REQUEST * (20 if quick else 200)),
    ]
    show(findings, INTRO)
    if not quick:
        write(findings, "tiered", {"sets": sets, "rounds": rounds, "generations": GENERATIONS}, intro=INTRO)


if __name__ == "__main__":
    main()
