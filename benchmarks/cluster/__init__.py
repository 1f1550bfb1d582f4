"""`python -m benchmarks cluster`: clients of several servers, and an engine that restores contexts from several
servers.
"""

from __future__ import annotations

import argparse

from benchmarks.findings import show, write


def main(words: list[str]) -> None:
    """Measure, print the findings, and write them to `results/`."""
    from benchmarks.cluster import a_client_each, clients, first_token  # clients' processes need none of it
    from benchmarks.pages import tables

    parser = argparse.ArgumentParser(prog="python -m benchmarks cluster", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(words).quick
    findings, version = clients.measured(quick)
    findings += a_client_each.measured(quick)
    show(findings, "clients of a cluster")
    if not quick:
        write(findings, "cluster", {"valkey": version, "rounds": clients.ROUNDS}, intro=clients.INTRO)
    findings = list(first_token.measured(quick))
    show(findings, first_token.INTRO)
    if not quick:
        write(findings, "cluster_engine", {"rounds": first_token.ROUNDS}, intro=first_token.INTRO)
        tables.rewrite()
