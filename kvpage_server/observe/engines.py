"""What engines tell of themselves on a channel: who they are, and what each of their tiers has spared them.

Every few seconds each of them publishes a JSON object. Who may publish there may tell anything: what makes no sense is
passed over, names are cut, and there are so many engines at most.
"""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

CHANNEL = b"kvpage:engines"
TIERS = ("hot", "prefix", "page", "cold")  # where contexts are found
COMPUTED = "none"  # where the tokens come from that were found nowhere
MOST_BYTES = 4096  # of what is told
MOST_ENGINES = 100
MOST_LETTERS = 100  # of a name
MOST_COUNT = 1 << 62
SILENT_SECONDS = 16.0  # after which an engine is not connected any more: three times it has told nothing


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What a tier of an engine's memory was good for, since the engine's start."""

    hits: int = 0
    tokens: int = 0  # of prompts, that were not computed
    bytes: int = 0  # loaded


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """An engine."""

    name: str  # machine:process
    model: str
    answers: int
    computed: int  # tokens of prompts
    used: int  # bytes of contexts in its memory
    room: int  # and how many there may be; 0: no limit
    tiers: Mapping[str, TierFigures]

    @property
    def tokens(self) -> dict[str, int]:
        """Of all prompts, by where they were found; those that were computed under COMPUTED."""
        return {COMPUTED: self.computed} | {name: tier.tokens for name, tier in self.tiers.items()}


class Engines:
    """Those that were heard lately, and what all of them have told so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = Counter(dict.fromkeys((COMPUTED, *TIERS), 0))  # of prompts, since this began to listen
        self._clock = clock
        self._last: OrderedDict[str, tuple[float, EngineFigures]] = OrderedDict()  # when, and what

    def heard(self, raw: bytes) -> None:
        """One of them has told this."""
        now = parse(raw)
        if now is None:
            return
        if before := self._last.pop(now.name, None):
            was = before[1].tokens
            self.tokens.update({where: max(count - was[where], 0) for where, count in now.tokens.items()})
        self._last[now.name] = self._clock(), now
        if len(self._last) > MOST_ENGINES:
            self._last.popitem(last=False)

    def connected(self) -> list[EngineFigures]:
        """By name."""
        since = self._clock() - SILENT_SECONDS
        return sorted((figures for at, figures in self._last.values() if at >= since), key=lambda each: each.name)


def parse(raw: bytes) -> EngineFigures | None:
    """What one has told; None for what makes no sense."""
    try:
        if len(raw) > MOST_BYTES:
            return None
        told = json.loads(raw)
        return EngineFigures(
            str(told["name"])[:MOST_LETTERS],
            str(told["model"])[:MOST_LETTERS],
            _count(told["answers"]),
            _count(told["computed"]),
            _count(told["used"]),
            _count(told["room"]),
            {name: _tier(told["tiers"][name]) for name in TIERS},
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _tier(told: Mapping[str, object]) -> TierFigures:
    return TierFigures(_count(told["hits"]), _count(told["tokens"]), _count(told["bytes"]))


def _count(told: object) -> int:
    if not isinstance(told, int) or not 0 <= told < MOST_COUNT:
        raise ValueError(f"a count is a number from 0, got {told!r:.40}")
    return told
