"""Measurements and their targets, printed in the terminal and written as JSON and Markdown."""

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
    """One measurement. `at_least` or `at_most` is its target, if it has one."""

    work: str
    against: str
    what: str  # GB/s, CPU s/GB, ...
    measured: str  # the compared figures, as text
    value: float  # their ratio, or the figure itself
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""  # a remark, such as which side waited

    @property
    def target(self) -> str:
        """Return the target as text; empty without one."""
        if self.at_least is not None:
            return f"≥ {self.at_least:.3g}"
        return f"≤ {self.at_most:.3g}" if self.at_most is not None else ""

    @property
    def met(self) -> bool | None:
        """Return whether the target was met; None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return self.value <= self.at_most if self.at_most is not None else None

    @property
    def cells(self) -> list[str]:
        """Return the cells of its row in the table."""
        met = {True: "yes", False: "**no**", None: ""}[self.met]
        return [self.work, self.against, self.what, self.measured, f"{self.value:.3g}", self.target, met, self.note]


COLUMNS = ["work", "against", "", "measured", "ratio or figure", "target", "met", "note"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def show(findings: list[Finding], title: str) -> None:
    """Print the findings in the terminal, under a title."""
    table = Table(*COLUMNS, title=title, title_justify="left")
    for finding in findings:
        style = {True: "green", False: "red", None: ""}[finding.met]
        table.add_row(*(cell.replace("**", "") for cell in finding.cells), style=style)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    aimed = [finding for finding in findings if finding.met is not None]
    print(f"{sum(bool(finding.met) for finding in aimed)} of {len(aimed)} targets met")


def write(findings: list[Finding], name: str, about: dict[str, Any], *, intro: str) -> None:
    """Write the findings to `results/NAME.json` and `results/NAME.md`. `about` describes the machine and the
    versions.
    """
    RESULTS.mkdir(exist_ok=True)
    found = {"machine": {**machine(), **about}, "findings": [{**asdict(f), "met": f.met} for f in findings]}
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = [" | ".join(("", *cells, "")).strip() for cells in (COLUMNS, ["---"] * len(COLUMNS))]
    lines += [" | ".join(("", *finding.cells, "")).strip() for finding in findings]
    (RESULTS / f"{name}.md").write_text(f"{intro}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
