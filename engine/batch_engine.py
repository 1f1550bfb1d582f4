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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import count, pairwise
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine import kvcache
from engine.answer import AnswerText
from engine.blocks import AgentBlocks, check_agent_id
from engine.kvcache import Cache
from engine.pool import BlockPool, PoolExhaustedError
from engine.prefix import common_prefix
from engine.request import (
    CompletedGeneration,
    EmptyPromptError,
    EngineClosedError,
    PromptError,
    PromptReceiver,
    PromptTooLongError,
    Request,
    Token,
    TokenReceiver,
    UnknownTokenError,
)
from engine.singly import Sampler, SingleGenerator
from engine.spec import ModelCacheSpec

PREFILL_CHUNK = 512  # tokens of a prompt computed between two tokens of an answer


class BlockPoolBatchEngine:
    """Runs prompts of many agents in one batch. One thread owns it, the model and all arrays.

    Memory is promised at the door: `submit` reserves in `pool` every block that the answer may need and gives back
    at its end what it did not use, so that what was admitted always completes and can always be kept.

    Prompts join and leave between steps. A step takes every answer on by a token and each prompt by at most
    `prefill_chunk` tokens, so that a long prompt holds up the others' next tokens by no more than that.

    Where layers carry a state (windows, recurrences), a context can be taken up at the end of an answer and at
    checkpoints: blocks' ends, spread evenly over the prompt, as many as `state_budget` bytes a prompt allow.

    Where mlx-lm has no batches for a model, or wrong ones, prompts run in turns, a sequence at a time. A model whose
    kind of cache nobody knows is run so too, and its contexts are not kept: `spec.refusal` says why, and every
    completion's `not_kept`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        spec: ModelCacheSpec,
        pool: BlockPool,
        *,
        state_budget: int = 64 << 20,
        prefill_chunk: int = PREFILL_CHUNK,
        wait_for_blocks: bool = False,
    ) -> None:
        """`wait_for_blocks`: a prompt for which the pool has no room now, but could have, waits instead of being
        refused; those that wait are admitted in their order.

        Raises ValueError for a chunk below 1.
        """
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        self.spec = spec
        self.pool = pool
        self._model = model
        self._state_budget = state_budget
        self.wait_for_blocks = wait_for_blocks
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self._generator = _generator(model, spec, self._tokenizer.eos_token_ids, prefill_chunk)
        self._uids = count()
        self._waiting: deque[Request] = deque()  # for blocks
        self._running: dict[int, Request] = {}  # by the generator's uid
        self._completed: deque[CompletedGeneration] = deque()  # what a `step` that was left early has not handed out
        self._closed = False

    @property
    def pending(self) -> int:
        """Prompts that were submitted and are not completed."""
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> int:
        """Those of them that the next step takes on."""
        return len(self._running)

    @property
    def wanted(self) -> tuple[int, int] | None:
        """Blocks and bytes that have to be free for the first of those that wait; None when none does."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        return self._needed(first.capacity, len(first.shared), len(first.checkpoints))

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
        on_token: TokenReceiver | None = None,
        logprobs: int = 0,
        on_prompt: PromptReceiver | None = None,
    ) -> int:
        """Queue `prompt`, the whole of it (text or token ids), and return the uid of its completion.

        The tokens that `cache` has in common with the prompt are not computed again; of a prompt that it holds
        entirely, all but the last. Where layers carry a state, they are those up to the furthest that was kept.
        `cache` stays the caller's, untouched, and may be freed at once.
        The answer ends at the model's end of text, at `max_tokens`, where the model's context ends, or before the
        first of the `stop` strings. `sampler` picks each token; without one, the likeliest.

        `on_token` is called with each token as it comes; with `logprobs` above 0, it has its log-probability and those
        of as many of the likeliest. `on_prompt` is called once, with the full blocks of the prompt up to its last token
        but one, as soon as that is computed: the answer's context will share them. They are lent: who keeps them takes
        a reference of its own in the pool. What either raises ends this answer alone, with the reason "error" and no
        context; it may submit and cancel.

        Raises EmptyPromptError, PromptTooLongError, UnknownTokenError, BlockError for the agent's id,
        IncompatibleBlocksError for another model's cache, ValueError for one that was freed, for max_tokens below 1,
        an empty stop string or more logprobs than there are tokens, PoolExhaustedError when the blocks the answer may
        need are not to be had (with `wait_for_blocks`, when the pool is too small for them), and EngineClosedError.
        Nothing is then queued or allocated.
        """
        if self._closed:
            raise EngineClosedError("the engine was drained or shut down and takes no more prompts")
        submitted = time.perf_counter()
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(map(int, prompt))
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.check(agent_id, tokens, max_tokens=max_tokens, stop=stop, logprobs=logprobs)
        max_tokens = self._room_for_answer(tokens, max_tokens)
        reused = self._reusable(cache, tokens)
        request = Request(
            uid=next(self._uids),
            agent_id=agent_id,
            prompt=tokens,
            tokens_reused=reused,
            max_tokens=max_tokens,
            cache=self._reconstruct_cache(cache, reused) if cache and reused else self._empty_cache(),
            shared=cache.blocks[: reused // self.spec.block_tokens] if cache else (),
            checkpoints=self._checkpoints(reused, len(tokens)),
            sampler=sampler,
            text=AnswerText(self._tokenizer.detokenizer, stop),
            submitted=submitted,
            on_token=on_token,
            on_prompt=on_prompt,
            logprobs=logprobs,
        )
        self.pool.share((block.block_id for block in request.shared), agent_id)
        if self.wait_for_blocks:
            self._waiting.append(request)
            self._admit_waiting()
            return request.uid
        try:
            self._reserve(request)
        except PoolExhaustedError:
            self._release(request)
            raise
        self._start(request)
        return request.uid

    def check(
        self, agent_id: str, tokens: Sequence[int], *, max_tokens: int, stop: Sequence[str] = (), logprobs: int = 0
    ) -> None:
        """Raise what `submit` would, whatever the cache and however full the pool: PoolExhaustedError only when the
        answer may need more than the whole pool."""
        check_agent_id(agent_id)
        self._check_prompt(tokens)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        if not 0 <= logprobs <= self.spec.vocab_size:
            raise ValueError(f"logprobs must be 0 to {self.spec.vocab_size}, got {logprobs}")
        capacity = len(tokens) + self._room_for_answer(tokens, max_tokens)
        blocks, nbytes = self._needed(capacity, 0, len(self._checkpoints(0, len(tokens))))
        for needed, total, what in (
            (blocks, self.pool.total_blocks, "blocks"),
            (nbytes, self.pool.total_bytes, "bytes"),
        ):
            if needed > total:
                raise PoolExhaustedError(f"{needed} {what} needed, the pool has {total} in all: make it larger")

    def cancel(self, uid: int) -> None:
        """Drop a prompt or an answer that isn't complete; its blocks are free at once.

        Raises KeyError for a uid that isn't pending.
        """
        for request in self._waiting:
            if request.uid == uid:
                self._waiting.remove(request)
                return self._release(request)
        for running, request in self._running.items():
            if request.uid == uid:
                self._generator.remove([running])
                del self._running[running]
                return self._release(request)
        raise KeyError(f"no request {uid} is pending")

    def step(self) -> Iterator[CompletedGeneration]:
        """Run the batch and yield each generation as it completes, until none is left.

        What is submitted between two of them joins the batch. What waits for blocks when nothing else is left to run
        stays pending: go on with `step` once some are free.
        """
        while True:
            while self._completed:
                yield self._completed.popleft()
            self._completed.extend(self.step_once())
            if not self._running and not self._completed:
                return

    def step_once(self) -> list[CompletedGeneration]:
        """Advance every prompt by a chunk and every answer by a token; what completed with it."""
        self._admit_waiting()
        if not self._running:
            return []
        prompts, responses = self._generator.next()
        ends = [self._progress(prompt) for prompt in prompts]
        ends += [self._advance(response) for response in responses]
        return [done for done in ends if done]

    def drain(self) -> Iterator[CompletedGeneration]:
        """Take no more prompts, and finish those that were submitted, as `step` does."""
        self._closed = True
        return self.step()

    def shutdown(self) -> None:
        """Take no more prompts, and drop those that are not complete: their blocks are free at once.

        What has completed can still be had from `step`. May be called again.
        """
        self._closed = True
        for request in [*self._waiting, *self._running.values()]:
            self.cancel(request.uid)
        self._generator.close()

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
        if not self.spec.has_state:
            return []
        size = self.spec.block_tokens
        ends = range((start // size + 1) * size, tokens, size)
        count = min(len(ends), self._state_budget // self.spec.state_nbytes(tokens))
        return [ends[(i + 1) * len(ends) // count - 1] for i in range(count)]

    def _room_for_answer(self, tokens: Sequence[int], max_tokens: int) -> int:
        """Tokens that an answer may have at most."""
        return min(max_tokens, self.spec.context - len(tokens)) if self.spec.context else max_tokens

    def _needed(self, capacity: int, shared: int, checkpoints: int) -> tuple[int, int]:
        """The blocks that a context of `capacity` tokens may need beside its `shared` ones, and their bytes."""
        if self.spec.refusal:
            return 0, 0
        rows = capacity - shared * self.spec.block_tokens
        states = (checkpoints + 1) * self.spec.state_nbytes(capacity)
        return self.spec.blocks_for(capacity) - shared, rows * self.spec.token_nbytes + states

    def _reserve(self, request: Request) -> None:
        """Raises PoolExhaustedError."""
        blocks, nbytes = self._needed(request.capacity, len(request.shared), len(request.checkpoints))
        request.reserved = self.pool.allocate(blocks, request.agent_id, nbytes)
        request.promised = nbytes

    def _admit_waiting(self) -> None:
        """In their order: none overtakes another that needs more."""
        while self._waiting:
            try:
                self._reserve(self._waiting[0])
            except PoolExhaustedError:
                return
            self._start(self._waiting.popleft())

    def _start(self, request: Request) -> None:
        ends = [request.tokens_reused, *request.checkpoints, len(request.prompt)]
        (uid,) = self._generator.insert_segments(
            [[list(request.prompt[start:end]) for start, end in pairwise(ends)]],
            max_tokens=[request.max_tokens],
            caches=[request.cache],
            all_tokens=[list(request.prompt[: request.tokens_reused])],
            samplers=[request.sampler],
        )
        self._running[uid] = request
        request.started = time.perf_counter()

    def _release(self, request: Request) -> None:
        self.pool.free(request.held, request.agent_id)

    def _progress(self, prompt: Any) -> CompletedGeneration | None:
        """A prompt was taken on (mlx-lm's PromptProcessingBatch.Response): keep its state if it is at a checkpoint, and
        tell if it is at its last token but one."""
        request = self._running.get(prompt.uid)
        if not request or not prompt.end_of_segment:
            return None
        computed = prompt.end_of_prompt
        if not computed and (request.checkpoints or request.on_prompt):
            cache, tokens = self._generator.extract_cache([prompt.uid])[prompt.uid]
            if len(tokens) in request.checkpoints:
                request.states[len(tokens)] = kvcache.capture(self.spec, cache)
            computed = len(tokens) == len(request.prompt) - 1
            if computed and request.on_prompt and not self.spec.refusal:
                # For want of memory they are made with the answer's last, or `not_kept` says why not.
                with suppress(RuntimeError, MemoryError):
                    self._extract_full(request, cache, len(tokens))
        if not computed or not request.on_prompt:
            return None
        on_prompt, request.on_prompt = request.on_prompt, None
        return self._tell(prompt.uid, on_prompt, request.full_blocks(self.spec))

    def _extract_full(self, request: Request, cache: Cache, tokens: int) -> None:
        """Make the full blocks of a prompt now that the answer would make later."""
        kept = len(request.shared)
        needed = tokens // self.spec.block_tokens - kept
        ids, others = request.reserved[:needed], request.reserved[needed:]
        start = kept * self.spec.block_tokens
        made = kvcache.extract_full(self.spec, cache, ids, tokens, start, request.states)
        sizes = {block.block_id: block.nbytes for block in made}
        request.promised -= sum(sizes.values())
        self.pool.settle(sizes | dict.fromkeys(others, 0) | {others[0]: request.promised})
        request.shared, request.reserved = (*request.shared, *made), others

    def _tell(self, uid: int, receiver: Callable[[_Told], None], told: _Told) -> CompletedGeneration | None:
        """Call a receiver of the request's; the end of the answer if that fails."""
        try:
            receiver(told)
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes to whoever asked
            return self._fail(uid, error) if uid in self._running else None
        return None

    def _empty_cache(self) -> Cache:
        return make_prompt_cache(self._model) if self.spec.refusal else kvcache.empty(self.spec)

    def _reconstruct_cache(self, cache: AgentBlocks, tokens: int) -> Cache:
        return kvcache.reconstruct(self.spec, cache.blocks, tokens)

    def _advance(self, response: Any) -> CompletedGeneration | None:
        """Take one token (mlx-lm's GenerationBatch.Response) into its request; the completion if it was the last."""
        request = self._running.get(response.uid)
        if not request:
            return None
        ends_text = response.finish_reason == "stop"
        request.add(response.token, ends=ends_text)
        if response.finish_reason or request.text.stopped:
            request.text.finish()
        if request.on_token:
            token = _token(request, response, ends_text=ends_text)
            if failed := self._tell(response.uid, request.on_token, token):
                return failed
        if response.uid not in self._running:
            return None
        if response.finish_reason:
            return self._complete(response.uid, response.prompt_cache, response.all_tokens, response.finish_reason)
        if not request.text.stopped:
            return None
        cache, tokens = self._generator.extract_cache([response.uid])[response.uid]
        self._generator.remove([response.uid])
        return self._complete(response.uid, cache, tokens, "stop")

    def _complete(self, uid: int, cache: Cache, tokens: Sequence[int], reason: str) -> CompletedGeneration:
        request = self._running.pop(uid)
        not_kept = self.spec.refusal
        blocks = None
        if not not_kept:
            try:
                blocks = self._extract_cache(request, cache, tokens)
            except (ValueError, RuntimeError, MemoryError) as error:  # no reason to lose the answer, or the others'
                not_kept = str(error)
        if not blocks:
            self._release(request)
        return self._completion(request, "stop" if request.text.stopped else reason, blocks, not_kept)

    def _fail(self, uid: int, error: Exception) -> CompletedGeneration:
        """What a request's receiver raised is the end of it, and of nobody else."""
        self._generator.remove([uid])
        request = self._running.pop(uid)
        request.text.finish()
        self._release(request)
        return self._completion(request, "error", None, f"a receiver raised {error!r}", error)

    def _completion(
        self,
        request: Request,
        reason: str,
        blocks: AgentBlocks | None,
        not_kept: str | None,
        error: Exception | None = None,
    ) -> CompletedGeneration:
        return CompletedGeneration(
            uid=request.uid,
            agent_id=request.agent_id,
            text=request.text.text,
            tokens=tuple(request.tokens),
            finish_reason=reason,
            blocks=blocks or AgentBlocks(request.agent_id, (), (), self.spec.fingerprint),
            prompt_tokens=len(request.prompt),
            tokens_reused=request.tokens_reused,
            time_to_first_token=request.first_token - request.submitted,
            prefill_seconds=request.first_token - request.started,
            not_kept=not_kept,
            error=error,
        )

    def _extract_cache(self, request: Request, cache: Cache, tokens: Sequence[int]) -> AgentBlocks:
        """The context after an answer: the blocks it shares with the one before it, and new ones from there on.

        The new ones are made in blocks reserved at submit, before anything of the old is let go.
        """
        kept = len(request.shared)
        needed = self.spec.blocks_for(len(tokens)) - kept
        ids, surplus = request.reserved[:needed], request.reserved[needed:]
        start = kept * self.spec.block_tokens
        made = kvcache.extract(self.spec, cache, ids, len(tokens), start, request.states)
        self.pool.settle(dict.fromkeys(surplus, 0) | {block.block_id: block.nbytes for block in made})
        self.pool.free(surplus, request.agent_id)
        return AgentBlocks(request.agent_id, tuple(tokens), (*request.shared, *made), self.spec.fingerprint)


_Told = TypeVar("_Told", Token, AgentBlocks)


def _token(request: Request, response: Any, *, ends_text: bool) -> Token:
    text = request.text.read()
    if not request.logprobs:
        return Token(request.uid, response.token, text, ends_text)
    logprobs = response.logprobs
    likeliest = cast("list[int]", mx.argsort(-logprobs)[: request.logprobs].tolist())
    *top, logprob = cast("list[float]", logprobs[mx.array([*likeliest, response.token])].tolist())
    return Token(request.uid, response.token, text, ends_text, logprob, tuple(zip(likeliest, top, strict=True)))


def _generator(model: nn.Module, spec: ModelCacheSpec, stop_tokens: Collection[int], prefill_chunk: int) -> Any:
    """mlx-lm's own, where its batches are right."""
    if not spec.batches:
        return SingleGenerator(model, stop_tokens=stop_tokens, prefill_step_size=prefill_chunk)
    stop = [[token] for token in stop_tokens]
    return BatchGenerator(model, stop_tokens=stop, prefill_step_size=prefill_chunk)


__all__ = [
    "BlockPoolBatchEngine",
    "CompletedGeneration",
    "EmptyPromptError",
    "EngineClosedError",
    "PromptError",
    "PromptReceiver",
    "PromptTooLongError",
    "Sampler",
    "Token",
    "TokenReceiver",
    "UnknownTokenError",
]
