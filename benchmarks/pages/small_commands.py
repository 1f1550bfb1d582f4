"""The cost of a command without pages: redis-benchmark on kvpage-server compared with redis-server.

50 clients, values of 3 bytes; 16 commands in a pipeline, and one at a time.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from statistics import median

from benchmarks.findings import Finding
from benchmarks.pages.rounds import Plan
from benchmarks.servers import Server, start_kvpage, start_redis

COMMANDS = {"PING_MBULK": "PING", "SET": "SET", "GET": "GET"}
AT_LEAST = {16: 0.35, 1: None}  # by pipeline

Rates = dict[str, float]  # requests a second by command


def measure(server: Server, *, pipeline: int, requests: int) -> Rates:
    """One run of redis-benchmark. Raises CalledProcessError when it fails."""
    command = ["redis-benchmark", "-p", str(server.port), "--csv", "-t", "ping_mbulk,set,get", "-c", "50", "-d", "3"]
    command += ["-P", str(pipeline), "-n", str(requests)]
    received = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    return {COMMANDS[row["test"]]: float(row["rps"]) for row in csv.DictReader(received.splitlines())}


def findings(plan: Plan) -> list[Finding]:
    """None, and a line that says why, where there is no redis-benchmark."""
    if shutil.which("redis-benchmark") is None:
        print("no small commands: redis-benchmark is missing. On Debian or Ubuntu: sudo apt-get install redis-tools")
        return []
    print("small commands ...", flush=True)
    rounds, requests = (2, 40_000) if plan.quick else (5, 200_000)
    with start_kvpage() as ours, start_redis() as theirs:
        return [
            *_compared(ours, theirs, pipeline=16, rounds=rounds, requests=requests),
            *_compared(ours, theirs, pipeline=1, rounds=rounds, requests=requests // 10),
        ]


def _compared(ours: Server, theirs: Server, *, pipeline: int, rounds: int, requests: int) -> list[Finding]:
    """Both servers in turn, each first every other time."""
    pairs: list[tuple[Rates, Rates]] = []
    for turn in range(rounds + 1):  # the first round warms up
        order = (ours, theirs) if turn % 2 else (theirs, ours)
        rates = {server.name: measure(server, pipeline=pipeline, requests=requests) for server in order}
        pairs.append((rates[ours.name], rates[theirs.name]))
    del pairs[0]
    return [
        Finding(
            f"{name}, pipeline {pipeline}",
            theirs.name,
            "1000/s",
            " / ".join(f"{median(rates[name] for rates in side) / 1000:.0f}" for side in zip(*pairs, strict=True)),
            median(one[name] / other[name] for one, other in pairs),
            at_least=AT_LEAST[pipeline],
        )
        for name in COMMANDS.values()
    ]
