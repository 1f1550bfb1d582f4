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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, TypeVar

from engine.batch_engine import BlockPoolBatchEngine
from engine.blocks import AgentBlocks
from engine.request import CompletedGeneration, EngineClosedError, Token, TokenReceiver
from engine.singly import Sampler

log = logging.getLogger(__name__)

Tier = Literal["hot", "page", "cold", "prefix", "none"]


@dataclass(frozen=True, slots=True)
class Reuse:
    """What an answer owes to the store."""

    tier: Tier = "none"  # where it was found
    tokens: int = 0  # of the prompt, not computed
    restore_seconds: float = 0.0  # from asking the store to having its blocks
    waited_seconds: float = 0.0  # for another who computed the same
    time_to_first_token: float = 0.0  # seconds since submit, all of it included
    why: str | None = None  # the reason, when the store found nothing or less


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


@dataclass(slots=True, eq=False)
class _Job:
    """A prompt on its way to an answer."""

    uid: int
    agent_id: str
    tokens: tuple[int, ...]
    options: dict[str, Any]  # of the batch's submit
    keep: bool
    on_token: TokenReceiver | None
    on_done: Callable[[Answer], None]
    on_error: Callable[[Exception], None]
    submitted: float = field(default_factory=time.perf_counter)
    known: AgentBlocks | None = None  # what the store has of it; its references are held under the agent's id
    reuse: Reuse = field(default_factory=Reuse)
    error: Exception | None = None  # why it will not be answered
    joined: float = 0.0  # the batch
    running: int | None = None  # its uid there


class AgentEngine:
    """Answers prompts of many agents at once. One thread owns it; only `wake` may be called from others.

    What is submitted comes back by its callbacks, which are called from `step`: `on_token` for every token, and then
    once `on_done` or `on_error`. One that raises ends its own answer, and no other.
    """

    def __init__(self, batch: BlockPoolBatchEngine, store: Any = None) -> None:
        """`batch` is the engine's own from now on: prompts for which there is no room yet wait there."""
        self._batch = batch
        self._batch.wait_for_blocks = True
        self._store = store
        self._uids = count()
        self._jobs: dict[int, _Job] = {}  # by uid; those that are pending, in their order
        self._running: dict[int, _Job] = {}  # by the batch's uid
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
        job = _Job(next(self._uids), agent_id, tuple(tokens), options, keep, on_token, on_done, on_error)
        try:
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
            self._batch.cancel(job.running)
        self._let_go(job)

    def step(self, timeout: float = 0.0) -> bool:
        """One round: what was loaded joins the batch, which takes every answer on by a token and every prompt by a
        chunk. Waits up to `timeout` seconds when there is nothing to run. True while anything is pending."""
        self._refuse()
        self._load()
        if self._batch.pending:
            for done in self._batch.step_once():
                self._complete(done)
        elif timeout:
            self._woken.wait(timeout)
        self._woken.clear()
        return bool(self._jobs)

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

    def _refuse(self) -> None:
        for job in [job for job in self._jobs.values() if job.error]:
            self._fail(job)

    def _load(self) -> None:
        for job in [job for job in self._jobs.values() if job.running is None]:
            asked = time.perf_counter()
            if self._store:
                job.known = self._store.load(job.agent_id, job.tokens)
            job.reuse = replace(job.reuse, restore_seconds=time.perf_counter() - asked)
            self._join(job)

    def _join(self, job: _Job) -> None:
        """Hand a prompt to the batch."""
        job.joined = time.perf_counter()
        on_token = self._renamed(job) if job.on_token else None
        try:
            job.running = self._batch.submit(job.agent_id, job.tokens, job.known, on_token=on_token, **job.options)
            self._running[job.running] = job
        except (ValueError, RuntimeError) as error:
            job.error = error
            self._fail(job)
        finally:
            self._let_go(job)

    def _renamed(self, job: _Job) -> TokenReceiver:
        """Tokens bear the batch's uid; whoever asked knows another."""
        on_token = job.on_token
        assert on_token

        def receive(token: Token) -> None:
            on_token(replace(token, uid=job.uid))

        return receive

    def _complete(self, done: CompletedGeneration) -> None:
        job = self._running.pop(done.uid)
        del self._jobs[job.uid]
        if job.keep and self._store:
            self._store.save(done.blocks)
        self._batch.pool.free(done.blocks.block_ids, job.agent_id)
        if done.error:
            _tell(job.on_error, done.error)
        else:
            _tell(job.on_done, _answer(job, done))

    def _fail(self, job: _Job) -> None:
        assert job.error
        del self._jobs[job.uid]
        self._let_go(job)
        _tell(job.on_error, job.error)

    def _let_go(self, job: _Job) -> None:
        """Of what was loaded for it."""
        known, job.known = job.known, None
        if known:
            self._batch.pool.free(known.block_ids, job.agent_id)


def _answer(job: _Job, done: CompletedGeneration) -> Answer:
    reuse = replace(
        job.reuse,
        tier="page" if done.tokens_reused else "none",
        tokens=done.tokens_reused,
        time_to_first_token=job.joined - job.submitted + done.time_to_first_token,
    )
    return Answer(
        uid=job.uid,
        agent_id=job.agent_id,
        text=done.text,
        tokens=done.tokens,
        finish_reason=done.finish_reason,
        prompt_tokens=done.prompt_tokens,
        reuse=reuse,
        not_kept=done.not_kept,
    )


_Told = TypeVar("_Told")


def _tell(receiver: Callable[[_Told], None], told: _Told) -> None:
    """Call a receiver that has nothing more to lose; what it raises is logged."""
    try:
        receiver(told)
    except Exception:
        log.exception("a receiver failed")
