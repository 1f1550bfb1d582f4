"""Profile of the server's CPU time: `python -m benchmarks profile --only PATH,...`, of one path at a time.

For each path it prints the places with most samples, and writes them to `results/profile-PATH.txt`: by library and by
symbol with `perf`, if it is installed and permitted; by function of Python with py-spy, which samples from outside.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import shares
from benchmarks.findings import RESULTS
from benchmarks.pages import clients, single_commands
from benchmarks.pages.clients import Step, Way
from benchmarks.pages.work import KIB, ORDERS, blocks, mixed_pages, pages
from benchmarks.servers import Server, pin_client, start_kvpage
from kvpage_server.bench import LLAMA3_16, machine

SECONDS, QUICK_SECONDS = 5, 1  # seconds for which each of the two samplers runs
LINES = 30
LAYERS_FASTEST = list(ORDERS)[1]


class Driven(NamedTuple):
    """A server with a client, and the number of pages that a write or read of all generations transfers."""

    server: Server
    way: Way
    pages: int


def _batches(count: int, size: int, stack: ExitStack, server: Server) -> Driven:
    work = pages(count, size * KIB, LAYERS_FASTEST)
    way = clients.kvpage_pages(stack.enter_context(server.connect()), work)
    return Driven(server, way, count * len(work.batches))


def _mixed(stack: ExitStack, server: Server) -> Driven:
    work = mixed_pages(256, LAYERS_FASTEST)
    way = clients.kvpage_pages(stack.enter_context(server.connect()), work)
    return Driven(server, way, 256 * len(work.batches))


def _blocks(stack: ExitStack, server: Server) -> Driven:
    work = blocks(8, LLAMA3_16)
    way = clients.kvpage_blocks(stack.enter_context(server.connect()), work)
    return Driven(server, way, 8 * LLAMA3_16.pages * len(work.names))


def _alone(sockets: int, size: int, stack: ExitStack, server: Server) -> Driven:
    connected = [stack.enter_context(server.connect()) for _ in range(sockets)]
    (batch, *_) = pages(single_commands.ALONE_SIZES[size], size * KIB, LAYERS_FASTEST).batches
    return Driven(server, single_commands.kvpage_way(connected, batch), len(batch.keys))


DRIVERS: dict[str, Callable[[ExitStack, Server], Driven]] = {
    **{f"{size}KiB": partial(_batches, 900, size) for size in (1, 4)},
    **{f"{size}KiB": partial(_batches, 256, size) for size in (16, 64, 256)},
    "mixed": _mixed,
    "blocks": _blocks,
    **{f"alone-{size}KiB": partial(_alone, 1, size) for size in single_commands.ALONE_SIZES},
    **{f"alone-{size}KiB-16-sockets": partial(_alone, 16, size) for size in single_commands.ALONE_SIZES},
}
PATHS = [f"{op}-{driver}" for driver in DRIVERS for op in ("write", "read")]
USUAL = [path for path in PATHS if "sockets" not in path and "mixed" not in path]


def profile(path: str, core: str, *, quick: bool = False) -> Iterator[str]:
    """Profile a path, and yield lines to print. Unless `quick`, store the cost of a page for the table of
    docs/performance.md.
    """
    seconds = QUICK_SECONDS if quick else SECONDS
    op, driver = path.split("-", 1)
    with ExitStack() as stack:
        driven = DRIVERS[driver](stack, stack.enter_context(start_kvpage(core=core)))
        for write in driven.way.writes:
            write()
        steps = driven.way.writes if op == "write" else driven.way.reads
        pid = driven.server.process.pid
        yield from (path, ", ".join(f"{what}: {value}" for what, value in machine().items()))
        cpu, started = driven.server.cpu_seconds(), time.monotonic()
        times = _drive(steps, seconds / 2)
        cpu, passed = driven.server.cpu_seconds() - cpu, time.monotonic() - started
        micros = cpu * 1e6 / (times * driven.pages)
        yield f"{micros:.2f} µs of the server's CPU a page; it was busy for {cpu / passed:.0%} of the time"
        found = yield from _perf(pid, steps, seconds)
        if found and not quick:
            shares.keep(path, micros, found)
        yield from _py_spy(pid, steps, seconds)


def _drive(steps: Sequence[Step], seconds: float) -> int:
    """Repeat the steps for `seconds`, and return the number of repetitions."""
    times, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for step in steps:
            step()
        times += 1
    return times


def _perf(pid: int, steps: Sequence[Step], seconds: int) -> Generator[str, None, dict[str, float]]:
    """Each function by itself, of the kernel, the interpreter and the compiled core. Returns the share of each part;
    nothing where there is no perf."""
    if not shutil.which("perf"):
        yield "perf is not installed: on Debian or Ubuntu, apt-get install linux-perf"
        return {}
    with tempfile.TemporaryDirectory() as directory:
        data = str(Path(directory, "perf.data"))
        record = ["perf", "record", "--quiet", "--freq", "997", "--pid", str(pid), "--output", data, "sleep"]
        if reason := _recorded([*record, str(seconds)], steps, seconds):
            yield f"perf is not allowed here: {reason}"
            return {}
        report = ["perf", "report", "--stdio", "--quiet", "--input", data, "--fields", "overhead,dso,symbol"]
        output = subprocess.run(report, capture_output=True, encoding="utf-8", check=True, timeout=60).stdout
    found = shares.samples(output)
    parts = shares.shares(found)
    yield from ("", "by part, by perf", *(f"{share:6.1f}%  {part}" for part, share in parts.items()))
    yield from ("", "by symbol, by perf")
    yield from (f"{sample.percent:6.2f}%  {sample.library:45} {sample.symbol}" for sample in found[:LINES])
    return parts


def _py_spy(pid: int, steps: Sequence[Step], seconds: int) -> Iterator[str]:
    """Yield the Python functions with most samples. The time of compiled code counts for the line that calls it."""
    with tempfile.TemporaryDirectory() as directory:
        raw = Path(directory) / "raw"
        options = ["--function", "--threads", "--duration", str(seconds), "--rate", "400", "--format", "raw"]
        spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(pid), *options, "--output"]
        if reason := _recorded([*spy, str(raw)], steps, seconds):
            yield f"py-spy is not allowed here: {reason}"
            return
        yield from ("", *_functions(raw.read_text(encoding="utf-8")))


def _recorded(command: Sequence[str], steps: Sequence[Step], seconds: int) -> str:
    """Keep the server busy while a command records it; return the error if it fails."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as recording:
        _drive(steps, seconds + 1)
        _, reason = recording.communicate(timeout=60)
    return reason.decode(errors="replace").strip() or "no reason given" if recording.returncode else ""


