"""`kvpage replay`: a simulation of the store's eviction policies on a trace of recorded requests, to compare hit
ratios.
"""

from __future__ import annotations

import heapq
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpage_server import bounded
from kvpage_server.bounded import open_regular
from kvpage_server.page import first_of
from kvpage_server.store.eviction.policies import POLICIES
from kvpage_server.store.eviction.queues import Queues
from kvpage_server.system.terminal import table_of
from kvpage_server.system.text import as_size, plural

# -- Traces in Mooncake's format: the requested blocks of each prompt, and its time ------------------------------------
#
# Each line is an object with ``timestamp`` in milliseconds and ``hash_ids``, the chain of the prompt's blocks. Equal
# ids mean equal content after an equal prefix. (Qin et al.: Mooncake, FAST '25; the repository kvcache-ai/Mooncake.)

_MOST_BLOCKS = 1_000_000  # of a prompt, at most


class TraceError(ValueError):
    """Error: a line of a trace does not have the format. The message has the line and the reason."""


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt of a trace: its time in seconds, and the names of its blocks from the start."""

    second: int
    blocks: list[bytes]


def read_trace(path: Path) -> list[TracedPrompt]:
    """Return all prompts of a trace file in order. Raises TraceError for an invalid line or an empty file, OSError."""
    names: dict[int, bytes] = {}
    requests = []
    with open_regular(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                requests.append(_request(line, names, f"{path}, line {number}"))
    if not requests:
        raise TraceError(f"{path} has no requests")
    return requests


def _request(line: bytes, names: dict[int, bytes], where: str) -> TracedPrompt:
    try:
        found: Any = bounded.parse(line, containers=100, strings=1000, values=_MOST_BLOCKS)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict) or not {"timestamp", "hash_ids"} <= found.keys():
        raise TraceError(f"{where}: must be an object with timestamp and hash_ids")
    milliseconds, ids = found["timestamp"], found["hash_ids"]
    if type(milliseconds) not in (int, float) or not 0 <= milliseconds < 1 << 63:
        raise TraceError(f"{where}: timestamp must be a number of milliseconds, got {milliseconds!r:.40}")
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise TraceError(f"{where}: hash_ids must be a list of whole numbers")
    if len(set(ids)) < len(ids):
        raise TraceError(f"{where}: hash_ids names a block twice; a chain cannot return to one")
    blocks = [names.get(block) or names.setdefault(block, b"%d" % block) for block in ids]
    return TracedPrompt(int(milliseconds) // 1000, blocks)


# -- Upper bound of all policies: a policy that knows the future requests ----------------------------------------------
#
# Belady's algorithm ("A study of replacement algorithms for a virtual-storage computer", 1966) for prefixes. The block
# whose next request is latest is evicted first; of blocks with the same next request, the one furthest from the start
# of its prompt. A request for a block also requests all blocks before it, so chains are evicted from their ends. A
# block without another request is not stored.

_NEVER = -1  # the next request of a block without one


def clairvoyant(trace: Sequence[TracedPrompt], capacity: int) -> Outcome:
    """Simulate the best possible policy, which knows the future, with a capacity in blocks. O(n log n) in the requested
    blocks.
    """
    outcome = Outcome()
    due = _next_uses(trace)
    there: dict[bytes, int] = {}  # stored blocks, with the index of their next request
    latest: list[tuple[int, int, bytes]] = []  # heap of (-next request, -place in the prompt, block)
    for request, nexts in zip(trace, due, strict=True):
        outcome.asked += len(request.blocks)
        hits = next((i for i, block in enumerate(request.blocks) if block not in there), len(request.blocks))
        outcome.hits += hits
        for place, (block, use) in enumerate(zip(request.blocks, nexts, strict=True)):
            if use == _NEVER:
                there.pop(block, None)
                continue
            outcome.written += block not in there
            there[block] = use
            heapq.heappush(latest, (-use, -place, block))
        while len(there) > capacity:
            use, _, block = heapq.heappop(latest)
            if there.get(block) == -use:  # otherwise the heap's entry is outdated
                del there[block]
                outcome.evicted += 1
    return outcome


def _next_uses(trace: Sequence[TracedPrompt]) -> list[list[int]]:
    """Return for each block of each prompt the index of the next prompt that requests it; _NEVER if there is none."""
    following: dict[bytes, int] = {}
    found = []
    for index in range(len(trace) - 1, -1, -1):
        blocks = trace[index].blocks
        found.append([following.get(block, _NEVER) for block in blocks])
        following.update(dict.fromkeys(blocks, index))
    return found[::-1]


# -- Simulation of an engine and a policy: the engine reads the stored prefix, computes the rest and writes it ---------
#
# Like KVPAGEMSET, a write evicts enough for all its blocks before it stores the first one.


@dataclass(slots=True)
class Outcome:
    """Result of a simulation, in numbers of blocks."""

    asked: int = 0  # requested blocks
    hits: int = 0  # of these, the blocks of each prompt before its first missing one
    written: int = 0
    evicted: int = 0

    @property
    def ratio(self) -> float:
        """Share of requested blocks that need not be computed."""
        return self.hits / self.asked if self.asked else 0.0


Simulation = Callable[[Sequence[TracedPrompt], int], Outcome]  # from a trace and a capacity in blocks


def simulate(make: Callable[[], Queues], trace: Sequence[TracedPrompt], capacity: int) -> Outcome:
    """Simulate a trace with a capacity in blocks. `make` creates the eviction policy."""
    policy, outcome = make(), Outcome()
    there: set[bytes] = set()
    for request in trace:
        count_hits(outcome, request, there)
        enter(policy, there, request.blocks[:capacity], request.second, capacity, outcome)
    return outcome


def enter(policy: Queues, there: set[bytes], blocks: list[bytes], second: int, capacity: int, outcome: Outcome) -> None:
    """Store the blocks of a prompt at time `second`, and evict others if necessary. `there` are the stored blocks."""
    policy.now = second
    new = [block for block in blocks if block not in there]
    for block in blocks:
        if block in there:
            policy.used(block)
    outcome.evicted += _evict(policy, there, capacity - len(new))
    for block in new:
        there.add(block)
        policy.used(block)
    outcome.written += len(new)
    policy.follows(blocks)


def _evict(policy: Queues, there: set[bytes], most: int) -> int:
    """Evict blocks in the policy's order until at most `most` are left. Return the number of evicted blocks."""
    before = len(there)
    if before > most:
        for victim in policy.victims():
            assert isinstance(victim, bytes)
            there.remove(victim)
            policy.evicted(victim)
            if len(there) <= most:
                break
    return before - len(there)


