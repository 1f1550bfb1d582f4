"""The tables of docs/scaling.md, from the measurements: `results/cluster.json` and `results/cluster_engine.json`."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.findings import RESULTS, table

_OPS = ("write", "read")
_ROWS = (  # of clients.py and a_client_each.py, which need more than this to be imported
    ("three masters, GB/s", "PageClient", "GB/s", False),
    ("three masters, the client's CPU seconds a GB", "PageClient", "client CPU s/GB", False),
    ("one master, times the GB/s of three", "PageClient, one master", "GB/s", True),
    ("three masters behind a gateway, times the GB/s of three", "PageClient, through a gateway", "GB/s", True),
    ("one kvpage-server, times the GB/s of three masters", "PageClient, one kvpage-server", "GB/s", True),
    (
        "two kvpage-servers side by side, times the GB/s of one",
        "PageClient, two kvpage-servers side by side",
        "GB/s",
        True,
    ),
    (
        "two with a client each, times the GB/s of one with one client",
        "two kvpage-servers side by side, a client each",
        "GB/s",
        True,
    ),
)


def _found(name: str) -> list[dict[str, Any]]:
    """Return the measurements in a file of `results/`; empty if there is none."""
    path = RESULTS / f"{name}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["findings"] if path.exists() else []
    return found


def clients() -> str:
    """Return the table of writes and reads, by the size of blocks."""
    known = {(one["work"], one["against"], one["what"]): one for one in _found("cluster")}
    works = [work.removeprefix("write ") for work, who, what in known if (who, what) == ("PageClient", "GB/s")]
    works = list(dict.fromkeys(work for work in works if not work.startswith("read ")))

    def cell(work: str, who: str, what: str, is_ratio: bool) -> str:
        both = [known[f"{op} {work}", who, what] for op in _OPS]
        return " / ".join(f"{one['value']:.2f}" if is_ratio else one["measured"].split(" / ")[0] for one in both)

    rows = [
        [label, *(cell(work, who, what, is_ratio) for work in works)]
        for label, who, what, is_ratio in _ROWS
        if all((f"{op} {work}", who, what) in known for work in works for op in _OPS)
    ]
    return table(["writing / reading", *works], rows)


def coming_back() -> str:
    """Return the table of seconds to the first token, and their ratio to the page server's."""
    cells: dict[str, list[str]] = {}
    heads = dict.fromkeys(["", "page server"])
    for one in _found("cluster_engine"):
        turn, _, name = one["work"].partition(" from ")
        ours, theirs = one["measured"].removesuffix(" s").split(" / ")
        heads[name] = None
        cells.setdefault(turn, [turn, f"{theirs} s"]).append(f"{ours} s ({one['value']:.2f})")
    return table(list(heads), cells.values()) if cells else "Not measured yet.\n"


TABLES = {"clients of several servers": clients, "coming back from several servers": coming_back}
