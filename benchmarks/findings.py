"""Measurements compared with their targets: in the terminal, as JSON, as Markdown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpage_server.bench import machine

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Finding:
    """One figure. `at_least` or `at_most` is its target, if it has one."""

    work: str
    against: str
    what: str  # GB/s, CPU s/GB, ...
    measured: str  # the figures that were compared, for people
    value: float  # their ratio, or the figure itself
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""  # such as who waited for whom

    @property
    def target(self) -> str:
        """For people."""
        if self.at_least is not None:
            return f"≥ {self.at_least:.3g}"
        return f"≤ {self.at_most:.3g}" if self.at_most is not None else ""

    @property
    def met(self) -> bool | None:
        """Whether the target was; None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return self.value <= self.at_most if self.at_most is not None else None

    @property
    def cells(self) -> list[str]:
        """Its line of a table."""
        met = {True: "yes", False: "**no**", None: ""}[self.met]
        return [self.work, self.against, self.what, self.measured, f"{self.value:.3g}", self.target, met, self.note]


COLUMNS = ["work", "against", "", "measured", "ratio or figure", "target", "met", "note"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def show(findings: list[Finding], title: str) -> None:
    """In the terminal."""
    table = Table(*COLUMNS, title=title, title_justify="left")
    for finding in findings:
        style = {True: "green", False: "red", None: ""}[finding.met]
        table.add_row(*(cell.replace("**", "") for cell in finding.cells), style=style)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    aimed = [finding for finding in findings if finding.met is not None]
    print(f"{sum(bool(finding.met) for finding in aimed)} of {len(aimed)} targets met")


def write(findings: list[Finding], name: str, about: dict[str, Any], *, intro: str) -> None:
    """`results/NAME.json` and `results/NAME.md`."""
    RESULTS.mkdir(exist_ok=True)
    found = {"machine": {**machine(), **about}, "findings": [{**asdict(f), "met": f.met} for f in findings]}
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = [" | ".join(("", *cells, "")).strip() for cells in (COLUMNS, ["---"] * len(COLUMNS))]
    lines += [" | ".join(("", *finding.cells, "")).strip() for finding in findings]
    (RESULTS / f"{name}.md").write_text(f"{intro}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
