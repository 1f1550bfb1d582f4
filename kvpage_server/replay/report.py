"""What was replayed as a table, as JSON, and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvpage_server.replay.simulate import Outcome


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the figures go: a table always, files where they are asked for."""

    terminal: Console
    json: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """One trace under one policy with room for `capacity` blocks."""

    policy: str
    capacity: int
    outcome: Outcome


def table(replays: list[Replay], block_bytes: int) -> Table:
    """For the terminal."""
    found = Table(box=None, header_style="bold", pad_edge=False)
    found.add_column("policy")
    for column in ("blocks", "prefix hits", "read", "written", "evicted"):
        found.add_column(column, justify="right")
    before = replays[0].policy
    for replay in replays:
        if replay.policy != before:
            found.add_row()
        before, outcome = replay.policy, replay.outcome
        sizes = [decimal(count * block_bytes) for count in (outcome.hits, outcome.written, outcome.evicted)]
        found.add_row(replay.policy, f"{replay.capacity:,}", f"{outcome.ratio:.2%}", *sizes)
    return found


def write_json(trace: Path, replays: list[Replay], block_bytes: int, path: Path) -> None:
    """Every figure, in blocks; `ratio` is hits of all that was asked for."""
    rows = [
        {"policy": replay.policy, "capacity": replay.capacity, "ratio": replay.outcome.ratio, **asdict(replay.outcome)}
        for replay in replays
    ]
    path.write_text(json.dumps({"trace": trace.name, "block_bytes": block_bytes, "replays": rows}, indent=1) + "\n")


def write_plot(title: str, replays: list[Replay], path: Path) -> None:
    """Prefix hit ratio over capacity, a line a policy. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(replay.policy for replay in replays):
        points = sorted((r.capacity, r.outcome.ratio * 100) for r in replays if r.policy == policy)
        bound = policy == "clairvoyant"
        axes.plot(*zip(*points, strict=True), "--" if bound else "o-", color="black" if bound else None, label=policy)
    axes.set_xscale("log")
    capacities = sorted({replay.capacity for replay in replays})
    axes.set_xticks(capacities, [f"{capacity:,}" for capacity in capacities])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("room, in blocks")
    axes.set_ylabel("prefix hits, % of blocks asked for")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
