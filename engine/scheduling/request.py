"""Requests to the batch engine, and its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..generation.sampling import Guarded
from ..generation.text import AnswerText
from ..generation.unbatched import Choice
from ..memory.blocks import AgentBlocks, Arrays, KVBlock
from ..memory.kvcache import Cache
from ..spec import ModelCacheSpec

# -- The settings of the batch engine ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the batch engine."""

    prefill_chunk: int = 512  # tokens of a prompt in one step
    state_budget: int = 64 << 20  # bytes of a prompt's states, without its last one and the answer's
    wait_for_blocks: bool = False  # a prompt waits while the pool is full, instead of an error

    def __post_init__(self) -> None:
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {self.prefill_chunk}")


IMPOSSIBLE = -9999.0  # the log-probability of a forbidden token, as in OpenAI's API: JSON has no infinity


class EngineClosedError(RuntimeError):
    """Error: the engine was drained or shut down, and accepts no prompts."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer, for `on_token`. The concatenated texts of all tokens are the text of the answer."""

    uid: int
    token: int
    text: str  # text completed by it; "" within a character or a possible stop string
    ends_text: bool  # the model's end of text, which is not part of the answer
    logprob: float | None = None  # natural logarithm; None unless requested
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their logprobs, the likeliest first


TokenReceiver = Callable[[Token], None]
PromptReceiver = Callable[[AgentBlocks], None]


@dataclass(frozen=True, slots=True)
class CompletedGeneration:
    """A finished answer, and its context."""

    uid: int
    agent_id: str
    text: str
    tokens: tuple[int, ...]  # without the end-of-text token
    finish_reason: str  # "stop" or "length"; "error" when `error` was raised
    stopped_by: str | None  # the stop string before which the text ends
    blocks: AgentBlocks  # prompt and answer with end of text; the receiver frees them; empty when not kept
    prompt_tokens: int
    tokens_reused: int  # of the prompt, taken from `cache`
    time_to_first_token: float  # seconds since submit
    prefill_seconds: float  # of these, since it joined the batch
    not_kept: str | None = None  # the reason if the context is not kept
    error: Exception | None = None  # raised by a callback, the sampler or the model


class Use(NamedTuple):
    """The part of the caller's cache that a prompt uses, and the states that it keeps."""

    tokens: int  # the reused ones
    shared: tuple[KVBlock, ...]  # full blocks of the cache that the result shares
    carried: dict[int, Arrays]  # states of the cache behind these, by position
    checkpoints: Sequence[int]  # positions in the prompt at which to keep the state
    spare_states: int  # more states that may be kept, without the last one before the prompt's end


@dataclass(slots=True)
class Request:
    """A submitted prompt. It has a reference on the blocks in `shared` and `reserved` until it is finished."""

    uid: int
    agent_id: str
    prompt: Sequence[int]  # token ids
    tokens_reused: int
    max_tokens: int
    cache: Cache  # with the tokens that are reused
    shared: tuple[KVBlock, ...]  # full blocks of the caller's cache that the result shares
    checkpoints: Sequence[int]  # positions in the prompt at which to keep the state
    spare_states: int  # more states that may be kept, without the last one before the prompt's end
    choice: Choice
    guard: Guarded | None  # of the sampler and processors in `choice`, if it has any
    text: AnswerText
    submitted: float  # time.perf_counter(), like `started` and `first_token`
    on_token: TokenReceiver | None
    on_prompt: PromptReceiver | None  # None once it was called
    logprobs: int  # number of likeliest tokens to report
    kept_tokens: int | None = None  # tokens of the context to keep, from its beginning; None for all
    forked: bool = False  # whether the prompt is computed up to its last token, and then shared with `forks`
    forks: list[Request] = field(default_factory=list)  # further answers that wait for the prompt
    computed: bool = False  # whether all of the prompt but its last token is computed
    reserved: list[int] = field(default_factory=list)  # ids of the blocks to be made
    promised: int = 0  # bytes that are reserved for these blocks
    started: float = 0.0
    tokens: list[int] = field(default_factory=list)  # the answer
    first_token: float = 0.0
    states: dict[int, Arrays] = field(default_factory=dict)  # by position: from the caller's cache, and captured since
    not_kept: str | None = None  # the reason if the context will not be kept

    @property
    def capacity(self) -> int:
        """The largest possible number of tokens of its context: prompt and answer."""
        return len(self.prompt) + self.max_tokens

    @property
    def held(self) -> list[int]:
        """Ids of the blocks on which the request has a reference."""
        return [*(block.block_id for block in self.shared), *self.reserved]

    def kept_states(self) -> dict[int, Arrays]:
        """Return the states to store in blocks, by position: the states at checkpoints, the last one within the prompt,
        and of the others the last `spare_states`.
        """
        others = sorted(self.states.keys() - {*self.checkpoints}, reverse=True)
        last = [position for position in others if position < len(self.prompt)][:1]
        spare = [position for position in others if position not in last][: self.spare_states]
        kept = {*self.checkpoints, *last, *spare}
        return {position: state for position, state in self.states.items() if position in kept}

    def full_blocks(self, spec: ModelCacheSpec) -> AgentBlocks:
        """Return the full blocks of its prompt that were made so far, as a context."""
        tokens = tuple(self.prompt[: len(self.shared) * spec.block_tokens])
        return AgentBlocks(self.agent_id, tokens, self.shared, spec.fingerprint)

    def add(self, token: int, *, ends: bool) -> None:
        """Add a token to the answer. If it `ends` the text, only note the time of the first token."""
        self.first_token = self.first_token or time.perf_counter()
        if not ends:
            self.tokens.append(token)
            self.text.add(token)

    def token_event(self, response: Any, *, ends_text: bool) -> Token:
        """Return the argument of `on_token` for a token that was added. `response` is mlx-lm's
        GenerationBatch.Response.
        """
        text = self.text.read()
        if not self.logprobs:
            return Token(self.uid, response.token, text, ends_text)
        logprobs = response.logprobs
        likeliest = cast("list[int]", mx.argsort(-logprobs)[: self.logprobs].tolist())
        shown = mx.maximum(logprobs[mx.array([*likeliest, response.token])], IMPOSSIBLE)
        *top, logprob = cast("list[float]", shown.tolist())
        return Token(self.uid, response.token, text, ends_text, logprob, tuple(zip(likeliest, top, strict=True)))

    def completed(
        self,
        reason: str,
        spec: ModelCacheSpec,
        blocks: AgentBlocks | None,
        not_kept: str | None,
        error: Exception | None = None,
    ) -> CompletedGeneration:
        return CompletedGeneration(
            uid=self.uid,
            agent_id=self.agent_id,
            text=self.text.text,
            tokens=tuple(self.tokens),
            finish_reason=reason,
            stopped_by=self.text.stopped_by,
            blocks=blocks or AgentBlocks(self.agent_id, (), (), spec.fingerprint),
            prompt_tokens=len(self.prompt),
            tokens_reused=self.tokens_reused,
            time_to_first_token=self.first_token - self.submitted,
            prefill_seconds=self.first_token - self.started,
            not_kept=not_kept,
            error=error,
        )
