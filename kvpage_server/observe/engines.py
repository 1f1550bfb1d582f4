"""Statistics that engines publish: their names, and the prompt tokens that each of their tiers supplied.

Every few seconds, each engine publishes a JSON object on the channel of its user. Any client that may publish there can
send other messages, too. So invalid messages are ignored, names are cut, and the number of engines is limited.
"""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

CHANNEL = b"kvpage:engines"  # with ":" and a user's name, the channel of that user; by itself for engines without one
ALL_CHANNELS = CHANNEL + b"*"
TIERS = ("hot", "prefix", "page", "cold")  # the tiers that supply contexts
COMPUTED = "none"  # the source of tokens that no tier had
MOST_BYTES = 4096  # bytes of a message
MOST_ENGINES = 100
MOST_USERS = 100  # users with sums of their own
MOST_LETTERS = 100  # characters of a name
MOST_COUNT = 1 << 62  # every count is less
SILENT_SECONDS = 16.0  # seconds without a message after which an engine counts as disconnected: three messages


@dataclass(frozen=True, slots=True)
class TierFigures:
    """The use of one tier of an engine since the engine's start."""

    hits: int = 0
    tokens: int = 0  # prompt tokens that the tier supplied
    bytes: int = 0  # bytes that were loaded from it
    seconds: float = 0.0  # the duration of these loads


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Statistics of an engine since its start."""

    name: str  # machine:process
    model: str
    answers: int
    computed: int  # prompt tokens that no tier supplied
    used: int  # bytes of contexts in its memory
    room: int  # limit of these bytes; 0 for no limit
    tiers: Mapping[str, TierFigures]
    prefill_rate: float = 0.0  # tokens a second that it has computed, of all prompts together; 0 if unknown

    @property
    def reused(self) -> int:
        """Prompt tokens that a tier supplied."""
        return sum(tier.tokens for tier in self.tiers.values())

    @property
    def seconds_saved(self) -> float:
        """Seconds of prefill that reuse has saved: the reused tokens at the rate of prefill, less the duration
        of the loads. 0 if the rate is unknown, or if the loads took longer.
        """
        if not self.prefill_rate:
            return 0.0
        return max(self.reused / self.prefill_rate - sum(tier.seconds for tier in self.tiers.values()), 0.0)

    @property
    def tokens(self) -> dict[str, int]:
        """Prompt tokens by source: a tier, or COMPUTED."""
        return {COMPUTED: self.computed} | {name: tier.tokens for name, tier in self.tiers.items()}


@dataclass(frozen=True, slots=True)
class EnginesSeen:
    """Figures of all engines, or of the engines of one user."""

    connected: list[EngineFigures]  # engines with recent messages, sorted by name
    tokens: Mapping[str, int]  # prompt tokens by source, since the first message of each engine


class Engines:
    """The statistics of all engines: the last message of each, and the sums of prompt tokens by user.

    `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By user; "" for CHANNEL and for users above MOST_USERS.
        self._tokens: dict[str, Counter[str]] = {"": Counter()}
        self._last: OrderedDict[tuple[str, str], tuple[float, EngineFigures]] = OrderedDict()  # by user and name

    def receive(self, channel: bytes, raw: bytes) -> None:
        """Process a message `raw` that was published on a channel. Ignore an invalid one."""
        now = parse(raw)
        if now is None:
            return
        user = channel.removeprefix(CHANNEL).removeprefix(b":").decode("utf-8", "backslashreplace")
        if user not in self._tokens and len(self._tokens) > MOST_USERS:
            user = ""
        tokens = self._tokens.setdefault(user, Counter())
        if before := self._last.pop((user, now.name), None):
            was = before[1].tokens
            tokens.update({where: max(count - was[where], 0) for where, count in now.tokens.items()})
        self._last[user, now.name] = self._clock(), now
        if len(self._last) > MOST_ENGINES:
            self._last.popitem(last=False)

    def seen(self, by: str | None = None) -> EnginesSeen:
        """Return the connected engines and the prompt tokens of the user `by`, or of all users if `by` is None."""
        since = self._clock() - SILENT_SECONDS
        found = [received for (user, _), (at, received) in self._last.items() if at >= since and by in (None, user)]
        counts = [each for user, each in self._tokens.items() if by in (None, user)]
        tokens = {where: sum(each[where] for each in counts) for where in (COMPUTED, *TIERS)}
        return EnginesSeen(sorted(found, key=lambda each: each.name), tokens)


def parse(raw: bytes) -> EngineFigures | None:
    """Parse a message; None if it is invalid."""
    try:
        if len(raw) > MOST_BYTES:
            return None
        received = json.loads(raw)
        return EngineFigures(
            str(received["name"])[:MOST_LETTERS],
            str(received["model"])[:MOST_LETTERS],
            _count(received["answers"]),
            _count(received["computed"]),
            _count(received["used"]),
            _count(received["room"]),
            {name: _tier(received["tiers"][name]) for name in TIERS},
            _rate(received.get("prefill_rate") or 0.0),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _tier(received: Mapping[str, object]) -> TierFigures:
    hits, tokens, nbytes = (_count(received[name]) for name in ("hits", "tokens", "bytes"))
    return TierFigures(hits, tokens, nbytes, _rate(received.get("seconds", 0.0)))


def _count(received: object) -> int:
    if not isinstance(received, int) or not 0 <= received < MOST_COUNT:
        raise ValueError(f"a count is a number from 0, got {received!r:.40}")
    return received


def _rate(received: object) -> float:
    """Return a duration or a rate, which engines of earlier versions do not publish."""
    if type(received) not in (int, float) or not 0 <= received < MOST_COUNT:  # type: ignore[operator]
        raise ValueError(f"a duration or a rate is a number from 0, got {received!r:.40}")
    return float(received)  # type: ignore[arg-type]
