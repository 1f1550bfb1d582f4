"""What the engine is asked for and what it answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.blocks import AgentBlocks, Arrays, KVBlock
from engine.kvcache import Cache
from engine.singly import Sampler


class PromptError(ValueError):
    """A prompt that the model cannot be given."""


class EngineClosedError(RuntimeError):
    """The engine was drained or shut down and takes no more prompts."""


class EmptyPromptError(PromptError):
    """A prompt without a token."""


class PromptTooLongError(PromptError):
    """A prompt that leaves no room for an answer in the model's context."""


class UnknownTokenError(PromptError):
    """A prompt with an id that is not in the model's vocabulary."""


@dataclass(frozen=True, slots=True)
class CompletedGeneration:
    """A finished answer, and the context to go on from."""

    uid: int
    agent_id: str
    text: str
    tokens: tuple[int, ...]  # what was generated, the end-of-text token left out
    finish_reason: str  # "stop" or "length"
    blocks: AgentBlocks  # prompt and answer with its end-of-text token; the receiver's to free; empty when not kept
    prompt_tokens: int
    tokens_reused: int  # of the prompt, taken from `cache`
    time_to_first_token: float  # seconds since submit
    not_kept: str | None = None  # why there is no context to go on from


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
    stop: tuple[str, ...]
    detokenizer: Any
    submitted: float
    reserved: list[int] = field(default_factory=list)  # ids for the blocks to be made
    tokens: list[int] = field(default_factory=list)  # the answer
    first_token: float = 0.0
    states: dict[int, Arrays] = field(default_factory=dict)  # what the layers carried at the checkpoints passed

    @property
    def capacity(self) -> int:
        """Tokens that its context may come to have."""
        return len(self.prompt) + self.max_tokens

    @property
    def held(self) -> list[int]:
        """The ids of the blocks on which it holds a reference."""
        return [*(block.block_id for block in self.shared), *self.reserved]

    def add(self, token: int, *, ends: bool) -> None:
        """Take the next token; one that `ends` the text is not part of it."""
        self.first_token = self.first_token or time.perf_counter()
        if not ends:
            self.tokens.append(token)
            self.detokenizer.add_token(token)

    def stopped_at(self) -> int:
        """Where in the text the first stop string begins; -1 while there is none."""
        text = self.detokenizer.text if self.stop else ""
        return min((at for word in self.stop if (at := text.find(word)) >= 0), default=-1)