def simulate_noeviction(trace: Sequence[TracedPrompt], capacity: int) -> Outcome:
    """Simulate a store that evicts nothing: without free space, it refuses a block and all blocks after it in the
    prompt.
    """
    outcome = Outcome()
    there: set[bytes] = set()
    for request in trace:
        count_hits(outcome, request, there)
        for block in request.blocks:
            if block not in there:
                if len(there) == capacity:
                    break
                outcome.written += 1
                there.add(block)
    return outcome


def count_hits(outcome: Outcome, request: TracedPrompt, there: set[bytes]) -> None:
    """Count a prompt's blocks as requested, and the blocks before the first missing one as hits."""
    outcome.asked += len(request.blocks)
    for block in request.blocks:
        if block not in there:
            break
        outcome.hits += 1


# -- Simulation of several nodes with an equal part of the capacity each: the balance and the cost of spreading --------
#
# A prompt is divided into segments of several blocks. The first block is a segment of its own, because many prompts
# have the same start, and all their blocks would be on one node. The slot of a segment's first block determines its
# node, as in a cluster. Blocks are hits up to the first missing one, whatever its node.

SEGMENTS = [1, 2, 4, 8, 16, 32, 64]  # blocks


@dataclass(slots=True)
class NodeLoad:
    """Load of one node."""

    blocks: int = 0  # blocks that were read or written on it
    prompts: int = 0  # prompts with blocks on it


@dataclass(slots=True)
class Spread:
    """Result of a simulation on several nodes, with segments of `segment` blocks."""

    segment: int
    loads: list[NodeLoad]
    outcome: Outcome = field(default_factory=Outcome)
    prompts: int = 0

    @property
    def nodes_a_prompt(self) -> float:
        """Mean number of nodes with blocks of a prompt."""
        return sum(load.prompts for load in self.loads) / self.prompts

    @property
    def busiest_by_blocks(self) -> float:
        """Blocks read or written on the busiest node, divided by the mean of all nodes."""
        return _over_mean([load.blocks for load in self.loads])

    @property
    def busiest_by_prompts(self) -> float:
        """Prompts with blocks on the busiest node, divided by the mean of all nodes."""
        return _over_mean([load.prompts for load in self.loads])


