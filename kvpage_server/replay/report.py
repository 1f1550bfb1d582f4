"""What was replayed as a table, as JSON, and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvpage_server.replay.nodes import Spread
from kvpage_server.replay.simulate import Outcome
from kvpage_server.system.plurals import as_size
from kvpage_server.system.terminal import table_of


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the figures go: always to a table, and to files if asked for."""

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
    found = table_of("policy", "blocks", "prefix hits", "read", "written", "evicted", numbers_from=1)
    before = replays[0].policy
    for replay in replays:
        if replay.policy != before:
            found.add_row()
        before, outcome = replay.policy, replay.outcome
        sizes = [as_size(count * block_bytes) for count in (outcome.hits, outcome.written, outcome.evicted)]
        found.add_row(replay.policy, f"{replay.capacity:,}", f"{outcome.ratio:.2%}", *sizes)
    return found


def write_json(trace: Path, replays: list[Replay], block_bytes: int, path: Path) -> None:
    """All figures, in blocks. `ratio` is the share of requested blocks that were found."""
    rows = [
        {"policy": replay.policy, "capacity": replay.capacity, "ratio": replay.outcome.ratio, **asdict(replay.outcome)}
        for replay in replays
    ]
    path.write_text(
        json.dumps({"trace": trace.name, "block_bytes": block_bytes, "replays": rows}, indent=1) + "\n",
        encoding="utf-8",
    )


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


# -- several nodes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpreadReplay:
    """One trace on several nodes, and again with one of them lost in the middle."""

    whole: Spread
    with_loss: Spread

    @property
    def lost(self) -> int:
        """Blocks that were computed again because of the loss."""
        return self.whole.outcome.hits - self.with_loss.outcome.hits

    def figures(self) -> dict[str, float]:
        whole = self.whole
        return {
            "segment": whole.segment,
            "ratio": whole.outcome.ratio,
            "nodes_a_prompt": whole.nodes_a_prompt,
            "busiest_by_blocks": whole.busiest_by_blocks,
            "busiest_by_prompts": whole.busiest_by_prompts,
            "lost": self.lost,
            "lost_ratio": self.lost / whole.outcome.hits if whole.outcome.hits else 0.0,
        }


def spread_table(replays: list[SpreadReplay]) -> Table:
    columns = ("segment", "prefix hits", "nodes a prompt", "busiest, blocks", "busiest, prompts", "lost with a node")
    found = table_of(*columns, numbers_from=0)
    for replay in replays:
        told = replay.figures()
        busiest = (f"{told[name]:.2f} x mean" for name in ("busiest_by_blocks", "busiest_by_prompts"))
        lost = f"{replay.lost:,} ({told['lost_ratio']:.2%})"
        found.add_row(
            f"{replay.whole.segment}", f"{told['ratio']:.2%}", f"{told['nodes_a_prompt']:.2f}", *busiest, lost
        )
    return found


def write_spread_json(trace: Path, nodes: int, capacity: int, replays: list[SpreadReplay], path: Path) -> None:
    told = {"trace": trace.name, "nodes": nodes, "capacity": capacity, "replays": [r.figures() for r in replays]}
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def write_spread_plot(title: str, replays: list[SpreadReplay], path: Path) -> None:
    """Balance and round trips over the segment's size. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    told = [replay.figures() for replay in replays]
    segments = [replay.whole.segment for replay in replays]
    for name, label in (("busiest_by_blocks", "blocks moved"), ("busiest_by_prompts", "prompts that ask it")):
        left.plot(segments, [figures[name] for figures in told], "o-", label=label)
    left.set_ylabel("busiest node / mean of all nodes")
    left.legend()
    right.plot(segments, [figures["nodes_a_prompt"] for figures in told], "o-", color="C2")
    right.set_ylabel("nodes that a prompt asks")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(segments, [str(segment) for segment in segments])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("blocks of a segment")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
