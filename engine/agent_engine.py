"""The engine that other code drives: prompts of agents, whose contexts come from a store and go back to it.

>>> engine = AgentEngine(BlockPoolBatchEngine(model, tokenizer, spec, pool), store)
>>> engine.submit("alice", tokens, max_tokens=100, on_token=print, on_done=print, on_error=print)
>>> while engine.step(timeout=1.0):
...     pass

A prompt's way: it is submitted; what the store has of it is loaded, while the batch goes on with others; it joins the
batch; its answer is handed out, and its context goes to the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TypeVar

from engine.agent_job import Answer, Job, Reuse, Stage
from engine.batch_engine import BlockPoolBatchEngine
from engine.generation.tokens import token_ids
from engine.generation.unbatched import Sampler
from engine.memory.blocks import AgentBlocks
from engine.scheduling.request import CompletedGeneration, EngineClosedError, PromptReceiver, Token, TokenReceiver
from engine.tiers.store import AgentCacheStore

log = logging.getLogger(__name__)

MAX_PROMPTS_AHEAD = 8  # that are loaded before there is room for them
LOOK_AGAIN_SECONDS = 0.02  # while somebody outside may make room, or somebody's patience may end
PATIENCE_FACTOR = 2.0  # times as long as computing it takes, to wait for what another computes
MEASURED_TOKENS = 64  # of a prompt, at least: its time tells how fast tokens are computed


class AgentEngine:
    """Answers prompts of many agents at once. One thread owns it; only `wake` may be called from others.

    What is submitted comes back by its callbacks, which are called from `step`: `on_token` for every token, and then
    once `on_done` or `on_error`. One that raises ends its own answer, and no other.
    """

    def __init__(self, batch: BlockPoolBatchEngine, store: AgentCacheStore | None = None) -> None:
        """`batch` is the engine's own from now on; for what has no room there it makes some, in `store`, or waits."""
        self._batch = batch
        self._batch.wait_for_blocks = True
        self._store = store
        self._uids = count()
        self._jobs: dict[int, Job] = {}  # by uid; those that are pending, in their order
        self._running: dict[int, Job] = {}  # by the batch's uid
        self._speed = 0.0  # tokens of prompts a second, lately; 0 before it is known
        self._ended = 0  # answers that have given back what they needed
        self._woken = threading.Event()
        self._closed = False

    @property
    def pending(self) -> int:
        """Prompts that were submitted and have not been answered."""
        return len(self._jobs)

    def submit(
        self,
        agent_id: str,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        sampler: Sampler | None = None,
        stop: Sequence[str] = (),
        logprobs: int = 0,
        keep: bool = True,
        on_token: TokenReceiver | None = None,
        on_done: Callable[[Answer], None],
        on_error: Callable[[Exception], None],
    ) -> int:
        """Take up a prompt, the whole of it as token ids, and return at once; the uid of its answer.

        What the agent's last context, or anybody's full blocks, have of the prompt is loaded and not computed. With
        `keep` the context after the answer replaces the agent's last one; without it, only its full blocks are shared
        with whoever has the same beginning. The rest is as in the batch's `submit`, and so is what `on_error` is called
        with, PoolExhaustedError only when the answer may need more than the whole pool: what has no room now waits.
        """
        options = {"max_tokens": max_tokens, "sampler": sampler, "stop": stop, "logprobs": logprobs}
        job = Job(next(self._uids), agent_id, (), options, keep, on_token, on_done, on_error)
        try:
            job.tokens = tuple(token_ids(tokens, self._batch.spec.vocab_size))
            if self._closed:
                raise EngineClosedError("the engine was drained or shut down and takes no more prompts")
            self._batch.check(agent_id, job.tokens, max_tokens=max_tokens, stop=stop, logprobs=logprobs)
        except (ValueError, RuntimeError) as error:
            job.error = error
        self._jobs[job.uid] = job
        self.wake()
        return job.uid

    def cancel(self, uid: int) -> None:
        """Drop a prompt, wherever it is; its blocks are free at once, and none of its callbacks is called any more.

        Raises KeyError for a uid that isn't pending.
        """
        job = self._jobs.pop(uid)
        if job.running is not None:
            del self._running[job.running]
            self._ended += 1
            with suppress(KeyError):  # complete, by the step whose receivers are being told
                self._batch.cancel(job.running)
        self._release(job)
        self._let_go(job)

    def step(self, timeout: float = 0.0) -> bool:
        """One round: what was loaded joins the batch, which takes every answer on by a token and every prompt by a
        chunk. Waits up to `timeout` seconds when there is nothing to run. True while anything is pending."""
        self._begin()
        self._take_up()
        self._wait_no_longer()
        self._join()
        if wanted := self._batch.wanted:
            self._make_room(*wanted)
        for done in self._batch.step_once():
            self._complete(done)
        if timeout > 0 and not self._batch.running:
            look_again = self._batch.wanted or any(self._at(Stage.WAITING))
            self._woken.wait(min(timeout, LOOK_AGAIN_SECONDS) if look_again else timeout)
        self._woken.clear()
        return bool(self._jobs)

    def model_changed(self) -> None:
        """Say that the model was changed while answers run, as to the batch."""
        self._batch.model_changed()

    def wake(self) -> None:
        """End the waiting of a `step`, or of the next one. From any thread."""
        self._woken.set()

    def drain(self) -> None:
        """Take no more prompts, and answer those that were submitted."""
        self._closed = True
        while self.step(timeout=1.0):
            pass

    def shutdown(self) -> None:
        """Take no more prompts, and drop those that are not answered; `on_error` is told so. May be called again."""
        self._closed = True
        for job in list(self._jobs.values()):
            self.cancel(job.uid)
            _tell(job.on_error, EngineClosedError("the engine was shut down before the answer was complete"))
        self._batch.shutdown()

    def _at(self, stage: Stage) -> Iterator[Job]:
        """In their order; what a receiver cancels meanwhile is left out."""
        return (job for job in list(self._jobs.values()) if job.stage is stage and job.uid in self._jobs)

    def _begin(self) -> None:
        """Begin to load what was submitted, not far ahead of what can run."""
        ahead = sum(job.stage in (Stage.LOADING, Stage.READY) for job in self._jobs.values())
        for job in self._at(Stage.SUBMITTED):
            if job.error:
                self._fail(job, job.error)
            elif not self._store:
                job.stage = Stage.READY
            elif ahead < MAX_PROMPTS_AHEAD and (self._ended >= job.not_before or not self._batch.running):
                job.stage = Stage.LOADING
                # What it loads again, because another has computed it meanwhile, is on the same time.
                job.loading = self._store.begin_load(
                    job.agent_id, job.tokens, within=self._store.restore_within - job.restore_seconds
                )
                job.loading.add_done_callback(self.wake)
                ahead += 1

    def _take_up(self) -> None:
        """What was loaded is ready, unless somebody else computes what it lacks."""
        for job in self._at(Stage.LOADING):
            if not (job.loading and job.loading.done()):
                continue
            try:
                job.loaded, job.loading = job.loading.result(), None
            except Exception as error:  # noqa: BLE001 - whatever it is, it goes to whoever asked, and to nobody else
                self._fail(job, error)
                continue
            job.restore_seconds += job.loaded.seconds
            if job.loaded.why == "pool" and not job.loaded.blocks and self._batch.running:
                job.not_before = self._ended + 1
                job.stage = Stage.SUBMITTED
            else:
                self._claim(job, job.loaded.reach)

    def _claim(self, job: Job, reach: int) -> None:
        """What a prompt lacks is computed once, by whoever has the claim on it; who has waited for that loads again,
        and claims what is still missing, unless there is no more than before."""
        if self._store and (job.claim is None or (job.claim.state == "proceed" and reach > job.reach)):
            self._release(job)
            job.reach = reach
            job.claim = self._store.claims.begin(job.agent_id, job.tokens, reach)
            job.claim.add_done_callback(self.wake)
        job.waiting_since = time.perf_counter()
        job.stage = Stage.WAITING if job.waits else Stage.READY

    def _wait_no_longer(self) -> None:
        """Who has waited goes on; who has waited for longer than computing it takes does so, too."""
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
        """Hand what is ready to the batch, in order; one at most waits for room there."""
        for job in self._at(Stage.READY):
            if self._batch.wanted:
                return
            job.joined = time.perf_counter()
            try:
                job.running = self._batch.submit(
                    job.agent_id,
                    job.tokens,
                    job.loaded.blocks if job.loaded else None,
                    on_token=self._renamed(job) if job.on_token else None,
                    on_prompt=self._publisher(job, self._store) if self._store else None,
                    **job.options,
                )
            except (ValueError, RuntimeError) as error:
                self._fail(job, error)
            else:
                job.stage = Stage.RUNNING
                self._running[job.running] = job
                self._let_go(job)

    def _make_room(self, blocks: int, nbytes: int) -> None:
        """For what waits in the batch: contexts leave memory, and if that is not enough and nothing runs that will
        give back its blocks, those that were loaded for later prompts, which will be loaded again."""
        if not self._store or self._store.make_room(blocks, nbytes) or self._batch.running:
            return
        for job in reversed([*self._at(Stage.READY), *self._at(Stage.WAITING)]):
            if job.loaded and job.loaded.blocks:
                self._let_go(job)
                job.stage = Stage.WAITING if job.stage is Stage.WAITING else Stage.SUBMITTED
                return

    def _renamed(self, job: Job) -> TokenReceiver:
        """Tokens bear the batch's uid; whoever asked knows another."""
        on_token = job.on_token
        assert on_token

        def receive(token: Token) -> None:
            on_token(replace(token, uid=job.uid))

        return receive

    def _publisher(self, job: Job, store: AgentCacheStore) -> PromptReceiver:
        """What a prompt had computed is known to all before its answer is complete."""

        def publish(blocks: AgentBlocks) -> None:
            if len(blocks) > job.reach:
                claim, job.claim = job.claim, None  # the store's now, until the server has the blocks
                store.publish(blocks, claim)
            self._release(job)

        return publish

    def _complete(self, done: CompletedGeneration) -> None:
        job = self._running.pop(done.uid, None)
        if job is None:  # cancelled by the receiver of another that is complete
            return self._batch.pool.free(done.blocks.block_ids, done.agent_id)
        del self._jobs[job.uid]
        self._ended += 1
        self._release(job)
        computed = done.prompt_tokens - done.tokens_reused
        if computed >= MEASURED_TOKENS and done.tokens:
            self._speed = computed / done.prefill_seconds
            if self._store:
                self._store.prefilled(computed, done.prefill_seconds)
        if self._store and done.blocks.blocks:
            keep = self._store.save if job.keep else self._store.publish
            keep(done.blocks)
        self._batch.pool.free(done.blocks.block_ids, job.agent_id)
        if done.error:
            _tell(job.on_error, done.error)
        else:
            _tell(job.on_done, job.answer(done))
        return None

    def _fail(self, job: Job, error: Exception) -> None:
        del self._jobs[job.uid]
        self._release(job)
        self._let_go(job)
        _tell(job.on_error, error)

    def _release(self, job: Job) -> None:
        """Its claim: what it was for is published, or won't be."""
        if job.claim:
            job.claim.release()

    def _let_go(self, job: Job) -> None:
        """Of what is being loaded for it, or was."""
        if job.loading:
            job.loading.cancel()
            job.loading = None
        if job.loaded and job.loaded.blocks:
            self._batch.pool.free(job.loaded.blocks.block_ids, job.agent_id)
            job.loaded = replace(job.loaded, blocks=None)


_Told = TypeVar("_Told")


def _tell(receiver: Callable[[_Told], None], told: _Told) -> None:
    """Call a receiver that has nothing more to lose; what it raises is logged."""
    try:
        receiver(told)
    except Exception:
        log.exception("a receiver failed")


__all__ = ["AgentEngine", "Answer", "Reuse"]
