"""Where the server's time goes: `python -m benchmarks.profile` samples it with py-spy, one path at a time.

For each path it writes `results/profile-PATH.txt`: the functions that the most samples fell on, by themselves and
with all that they called. py-spy samples from outside, 400 times a second, and slows the server little.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.findings import RESULTS
from benchmarks.pairs import GENERATIONS, Contestant, compare
from benchmarks.servers import Server, pin_client, start_kvpage
from benchmarks.stores import PageStore
from kvpage_server.bench.report import machine
from kvpage_server.bench.work import LLAMA3_16, Blocks, Pages, Work

SECONDS = 8
LINES = 24
PATHS: dict[str, tuple[str, Work]] = {
    "KVPAGEMSET-16KiB": ("write", Pages(256, 16 * 1024, GENERATIONS)),
    "KVPAGEMGET-16KiB": ("read", Pages(256, 16 * 1024, GENERATIONS)),
    "KVPAGEMSET-64KiB": ("write", Pages(256, 64 * 1024, GENERATIONS)),
    "KVPAGEMGET-64KiB": ("read", Pages(256, 64 * 1024, GENERATIONS)),
    "KVPAGEMSET-256KiB": ("write", Pages(256, 256 * 1024, GENERATIONS)),
    "KVBLOCKSET-2MiB": ("write", Blocks(8, LLAMA3_16, GENERATIONS)),
    "KVBLOCKMGET-2MiB": ("read", Blocks(8, LLAMA3_16, GENERATIONS)),
}


def profile(server: Server, op: str, work: Work) -> list[str]:
    """The functions that samples fell on, for people."""
    contestants = [Contestant("kvpage-server", PageStore(server.url), server)]
    compare(contestants, "write", work, rounds=1)
    pid = server.admin.info("server")["process_id"]
    with tempfile.TemporaryDirectory() as directory:
        raw = Path(directory) / "raw"
        options = ["-F", "-d", str(SECONDS), "-r", "400", "-f", "raw", "-o", str(raw)]
        with subprocess.Popen(
            [Path(sys.executable).with_name("py-spy"), "record", "-p", str(pid), *options], stdout=subprocess.DEVNULL
        ) as spy:
            until = time.monotonic() + SECONDS + 1
            while time.monotonic() < until:
                compare(contestants, op, work, rounds=1)
            spy.wait(60)
        return _table(raw.read_text())


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
    return [f"{total} samples", " itself  with what it calls"] + [
        f"{a:7.1%} {b:7.1%}  {frame}" for a, b, frame in shares
    ]


def main() -> None:
    """Profile the paths that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("paths", metavar="PATH", nargs="*", help=f"of {', '.join(PATHS)}")
    names = parser.parse_args().paths or list(PATHS)
    if unknown := set(names) - set(PATHS):
        parser.error(f"there is no path {', '.join(sorted(unknown))}, only {', '.join(PATHS)}")
    pin_client()
    RESULTS.mkdir(exist_ok=True)
    with start_kvpage() as server:
        for name in names:
            lines = profile(server, *PATHS[name])
            about = ", ".join(f"{what}: {value}" for what, value in machine().items())
            (RESULTS / f"profile-{name}.txt").write_text("\n".join([name, about, *lines]) + "\n")
            print(name, *lines, sep="\n")
            server.admin.flushall()


if __name__ == "__main__":
    main()
