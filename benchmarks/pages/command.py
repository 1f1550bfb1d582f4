"""The command line: which kinds of rows, and how much of each."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.findings import Finding, show, write
from benchmarks.pages import documents
from benchmarks.pages.rounds import Plan
from benchmarks.servers import pin_client, versions

INTRO = "kvpage-server / the other; ratios are medians of the ratios of each round; CPU time is the server's"
KINDS = {
    "batches": "single pages, many at once, by an ordinary client and by PageClient",
    "blocks": "blocks of 2 and 5.6 MiB, likewise",
    "absent": "KVPAGEMGET of which half is absent",
    "one_at_a_time": "KVPAGESET and KVPAGEGET, one outstanding on one socket and on each of sixteen",
    "latency": "one KVPAGEGET beside redis-server's GET",
    "small_commands": "PING, SET and GET by redis-benchmark, beside redis-server",
    "lmcache": "LMCache's own benchmark; the variable LMCACHE says where its command is",
    "default_store": "memory and disk beside memory alone",
    "clients": "the page clients beside redis-py, and beside bare sockets",
    "watched": "a server that is scraped, with open dashboards, beside one that nobody watches",
    "growth": "a million pages: bytes beside their own, and speed",
    "processes": "two servers beside one",
    "twin": "the core's Python twin beside an older checkout, which --against names",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table. Unless --quick is given, write `results/pages-KIND.json` and `.md`, and update the documents'
    tables, and README's picture.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks pages",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["kinds of rows:", *(f"  {kind:16}{what}" for kind, what in KINDS.items())]),
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
        found = list(importlib.import_module(f"benchmarks.pages.{kind}").findings(plan))
        everything += found
        if found and not plan.quick:
            write(found, f"pages-{kind}", about, intro=INTRO)
    show(everything, INTRO)
    if not plan.quick:
        from benchmarks.pages import plot  # it imports matplotlib

        plot.write()
        documents.rewrite()


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"there is no kind {', '.join(unknown)}, only {', '.join(KINDS)}")
    return kinds
