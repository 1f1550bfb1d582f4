"""Where the server's CPU goes: `python -m benchmarks profile [PATH ...]`, of one path at a time.

For each path it prints what the most samples fell on, and writes it to `results/profile-PATH.txt`: by library and by
symbol with `perf`, where that is installed and allowed; by function of Python with py-spy, which samples from outside.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.findings import RESULTS
from benchmarks.pages import one_at_a_time, ordinary
from benchmarks.pages.ordinary import Way
from benchmarks.pages.work import KIB, ORDERS, BlockWork, Work, blocks, mixed_pages, pages
from benchmarks.servers import Server, pin_client, start_kvpage
from kvpage_server.bench.report import machine
from kvpage_server.bench.work import LLAMA3_16

SECONDS = 5
LINES = 30
ORDER = list(ORDERS)[1]  # layers fastest


def _batches(make: Callable[[], Work | BlockWork], stack: ExitStack, server: Server) -> Way:
    return ordinary.kvpage_way(stack.enter_context(server.connect()), make())


def _one(count: int, size: int, stack: ExitStack, server: Server) -> Way:
    sockets = [stack.enter_context(server.connect()) for _ in range(count)]
    (batch, *_) = pages(one_at_a_time.SIZES[size], size * KIB, ORDER).batches
    return one_at_a_time.kvpage_way(sockets, batch)


PATHS: dict[str, Callable[[ExitStack, Server], Way]] = {
    **{f"{size}KiB": partial(_batches, partial(pages, 900, size * KIB, ORDER)) for size in (1, 4)},
    **{f"{size}KiB": partial(_batches, partial(pages, 256, size * KIB, ORDER)) for size in (16, 64, 256)},
    "mixed": partial(_batches, partial(mixed_pages, 256, ORDER)),
    "blocks": partial(_batches, partial(blocks, 8, LLAMA3_16)),
    **{f"one-{size}KiB": partial(_one, 1, size) for size in one_at_a_time.SIZES},
    **{f"one-{size}KiB-16-sockets": partial(_one, 16, size) for size in one_at_a_time.SIZES},
}
NAMES = [f"{op}-{path}" for path in PATHS for op in ("write", "read")]


def profile(name: str, core: str) -> Iterator[str]:
    """The lines for people."""
    op, path = name.split("-", 1)
    with ExitStack() as stack:
        server = stack.enter_context(start_kvpage(core=core))
        way = PATHS[path](stack, server)
        for write in way.writes:
            write()
        steps = way.writes if op == "write" else way.reads
        yield from (name, ", ".join(f"{what}: {value}" for what, value in machine().items()))
        cpu, started = server.cpu_seconds(), time.monotonic()
        _drive(steps, SECONDS / 2)
        yield f"the server was busy for {(server.cpu_seconds() - cpu) / (time.monotonic() - started):.0%} of the time"
        if shutil.which("perf"):
            yield from _perf(server.process.pid, steps)
        else:
            yield "perf is not installed: on Debian or Ubuntu, apt-get install linux-perf"
        yield from _py_spy(server.process.pid, steps)


def _drive(steps: Sequence[Callable[[], None]], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for step in steps:
            step()


def _perf(pid: int, steps: Sequence[Callable[[], None]]) -> Iterator[str]:
    """The kernel, the interpreter, the compiled core and each of their functions, by themselves."""
    with tempfile.TemporaryDirectory() as directory:
        data = str(Path(directory, "perf.data"))
        record = ["perf", "record", "--quiet", "--freq", "997", "--pid", str(pid), "--output", data, "sleep"]
        with subprocess.Popen([*record, str(SECONDS)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as recording:
            _drive(steps, SECONDS + 0.5)
            _, said = recording.communicate(timeout=60)
        if recording.returncode:
            yield f"perf is not allowed here: {said.decode(errors='replace').strip()}"
            return
        for title, by in (("by library", "dso"), ("by symbol", "dso,symbol")):
            report = ["perf", "report", "--stdio", "--quiet", "--input", data, "--sort", by]
            told = subprocess.run(report, capture_output=True, text=True, check=True, timeout=60).stdout
            lines = [line.rstrip() for line in told.splitlines() if line.strip() and not line.startswith("#")]
            yield from ("", f"{title}, by perf", *lines[:LINES])


def _py_spy(pid: int, steps: Sequence[Callable[[], None]]) -> Iterator[str]:
    """The functions of Python. What a call into compiled code takes is that of the line which calls it."""
    with tempfile.TemporaryDirectory() as directory:
        raw = Path(directory) / "raw"
        options = ["-F", "-d", str(SECONDS), "-r", "400", "-f", "raw", "-o", str(raw)]
        spy = [str(Path(sys.executable).with_name("py-spy")), "record", "-p", str(pid), *options]
        with subprocess.Popen(spy, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as recording:
            _drive(steps, SECONDS + 1)
            _, said = recording.communicate(timeout=60)
        if recording.returncode:
            yield f"py-spy is not allowed here: {said.decode(errors='replace').strip()}"
            return
        yield from ("", *_table(raw.read_text()))


def _table(raw: str) -> list[str]:
    """Of stacks, each with its number of samples."""
    alone: Counter[str] = Counter()
    in_all: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, count = line.rsplit(" ", 1)
        frames = stack.split(";")
        if "ahead.py" in stack:  # a thread that waits for a queue looks busy
            continue
        alone[frames[-1]] += int(count)
        for frame in set(frames):
            in_all[frame] += int(count)
    total = alone.total()
    shares = ((alone[frame] / total, in_all[frame] / total, frame) for frame, _ in alone.most_common(LINES))
    return ["by function, by py-spy", "  itself  with what it calls"] + [
        f"{a:7.1%} {b:7.1%}  {frame}" for a, b, frame in shares
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile the paths that are named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks profile",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["paths:", *(f"  {name}" for name in NAMES)]),
    )
    parser.add_argument("--only", metavar="PATH,...", type=_paths, default=NAMES, help="these paths, not all")
    parser.add_argument("--core", choices=("native", "python"), default="", help="the core that is to run")
    args = parser.parse_args(arguments)
    pin_client()
    RESULTS.mkdir(exist_ok=True)
    for name in args.only:
        lines = list(profile(name, args.core))
        print(*lines, "", sep="\n")
        (RESULTS / f"profile-{name}.txt").write_text("\n".join(lines) + "\n")


def _paths(text: str) -> list[str]:
    paths = text.split(",")
    if unknown := [path for path in paths if path not in NAMES]:
        raise argparse.ArgumentTypeError(f"there is no path {', '.join(unknown)}; --help lists them")
    return paths


if __name__ == "__main__":
    main()
