"""Replays a trace with a policy, as an engine would: it reads the stored prefix, computes the rest and writes it.

A write makes room for all its blocks before it stores the first, as KVPAGEMSET does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpage_server.replay.trace import TracedPrompt
from kvpage_server.store.eviction.queues import Queues


@dataclass(slots=True)
class Outcome:
    """The outcome of a trace, in blocks."""

    asked: int = 0
    hits: int = 0  # blocks of prompts up to the first that was not there
    written: int = 0
    evicted: int = 0

    @property
    def ratio(self) -> float:
        """The share of requested blocks that need not be computed."""
        return self.hits / self.asked if self.asked else 0.0


Simulation = Callable[[Sequence[TracedPrompt], int], Outcome]  # of a trace with room for so many blocks


def simulate(make: Callable[[], Queues], trace: Sequence[TracedPrompt], capacity: int) -> Outcome:
    """The outcome of a trace under a policy, with room for `capacity` blocks."""
    policy, outcome = make(), Outcome()
    there: set[bytes] = set()
    for request in trace:
        count_hits(outcome, request, there)
        enter(policy, there, request.blocks[:capacity], request.second, capacity, outcome)
    return outcome


def enter(policy: Queues, there: set[bytes], blocks: list[bytes], second: int, capacity: int, outcome: Outcome) -> None:
    """Store the blocks of a prompt, evicting others if necessary."""
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
    """Evict blocks until at most `most` are left. Returns how many were evicted."""
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
    """What is left of a trace when nothing ever goes: blocks that have no room are refused, with all behind them."""
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
    """Count the requested blocks, and those that need not be computed."""
    outcome.asked += len(request.blocks)
    for block in request.blocks:
        if block not in there:
            break
        outcome.hits += 1
