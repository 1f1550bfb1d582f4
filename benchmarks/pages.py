"""Pages and blocks on the wire: kvpage-server beside redis-server 7 and Valkey 9.1, and bare sockets.

Servers have one core, the client the other. Every page is new or long out of the CPU's cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

from benchmarks import growth, latency, processes, readme, receiving, redis_py
from benchmarks.findings import RESULTS, Finding, show, write
from benchmarks.pairs import (
    GENERATIONS,
    SETS,
    Contestant,
    Passes,
    compare,
    cpu,
    cpu_ratio,
    own_cpu,
    speed,
    speed_ratio,
    together,
)
from benchmarks.servers import PINNED, pin_client, start_bare, start_kvpage, start_redis, start_valkey
from benchmarks.stores import PageStore, RawStore, ValueStore
from kvpage_server.bench.measure import Figures
from kvpage_server.bench.raw import start_raw
from kvpage_server.bench.report import Row, write_plot
from kvpage_server.bench.work import LLAMA3_16, SMOLLM2_256, Blocks, Pages, Work

KIB = 1024
INTRO = (
    "kvpage-server / the other; ratios are medians of the ratios of each round; of the servers' CPU time their own is "
    "that which is not the kernel's"
)
OURS, REDIS, VALKEY, RAW = "kvpage-server", "redis-server", "Valkey", "raw sockets"
BARE = "bare Python"


@dataclass(frozen=True)
class Target:
    """At least so many times as fast, with at most so many times the server's CPU time."""

    against: str
    speed: float
    cpu: float | None = None


Targets = dict[str, list[Target]]  # by op

PAGES: dict[int, Targets] = {
    16: {"read": [Target(VALKEY, 0.95, 1.15)], "write": [Target(VALKEY, 0.6)]},
    32: {
        "read": [Target(REDIS, 1.7, 0.5), Target(VALKEY, 0.95, 1.15)],
        "write": [Target(REDIS, 1.5, 0.8), Target(VALKEY, 0.8)],
    },
    64: {
        "read": [Target(REDIS, 1.7, 0.5), Target(VALKEY, 0.95, 1.15)],
        "write": [Target(REDIS, 1.15, 0.8), Target(VALKEY, 0.8)],
    },
    256: {
        "read": [Target(REDIS, 1.7, 0.5), Target(VALKEY, 0.95, 1.15)],
        "write": [Target(REDIS, 1.5, 0.8), Target(VALKEY, 1.0)],
    },
}
SINGLE_PAGES: Targets = {"read": [Target(VALKEY, 1.8)], "write": [Target(VALKEY, 1.6)]}
WHOLE_BLOCKS: Targets = {
    "read": [Target(VALKEY, 1.0), Target(RAW, 0.8)],
    "write": [Target(VALKEY, 1.0), Target(RAW, 0.75)],
}


