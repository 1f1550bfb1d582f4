"""Parts of the server's CPU time: samples of `perf`, grouped by library and symbol."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.findings import RESULTS

KEPT = RESULTS / "profile.json"
CORE = {path.stem for path in Path(__file__).parents[1].glob("kvpage_server/core/native/*.pyx")}

PARTS = ("kernel, copying", "kernel, the rest", "hashing", "core", "interpreter", "others")


class Sample(NamedTuple):
    """A line of perf's report."""

    percent: float
    library: str
    symbol: str


_LINE = re.compile(r"\s*([\d.]+)%\s+(\S+)\s+\[.\]\s+(.*\S)")


def samples(report: str) -> list[Sample]:
    """Parse the output of `perf report --fields overhead,dso,symbol`."""
    return [Sample(float(line[1]), line[2], line[3]) for line in map(_LINE.match, report.splitlines()) if line]


def part_of(library: str, symbol: str) -> str:
    """Return the one of PARTS to which a symbol belongs."""
    if library.startswith("["):  # [kernel.kallsyms], [vdso]
        return "kernel, copying" if "copy" in symbol or "rep_movs" in symbol else "kernel, the rest"
    if symbol.startswith("XXH"):
        return "hashing"
    name = library.split(".")[0]
    if name in CORE:
        return "core"
    return "interpreter" if name.startswith(("libpython", "python")) else "others"


def shares(found: list[Sample]) -> dict[str, float]:
    """Return the percentage of each part."""
    parts: defaultdict[str, float] = defaultdict(float)
    for sample in found:
        parts[part_of(sample.library, sample.symbol)] += sample.percent
    return {part: parts[part] for part in PARTS}


def keep(path: str, micros: float, parts: dict[str, float]) -> None:
    """Store the cost of a page of a path: microseconds, and the percentages of the parts."""
    known = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    known[path] = {"micros": round(micros, 2), **{part: round(share, 1) for part, share in parts.items()}}
    KEPT.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


def table() -> str:
    """Return the table of all profiled paths."""
    known = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    head = ["path", "µs of CPU a page", *PARTS]
    rows = [[path, f"{of['micros']:.1f}", *(f"{of[part]:.0f} %" for part in PARTS)] for path, of in known.items()]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