def _functions(raw: str) -> list[str]:
    """Return the functions of stacks, each with its number of samples. Those of the loop's thread: one that waits for a
    lock looks busy.
    """
    alone: Counter[str] = Counter()
    in_all: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, count = line.rsplit(" ", 1)
        thread, *frames = stack.split(";")
        if "MainThread" not in thread or not frames:
            continue
        alone[frames[-1]] += int(count)
        for frame in set(frames):
            in_all[frame] += int(count)
    total = alone.total()
    rows = ((alone[frame] / total, in_all[frame] / total, frame) for frame, _ in alone.most_common(LINES))
    return [
        "by function of the loop's thread, by py-spy",
        "  itself  with what it calls",
        *(f"{itself:7.1%} {with_all:7.1%}  {frame}" for itself, with_all, frame in rows),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile the named paths, or the usual ones."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks profile",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["paths:", *(f"  {path}" for path in PATHS)]),
    )
    parser.add_argument("--only", metavar="PATH,...", type=_paths, default=USUAL, help="these paths")
    parser.add_argument("--quick", action="store_true", help="a second of each, and nothing is written")
    parser.add_argument("--core", choices=("native", "python"), default="", help="the core that is to run")
    args = parser.parse_args(arguments)
    pin_client()
    RESULTS.mkdir(exist_ok=True)
    for path in args.only:
        lines = list(profile(path, args.core, quick=args.quick))
        print(*lines, "", sep="\n")
        if not args.quick:
            (RESULTS / f"profile-{path}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _paths(text: str) -> list[str]:
    paths = text.split(",")
    if unknown := [path for path in paths if path not in PATHS]:
        raise argparse.ArgumentTypeError(f"there is no path {', '.join(unknown)}; --help lists them")
    return paths
