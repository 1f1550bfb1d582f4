"""A trace through several nodes, each with its share of the room: what spreading prompts over them is worth and costs.

A prompt is cut into segments of some blocks, after its first block, which is a segment of its own: very many prompts
begin alike, and what follows would all be on one node. A segment is named by its first block, and its name's slot says
which node it is on, as in a cluster. Blocks are found up to the first that is missing, on whichever node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvpage_server.replay.simulate import Outcome, count_hits, enter
from kvpage_server.replay.trace import TracedPrompt
from kvpage_server.segments import first_of
from kvpage_server.store.eviction.queues import Queues

SEGMENTS = [1, 2, 4, 8, 16, 32, 64]  # blocks


@dataclass(slots=True)
class NodeLoad:
    """What one node had to do."""

    blocks: int = 0  # that were read or written
    prompts: int = 0  # of which it was asked something


@dataclass(slots=True)
class Spread:
    """The outcome of a trace on several nodes, in blocks."""

    segment: int
    loads: list[NodeLoad]
    outcome: Outcome = field(default_factory=Outcome)
    prompts: int = 0

    @property
    def nodes_a_prompt(self) -> float:
        """The mean number of nodes that a prompt asks."""
        return sum(load.prompts for load in self.loads) / self.prompts

    @property
    def busiest_by_blocks(self) -> float:
        """The blocks that the busiest node moves, divided by the mean of all nodes."""
        return _over_mean([load.blocks for load in self.loads])

    @property
    def busiest_by_prompts(self) -> float:
        """The same, counting prompts."""
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
    """What a trace comes to on so many nodes that have room for `capacity` blocks together.

    Before request `lose_at` the node that has most loses all it has, as one does that is started again empty.
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
    """The node of each block."""
    firsts = [blocks[first_of(place, segment)] for place in range(len(blocks))]
    return [key_slot(first) * nodes // REDIS_CLUSTER_HASH_SLOTS for first in firsts]
