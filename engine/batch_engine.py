"""Continuous batching over mlx-lm, with contexts that come and go as blocks.

>>> model, tokenizer = engine.model.load("models/smollm2")
>>> spec = ModelCacheSpec.probe(model, tokenizer, model_id="smollm2")
>>> pool = BlockPool(64)
>>> batch = BlockPoolBatchEngine(model, tokenizer, spec, pool)
>>> pages = PageTier("redis://127.0.0.1:9221", spec, pool)
>>>
>>> known = pages.load("alice", batch.encode(prompt))  # None: nothing is known, all is computed
>>> batch.submit("alice", prompt, cache=known, max_tokens=100)
>>> for done in batch.step():
...     print(done.text, done.tokens_reused)
...     pages.save(done.blocks)
...     pool.free(done.blocks.block_ids)  # or keep them, for the agent's next turn
>>> if known:
...     pool.free(known.block_ids)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine import kvcache
from engine.blocks import AgentBlocks, Arrays, KVBlock, check_agent_id
from engine.caches import UnsupportedCacheError
from engine.kvcache import Cache
from engine.pool import BlockPool
from engine.prefix import common_prefix
from engine.spec import ModelCacheSpec

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [batch, vocabulary] -> token ids [batch]


class PromptError(ValueError):
    """A prompt that the model cannot be given."""


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
    blocks: AgentBlocks  # prompt and answer with its end-of-text token; the receiver's to free
    prompt_tokens: int
    tokens_reused: int  # of the prompt, taken from `cache`
    time_to_first_token: float  # seconds since submit


@dataclass(slots=True)
class _Request:
    """A submitted prompt. Holds one reference on `shared` and on `reserved` until it is finished."""

    agent_id: str
    prompt_tokens: int
    tokens_reused: int
    stop: tuple[str, ...]
    shared: tuple[KVBlock, ...]  # full blocks of the caller's cache that the result will go on using
    reserved: list[int]  # ids for all the blocks that may be made
    detokenizer: Any
    submitted: float
    tokens: list[int] = field(default_factory=list)
    first_token: float = 0.0
    checkpoints: frozenset[int] = frozenset()  # positions in the prompt at which to keep what the layers carry
    states: dict[int, Arrays] = field(default_factory=dict)  # what they carried, at those that were passed

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


class BlockPoolBatchEngine:
    """Runs prompts of many agents in one batch. One thread owns it, the model and all arrays.

    Memory is promised at the door: `submit` reserves in `pool` every block that the answer may need and gives back
    at its end what it did not use, so that what was admitted always completes and can always be kept.

    Where layers carry a state (windows, recurrences), a context can be taken up at the end of an answer and at
    checkpoints: blocks' ends, spread evenly over the prompt, as many as `state_budget` bytes a prompt allow.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, spec: ModelCacheSpec, pool: BlockPool, *, state_budget: int = 64 << 20
    ) -> None:
        """Raises UnsupportedCacheError for a kind of cache that mlx-lm cannot batch."""
        if single := {layer.KIND.__name__ for layer in spec.layers if not hasattr(layer.KIND, "merge")}:
            raise UnsupportedCacheError(f"mlx-lm batches no {', '.join(sorted(single))}")
        self.spec = spec
        self.pool = pool
        self._state_budget = state_budget
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self._generator = BatchGenerator(model, stop_tokens=[[token] for token in self._tokenizer.eos_token_ids])
        self._running: dict[int, _Request] = {}
        self._completed: deque[CompletedGeneration] = deque()  # what a `step` that was left early has not handed out

    @property
    def pending(self) -> int:
        """Prompts that were submitted and are not completed."""
        return len(self._running)

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, as mlx-lm's own generate makes them."""
        bos = self._tokenizer.bos_token
        return list(self._tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos)))

    def submit(
        self,
        agent_id: str,
        prompt: str | Sequence[int],
        cache: AgentBlocks | None = None,
        *,
        max_tokens: int = 256,
        sampler: Sampler | None = None,
        stop: str | Sequence[str] = (),
    ) -> int:
        """Queue `prompt`, the whole of it (text or token ids), and return the uid of its completion.

        The tokens that `cache` has in common with the prompt are not computed again; of a prompt that it holds
        entirely, all but the last. Where layers carry a state, they are those up to the furthest that was kept.
        `cache` stays the caller's, untouched, and may be freed at once.
        The answer ends at the model's end of text, at `max_tokens`, where the model's context ends, or before the
        first of the `stop` strings. `sampler` picks each token; without one, the likeliest.

        Raises EmptyPromptError, PromptTooLongError, UnknownTokenError, BlockError for the agent's id,
        IncompatibleBlocksError for another model's cache, ValueError for max_tokens below 1 or an empty stop
        string, and PoolExhaustedError when the blocks the answer may need are not to be had. Nothing is then queued
        or allocated.
        """
        submitted = time.perf_counter()
        check_agent_id(agent_id)
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(map(int, prompt))
        self._check_prompt(tokens)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        if self.spec.context:
            max_tokens = min(max_tokens, self.spec.context - len(tokens))
        reused = self._reusable(cache, tokens)
        shared = cache.blocks[: reused // self.spec.block_tokens] if cache else ()
        restored = self._reconstruct_cache(cache, reused) if cache and reused else None
        reserved = self.pool.allocate(self.spec.blocks_for(len(tokens) + max_tokens) - len(shared))
        self.pool.share(block.block_id for block in shared)
        checkpoints = self._checkpoints(reused, len(tokens))
        uid: int
        (uid,) = self._generator.insert_segments(
            [[tokens[start:end] for start, end in pairwise([reused, *checkpoints, len(tokens)])]],
            max_tokens=[max_tokens],
            caches=[restored],
            all_tokens=[tokens[:reused]],
            samplers=[sampler],
        )
        self._running[uid] = _Request(
            agent_id=agent_id,
            prompt_tokens=len(tokens),
            tokens_reused=reused,
            stop=stop,
            shared=shared,
            reserved=reserved,
            detokenizer=self._tokenizer.detokenizer,
            submitted=submitted,
            checkpoints=frozenset(checkpoints),
        )
        return uid

    def step(self) -> Iterator[CompletedGeneration]:
        """Run the batch and yield each generation as it completes, until none is left.

        What is submitted between two of them joins the batch.
        """
        while self._running or self._completed:
            if not self._completed:
                self._completed.extend(self.step_once())
            while self._completed:
                yield self._completed.popleft()

    def step_once(self) -> list[CompletedGeneration]:
        """Advance every prompt by a chunk and every answer by a token; what completed with it."""
        prompts, responses = self._generator.next()
        for prompt in prompts:
            if prompt.end_of_segment and not prompt.end_of_prompt:
                self._keep_state(prompt.uid)
        return [done for response in responses if (done := self._advance(response))]

    def _check_prompt(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise EmptyPromptError("a prompt has at least one token")
        context = self.spec.context
        if context and len(tokens) >= context:
            raise PromptTooLongError(f"a prompt of {len(tokens)} tokens leaves no room in a context of {context}")
        if wrong := [token for token in tokens if not 0 <= token < self.spec.vocab_size]:
            raise UnknownTokenError(f"token ids are 0 to {self.spec.vocab_size - 1}, got {wrong[0]}")

    def _reusable(self, cache: AgentBlocks | None, tokens: Sequence[int]) -> int:
        """How many tokens of the prompt need not be computed: one at least must be fed to the model."""
        if cache is None:
            return 0
        cache.validate(self.spec)
        return cache.reusable(self.spec, min(common_prefix(cache.tokens, tokens), len(tokens) - 1))

    def _checkpoints(self, start: int, tokens: int) -> list[int]:
        """Where between `start` and the last token of a prompt to keep what the layers carry."""
        size = self.spec.block_tokens
        if not self.spec.has_state:
            return []
        ends = range((start // size + 1) * size, tokens, size)
        count = min(len(ends), self._state_budget // self.spec.state_nbytes(tokens))
        return [ends[(i + 1) * len(ends) // count - 1] for i in range(count)]

    def _keep_state(self, uid: int) -> None:
        """If the prompt is at a checkpoint."""
        request = self._running[uid]
        if request.checkpoints:
            cache, tokens = self._generator.extract_cache([uid])[uid]
            if len(tokens) in request.checkpoints:
                request.states[len(tokens)] = kvcache.capture(self.spec, cache)

    def _reconstruct_cache(self, cache: AgentBlocks, tokens: int) -> Cache:
        return kvcache.reconstruct(self.spec, cache.blocks, tokens)

    def _advance(self, response: Any) -> CompletedGeneration | None:
        """Take one token (mlx-lm's GenerationBatch.Response) into its request; the completion if it was the last."""
        request = self._running[response.uid]
        request.add(response.token, ends=response.finish_reason == "stop")
        if response.finish_reason:
            return self._complete(response.uid, response.prompt_cache, response.all_tokens, response.finish_reason)
        if request.stopped_at() < 0:
            return None
        cache, tokens = self._generator.extract_cache([response.uid])[response.uid]
        self._generator.remove([response.uid])
        return self._complete(response.uid, cache, tokens, "stop")

    def _complete(self, uid: int, cache: Cache, tokens: Sequence[int], reason: str) -> CompletedGeneration:
        request = self._running.pop(uid)
        request.detokenizer.finalize()
        text = request.detokenizer.text
        if (stopped := request.stopped_at()) >= 0:
            text, reason = text[:stopped], "stop"
        return CompletedGeneration(
            uid=uid,
            agent_id=request.agent_id,
            text=text,
            tokens=tuple(request.tokens),
            finish_reason=reason,
            blocks=self._extract_cache(request, cache, tokens),
            prompt_tokens=request.prompt_tokens,
            tokens_reused=request.tokens_reused,
            time_to_first_token=request.first_token - request.submitted,
        )

    def _extract_cache(self, request: _Request, cache: Cache, tokens: Sequence[int]) -> AgentBlocks:
        """The context after an answer: the blocks it shares with the one before it, and new ones from there on.

        The new ones are made in blocks reserved at submit, before anything of the old is let go.
        """
        kept = len(request.shared)
        needed = self.spec.blocks_for(len(tokens)) - kept
        ids, surplus = request.reserved[:needed], request.reserved[needed:]
        try:
            start = kept * self.spec.block_tokens
            made = kvcache.extract(self.spec, cache, ids, len(tokens), start, request.states)
        except Exception:
            self.pool.free([*request.reserved, *(block.block_id for block in request.shared)])
            raise
        self.pool.free(surplus)
        return AgentBlocks(request.agent_id, tuple(tokens), (*request.shared, *made), self.spec.fingerprint)
