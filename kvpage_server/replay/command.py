"""What `kvpage replay` does."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

from rich.progress import track

from kvpage_server.replay.clairvoyant import clairvoyant
from kvpage_server.replay.report import Destination, Replay, table, write_json, write_plot
from kvpage_server.replay.simulate import Simulation, simulate, simulate_noeviction
from kvpage_server.replay.trace import read_trace
from kvpage_server.store.eviction.policies import NO_EVICTION, POLICIES, VOLATILE_TTL
from kvpage_server.system.plurals import how_many

CLAIRVOYANT = "clairvoyant"

SIMULATIONS: dict[str, Simulation] = {  # a trace says nothing of expiry: there is nothing for volatile-ttl to choose
    **{name: partial(simulate, make) for name, make in POLICIES.items() if name not in (NO_EVICTION, VOLATILE_TTL)},
    NO_EVICTION: simulate_noeviction,
    CLAIRVOYANT: clairvoyant,
}
USUAL = [name for name in SIMULATIONS if name != NO_EVICTION]
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
    if to.plot:
        importlib.import_module("matplotlib")
    requests = read_trace(trace)
    asked = [block for request in requests for block in request.blocks]
    different = len(set(asked))
    counts = f"{how_many(len(requests), 'request')} for {how_many(len(asked), 'block')}"
    to.terminal.print(f"{counts}, {different:,} of them different")
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
