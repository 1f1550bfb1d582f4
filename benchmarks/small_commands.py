"""What a command that is no page costs: redis-benchmark on kvpage-server beside redis-server.

50 clients, values of 3 bytes; 16 commands in a pipeline, and one at a time.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from statistics import median

from benchmarks.findings import Finding, show, write
from benchmarks.servers import Server, pin_client, start_kvpage, start_redis

INTRO = "kvpage-server / redis-server; ratios are medians of the ratios of each round"
COMMANDS = {"PING_MBULK": "PING", "SET": "SET", "GET": "GET"}
AT_LEAST = {16: 0.15, 1: None}  # by pipeline

Rates = dict[str, float]  # requests a second by command


def measure(server: Server, *, pipeline: int, requests: int) -> Rates:
    """One run of redis-benchmark. Raises CalledProcessError when it fails."""
    command = ["redis-benchmark", "-p", str(server.port), "--csv", "-t", "ping_mbulk,set,get", "-c", "50", "-d", "3"]
    command += ["-P", str(pipeline), "-n", str(requests)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {COMMANDS[row["test"]]: float(row["rps"]) for row in csv.DictReader(told.splitlines())}


def findings(ours: Server, theirs: Server, *, pipeline: int, rounds: int, requests: int) -> list[Finding]:
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


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/small_commands.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks small_commands")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    if shutil.which("redis-benchmark") is None:
        sys.exit("redis-benchmark is not installed. On Debian or Ubuntu: sudo apt-get install redis-tools")
    rounds, requests = (3, 50_000) if quick else (9, 200_000)
    pin_client()
    with start_kvpage() as ours, start_redis() as theirs:
        found = [
            finding
            for pipeline in AT_LEAST
            for finding in findings(
                ours, theirs, pipeline=pipeline, rounds=rounds, requests=requests if pipeline > 1 else requests // 4
            )
        ]
        about = {"servers": [ours.name, theirs.name], "rounds": rounds, "requests": requests}
    show(found, INTRO)
    if not quick:
        write(found, "small_commands", about, intro=INTRO)


if __name__ == "__main__":
    main()