class Comparisons:
    """What was found of the servers of several sets."""

    def __init__(self) -> None:
        self._sets: dict[tuple[str, str], list[tuple[Passes, Passes]]] = {}  # cold and hot, by name and op
        self._targets: dict[tuple[str, str], list[Target]] = {}

    def run(self, contestants: list[Contestant], rounds: int, work: Work, targets: Targets, name: str = "") -> None:
        """Write and read, cold and cache-hot; what was written is forgotten afterwards."""
        name = name or work.name
        print(f"{name} ...", flush=True)
        for op in ("write", "read"):
            cold = compare(contestants, op, work, rounds=rounds)
            hot = compare(contestants, op, work, rounds=max(1, rounds // 3), hot=True)
            self._sets.setdefault((name, op), []).append((cold, hot))
            self._targets[name, op] = targets[op]
        for contestant in contestants:
            if contestant.server:
                contestant.server.admin.flushall()

    @property
    def rows(self) -> list[Row]:
        """For the plot."""
        return [_row(name, op, together(cold for cold, _ in sets)) for (name, op), sets in self._sets.items()]

    @property
    def findings(self) -> list[Finding]:
        """For the table."""
        found: list[Finding] = []
        for (name, op), sets in self._sets.items():
            cold, hot = (together(passes) for passes in zip(*sets, strict=True))
            found += [f for target in self._targets[name, op] for f in _findings(f"{op} {name}", target, cold, hot)]
        return found


def _row(name: str, op: str, passes: Passes) -> Row:
    figures = {
        server: Figures(speed(passes, server), cpu(passes, server), 0, 0, len(passes[server]))
        for server in passes
        if server not in (RAW, BARE)
    }
    return Row(name, op, figures, speed(passes, RAW))


def _findings(name: str, target: Target, cold: Passes, hot: Passes) -> Iterator[Finding]:
    other = target.against
    yield _of_speed(name, OURS, other, cold, hot, target.speed)
    if other != RAW:
        yield _of_cpu(name, OURS, other, cold, hot, target.cpu)
    if other == VALKEY and BARE in cold:
        yield _of_speed(f"{name}, {BARE}", BARE, other, cold, hot)
        yield _of_cpu(f"{name}, {BARE}", BARE, other, cold, hot)


def _of_speed(name: str, server: str, other: str, cold: Passes, hot: Passes, at_least: float | None = None) -> Finding:
    found = f"{speed(cold, server):.2f} / {speed(cold, other):.2f}"
    ratios = [speed_ratio(passes, server, other) for passes in (cold, hot)]
    return Finding(name, other, "GB/s", found, ratios[0], at_least=at_least, note=f"{ratios[1]:.2f}")


def _of_cpu(name: str, server: str, other: str, cold: Passes, hot: Passes, at_most: float | None = None) -> Finding:
    total, own = (f"{of(cold, server):.2f} / {of(cold, other):.2f}" for of in (cpu, own_cpu))
    ratios = [cpu_ratio(passes, server, other) for passes in (cold, hot)]
    return Finding(name, other, "CPU s/GB", f"{total}, own {own}", ratios[0], at_most=at_most, note=f"{ratios[1]:.2f}")


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/pages.json, .md and .png and the README's table, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pages")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    sets, rounds, generations = (1, 3, 4) if quick else (SETS, 3, GENERATIONS)
    pin_client()
    found = Comparisons()
    latencies: list[tuple[float, float]] = []
    for _ in range(sets):
        with ExitStack() as stack:
            ours, redis, valkey, bare = map(
                stack.enter_context, (start_kvpage(), start_redis(), start_valkey(), start_bare())
            )
            raw = stack.enter_context(closing(stack.enter_context(start_raw(prefix=PINNED))(1)))
            latencies += latency.rounds(ours, redis, rounds)
            page_store, sockets = Contestant(OURS, PageStore(ours.url), ours), Contestant(RAW, RawStore(raw), None)
            all_of_them = [
                page_store,
                Contestant(REDIS, ValueStore(redis.url), redis),
                Contestant(VALKEY, ValueStore(valkey.url), valkey),
                sockets,
            ]
            least = Contestant(BARE, PageStore(bare.url), bare)
            for size in (16, 64) if quick else PAGES:
                found.run([*all_of_them, least], rounds, Pages(256, size * KIB, generations), PAGES[size])
            single_pages = Contestant(VALKEY, ValueStore(valkey.url, single_pages=True), valkey)
            blocks = Blocks(8, LLAMA3_16, generations)
            found.run([page_store, single_pages, sockets], rounds, blocks, SINGLE_PAGES, readme.SINGLE)
            found.run(all_of_them, rounds, blocks, WHOLE_BLOCKS)
            if not quick:
                found.run(all_of_them, rounds, Blocks(8, SMOLLM2_256, generations), WHOLE_BLOCKS)
    findings = found.findings
    with start_kvpage() as ours, start_redis() as redis, start_valkey() as valkey, start_raw(prefix=PINNED) as connect:
        with closing(connect(1)) as raw:
            findings += redis_py.findings(ours, raw, rounds=sets * rounds)
        findings += receiving.findings(ours, rounds=sets * rounds)
        findings.append(latency.finding(latencies))
        about = {
            "servers": [server.name for server in (ours, redis, valkey)],
            "sets": sets,
            "rounds": rounds,
            "generations": generations,
        }
    findings += processes.findings(rounds=5 if not quick else 3)
    findings += growth.findings(pages=100_000 if quick else 1_000_000, rounds=sets * rounds)
    show(findings, INTRO)
    if not quick:
        write(findings, "pages", about, intro=INTRO)
        readme.rewrite(findings)
        write_plot(found.rows, RESULTS / "pages.png")


if __name__ == "__main__":
    main()