def _over_mean(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0


def simulate_nodes(
    make: Callable[[], Queues],
    trace: Sequence[TracedPrompt],
    capacity: int,
    nodes: int,
    segment: int,
    lose_at: int | None = None,
) -> Spread:
    """Simulate a trace on `nodes` nodes, which have a capacity of `capacity` blocks together. `make` creates a policy.

    A prompt is divided into segments of `segment` blocks. Before prompt number `lose_at`, the node with the most blocks
    loses all of them, as after a restart.
    """
    policies, there = [make() for _ in range(nodes)], [set[bytes]() for _ in range(nodes)]
    found, room = Spread(segment, [NodeLoad() for _ in range(nodes)]), max(capacity // nodes, 1)
    for number, request in enumerate(trace):
        if number == lose_at:
            lost = max(range(nodes), key=lambda node: len(there[node]))
            policies[lost], there[lost] = make(), set()
        places = _places(request.blocks, nodes, segment)
        here = {block for block, node in zip(request.blocks, places, strict=True) if block in there[node]}
        count_hits(found.outcome, request, here)
        found.prompts += 1
        for node in dict.fromkeys(places):
            blocks = [block for block, place in zip(request.blocks, places, strict=True) if place == node][:room]
            enter(policies[node], there[node], blocks, request.second, room, found.outcome)
            found.loads[node].blocks += len(blocks)
            found.loads[node].prompts += 1
    return found


def _places(blocks: Sequence[bytes], nodes: int, segment: int) -> list[int]:
    """Return the node of each block."""
    firsts = [blocks[first_of(place, segment)] for place in range(len(blocks))]
    return [key_slot(first) * nodes // REDIS_CLUSTER_HASH_SLOTS for first in firsts]


# -- Results as a table, as JSON, and as a picture ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Destination:
    """Outputs of the results: the terminal, and files for JSON and for a chart, if they are requested."""

    terminal: Console
    json: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of the simulation of one policy, with a capacity in blocks."""

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
    """Write all results to a JSON file, in blocks. `ratio` is the share of requested blocks that were hits."""
    rows = [
        {"policy": replay.policy, "capacity": replay.capacity, "ratio": replay.outcome.ratio, **asdict(replay.outcome)}
        for replay in replays
    ]
    path.write_text(
        json.dumps({"trace": trace.name, "block_bytes": block_bytes, "replays": rows}, indent=1) + "\n",
        encoding="utf-8",
    )


def write_plot(title: str, replays: list[Replay], path: Path) -> None:
    """Write a chart of the prefix hit ratio over the capacity, with a line for each policy. Needs matplotlib."""
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


# -- Results of several nodes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpreadReplay:
    """Results of the same trace on several nodes: without a failure, and with the loss of a node's blocks in the
    middle.
    """

    whole: Spread
    with_loss: Spread

    @property
    def lost(self) -> int:
        """Blocks that have to be computed again because of the loss: the difference of the hits."""
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
        figures = replay.figures()
        busiest = (f"{figures[name]:.2f} x mean" for name in ("busiest_by_blocks", "busiest_by_prompts"))
        lost = f"{replay.lost:,} ({figures['lost_ratio']:.2%})"
        found.add_row(
            f"{replay.whole.segment}",
            f"{figures['ratio']:.2%}",
            f"{figures['nodes_a_prompt']:.2f}",
            *busiest,
            lost,
        )
    return found


def write_spread_json(trace: Path, nodes: int, capacity: int, replays: list[SpreadReplay], path: Path) -> None:
    all_figures = {"trace": trace.name, "nodes": nodes, "capacity": capacity, "replays": [r.figures() for r in replays]}
    path.write_text(json.dumps(all_figures, indent=1) + "\n", encoding="utf-8")


def write_spread_plot(title: str, replays: list[SpreadReplay], path: Path) -> None:
    """Write a chart of the balance of nodes, and of the nodes of a prompt, over the size of segments. Needs
    matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    all_figures = [replay.figures() for replay in replays]
    segments = [replay.whole.segment for replay in replays]
    for name, label in (("busiest_by_blocks", "blocks moved"), ("busiest_by_prompts", "prompts that ask it")):
        left.plot(segments, [figures[name] for figures in all_figures], "o-", label=label)
    left.set_ylabel("busiest node / mean of all nodes")
    left.legend()
    right.plot(segments, [figures["nodes_a_prompt"] for figures in all_figures], "o-", color="C2")
    right.set_ylabel("nodes that a prompt asks")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(segments, [str(segment) for segment in segments])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("blocks of a segment")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


# -- `kvpage replay` ---------------------------------------------------------------------------------------------------

CLAIRVOYANT = "clairvoyant"
NO_EVICTION = "noeviction"

SIMULATIONS: dict[str, Simulation] = {  # without volatile-ttl, because a trace has no TTLs
    **{name: partial(simulate, policy.order) for name, policy in POLICIES.items() if policy.evicts_any},
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
    """Simulate a trace under each policy with each capacity in blocks. Print a table, and write the requested files.

    `block_bytes` converts blocks to bytes in the table. Raises TraceError, OSError, and ModuleNotFoundError when
    matplotlib is needed and missing.
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
    """Simulate a trace on several nodes with each size of segments. Print a table, and write the requested files.

    Raises as `run`.
    """
    requests = _read(trace, to)
    replays = [
        SpreadReplay(
            simulate_nodes(POLICIES[policy].order, requests, capacity, nodes, segment),
            simulate_nodes(POLICIES[policy].order, requests, capacity, nodes, segment, lose_at=len(requests) // 2),
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
    """Return the prompts of a trace, and print their number. Raises as `run`."""
    if to.plot:
        importlib.import_module("matplotlib")
    requests = read_trace(trace)
    asked = [block for request in requests for block in request.blocks]
    counts = f"{plural(len(requests), 'request')} for {plural(len(asked), 'block')}"
    to.terminal.print(f"{counts}, {len(set(asked)):,} of them different")
    return requests
