"""How much any policy could have kept: one that knows what will be asked for next.

Belady, "A study of replacement algorithms for a virtual-storage computer" (1966), for prefixes: what is asked for
again last goes first, and of blocks that are asked for together the one furthest from the beginning. Nothing that is
asked for again is behind something that is not, so chains go from their ends. A block that is never asked for again
takes no room at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvpage_server.replay.simulate import Outcome
from kvpage_server.replay.trace import TracedPrompt

_NEVER = -1


def clairvoyant(trace: Sequence[TracedPrompt], capacity: int) -> Outcome:
    """The best possible outcome of a trace with room for `capacity` blocks. O(n log n) in the requested blocks."""
    outcome = Outcome()
    due = _next_uses(trace)
    there: dict[bytes, int] = {}  # and the request that asks for it next
    latest: list[tuple[int, int, bytes]] = []  # heap of (-next use, -place in the prompt); stale ones are passed over
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
            if there.get(block) == -use:
                del there[block]
                outcome.evicted += 1
    return outcome


def _next_uses(trace: Sequence[TracedPrompt]) -> list[list[int]]:
    """For each block of each request, the index of the next request that asks for it."""
    following: dict[bytes, int] = {}
    found = []
    for index in range(len(trace) - 1, -1, -1):
        blocks = trace[index].blocks
        found.append([following.get(block, _NEVER) for block in blocks])
        following.update(dict.fromkeys(blocks, index))
    return found[::-1]
