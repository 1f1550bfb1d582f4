"""What `kvpage replay` does."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

from rich.progress import track

from kvpage_server.replay.clairvoyant import clairvoyant
from kvpage_server.replay.nodes import SEGMENTS, simulate_nodes
from kvpage_server.replay.report import (
    Destination,
    Replay,
    SpreadReplay,
    spread_table,
    table,
    write_json,
    write_plot,
    write_spread_json,
    write_spread_plot,
)
from kvpage_server.replay.simulate import Simulation, simulate, simulate_noeviction
from kvpage_server.replay.trace import TracedPrompt, read_trace
from kvpage_server.store.eviction.policies import NO_EVICTION, POLICIES, VOLATILE_TTL
from kvpage_server.system.plurals import how_many

CLAIRVOYANT = "clairvoyant"

SIMULATIONS: dict[str, Simulation] = {  # a trace says nothing of expiry: there is nothing for volatile-ttl to choose
    **{name: partial(simulate, make) for name, make in POLICIES.items() if name not in (NO_EVICTION, VOLATILE_TTL)},
    NO_EVICTION: simulate_noeviction,
    CLAIRVOYANT: clairvoyant,
}
USUAL = [name for name in SIMULATIONS if name != NO_EVICTION]
ON_NODES = [name for name in USUAL if name in POLICIES]
CAPACITIES = [1_000, 5_000, 10_000, 50_000]


def run(
    trace: Path,
    *,
    policies: list[str],
    capacities: list[int],
    block_bytes: int,
    to: Destination,
) -> None:
    """Replay a trace under each policy with each capacity; show what was found, and write it.

    Raises TraceError, OSError, ModuleNotFoundError when there is nothing to plot with.
    """
    requests = _read(trace, to)
    pairs = [(policy, capacity) for policy in policies for capacity in capacities]
    replays = [
        Replay(policy, capacity, SIMULATIONS[policy](requests, capacity))
        for policy, capacity in track(pairs, console=to.terminal, transient=True)
    ]
    to.terminal.print(table(replays, block_bytes))
    if to.json:
        write_json(trace, replays, block_bytes, to.json)
    if to.plot:
        write_plot(trace.stem.replace("_", " "), replays, to.plot)


def run_nodes(trace: Path, *, policy: str, capacity: int, nodes: int, to: Destination) -> None:
    """Replay a trace on several nodes, cut into segments of several sizes; show what was found, and write it.

    Raises as `run`.
    """
    requests = _read(trace, to)
    replays = [
        SpreadReplay(
            simulate_nodes(POLICIES[policy], requests, capacity, nodes, segment),
            simulate_nodes(POLICIES[policy], requests, capacity, nodes, segment, lose_at=len(requests) // 2),
        )
        for segment in track(SEGMENTS, console=to.terminal, transient=True)
    ]
    to.terminal.print(spread_table(replays))
    if to.json:
        write_spread_json(trace, nodes, capacity, replays, to.json)
    if to.plot:
        title = f"{trace.stem.replace('_', ' ')}, {nodes} nodes, room for {capacity:,} blocks, {policy}"
        write_spread_plot(title, replays, to.plot)


def _read(trace: Path, to: Destination) -> list[TracedPrompt]:
    """The requests. Prints how many there are. Raises as `run`."""
    if to.plot:
        importlib.import_module("matplotlib")
    requests = read_trace(trace)
    asked = [block for request in requests for block in request.blocks]
    counts = f"{how_many(len(requests), 'request')} for {how_many(len(asked), 'block')}"
    to.terminal.print(f"{counts}, {len(set(asked)):,} of them different")
    return requests
