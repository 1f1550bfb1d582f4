"""Tables and the picture of docs/performance.md and docs/scaling.md, from the measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import shares
from benchmarks.cluster import tables as cluster
from benchmarks.findings import RESULTS, Finding, table
from benchmarks.pages import single_commands
from benchmarks.pages.batches import MIXED, OURS, PIECES, REDIS, SIZES, VALKEY
from benchmarks.pages.rounds import CPU, SPEED
from benchmarks.pages.single_commands import LMCACHE_SIZES
from benchmarks.pages.work import ORDERS, mixed_name

# -- The tables of docs/performance.md: `results/pages-KIND.json` ----------------------------------------

OPS = ("read", "write")
ENGINES = next(iter(ORDERS))
SMALL, LARGE = [size for size in SIZES if size <= 4], [size for size in SIZES if size > 4]


class Found:
    """Measurements, by work and compared server."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = list(findings)
        self._by_name = {(each.work, each.against, each.what): each for each in self.findings}

    def one(self, work: str, against: str, what: str) -> Finding:
        """Return a measurement. Raises KeyError if it is missing."""
        return self._by_name[work, against, what]

    def knows(self, work: str, against: str, what: str) -> bool:
        """Return whether a measurement exists."""
        return (work, against, what) in self._by_name

    def ratio(self, works: Sequence[str], against: str, what: str) -> float:
        """Return the worst ratio of several works: the largest of CPU time, the smallest of others."""
        ratios = [self.one(work, against, what).value for work in works]
        return max(ratios) if what.startswith("CPU") else min(ratios)


def found() -> Found:
    """Return the measurements of all files in `results/`."""
    findings: list[Finding] = []
    for path in sorted(RESULTS.glob("pages-*.json")):
        kept: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["findings"]
        findings += [Finding(**{name: value for name, value in each.items() if name != "met"}) for each in kept]
    return Found(findings)


Works = list[str]  # that share a figure; `{op}` in them is read or write, `{theirs}` what LMCache calls it
THEIRS = {"read": "load", "write": "store"}


def _pages(size: int, orders: Iterable[str] = ORDERS, more: str = "") -> Works:
    return [f"{{op}} {SIZES[size]} pages of {size} KiB, {order}{more}" for order in orders]


def _mixed(more: str = "") -> Works:
    return [f"{{op}} {mixed_name(MIXED)}, {order}{more}" for order in ORDERS]


def _alone(count: int) -> list[Works]:
    return [[single_commands.alone_name("{op}", size, count)] for size in single_commands.ALONE_SIZES]


BATCH, ALONE = (CPU, SPEED), (single_commands.CPU, single_commands.RATE)
SUMMARY: list[tuple[str, str, tuple[str, str], list[Works]]] = [
    ("Valkey 9.1, 900 pages of 1 / 4 KiB", VALKEY, BATCH, list(map(_pages, SMALL))),
    ("Valkey 9.1, 256 pages of 16 / 32 / 64 / 256 KiB", VALKEY, BATCH, list(map(_pages, LARGE))),
    ("Valkey 9.1, 256 pages of 3 bytes to 300 KB", VALKEY, BATCH, [_mixed()]),
    (
        "Valkey 9.1, blocks of 2 / 5.6 MiB, each beside a value",
        VALKEY,
        BATCH,
        [[f"{{op}} 8 blocks of {size} MiB"] for size in (2, 5.6)],
    ),
    ("Valkey 9.1, blocks of 512 pages beside 512 values", VALKEY, BATCH, [[f"{{op}} 8 blocks of 2 MiB, {PIECES}"]]),
    *(
        (
            f"Valkey 9.1, one page of 4 / 16 / 64 / 256 KiB at a time, {single_commands.spell_sockets(count)}",
            VALKEY,
            ALONE,
            _alone(count),
        )
        for count in single_commands.ALONE_TARGETS
    ),
    (
        "Valkey 9.1, LMCache's own benchmark, 64 / 256 / 2048 KB",
        VALKEY,
        BATCH,
        [[f"LMCache, {{theirs}} values of {size} KB"] for size in LMCACHE_SIZES],
    ),
    (
        "redis-server 7.0, 256 pages of 16 / 32 / 64 / 256 KiB",
        REDIS,
        BATCH,
        [_pages(size, [ENGINES]) for size in LARGE],
    ),
]


def summary(known: Found) -> str:
    """Return the table of all kinds: the ordinary client, and the worst of three orders of keys. Missing measurements
    are omitted.
    """

    def cell(against: str, what: str, op: str, all_works: list[Works]) -> str:
        ratios = (
            known.ratio([work.format(op=op, theirs=THEIRS[op]) for work in works], against, what) for works in all_works
        )
        return " / ".join(f"{ratio:.2g}" for ratio in ratios)

    head = ["times that of", "CPU time, reading", "CPU time, writing", "rate, reading", "rate, writing"]
    rows = (
        [label, *(cell(against, what, op, works) for what in names for op in OPS)]
        for label, against, names, works in SUMMARY
        if known.knows(works[0][0].format(op="read", theirs=THEIRS["read"]), against, names[0])
    )
    return table(head, rows)


