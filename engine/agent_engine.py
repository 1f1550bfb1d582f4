"""The agent engine: it answers prompts of agents, loads their contexts from a store, and saves them to it.

>>> engine = AgentEngine(BlockPoolBatchEngine(model, tokenizer, spec, pool), store)
>>> engine.submit("alice", tokens, max_tokens=100, on_token=print, on_done=print, on_error=print)
>>> while engine.step(timeout=1.0):
...     pass

The context of a submitted prompt is loaded while the batch runs other prompts. Then the prompt joins the batch. Its
answer is passed to a callback, and its context is saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

from kvpage_server.tracing import TraceSpan, span

from .batch_engine import BlockPoolBatchEngine
from .chains import ContextNames
from .generation.sampling import Sampling
from .generation.tokens import token_ids
from .generation.unbatched import Processor, Sampler
from .memory.blocks import AgentBlocks
from .memory.lifetimes import KeptContext, Lifetimes
from .scheduling.request import CompletedGeneration, EngineClosedError, PromptReceiver, Token, TokenReceiver
from .tiers.loading import Loaded, Loading
from .tiers.metrics import Tier
from .tiers.prefill_claims import Claim
from .tiers.store import AgentCacheStore

# -- A prompt of an agent, from submission to answer, and the arguments of its callbacks -------------------------------


class Boundary(NamedTuple):
    """A breakpoint of the prompt cache."""

    tokens: int  # of the prompt, before it
    ttl: str  # its lifetime, as the client named it
    steady: int  # of these tokens, the first ones that no other text after the breakpoint changes


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse of prompt tokens for one answer, and the times of the answer."""

    tier: Tier = "none"  # the tier that supplied the reused tokens; "none" if no token was reused
    tokens: int = 0  # prompt tokens that were not computed
    restore_seconds: float = 0.0  # spent in loads from the store
    waited_seconds: float = 0.0  # spent in waits for another prompt that computed the same prefix
    time_to_first_token: float = 0.0  # seconds since submit
    prefill_seconds: float = 0.0  # of these, for the computation of the other prompt tokens
    why: str | None = None  # the reason for which the last load found no more; None also if the rest is absent
    coded: float | None = None  # the ratio of blocks of the page server to their codes, if some arrived in the code
    mapped: bool = False  # whether blocks were read in the page server's memory


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    uid: int
    agent_id: str
    text: str
    tokens: tuple[int, ...]  # without the end-of-text token
    finish_reason: str  # "stop" or "length"
    stopped_by: str | None  # the stop string before which the text ends
    prompt_tokens: int
    reuse: Reuse
    shares_prompt: bool = False  # whether its prompt was computed once, for another answer that counts the tokens
    not_kept: str | None = None  # the reason if the context could not be kept
    context: ContextNames | None = None  # the names of the context, if it is kept without a name
    kept: KeptContext | None = None  # the part with a lifetime, if the prompt has lifetimes
    block: str | None = None  # the name of the last full block of the context
    short: tuple[int, ...] = ()  # the tokens of the context, if it has no full block and is kept without a name
    hints: Sequence[tuple[str, str]] | None = None  # ids and results of the request's hints
    states: tuple[int, ...] | None = None  # positions at which other prompts can continue its context; None for all


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of one pending prompt, as a copy that does not change."""

    uid: int
    agent_id: str
    kept: bool  # whether its context will be saved for the agent
    label: str  # the text that the web page shows for a context that is not kept
    stage: Stage
    prompt: int  # length in tokens
    reused: int  # prompt tokens that were found so far
    tier: Tier  # the tier that supplied them
    generated: int  # tokens of the answer so far
    seconds: float  # since submit


class Stage(Enum):
    """States of a prompt, and the next states of each.

    A claim on a block means that this prompt computes the block, and others wait for it (`tiers.prefill_claims`)::

    SUBMITTED  waits until its load may begin, or its leader runs       -> LOADING, READY, RUNNING
    LOADING    its context is being loaded from the store               -> WAITING, READY, SUBMITTED
    WAITING    another prompt has the claim on its first missing block, -> READY, SUBMITTED
               or the page server has not answered the claim
    READY      can join the batch                                       -> RUNNING, SUBMITTED
    RUNNING    has joined the batch; it may wait there for free blocks of the pool
    """

    SUBMITTED = auto()
    LOADING = auto()
    WAITING = auto()
    READY = auto()
    RUNNING = auto()


@dataclass(slots=True, eq=False)
class Job:
    """A prompt from its submission to its answer."""

    uid: int
    agent_id: str
    tokens: tuple[int, ...]
    options: dict[str, Any]  # keyword arguments of the batch's `submit`
    keep: bool
    label: str  # the text that `kvpage` and the web pages show for a context that is not kept
    on_token: TokenReceiver | None
    on_done: Callable[[Answer], None]
    on_error: Callable[[Exception], None]
    leader: Job | None = None  # a prompt with the same tokens, which is computed for both
    boundaries: Collection[int] = ()  # positions in the prompt after which later prompts may differ
    written: bool = True  # whether tiers below memory may get the context
    lifetimes: Lifetimes | None = None
    submitted: float = field(default_factory=time.perf_counter)
    stage: Stage = Stage.SUBMITTED
    error: Exception | None = None  # raised by the checks in `submit`; the next step passes it to `on_error`
    loading: Loading | None = None
    loaded: Loaded | None = None  # its blocks are held under the agent's id until it runs
    restored: tuple[Tier, int] = ("none", 0)  # tier and tokens of its loads; a repeated load finds them in memory
    restore_seconds: float = 0.0
    claim: Claim | None = None
    reach: int = 0  # tokens of the prompt that were loaded when the claim was made
    waiting_since: float = 0.0  # time.perf_counter()
    waited: float = 0.0  # seconds in earlier waits for a claim
    not_before: int = 0  # the value of `AgentEngine._ended` from which on it may be loaded again: the pool was full
    generated: int = 0  # tokens passed to `on_token`
    joined: float = 0.0  # time.perf_counter() when it joined the batch
    running: int | None = None  # its uid in the batch
    span: TraceSpan = field(default_factory=partial(span, "kvpage.request"))

    @property
    def publishes(self) -> bool:
        """Whether its blocks are written before the answer is complete, so that other prompts can wait for them."""
        return self.written and self.options["kept_tokens"] is None

    @property
    def waits(self) -> bool:
        """Whether another prompt holds the claim on the first missing block, or the page server has not answered."""
        return self.claim is not None and self.claim.state == "wait"

    def progress(self) -> JobProgress:
        """Return a copy of the job's state for display."""
        loaded = self.loaded
        return JobProgress(
            uid=self.uid,
            agent_id=self.agent_id,
            kept=self.keep,
            label=self.label,
            stage=self.stage,
            prompt=len(self.tokens),
            reused=loaded.reach if loaded else 0,
            tier=self.restored[0] if loaded and loaded.reach else "none",
            generated=self.generated,
            seconds=time.perf_counter() - self.submitted,
        )

    def answer(self, done: CompletedGeneration) -> Answer:
        """Return the answer for `on_done`, with the reuse of the job's loads."""
        loaded = self.loaded
        tier: Tier = self.restored[0] if loaded else "prefix" if self.leader else "none"
        dropped = loaded and loaded.reach and not done.tokens_reused and not done.not_kept  # see `ever_fits`
        reuse = Reuse(
            tier=tier if done.tokens_reused else "none",
            tokens=done.tokens_reused,
            restore_seconds=self.restore_seconds,
            waited_seconds=self.waited,
            time_to_first_token=self.joined - self.submitted + done.time_to_first_token,
            prefill_seconds=done.prefill_seconds,
            why="pool" if dropped else loaded.why if loaded else None,
            coded=loaded.coded if loaded else None,
            mapped=loaded is not None and loaded.mapped,
        )
        return Answer(
            uid=self.uid,
            agent_id=self.agent_id,
            text=done.text,
            tokens=done.tokens,
            finish_reason=done.finish_reason,
            stopped_by=done.stopped_by,
            prompt_tokens=done.prompt_tokens,
            reuse=reuse,
            shares_prompt=bool(self.leader and done.tokens_reused),  # 0 if it was computed by itself after all
            not_kept=done.not_kept,
        )


