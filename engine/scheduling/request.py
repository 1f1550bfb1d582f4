"""What the engine is asked for and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from engine.generation.answer_text import AnswerText
from engine.generation.unbatched import Sampler
from engine.memory.blocks import AgentBlocks, Arrays, KVBlock
from engine.memory.kvcache import Cache
from engine.spec import ModelCacheSpec


class EngineClosedError(RuntimeError):
    """The engine was drained or shut down and takes no more prompts."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. The texts of all of them, one after the other, are the answer's text."""

    uid: int
    token: int
    text: str  # what became readable with it: "" while a character or a stop string may be half said
    ends_text: bool  # the model's end of text, which isn't part of the answer; its text was held back until now
    logprob: float | None = None  # natural logarithm; None unless asked for
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their logprobs, the likeliest first


TokenReceiver = Callable[[Token], None]
PromptReceiver = Callable[[AgentBlocks], None]


@dataclass(frozen=True, slots=True)
class CompletedGeneration:
    """A finished answer, and the context to go on from."""

    uid: int
    agent_id: str
    text: str
    tokens: tuple[int, ...]  # what was generated, the end-of-text token left out
    finish_reason: str  # "stop" or "length"; "error" when `error` was raised
    blocks: AgentBlocks  # prompt and answer with its end-of-text token; the receiver's to free; empty when not kept
    prompt_tokens: int
    tokens_reused: int  # of the prompt, taken from `cache`
    time_to_first_token: float  # seconds since submit
    prefill_seconds: float  # of them, those since it was admitted to the batch
    not_kept: str | None = None  # why there is no context to go on from
    error: Exception | None = None  # what a receiver, the sampler or the model raised, which ended the answer


@dataclass(slots=True)
class Request:
    """A submitted prompt. Until it is finished it holds a reference on the blocks in `shared` and in `reserved`."""

    uid: int
    agent_id: str
    prompt: Sequence[int]  # token ids
    tokens_reused: int
    max_tokens: int
    cache: Cache  # with the tokens that are reused
    shared: tuple[KVBlock, ...]  # full blocks of the caller's cache that the result will go on using
    checkpoints: Sequence[int]  # positions in the prompt at which to keep what the layers carry
    sampler: Sampler | None
    text: AnswerText
    submitted: float  # time.perf_counter(), as the following
    on_token: TokenReceiver | None
    on_prompt: PromptReceiver | None  # None also when it was called
    logprobs: int  # of how many tokens they are asked for
    reserved: list[int] = field(default_factory=list)  # ids for the blocks to be made
    promised: int = 0  # bytes, for all of them
    started: float = 0.0
    tokens: list[int] = field(default_factory=list)  # the answer
    first_token: float = 0.0
    states: dict[int, Arrays] = field(default_factory=dict)  # what the layers carried at the checkpoints passed
    not_kept: str | None = None  # why there will be no context to go on from

    @property
    def capacity(self) -> int:
        """Tokens that its context may come to have."""
        return len(self.prompt) + self.max_tokens

    @property
    def held(self) -> list[int]:
        """The ids of the blocks on which it holds a reference."""
        return [*(block.block_id for block in self.shared), *self.reserved]

    def full_blocks(self, spec: ModelCacheSpec) -> AgentBlocks:
        """Those of its prompt that are made."""
        tokens = tuple(self.prompt[: len(self.shared) * spec.block_tokens])
        return AgentBlocks(self.agent_id, tokens, self.shared, spec.fingerprint)

    def add(self, token: int, *, ends: bool) -> None:
        """Take the next token; one that `ends` the text is not part of it."""
        self.first_token = self.first_token or time.perf_counter()
        if not ends:
            self.tokens.append(token)
            self.text.add(token)

    def told(self, response: Any, *, ends_text: bool) -> Token:
        """What its receiver is told of a token (mlx-lm's GenerationBatch.Response) that was added."""
        text = self.text.read()
        if not self.logprobs:
            return Token(self.uid, response.token, text, ends_text)
        logprobs = response.logprobs
        likeliest = cast("list[int]", mx.argsort(-logprobs)[: self.logprobs].tolist())
        *top, logprob = cast("list[float]", logprobs[mx.array([*likeliest, response.token])].tolist())
        return Token(self.uid, response.token, text, ends_text, logprob, tuple(zip(likeliest, top, strict=True)))

    def completed(
        self,
        reason: str,
        spec: ModelCacheSpec,
        blocks: AgentBlocks | None,
        not_kept: str | None,
        error: Exception | None = None,
    ) -> CompletedGeneration:
        """What is handed out at its end."""
        return CompletedGeneration(
            uid=self.uid,
            agent_id=self.agent_id,
            text=self.text.text,
            tokens=tuple(self.tokens),
            finish_reason=reason,
            blocks=blocks or AgentBlocks(self.agent_id, (), (), spec.fingerprint),
            prompt_tokens=len(self.prompt),
            tokens_reused=self.tokens_reused,
            time_to_first_token=self.first_token - self.submitted,
            prefill_seconds=self.first_token - self.started,
            not_kept=not_kept,
            error=error,
        )
