"""The command line of `python -m benchmarks pages`: the kinds of rows, and the number of rounds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.findings import Finding, show, write
from benchmarks.pages import tables
from benchmarks.pages.batches import absent_findings, batch_findings, block_findings
from benchmarks.pages.client_costs import client_findings
from benchmarks.pages.hicache import hicache_findings
from benchmarks.pages.rounds import Plan
from benchmarks.pages.single_commands import (
    latency_findings,
    lmcache_findings,
    one_at_a_time_findings,
    small_command_findings,
)
from benchmarks.pages.variants import (
    default_store_findings,
    growth_findings,
    process_findings,
    twin_findings,
    watched_findings,
)
from benchmarks.servers import pin_client, versions

INTRO = "kvpage-server / the other; ratios are medians of the ratios of each round; CPU time is the server's"


class Kind(NamedTuple):
    """A kind of rows of the table, with the function that measures it."""

    findings: Callable[[Plan], Iterable[Finding]]  # starts the servers it needs
    about: str


KINDS = {
    "batches": Kind(batch_findings, "single pages, many at once, by an ordinary client and by PageClient"),
    "blocks": Kind(block_findings, "blocks of 2 and 5.6 MiB, likewise"),
    "absent": Kind(absent_findings, "KVPAGEMGET of which half is absent"),
    "one_at_a_time": Kind(
        one_at_a_time_findings, "KVPAGESET and KVPAGEGET, one outstanding on one socket and on each of sixteen"
    ),
    "latency": Kind(latency_findings, "one KVPAGEGET beside redis-server's GET"),
    "small_commands": Kind(small_command_findings, "PING, SET and GET by redis-benchmark, beside redis-server"),
    "lmcache": Kind(
        lmcache_findings,
        "LMCache's own benchmark, its clients and the plugin; LMCACHE says where its command is",
    ),
    "hicache": Kind(hicache_findings, "SGLang's HiCache backend beside PageClient"),
    "default_store": Kind(default_store_findings, "memory and disk beside memory alone"),
    "clients": Kind(client_findings, "the page clients beside redis-py, and beside bare sockets"),
    "watched": Kind(watched_findings, "a server that is scraped, with open dashboards, beside one that nobody watches"),
    "growth": Kind(growth_findings, "a million pages: bytes beside their own, and speed"),
    "processes": Kind(process_findings, "two servers beside one"),
    "twin": Kind(twin_findings, "the core's Python twin beside an older checkout, which --against names"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table. Unless --quick is given, write `results/pages-KIND.json` and `.md`, and update the documents'
    tables, and the picture.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks pages",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["kinds of rows:", *(f"  {name:16}{kind.about}" for name, kind in KINDS.items())]),
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, and nothing is written")
    parser.add_argument("--only", metavar="KIND,...", help="these kinds of rows", type=_kinds, default=list(KINDS))
    parser.add_argument("--against", metavar="TREE", type=Path, help="an older checkout, for the kind twin")
    args = parser.parse_args(arguments)
    pin_client()
    plan = Plan(args.quick, args.against)
    about = {"servers": versions(), "sets": plan.sets, "rounds": plan.rounds, "MiB of a pass": plan.least >> 20}
    everything: list[Finding] = []
    for kind in args.only:
        found = list(KINDS[kind].findings(plan))
        everything += found
        if found and not plan.quick:
            write(found, f"pages-{kind}", about, intro=INTRO)
    show(everything, INTRO)
    if not plan.quick:
        tables.write_picture()
        tables.rewrite()


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"there is no kind {', '.join(unknown)}, only {', '.join(KINDS)}")
    return kinds