def batches(known: Found, more: str = "") -> str:
    """Return the table of CPU time relative to Valkey's, with GB/s in brackets, by size and order of keys."""

    def cell(work: str) -> str:
        return f"{known.one(work, VALKEY, CPU).value:.2f} ({known.one(work, VALKEY, SPEED).value:.2f})"

    head = ["pages", *(f"{op}, {order}" for op in OPS for order in ORDERS)]
    works = {f"{count} of {size} KiB": _pages(size, more=more) for size, count in SIZES.items()}
    works[mixed_name(MIXED)] = _mixed(more)
    rows = ([label, *(cell(work.format(op=op)) for op in OPS for work in each)] for label, each in works.items())
    return table(head, rows)


def batches_by_page_client(known: Found) -> str:
    """Return the same table for PageClient."""
    return batches(known, ", PageClient")


def alone(known: Found) -> str:
    """Return the table of single commands: CPU time and rate relative to Valkey's, and our microseconds."""
    cpu, rate = ALONE

    def cell(work: str) -> str:
        ours = known.one(work, VALKEY, cpu)
        micros = ours.measured.split(" / ")[0]
        return f"{ours.value:.2f} ({known.one(work, VALKEY, rate).value:.2f}), {micros} µs"

    kinds = [(op, count) for op in ("write", "read") for count in single_commands.ALONE_TARGETS]
    head = ["page", *(f"{op}, {single_commands.spell_sockets(count)}" for op, count in kinds)]
    return table(
        head,
        (
            [f"{size} KiB", *(cell(single_commands.alone_name(op, size, count)) for op, count in kinds)]
            for size in single_commands.ALONE_SIZES
        ),
    )


def others(known: Found) -> str:
    """Return the findings with a target that are in no other table."""
    elsewhere = (" pages of ", " a page of ")
    rows = [
        [each.work, each.against, each.what, each.measured, f"{each.value:.3g}", each.target]
        for each in known.findings
        if each.target and not (each.against == VALKEY and any(words in each.work for words in elsewhere))
    ]
    return table(["work", "beside", "", "measured", "ratio or figure", "target"], rows)


def missed(known: Found) -> str:
    """Return the list of targets that were not met."""
    rows = [
        [each.work, each.against, each.what, each.measured, f"{each.value:.3g}", each.target]
        for each in known.findings
        if each.met is False
    ]
    return table(["work", "beside", "", "measured", "ratio or figure", "target"], rows) if rows else "None.\n"


TABLES: dict[str, Callable[[Found], str]] = {
    "summary": summary,
    "batches": batches,
    "batches by PageClient": batches_by_page_client,
    "alone": alone,
    "others": others,
    "missed": missed,
}


def page_code() -> str:
    """Return the targets of the lossless code, from the results of `python -m benchmarks page_code`."""
    told = json.loads((RESULTS / "page_code.json").read_text(encoding="utf-8"))["findings"]
    findings = [Finding(**{field: each[field] for field in each if field != "met"}) for each in told]
    rows = [each.cells[:-1] for each in findings if each.met is not None or each.against == "raw blocks"]
    return table(["work", "beside", "", "measured", "ratio or figure", "target", "met"], rows)


# -- The documents: the tables between their marks, written anew -------------------------------------------------------
#
# A mark is a comment that is not shown: `<!-- table: NAME -->` before the table, `<!-- end of table -->` behind it.

ROOT = RESULTS.parent.parent
DOCUMENTS = (ROOT / "docs" / "performance.md", ROOT / "docs" / "scaling.md")
_TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def rewrite() -> None:
    """Write the tables into the documents. Raises KeyError if a measurement is missing."""
    known = found()
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text(encoding="utf-8"), known), encoding="utf-8")


def with_tables(text: str, known: Found) -> str:
    """Return a document's text with the current tables."""

    elsewhere = {"profile": shares.table, "page code": page_code, **cluster.TABLES}

    def written(mark: re.Match[str]) -> str:
        name = mark[2]
        made = elsewhere[name]() if name in elsewhere else TABLES[name](known)
        return f"{mark[1]}\n{made}\n{mark[3]}"

    return _TABLE.sub(written, text)


# -- The picture: CPU seconds a gigabyte of three servers, by size of page ----------------------------------------

BAR_WIDTH = 0.27


def write_picture() -> None:
    """Write `results/pages.png`. Needs matplotlib."""
    from matplotlib.figure import Figure  # part of the extra `bench`, which other commands do not need

    known = found()
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, op in zip(figure.subplots(1, 2, sharey=True), OPS, strict=True):
        for place, server in enumerate((OURS, VALKEY, REDIS)):
            heights = [_cost(known, f"{op} {SIZES[size]} pages of {size} KiB, {ENGINES}", server) for size in SIZES]
            axes.bar([i + (place - 1) * BAR_WIDTH for i in range(len(SIZES))], heights, BAR_WIDTH * 0.94, label=server)
        axes.set_title(op)
        axes.set_xticks(range(len(SIZES)), [f"{size} KiB" for size in SIZES])
        axes.set_ylabel("CPU seconds a gigabyte")
        axes.grid(axis="y", alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(RESULTS / "pages.png", dpi=120)


def _cost(known: Found, work: str, server: str) -> float:
    """Return a server's CPU seconds per GB; the text of a measurement has ours first."""
    ours, theirs = known.one(work, VALKEY if server == OURS else server, CPU).measured.split(" / ")
    return float(ours if server == OURS else theirs)