log = logging.getLogger(__name__)

MAX_PROMPTS_AHEAD = 8  # a load begins while fewer prompts are LOADING or READY
LOOK_AGAIN_SECONDS = 0.02  # longest wait of a step while blocks may become free, or a claim may change
PATIENCE_FACTOR = 2.0  # longest wait for a prefix that another prompt computes, as a multiple of the time to compute it
MEASURED_TOKENS = 64  # a prefill with fewer computed tokens does not measure the speed


class AgentEngine:
    """Scheduler that answers prompts of many agents in one batch. One thread owns it; others may only call `wake`.

    `step` calls the callbacks of a prompt: `on_token` for every token, then `on_done` or `on_error` once. An exception
    of `on_token` ends its own answer only, an exception of the others is logged.
    """

    def __init__(self, batch: BlockPoolBatchEngine, store: AgentCacheStore | None = None) -> None:
        """Take ownership of `batch`. When the batch lacks blocks, the engine evicts contexts from `store`."""
        self._batch = batch
        self._batch.wait_for_blocks = True
        self._store = store
        self._uids = count()
        self._jobs: dict[int, Job] = {}  # pending jobs by uid, in the order of submission
        self._running: dict[int, Job] = {}  # jobs in the batch, by the batch's uid
        self._speed = 0.0  # tokens per second of the last measured prefill; 0 if unknown
        self._ended = 0  # number of answers that have ended and freed their blocks
        self._woken = threading.Event()
        self._closed = False

    @property
    def pending(self) -> int:
        """Number of prompts that are not answered yet."""
        return len(self._jobs)

    def submit(
        self,
        agent_id: str,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        sampler: Sampler | Sampling | None = None,
        logits_processors: Sequence[Processor] = (),
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        continues: bool = False,
        logprobs: int = 0,
        keep: bool = True,
        label: str = "",
        leader: int | None = None,
        boundaries: Collection[int] = (),
        kept_tokens: int | None = None,
        written: bool = True,
        lifetimes: Lifetimes | None = None,
        on_token: TokenReceiver | None = None,
        on_done: Callable[[Answer], None],
        on_error: Callable[[Exception], None],
    ) -> int:
        """Queue a prompt, given as the token ids of its whole context, and return its uid without waiting.

        Tokens found in the agent's last context, or in any other context of its tenant, are loaded and not computed.
        With `keep`, the new context replaces the agent's last one. Without it, the agent's id stands for this prompt
        only, and its context is shared without a name; then `label` is the text that `kvpage ls` shows for it. With
        `leader`, the uid of a prompt of the same tokens, the prompt is computed once for both. With `kept_tokens`, only
        these first tokens of the context are kept; with 0, nothing is loaded or kept. A context that is not `written`
        stays in memory. With `lifetimes`, its first tokens are protected from eviction, and `on_done` is called when it
        is known how many: on another thread.

        `on_done` is called with the answer, or `on_error` with an exception, in a later `step`. All other arguments,
        and the exceptions, are those of `BlockPoolBatchEngine.submit`; this method itself raises none. A prompt waits
        while the pool is full. PoolExhaustedError means that the prompt needs more than the whole pool.
        """
        options = {
            "max_tokens": max_tokens,
            "sampler": sampler,
            "logits_processors": logits_processors,
            "stop": stop,
            "stop_tokens": stop_tokens,
            "continues": continues,
            "logprobs": logprobs,
            "kept_tokens": kept_tokens,
        }
        of = None if leader is None else self._jobs.get(leader)
        callbacks = on_token, on_done, on_error
        job = Job(next(self._uids), agent_id, (), options, keep, label, *callbacks, of, boundaries, written, lifetimes)
        job.span.set(agent=agent_id, model=self._batch.spec.model_id)
        try:
            job.tokens = tuple(token_ids(tokens, self._batch.spec.vocab_size))
            if self._closed:
                raise EngineClosedError("the engine was drained or shut down and takes no more prompts")
            self._batch.check(
                agent_id, job.tokens, max_tokens=max_tokens, stop=stop, logprobs=logprobs, boundaries=boundaries
            )
        except (ValueError, RuntimeError) as error:
            job.error = error
        self._jobs[job.uid] = job
        self.wake()
        return job.uid

    def cancel(self, uid: int) -> None:
        """Drop a prompt and free its blocks. Its callbacks are no longer called.

        Raises KeyError for a uid that is not pending.
        """
        job = self._jobs.pop(uid)
        if job.running is not None:
            del self._running[job.running]
            self._ended += 1
            with suppress(KeyError):  # the answer is complete, and this is a call of a callback of this step
                self._batch.cancel(job.running)
        self._release(job)
        self._let_go(job)
        job.span.set(finish_reason="cancelled")
        job.span.end()

    def step(self, timeout: float = 0.0) -> bool:
        """Add loaded prompts to the batch, advance the batch by one step (a token of every answer, a chunk of every
        prefill), and call the callbacks.

        If no prompt runs, wait up to `timeout` seconds for a call of `wake`, such as a finished load, unless this step
        answered the last prompt. Return True while prompts are pending.
        """
        had_any = bool(self._jobs)
        self._begin()
        self._take_up()
        self._wait_no_longer()
        self._join()
        if space := self._batch.needed_space:
            self._make_room(*space)
        for done in self._batch.step_once():
            self._complete(done)
        if timeout > 0 and not self._batch.running and (self._jobs or not had_any):
            look_again = self._batch.needed_space or any(self._at(Stage.WAITING))
            self._woken.wait(min(timeout, LOOK_AGAIN_SECONDS) if look_again else timeout)
        self._woken.clear()
        return bool(self._jobs)

    def model_changed(self) -> None:
        """Report that the model was changed while answers run, so that their contexts are not kept."""
        self._batch.model_changed()

    def progress(self) -> list[JobProgress]:
        """Return the progress of each pending prompt."""
        return [job.progress() for job in self._jobs.values()]

    def wake(self) -> None:
        """End the wait of the current `step`, or of the next one. Thread-safe."""
        self._woken.set()

    def drain(self) -> None:
        """Reject new prompts, and answer the pending ones."""
        self._closed = True
        while self.step(timeout=1.0):
            pass

    def shutdown(self) -> None:
        """Reject new prompts, and end the pending ones with an error. May be called more than once."""
        self._closed = True
        for job in list(self._jobs.values()):
            self.cancel(job.uid)
            _notify(job.on_error, EngineClosedError("the engine was shut down before the answer was complete"))
        self._batch.shutdown()

    def _at(self, stage: Stage) -> Iterator[Job]:
        """Iterate over the jobs at this stage, in the order of submission, without jobs that a callback cancels
        meanwhile.
        """
        return (job for job in list(self._jobs.values()) if job.stage is stage and job.uid in self._jobs)

    def _begin(self) -> None:
        """Start loads for submitted prompts, while fewer than MAX_PROMPTS_AHEAD are loading or ready."""
        ahead = sum(job.stage in (Stage.LOADING, Stage.READY) for job in self._jobs.values())
        for job in self._at(Stage.SUBMITTED):
            if job.leader and (job.leader.uid not in self._jobs or job.leader.stage is Stage.RUNNING):
                job.leader = None  # the leader has ended, so this prompt is computed by itself
            if job.error:
                self._fail(job, job.error)
            elif job.leader:
                continue
            elif not self._store or job.options["kept_tokens"] == 0:
                job.stage = Stage.READY
            elif ahead < MAX_PROMPTS_AHEAD and (self._ended >= job.not_before or not self._batch.running):
                job.stage = Stage.LOADING
                # A second load, after another prompt has computed the prefix, uses the rest of the same time limit.
                with job.span.current():
                    job.loading = self._store.begin_load(
                        job.agent_id,
                        job.tokens,
                        within=self._store.restore_within - job.restore_seconds,
                        named=job.keep,
                        lifetimes=job.lifetimes,
                    )
                job.loading.add_done_callback(self.wake)
                ahead += 1

    def _take_up(self) -> None:
        """Take the results of completed loads, and claim the first missing block of each prompt.

        A failed load fails its prompt. If the pool had no room for a load, the load is started again when another
        answer has ended and freed its blocks.
        """
        for job in self._at(Stage.LOADING):
            if not (job.loading and job.loading.done()):
                continue
            try:
                job.loaded, job.loading = job.loading.result(), None
            except Exception as error:  # noqa: BLE001 - passed to on_error of this prompt
                self._fail(job, error)
                continue
            job.restore_seconds += job.loaded.seconds
            if job.loaded.reach != job.restored[1]:
                job.restored = job.loaded.tier, job.loaded.reach
            if job.loaded.why == "pool" and not job.loaded.blocks and self._batch.running:
                job.not_before = self._ended + 1
                job.stage = Stage.SUBMITTED
            else:
                self._claim(job, job.loaded.reach)

    def _claim(self, job: Job, reach: int) -> None:
        """Claim the prompt's first missing block, so that only one prompt computes it. `reach` is the number of loaded
        tokens. The prompt is then READY, or WAITING if another prompt has the claim.

        After a second load that found more than the first, claim the next missing block. If the page server did not
        answer the load, the claim does not wait for its answer either, because that would take the same timeout again.
        """
        begins = job.claim is None or (job.claim.state == "proceed" and reach > job.reach)
        if self._store and job.publishes and begins:
            self._release(job)
            job.reach = reach
            answers = not (job.loaded and job.loaded.unanswered)
            job.claim = self._store.claims.begin(job.agent_id, job.tokens, reach, answers=answers)
            job.claim.add_done_callback(self.wake)
        job.waiting_since = time.perf_counter()
        job.stage = Stage.WAITING if job.waits else Stage.READY

    def _wait_no_longer(self) -> None:
        """End the wait of prompts whose claim has another state now, or that have waited longer than PATIENCE_FACTOR
        times the time to compute the missing tokens.

        A prompt that got the claim, and still has its loaded blocks, becomes READY. Other prompts are loaded again,
        because another prompt may have computed their blocks.
        """
        for job in self._at(Stage.WAITING):
            waited = time.perf_counter() - job.waiting_since
            if job.waits and self._speed and waited > PATIENCE_FACTOR * (len(job.tokens) - job.reach) / self._speed:
                self._release(job)
            if job.waits:
                continue
            job.waited += waited
            has_all = not job.reach or (job.loaded and job.loaded.blocks)
            if has_all and job.claim and job.claim.state == "mine":
                job.stage = Stage.READY
            else:
                self._let_go(job)
                job.stage = Stage.SUBMITTED

    def _join(self) -> None:
        """Submit ready prompts to the batch, in order, until one has to wait there for blocks."""
        for job in self._at(Stage.READY):
            if self._batch.needed_space:
                return
            job.joined = time.perf_counter()
            followers = [one for one in self._at(Stage.SUBMITTED) if one.leader is job and not one.error]
            try:
                with job.span.current():
                    job.running = self._batch.submit(
                        job.agent_id,
                        job.tokens,
                        job.loaded.blocks if job.loaded else None,
                        on_token=self._renamed(job) if job.on_token else None,
                        on_prompt=self._publisher(job, self._store) if self._store and job.publishes else None,
                        forked=bool(followers),
                        boundaries=job.boundaries,
                        **job.options,
                    )
            except (ValueError, RuntimeError) as error:
                self._fail(job, error)
            else:
                job.stage = Stage.RUNNING
                self._running[job.running] = job
                for follower in followers:
                    self._join_with(job.running, follower)
                self._let_go(job)

    def _join_with(self, running: int, job: Job) -> None:
        """Add a prompt to the batch as a fork of the prompt `running`, which has just joined."""
        job.joined = time.perf_counter()
        on_token = self._renamed(job) if job.on_token else None
        try:
            with job.span.current():
                job.running = self._batch.fork(running, job.agent_id, on_token=on_token, **job.options)
        except (ValueError, RuntimeError) as error:
            self._fail(job, error)
        else:
            job.stage = Stage.RUNNING
            self._running[job.running] = job

    def _make_room(self, blocks: int, nbytes: int) -> None:
        """Free blocks and bytes for the prompt that waits in the batch, if possible.

        Contexts are evicted from memory first. If that is not enough and no prompt runs, the blocks that were loaded
        for a later prompt are freed; that prompt will be loaded again. Pinned contexts are the last to be evicted.
        """
        if not self._store or self._store.make_room(blocks, nbytes) or self._batch.running:
            return
        for job in reversed([*self._at(Stage.READY), *self._at(Stage.WAITING)]):
            if job.loaded and job.loaded.blocks:
                self._let_go(job)
                if job.stage is Stage.READY:  # a waiting job is loaded again after its claim
                    job.stage = Stage.SUBMITTED
                return
        self._store.make_room(blocks, nbytes, pinned=True)

    def _renamed(self, job: Job) -> TokenReceiver:
        """Return a receiver that counts tokens, and calls the job's `on_token` with the job's uid in place of the
        batch's uid.
        """
        on_token = job.on_token
        assert on_token

        def receive(token: Token) -> None:
            job.generated += 1
            on_token(replace(token, uid=job.uid))

        return receive

    def _publisher(self, job: Job, store: AgentCacheStore) -> PromptReceiver:
        """Return an `on_prompt` callback for the batch. It writes the full blocks of a prompt to the store before the
        answer is complete, so that prompts that wait for them can go on.
        """

        def publish(blocks: AgentBlocks) -> None:
            if len(blocks) > job.reach:
                claim, job.claim = job.claim, None  # the store releases the claim when the server has the blocks
                inherited = None if job.lifetimes is None else job.lifetimes.of_context(())
                store.publish(blocks, claim, label=None if job.keep else job.label, lifetimes=inherited)
            self._release(job)

        return publish

    def _complete(self, done: CompletedGeneration) -> None:
        """End the job of a completed generation: save or publish its context, report its speed, and call `on_done`,
        or `on_error` if it failed.
        """
        job = self._running.pop(done.uid, None)
        if job is None:  # cancelled by another callback in this step
            return self._batch.pool.free(done.blocks.block_ids, done.agent_id)
        del self._jobs[job.uid]
        self._ended += 1
        self._release(job)
        computed = done.prompt_tokens - done.tokens_reused
        if computed >= MEASURED_TOKENS and done.tokens:
            self._speed = computed / done.prefill_seconds
            if self._store:
                first_token = job.joined + done.time_to_first_token
                self._store.prefilled(computed, done.prefill_seconds, time.perf_counter() - first_token)
        answer = job.answer(done)
        if self._store and done.blocks.blocks:
            names = None if job.keep else self._store.names_of(done.blocks)
            block = self._store.block_name(done.blocks)
            short = () if block or job.keep else done.blocks.tokens
            answer = replace(answer, context=names, block=block, short=short)
        if self._batch.spec.has_state:
            answer = replace(answer, states=tuple(done.blocks.states))
        if self._store and not done.error:
            counted = (0, 0) if answer.shares_prompt else (answer.reuse.tokens, computed)
            self._store.answered(answer.reuse.tier, *counted)
        lifetimes = None if done.error else job.lifetimes
        waits = bool(lifetimes)  # for the report
        if lifetimes:
            lifetimes.on_report(lambda kept: _notify(job.on_done, replace(answer, kept=kept)))
        if self._store and done.blocks.blocks:
            if job.keep:
                self._store.save(done.blocks, lifetimes, asked=job.submitted)
            else:
                self._store.publish(done.blocks, label=job.label, written=job.written, lifetimes=lifetimes)
        elif lifetimes:
            lifetimes.report(KeptContext(0, 0, done.not_kept or "this engine keeps no contexts"))
        self._batch.pool.free(done.blocks.block_ids, job.agent_id)
        _end_span(job, done, answer.reuse)
        if done.error:
            _notify(job.on_error, done.error)
        elif not waits:
            _notify(job.on_done, answer)
        return None

    def _fail(self, job: Job, error: Exception) -> None:
        """End a job with an error: free its blocks, release its claim, and call `on_error`."""
        del self._jobs[job.uid]
        self._release(job)
        self._let_go(job)
        job.span.end(error)
        _notify(job.on_error, error)

    def _release(self, job: Job) -> None:
        """Release the job's claim, if it has one."""
        if job.claim:
            job.claim.release()

    def _let_go(self, job: Job) -> None:
        """Cancel the load of a job, and free its blocks."""
        if job.loading:
            job.loading.cancel()
            job.loading = None
        if job.loaded and job.loaded.blocks:
            self._batch.pool.free(job.loaded.blocks.block_ids, job.agent_id)
            job.loaded = replace(job.loaded, blocks=None)


def _end_span(job: Job, done: CompletedGeneration, reuse: Reuse) -> None:
    """End the job's span. If there was a token, add a span from the start of the prefill to the first token."""
    if reuse.time_to_first_token > 0:
        first = job.submitted + reuse.time_to_first_token
        with job.span.current():
            computing = span("kvpage.first_token", began=first - done.prefill_seconds)
        computing.set(tokens=done.prompt_tokens - done.tokens_reused)
        computing.end(at=first)
    job.span.set(
        prompt_tokens=done.prompt_tokens,
        reused_tokens=reuse.tokens,
        answer_tokens=len(done.tokens),
        tier=reuse.tier,
        reason=reuse.why,
        waited_seconds=reuse.waited_seconds,
        finish_reason=done.finish_reason,
    )
    job.span.end(done.error)


_Event = TypeVar("_Event")


def _notify(receiver: Callable[[_Event], None], event: _Event) -> None:
    """Call `on_done` or `on_error` with `event`, and log an exception of the callback."""
    try:
        receiver(event)
    except Exception:
        log.exception("a receiver failed")
