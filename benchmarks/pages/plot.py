"""README's picture: CPU seconds a gigabyte of three servers, by size of page."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.findings import RESULTS
from benchmarks.pages.batches import OURS, REDIS, SIZES, VALKEY
from benchmarks.pages.rounds import CPU
from benchmarks.pages.tables import ENGINES, OPS, Found, found

WIDTH = 0.27


def write() -> None:
    """`results/pages.png`."""
    known = found()
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, op in zip(figure.subplots(1, 2, sharey=True), OPS, strict=True):
        for place, server in enumerate((OURS, VALKEY, REDIS)):
            heights = [_cost(known, f"{op} {SIZES[size]} pages of {size} KiB, {ENGINES}", server) for size in SIZES]
            axes.bar([i + (place - 1) * WIDTH for i in range(len(SIZES))], heights, WIDTH * 0.94, label=server)
        axes.set_title(op)
        axes.set_xticks(range(len(SIZES)), [f"{size} KiB" for size in SIZES])
        axes.set_ylabel("CPU seconds a gigabyte")
        axes.grid(axis="y", alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(RESULTS / "pages.png", dpi=120)


def _cost(known: Found, work: str, server: str) -> float:
    """Ours stands before the other's."""
    ours, theirs = known.one(work, VALKEY if server == OURS else server, CPU).measured.split(" / ")
    return float(ours if server == OURS else theirs)
