"""The subset of a run's steps that suffices to make it fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tests.simulation.acting.peers import shown
from tests.simulation.acting.run import Outcome
from tests.simulation.programs.step import MS, Step
from tests.simulation.world.clock import real_monotonic

MOST_TRIES = 120
LONGEST = 40  # seconds of the real clock


def like(one: Outcome, other: Outcome) -> bool:
    """Whether two runs fail in the same way, whatever the numbers and keys."""
    return bool(one.fault) and _kind(one.fault) == _kind(other.fault)


def _kind(fault: str) -> str:
    return re.split(r"b'|\[|\{", re.sub(r"\d+", "", fault.splitlines()[0]))[0]


def fewest(steps: Sequence[Step], fails: Callable[[list[Step]], bool]) -> list[Step]:
    """Some of the steps with which a run still fails: parts are left out, large ones first, as long as it does."""
    left, width, tries, end = list(steps), len(steps) // 2, 0, real_monotonic() + LONGEST
    while width and tries < MOST_TRIES:
        at = 0
        while at < len(left) and tries < MOST_TRIES and real_monotonic() < end:
            without = left[:at] + left[at + width :]
            tries += 1
            if fails(without):
                left = without
            else:
                at += width
        width = width // 2 if real_monotonic() < end else 0
    return left


def as_text(step: Step) -> str:
    """A step as somebody would do it: a line for redis-cli, where it is a command."""
    wait = f"after {step.gap / MS:.3f} ms" if step.gap else ""
    if step.kind == "send":
        return f"{f'client {step.peer}:':<10} {shown(step.words)}   {wait}"
    extra = " ".join(f"{name} {value}" for name, value in step.extra.items())
    who = f"client {step.peer}" if step.peer >= 0 else "the world"
    return f"{who}: {step.kind} {extra} {shown(step.words)}   {wait}"
