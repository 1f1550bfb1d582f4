"""LMCache's own benchmark of a store, `lmcache bench l2`, by its native client, which nobody here wrote: single SET and
GET, four sockets with one command outstanding each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.findings import Finding
from benchmarks.pages.batches import OURS, REDIS, VALKEY
from benchmarks.pages.rounds import NO_TARGET, Pass, Passes, Plan, Target, beside
from benchmarks.servers import Server, start_kvpage, start_redis, start_valkey
from kvpage_server.bench import GB

KEYS = 64  # a round
SIZES = {64: 31, 256: 15, 2048: 3}  # KiB of a value, and rounds
TARGETS = {  # relative to Valkey
    (64, "store"): Target(1.8, 0.7),
    (64, "load"): Target(1.8, 0.85),
    **{(256, op): Target(1.3, 0.9) for op in ("store", "load")},
    **{(2048, op): Target(1.05, 1.0) for op in ("store", "load")},
}
_TIMEOUT = 120  # seconds of a run


def findings(plan: Plan) -> Iterator[Finding]:
    """None, and a line that says why, where LMCache is not installed."""
    command = os.environ.get("LMCACHE") or shutil.which("lmcache")
    if not command:
        print("nothing of LMCache, which is several GB with torch: LMCACHE=... says where its command is")
        return
    found: dict[tuple[int, str], Passes] = {}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(start())
            for name, start in ((OURS, start_kvpage), (VALKEY, start_valkey), (REDIS, start_redis))
        }
        for size in (64,) if plan.quick else SIZES:
            for turn in range(2 * plan.sets):  # two runs of theirs may differ by a third
                print(f"LMCache, values of {size} KB, round {turn + 1} ...", flush=True)
                for name, server in servers.items():
                    for op in ("store", "load"):
                        passes = found.setdefault((size, op), {each: [] for each in servers})
                        passes[name].append(_run(command, server, op, size))
                    server.admin.flushall()
    for (size, op), passes in found.items():
        for other in (VALKEY, REDIS):
            target = TARGETS[size, op] if other == VALKEY else NO_TARGET
            yield from beside(f"LMCache, {op} values of {size} KB", passes, OURS, other, target)


def _run(command: str, server: Server, op: str, size: int) -> Pass:
    """One run of theirs. Raises CalledProcessError when it fails, AssertionError when not everything succeeded."""
    adapter = {"type": "resp", "host": "127.0.0.1", "port": server.port, "num_workers": 4}
    rounds = SIZES[size]
    with tempfile.TemporaryDirectory() as directory:
        received = Path(directory, "told.json")
        words = ["bench", "l2", "--l2-adapter", json.dumps(adapter), "--only", op, "--num-keys", str(KEYS)]
        options = ["--data-size-kb", str(size), "--rounds", str(rounds), "--format", "json", "--output", str(received)]
        before = server.cpu_seconds()
        subprocess.run([command, *words, *options], check=True, capture_output=True, timeout=_TIMEOUT, cwd=directory)
        cpu = server.cpu_seconds() - before
        result: dict[str, Any] = json.loads(received.read_text(encoding="utf-8"))["metrics"]["op_0"]
    assert result["total_success"] == rounds * KEYS, f"{server.name} answered {result['total_success']} of them well"
    moved = (rounds + 1) * KEYS * size * 1024 / GB  # the first round is for warming up
    return Pass(cpu / moved, rounds * KEYS * size * 1024 / GB / (result["duration_avg_ms"] * rounds / 1000))
