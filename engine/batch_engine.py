"""Continuous batching over mlx-lm, with contexts that are restored from blocks and saved as blocks.

>>> batch = BlockPoolBatchEngine(model, tokenizer, spec, BlockPool(64))
>>> batch.submit("alice", prompt, cache=known, max_tokens=100)  # known: blocks of her last context, or None
>>> for done in batch.step():
...     print(done.text, done.tokens_reused)
...     batch.pool.free(done.blocks.block_ids)  # or keep them, for the agent's next turn
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .generation.sampling import Guarded, Sampling
from .generation.text import AnswerText, TokenText
from .generation.tokens import check_answer, check_prompt, encode, token_ids
from .generation.unbatched import Choice, Processor, Sampler
from .memory import kvcache
from .memory.blocks import AgentBlocks, check_agent_id
from .memory.kvcache import Cache
from .pool import BlockPool, PoolExhaustedError
from .scheduling.block_manager import BlockManager
from .scheduling.model_runner import ModelRunner, ModelWatch
from .scheduling.request import (
    CompletedGeneration,
    EngineClosedError,
    PromptReceiver,
    Request,
    SchedulerConfig,
    TokenReceiver,
    Use,
)
from .spec import ModelCacheSpec

log = logging.getLogger(__name__)

# Last tokens of a prompt that are searched for the mark that opens the model's thinking, and most tokens of white space
# before the mark.
THOUGHT_TOKENS = 16
CHANGED = "the model is not the one that was probed"
NOT_WANTED = "the request keeps nothing"


class BlockPoolBatchEngine:
    """Scheduler that runs prompts of many agents in one batch. Only one thread calls it and the model.

    `submit` reserves in `pool` every block that the answer may need; unused blocks are freed when the answer ends. So
    an admitted prompt always completes, and its context can always be kept.

    Prompts join and leave between steps. A step adds a token to every answer and at most `prefill_chunk` tokens to each
    prefill, so a long prompt delays the next tokens of the others by no more than a chunk.

    If layers carry a state (a sliding window, or the state of a recurrence), a context can be continued only at
    positions with a kept state. States are kept at the end of an answer, before the last token of its prompt, before an
    opening mark of thinking at the end of the prompt, and at the boundaries that `submit` gets. As far as
    `state_budget` bytes allow, they are also kept at checkpoints (ends of blocks, spread evenly over the prompt), at
    the end of the prompt, and at the positions of states in the reused cache.

    If mlx-lm cannot batch a model, or its batches have other results than single prompts, prompts run separately, in
    turns. So do prompts of a model with an unknown kind of cache. Contexts of such a cache are not kept, nor are
    contexts of a model that has changed since it was probed; `CompletedGeneration.not_kept` is the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        spec: ModelCacheSpec,
        pool: BlockPool,
        config: SchedulerConfig | None = None,
    ) -> None:
        config = config or SchedulerConfig()
        self.spec = spec
        self.pool = pool
        self.wait_for_blocks = config.wait_for_blocks
        self._watch = ModelWatch(model, spec)
        self._block_manager = BlockManager(spec, pool, config.state_budget)
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self._token_text = TokenText(self._tokenizer)
        self._runner = ModelRunner(model, spec, self._tokenizer.eos_token_ids, config.prefill_chunk)
        self._uids = count()
        self._waiting: deque[Request] = deque()  # prompts that wait for blocks, in the order of submission
        self._running: dict[int, Request] = {}  # admitted prompts by the runner's uid
        self._completed: deque[CompletedGeneration] = deque()  # not yielded by `step` yet
        self._closed = False

    @property
    def pending(self) -> int:
        """Number of prompts without a complete answer, including waiting ones."""
        forks = sum(len(request.forks) for request in (*self._waiting, *self._running.values()))
        return len(self._running) + len(self._waiting) + forks

    @property
    def running(self) -> int:
        """Number of prompts in the batch."""
        return len(self._running)

    @property
    def needed_space(self) -> tuple[int, int] | None:
        """Blocks and bytes that the first waiting prompt needs; None if no prompt waits for space in the pool."""
        if not self._waiting:
            return None
        return self._block_manager.needed(self._waiting[0])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, encoded as by mlx_lm.generate. Raises UnknownTokenError if UTF-8
        cannot encode it."""
        return encode(self._tokenizer, text)

    def submit(
        self,
        agent_id: str,
        prompt: str | Sequence[int],
        cache: AgentBlocks | None = None,
        *,
        max_tokens: int = 256,
        sampler: Sampler | Sampling | None = None,
        logits_processors: Sequence[Processor] = (),
        stop: str | Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        continues: bool = False,
        on_token: TokenReceiver | None = None,
        logprobs: int = 0,
        on_prompt: PromptReceiver | None = None,
        forked: bool = False,
        boundaries: Collection[int] = (),
        kept_tokens: int | None = None,
    ) -> int:
        """Queue `prompt`, the whole context as text or token ids, and return its uid.

        Tokens at the start of the prompt that `cache` holds are not computed again, except the prompt's last one. If
        layers carry a state, reuse ends at a kept state. The caller still owns `cache`, and may free it after this
        call. The answer ends at the model's end of text, at one of the ids `stop_tokens`, at `max_tokens`, at the end
        of the model's context, or before the first of the `stop` strings. `sampler` selects each token; the default
        selects the likeliest one. `logits_processors`, and those of a `Sampling` before them, change the logits as in
        mlx-lm. The answer's text equals the text of mlx_lm.generate, which drops a first space; with `continues` it is
        the exact continuation of the prompt's text.

        `on_token` is called with each token. With `logprobs` above 0, a token has its log-probability and those of the
        `logprobs` likeliest tokens. `on_prompt` is called once with the full blocks of the prompt, as soon as they are
        computed; to keep them, the callback has to share them in the pool. `forked` announces calls of `fork`. Both
        callbacks may call `submit` and `cancel`. An exception from a callback, a processor or the sampler, or a sampled
        value that is no token, ends only this answer, with the reason "error" and without a context.

        If layers carry a state, it is also kept at `boundaries`, positions in the prompt after which later prompts may
        differ. With `kept_tokens`, the context is these first tokens of prompt and answer; with 0, there is none.

        Raises EmptyPromptError, PromptTooLongError, UnknownTokenError, BlockError for the agent's id,
        IncompatibleBlocksError for another model's cache, ValueError for a freed cache, max_tokens below 1, an empty
        stop string or too many logprobs, PoolExhaustedError when the pool lacks the blocks that the answer may need
        (with `wait_for_blocks`: when the whole pool is too small), and EngineClosedError. After an exception nothing is
        queued.
        """
        if self._closed:
            raise EngineClosedError("the engine was drained or shut down and takes no more prompts")
        submitted = time.perf_counter()
        tokens = self.encode(prompt) if isinstance(prompt, str) else token_ids(prompt, self.spec.vocab_size)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.check(agent_id, tokens, max_tokens=max_tokens, stop=stop, logprobs=logprobs, boundaries=boundaries)
        max_tokens = self.spec.answer_tokens(len(tokens), max_tokens)
        if cache is not None:
            cache.validate(self.spec)
        use = self._use(cache, tokens, boundaries)
        if cache and not self._block_manager.ever_fits(use, len(tokens) + max_tokens):
            cache, use = None, self._use(None, tokens, boundaries)
        choice, guard, least = self._choice(len(tokens), sampler, logits_processors, stop_tokens)
        request = Request(
            uid=next(self._uids),
            agent_id=agent_id,
            prompt=tokens,
            tokens_reused=use.tokens,
            max_tokens=max_tokens,
            cache=self._runner.cache(cache, use.tokens),
            shared=use.shared,
            checkpoints=use.checkpoints,
            spare_states=use.spare_states,
            states=use.carried,
            choice=choice,
            guard=guard,
            text=self._text(tokens, stop, least, continues=continues),
            submitted=submitted,
            on_token=on_token,
            on_prompt=on_prompt,
            logprobs=logprobs,
            not_kept=self.spec.refusal or (NOT_WANTED if kept_tokens == 0 else None),
            kept_tokens=kept_tokens,
            forked=forked,
        )
        self.pool.share((block.block_id for block in request.shared), agent_id)
        if self.wait_for_blocks:
            self._waiting.append(request)
            self._admit_waiting()
            return request.uid
        try:
            self._block_manager.reserve(request)
        except PoolExhaustedError:
            self._block_manager.release(request)
            raise
        self._start(request)
        return request.uid

    def fork(
        self,
        uid: int,
        agent_id: str,
        *,
        max_tokens: int = 256,
        sampler: Sampler | Sampling | None = None,
        logits_processors: Sequence[Processor] = (),
        stop: str | Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        continues: bool = False,
        on_token: TokenReceiver | None = None,
        logprobs: int = 0,
        kept_tokens: int | None = None,
    ) -> int:
        """Queue another answer to the prompt of the pending request `uid`, and return its uid.

        That request was submitted with `forked`, and has no token yet. The prompt is computed once, and both contexts
        share its full blocks. If the pool has no room for both, or the other request ends early, this one is computed
        by itself. The arguments and exceptions are those of `submit`, and KeyError if `uid` is not pending.
        """
        parent = next((one for one in (*self._waiting, *self._running.values()) if one.uid == uid), None)
        if not parent:
            raise KeyError(f"no request {uid} is pending")
        tokens = parent.prompt
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.check(agent_id, tokens, max_tokens=max_tokens, stop=stop, logprobs=logprobs)
        choice, guard, least = self._choice(len(tokens), sampler, logits_processors, stop_tokens)
        child = Request(
            uid=next(self._uids),
            agent_id=agent_id,
            prompt=tokens,
            tokens_reused=0,
            max_tokens=self.spec.answer_tokens(len(tokens), max_tokens),
            cache=self._runner.cache(None, 0),
            shared=(),
            checkpoints=(),
            spare_states=0,
            choice=choice,
            guard=guard,
            text=self._text(tokens, stop, least, continues=continues),
            submitted=time.perf_counter(),
            on_token=on_token,
            on_prompt=None,
            logprobs=logprobs,
            not_kept=parent.not_kept,
            kept_tokens=kept_tokens,
        )
        try:
            self._block_manager.reserve(child, forked=True)
        except PoolExhaustedError:
            if not self.wait_for_blocks:
                raise
            self._waiting.append(child)
            return child.uid
        parent.forks.append(child)
        if parent.computed:
            self._start_forks(parent)
        return child.uid

    def _choice(
        self,
        prompt: int,
        sampler: Sampler | Sampling | None,
        logits_processors: Sequence[Processor],
        stop_tokens: Collection[int],
    ) -> tuple[Choice, Guarded | None, int]:
        """Return the choice of tokens after a prompt of `prompt` tokens, the guard of the caller's functions, and the
        number of tokens before a stop string.
        """
        processors, least = [*logits_processors], 0
        if isinstance(sampler, Sampling):
            ends = {*self._tokenizer.eos_token_ids, *stop_tokens}
            processors, least = [*sampler.processors(prompt, ends), *logits_processors], sampler.min_tokens
            sampler = sampler.sampler()
        guard = Guarded(sampler, processors) if sampler or processors else None
        return Choice(guard, [guard.process] if guard and processors else [], stop_tokens), guard, least

    def _text(self, prompt: Sequence[int], stop: Sequence[str], least: int, *, continues: bool) -> AnswerText:
        text = self._token_text.after(prompt) if continues else self._token_text.as_generated()
        return AnswerText(text, stop, least)

    def check(
        self,
        agent_id: str,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        logprobs: int = 0,
        boundaries: Collection[int] = (),
    ) -> None:
        """Raise the exceptions that `submit` would raise for these arguments without a cache and with an empty pool."""
        check_agent_id(agent_id)
        check_prompt(tokens, self.spec.vocab_size, self.spec.context)
        check_answer(max_tokens, stop, logprobs, self.spec.vocab_size)
        capacity = len(tokens) + self.spec.answer_tokens(len(tokens), max_tokens)
        self._block_manager.check_fits(len(tokens), capacity, {*boundaries, *self._thought(tokens)})

    def cancel(self, uid: int) -> None:
        """Drop a prompt or an unfinished answer, and free its blocks.

        Raises KeyError for a uid that is not pending.
        """
        for request in self._waiting:
            if request.uid == uid:
                self._waiting.remove(request)
                self._let_forks_start(request)
                return self._block_manager.release(request)
        for running, request in self._running.items():
            if request.uid == uid:
                self._runner.remove(running)
                del self._running[running]
                self._let_forks_start(request)
                return self._block_manager.release(request)
        for request in (*self._waiting, *self._running.values()):
            for child in request.forks:
                if child.uid == uid:
                    request.forks.remove(child)
                    return self._block_manager.release(child)
        raise KeyError(f"no request {uid} is pending")

    def model_changed(self) -> None:
        """Report that the model was changed while answers run. Their contexts are not kept, and all weights are hashed
        again.

        Not needed for a change that is still present when a prompt starts, is published or completes, because it is
        detected then.
        """
        self._watch.forget()
        for request in self._running.values():
            request.not_kept = request.not_kept or CHANGED

    def step(self) -> Iterator[CompletedGeneration]:
        """Run the batch until no prompt is pending, and yield each generation when it completes.

        Prompts submitted meanwhile join the batch. The iterator also ends when all pending prompts wait for blocks of
        the pool; call `step` again when blocks are free.
        """
        while True:
            while self._completed:
                yield self._completed.popleft()
            self._completed.extend(self.step_once())
            if not self._running and not self._completed:
                return

    def step_once(self) -> list[CompletedGeneration]:
        """Advance every prefill by a chunk and every answer by a token. Return the generations that this step
        completes.
        """
        self._admit_waiting()
        if not self._running:
            return []
        try:
            prompts, responses = self._runner.step()
        except Exception as error:  # noqa: BLE001 - passed to all requests of the step
            return self._begin_anew(error)
        ends = [self._alone(self._progress, prompt) for prompt in prompts]
        ends += [self._alone(self._advance, response) for response in responses]
        return [done for done in ends if done]

    def drain(self) -> Iterator[CompletedGeneration]:
        """Reject new prompts, run the pending ones, and yield their generations as `step` does."""
        self._closed = True
        return self.step()

    def shutdown(self) -> None:
        """Reject new prompts, and drop the pending ones. `step` still yields completed answers.

        May be called more than once.
        """
        self._closed = True
        while self._waiting or self._running:
            self.cancel(next(iter((*self._waiting, *self._running.values()))).uid)
        self._runner.close()

    def _admit_waiting(self) -> None:
        """Start waiting prompts in order, as long as the pool has enough blocks. A small prompt does not overtake a
        large one. Forks of a prompt that do not leave it enough wait behind it, and are computed by themselves.
        """
        while self._waiting:
            first = self._waiting[0]
            try:
                self._block_manager.reserve(first)
            except PoolExhaustedError:
                if not first.forks:
                    return
                self._let_start(first.forks.pop())
                continue
            self._start(self._waiting.popleft())

    def _start(self, request: Request) -> None:
        if not self._keeps(request):  # the model has changed, so its earlier caches cannot be reused
            self.pool.free((block.block_id for block in request.shared), request.agent_id)
            request.shared, request.tokens_reused, request.cache = (), 0, self._runner.cache(None, 0)
            request.states = {}
        uid = self._runner.insert(request)
        self._running[uid] = request
        request.started = time.perf_counter()
        if request.tokens_reused == len(request.prompt) - 1:
            request.computed = True
            self._start_forks(request)

    def _start_forks(self, request: Request) -> None:
        """Start the answers that wait for a prompt, of which all but the last token is computed."""
        forks, request.forks = request.forks, []
        if not forks:
            return
        running = next(uid for uid, one in self._running.items() if one is request)
        full = request.shared[: self._block_manager.full_blocks(request)]
        at = len(request.prompt) - 1
        for child in forks:
            cache = None
            if len(full) == self._block_manager.full_blocks(child):  # otherwise memory was too short for the blocks
                with suppress(RuntimeError, MemoryError):
                    cache = self._runner.copied(running, at)
            if cache is None:
                self._let_start(child)
                continue
            child.cache, child.tokens_reused, child.shared = cache, at, full
            child.states = {at: request.states[at]} if at in request.states else {}
            child.not_kept = request.not_kept
            self.pool.share((block.block_id for block in full), child.agent_id)
            self._start(child)

    def _let_forks_start(self, request: Request) -> None:
        """Let the answers that wait for a prompt compute it by themselves, because the request ends before."""
        forks, request.forks = request.forks, []
        for child in forks:
            self._let_start(child)

    def _let_start(self, child: Request) -> None:
        self._block_manager.release(child)
        child.reserved, child.promised = [], 0
        self._waiting.append(child)

    def _alone(self, work: Callable[[Any], CompletedGeneration | None], response: Any) -> CompletedGeneration | None:
        """Call `work` with mlx-lm's response for one request, and return its result. An exception, from the request's
        callback or sampler, ends this answer only: the result is then its failed generation.
        """
        try:
            return work(response)
        except Exception as error:  # noqa: BLE001 - it ends only this answer
            if response.uid not in self._running:
                return None
            self._runner.remove(response.uid)
            return self._failed(self._running.pop(response.uid), error)

    def _begin_anew(self, error: Exception) -> list[CompletedGeneration]:
        """Remove all requests after a failed step of the model, because their caches may be half written. Return a
        failed generation with `error` for each.
        """
        log.error("a step of the model failed", exc_info=error)
        self._runner.restart()
        return [self._failed(self._running.pop(uid), error) for uid in list(self._running)]

    def _keeps(self, request: Request) -> bool:
        """Return whether the request's context may be kept. If the model has changed since it was probed, set the
        request's `not_kept` to this reason.
        """
        if not request.not_kept and not self._watch.same():
            request.not_kept = CHANGED
        return not request.not_kept

    def _progress(self, prompt: Any) -> CompletedGeneration | None:
        """Handle the progress of a prefill (mlx-lm's PromptProcessingBatch.Response): keep the state at a checkpoint,
        before the prompt's last token and after it, and call `on_prompt` when all but the last token is computed.
        Return None: a prefill completes no generation.
        """
        request = self._running.get(prompt.uid)
        if not request or not prompt.end_of_segment:
            return None
        computed = prompt.end_of_prompt
        if computed and request.spare_states and (held := self._runner.held(prompt.uid)):
            self._keep_state(request, *held)
        if not computed and (self.spec.has_state or request.forks or self._has_more(request)):
            cache, tokens = self._runner.extract(prompt.uid)
            computed = len(tokens) == len(request.prompt) - 1
            if computed or len(tokens) in request.checkpoints:
                self._keep_state(request, cache, tokens)
            if computed and self._has_more(request):
                # If memory is short, the blocks are made at the end of the answer, or `not_kept` is the reason.
                with suppress(RuntimeError, MemoryError):
                    self._block_manager.make_full(request, cache, len(tokens))
        if computed:
            request.computed = True
            self._start_forks(request)
        if not computed or not request.on_prompt:
            return None
        on_prompt, request.on_prompt = request.on_prompt, None
        on_prompt(request.full_blocks(self.spec))
        return None

    def _use(self, cache: AgentBlocks | None, tokens: Sequence[int], boundaries: Collection[int]) -> Use:
        """Return the part of the caller's cache that a prompt uses, and where it keeps states."""
        reused = cache.reusable_for(self.spec, tokens) if cache else 0
        shared = cache.blocks[: reused // self.spec.block_tokens] if cache else ()
        thought = () if self._runner.takes_one_pass(reused, len(tokens)) else self._thought(tokens)
        checkpoints = self._block_manager.checkpoints(reused, len(tokens), {*boundaries, *thought})
        behind = len(shared) * self.spec.block_tokens
        carried = {at: state for at, state in cache.states.items() if behind < at <= reused} if cache else {}
        checkpoints = [*(at for at in carried if at in boundaries), *checkpoints]
        spare = self._block_manager.spare_states(len(checkpoints), shared, len(carried), len(tokens))
        return Use(reused, shared, carried, checkpoints, spare)

    def _thought(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the position of the mark that opens the model's thinking at the end of a prompt, or of the white space
        before it; empty if there is no mark.

        A state is kept there, because the prompt of the next turn omits the thinking, and so equals this prompt up to
        the mark only. The white space may be a part of a longer token there, if the answer begins with white space.
        """
        if not self._tokenizer.has_thinking:
            return ()
        found: int = self._tokenizer.rfind_think_start(tokens, start=len(tokens) - THOUGHT_TOKENS)
        first = max(1, found - THOUGHT_TOKENS)
        while found > first and (self._token_text.bytes_of(tokens[found - 1]) or b"").isspace():
            found -= 1
        return (found,) if found > 0 else ()

    def _keep_state(self, request: Request, cache: Cache, tokens: Sequence[int]) -> None:
        """Copy the state of `cache`, which has computed `tokens`, for the request's context. If memory is short, no
        state is kept, and the context cannot be continued at this position.
        """
        if self.spec.has_state:
            with suppress(ValueError, RuntimeError, MemoryError):
                request.states[len(tokens)] = kvcache.capture(self.spec, cache)

    def _has_more(self, request: Request) -> bool:
        """Return whether `on_prompt` needs full blocks that are not made yet."""
        full = (len(request.prompt) - 1) // self.spec.block_tokens
        is_needed = request.on_prompt is not None or request.forks
        return bool(is_needed) and full > len(request.shared) and self._keeps(request)

    def _advance(self, response: Any) -> CompletedGeneration | None:
        """Add a generated token (mlx-lm's GenerationBatch.Response) to its request, and call `on_token`. Return the
        completed generation if it is the last token, and None otherwise.
        """
        request = self._running.get(response.uid)
        if not request:
            return None
        ends_text = response.finish_reason == "stop"
        if request.guard:
            request.guard.check(response.token)
        request.add(response.token, ends=ends_text)
        if response.finish_reason or request.text.stopped_by:
            request.text.finish()
        if request.on_token:
            request.on_token(request.token_event(response, ends_text=ends_text))
        if response.uid not in self._running:
            return None
        if response.finish_reason:
            return self._complete(response.uid, response.prompt_cache, response.all_tokens, response.finish_reason)
        if not request.text.stopped_by:
            return None
        cache, tokens = self._runner.extract(response.uid)
        self._runner.remove(response.uid)
        return self._complete(response.uid, cache, tokens, "stop")

    def _complete(self, uid: int, cache: Cache, tokens: Sequence[int], reason: str) -> CompletedGeneration:
        """End a request, and return its generation, with the context in `cache`, which has `tokens`, if it is kept."""
        request = self._running.pop(uid)
        blocks = None
        not_kept = None if self._keeps(request) else request.not_kept
        if not not_kept:
            try:
                blocks = self._block_manager.make_context(request, cache, tokens)
            except Exception as error:  # noqa: BLE001 - the answer is valid without its context
                not_kept = str(error)
        if not blocks:
            self._block_manager.release(request)
        return request.completed("stop" if request.text.stopped_by else reason, self.spec, blocks, not_kept)

    def _failed(self, request: Request, error: Exception) -> CompletedGeneration:
        with suppress(Exception):  # the tokenizer itself may have failed
            request.text.finish()
        self._let_forks_start(request)
        self._block_manager.release(request)
        return request.completed("error", self.spec, None, f"the answer failed: {error!r}", error)
