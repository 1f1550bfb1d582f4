"""What was measured as a table, as JSON, and as a picture."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kvpage_server import __version__
from kvpage_server.bench.measure import Figures


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of call, measured against each server and against raw sockets."""

    work: str
    op: str  # write or read
    figures: dict[str, Figures]  # by server
    raw_gb_per_s: float


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "kvpage": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def table(rows: list[Row]) -> Table:
    servers = list(rows[0].figures)
    found = Table(title="raw: the same bytes over bare sockets on this machine", title_justify="left")
    found.add_column("work")
    found.add_column("")
    for server in servers:
        for column in (f"{server}\nGB/s", "of raw", "CPU s/GB", "p50 ms", "p99 ms"):
            found.add_column(column, justify="right")
    found.add_column("raw\nGB/s", justify="right")
    before = ""
    for row in rows:
        cells = ["" if row.work == before else row.work, row.op]
        before = row.work
        for figures in row.figures.values():
            cpu = "" if figures.cpu_s_per_gb is None else f"{figures.cpu_s_per_gb:.2f}"
            of_raw = f"{figures.gb_per_s / row.raw_gb_per_s:.0%}"
            cells += [f"{figures.gb_per_s:.2f}", of_raw, cpu, f"{figures.p50_ms:.2f}", f"{figures.p99_ms:.2f}"]
        found.add_row(*cells, f"{row.raw_gb_per_s:.2f}")
    return found


def write_json(rows: list[Row], path: Path) -> None:
    path.write_text(
        json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8"
    )


def write_plot(rows: list[Row], path: Path) -> None:
    """GB/s of every row as bars, writes and reads side by side, raw sockets as a line above. Needs matplotlib."""
    from matplotlib.figure import Figure

    servers = list(rows[0].figures)
    works = list(dict.fromkeys(row.work for row in rows))
    figure = Figure(figsize=(12, 1.2 + 0.42 * len(works)), layout="constrained")
    for axes, op in zip(figure.subplots(1, 2, sharey=True), ("write", "read"), strict=True):
        found = [row for row in rows if row.op == op]
        height = 0.8 / len(servers)
        for i, server in enumerate(servers):
            bars = [(works.index(row.work), row.figures[server].gb_per_s) for row in found if server in row.figures]
            places = [work + (i + 0.5) * height - 0.4 for work, _ in bars]
            axes.barh(places, [speed for _, speed in bars], height * 0.92, label=server)
        ceilings = [works.index(row.work) for row in found]
        axes.plot([row.raw_gb_per_s for row in found], ceilings, "|", color="black", ms=14, label="raw sockets")
        axes.set_title(op)
        axes.set_xlabel("GB/s")
        axes.set_yticks(range(len(works)), works)
        axes.grid(axis="x", alpha=0.3)
    figure.axes[0].invert_yaxis()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)
