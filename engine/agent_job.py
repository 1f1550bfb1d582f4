"""A prompt of an agent on its way to an answer, and what its callbacks are given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

from engine.scheduling.request import CompletedGeneration, TokenReceiver
from engine.tiers.loading import Loaded, Loading
from engine.tiers.metrics import Tier
from engine.tiers.prefill_claims import Claim
from kvpage_server.tracing import TraceSpan, span


@dataclass(frozen=True, slots=True)
class Reuse:
    """What the store saved an answer."""

    tier: Tier = "none"  # where its context was found
    tokens: int = 0  # of the prompt that were not computed
    restore_seconds: float = 0.0  # from asking the store to having its blocks
    waited_seconds: float = 0.0  # for another prompt that computed the same prefix
    time_to_first_token: float = 0.0  # seconds since submit
    why: str | None = None  # reason, when the store found less than it might have


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    uid: int
    agent_id: str
    text: str
    tokens: tuple[int, ...]  # without the end-of-text token
    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    reuse: Reuse
    not_kept: str | None = None  # why the context could not be kept


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a prompt has come."""

    uid: int
    agent_id: str
    kept: bool  # its context will be
    label: str  # how to show it to people if it is not
    stage: Stage
    prompt: int  # tokens
    reused: int  # of them, found so far
    tier: Tier  # where
    said: int  # tokens of the answer
    seconds: float  # since submit


class Stage(Enum):
    """The states of a prompt::

    SUBMITTED  waits for room to load what the store has of it      -> LOADING, READY
    LOADING    its context is being loaded                          -> WAITING, READY, SUBMITTED
    WAITING    another prompt holds the claim on its prefix         -> READY, SUBMITTED
    READY      can join the batch                                   -> RUNNING, SUBMITTED
    RUNNING    has joined the batch; it may wait there for blocks
    """

    SUBMITTED = auto()
    LOADING = auto()
    WAITING = auto()
    READY = auto()
    RUNNING = auto()


@dataclass(slots=True, eq=False)
class Job:
    """A prompt on its way to an answer."""

    uid: int
    agent_id: str
    tokens: tuple[int, ...]
    options: dict[str, Any]  # of the batch's submit
    keep: bool
    label: str  # how to show the context to people if it is not kept
    on_token: TokenReceiver | None
    on_done: Callable[[Answer], None]
    on_error: Callable[[Exception], None]
    submitted: float = field(default_factory=time.perf_counter)
    stage: Stage = Stage.SUBMITTED
    error: Exception | None = None  # why it will not be answered
    loading: Loading | None = None
    loaded: Loaded | None = None  # its blocks are held under the agent's id until it runs
    restore_seconds: float = 0.0
    claim: Claim | None = None
    reach: int = 0  # tokens known when the claim was made
    waiting_since: float = 0.0  # time.perf_counter()
    waited: float = 0.0  # seconds
    not_before: int = 0  # the pool was too full: load again when so many answers have ended
    said: int = 0  # tokens of the answer
    joined: float = 0.0  # the batch; time.perf_counter()
    running: int | None = None  # its uid in the batch
    span: TraceSpan = field(default_factory=partial(span, "kvpage.request"))

    @property
    def waits(self) -> bool:
        """Whether another prompt has the claim."""
        return self.claim is not None and self.claim.state == "wait"

    def progress(self) -> JobProgress:
        loaded = self.loaded
        return JobProgress(
            uid=self.uid,
            agent_id=self.agent_id,
            kept=self.keep,
            label=self.label,
            stage=self.stage,
            prompt=len(self.tokens),
            reused=loaded.reach if loaded else 0,
            tier=loaded.tier if loaded and loaded.reach else "none",
            said=self.said,
            seconds=time.perf_counter() - self.submitted,
        )

    def answer(self, done: CompletedGeneration) -> Answer:
        loaded = self.loaded
        reuse = Reuse(
            tier=loaded.tier if loaded and done.tokens_reused else "none",
            tokens=done.tokens_reused,
            restore_seconds=self.restore_seconds,
            waited_seconds=self.waited,
            time_to_first_token=self.joined - self.submitted + done.time_to_first_token,
            why=loaded.why if loaded else None,
        )
        return Answer(
            uid=self.uid,
            agent_id=self.agent_id,
            text=done.text,
            tokens=done.tokens,
            finish_reason=done.finish_reason,
            prompt_tokens=done.prompt_tokens,
            reuse=reuse,
            not_kept=done.not_kept,
        )
