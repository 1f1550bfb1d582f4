"""The thread that runs the engine.

Only this thread loads and runs the model. Threads of the tiers create arrays, which they evaluate before this thread
gets them. The server's event loop passes calls to this thread through a queue, and this thread passes tokens to the
event loop with `call_soon_threadsafe`. Neither waits for the other.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypeVar

from ..agent_engine import AgentEngine, Answer, Boundary
from ..generation.sampling import Sampling
from ..generation.structure import Constraint
from ..memory.lifetimes import Lifetimes
from ..scheduling import Turns, run_call
from ..scheduling.request import EngineClosedError, Token
from ..startup import Engine

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # an idle engine checks after this time whether to end
PROMPTS_IN_ENGINE = 40  # at most: 32 in the batch, and 8 whose contexts are loaded meanwhile

Event = Token | Answer | Exception  # the next token, the complete answer, or an error
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine. The fields are the arguments of `AgentEngine.submit`."""

    agent_id: str
    keep: bool  # whether to keep the context as the agent's
    tokens: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    stop_tokens: Collection[int] = ()
    constraint: Constraint | None = None
    end_of_reasoning: Sequence[int] = ()  # tokens after which the constraint begins
    continues: bool = True  # whether the text of the answer keeps a space at its beginning
    logprobs: int = 0
    leader: int | None = None  # the index of a prompt of the same tokens, before it in the request
    label: str = ""  # the text that `kvpage` and the web pages show for a context without a name
    lifetimes: Lifetimes | None = None
    prewarms: bool = False  # whether it is computed for later requests, and its answer is not sent
    boundaries: Sequence[Boundary] = ()  # the breakpoints, in ascending order
    kept_tokens: int | None = None  # tokens of the context to keep, from its beginning; None for all
    written: bool = True  # whether tiers below memory may get the context
    explain: Callable[[Answer], str | None] | None = None  # called with the answer: returns why less was reused
    follow: Callable[[Answer], Awaitable[Sequence[tuple[str, str]]]] | None = None  # called with the answer: follows
    # the request's hints, and returns the ids and results of the actions


@dataclass(slots=True, eq=False)
class Generation:
    """One answer that is being computed."""

    prompt: Prompt
    tenant: str
    index: int  # among the answers to a request
    leader: Generation | None  # the answer with which its prompt is computed
    _ended: Callable[[Generation], bool]  # called at the end: returns whether it was pending
    _drop: Callable[[Generation], None]  # called by `cancel`: ends the computation
    _events: asyncio.Queue[tuple[Generation, Event]]
    uid: int | None = None  # the engine's id of the prompt; set and read on the engine's thread
    cancelled: bool = False
    answer: Answer | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)  # has the request's trace
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def receive(self, event: Event) -> None:
        """Add an event to the request's iteration. Thread-safe."""
        self._loop.call_soon_threadsafe(self._arrived, event)

    def cancel(self) -> None:
        """Cancel the answer. Its blocks are freed before the engine's next step. Further calls have no effect."""
        self.cancelled = True
        if self._ended(self):
            self._drop(self)

    def abandon(self, why: Exception) -> None:
        """Cancel the answer. The request's iteration raises `why` after the tokens that were computed already."""
        self.cancel()
        self._events.put_nowait((self, why))

    def _arrived(self, event: Event) -> None:
        if not isinstance(event, Token):
            self._ended(self)
        self._events.put_nowait((self, event))


class Answers:
    """The answers to one request. The event loop iterates over the tokens of all, each with the index of its answer.
    The last event of an answer is the complete Answer.
    """

    def __init__(self, model: str) -> None:
        self.model = model  # the name of the model for clients
        self.events: asyncio.Queue[tuple[Generation, Event]] = asyncio.Queue()
        self.generations: list[Generation] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Token | Answer]:
        """Wait for the next event. Raises the engine's exception, or the exception given to `abandon`."""
        if self.complete:
            raise StopAsyncIteration
        generation, event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Answer):
            if generation.prompt.explain and (why := generation.prompt.explain(event)):
                event = replace(event, reuse=replace(event.reuse, why=why))
            if generation.prompt.follow:
                event = replace(event, hints=await generation.prompt.follow(event))
            generation.answer = event
        return generation.index, event

    @property
    def complete(self) -> bool:
        """Whether all answers are complete."""
        return all(generation.answer for generation in self.generations)

    @property
    def whole(self) -> list[Answer]:
        """All complete answers."""
        return [generation.answer for generation in self.generations if generation.answer]

    @property
    def of_prompts(self) -> list[Answer]:
        """The first complete answer to each prompt."""
        return [one.answer for one in self.generations if one.answer and one.leader is None]

    def cancel(self) -> None:
        """Cancel all answers. Further calls have no effect."""
        for generation in reversed(self.generations):  # a leader last, so that no other starts to compute its prompt
            generation.cancel()

    def abandon(self, why: Exception) -> None:
        """Cancel all answers. The iteration raises `why` after the tokens that were computed already."""
        self.cancel()
        self.generations[0].abandon(why)


class EngineThread:
    """The thread that creates an engine with `make`, and runs it until `stop`. `model` is the model's name for clients.

    The engine runs prompts in the order of their submission. To be fair to tenants, this class keeps the waiting
    prompts, and submits at most PROMPTS_IN_ENGINE at a time, one of each tenant in turn.
    """

    def __init__(self, make: Callable[[], Engine], model: str) -> None:
        self._make = make
        self._model = model
        self._made: Future[Engine] = Future()
        self._calls: deque[Callable[[Engine], None]] = deque()
        # the event loop uses these five
        self._generations: set[Generation] = set()  # all pending ones: submitted or waiting
        self._pending: Counter[str] = Counter()  # their number by tenant
        self._submitted: set[Generation] = set()  # passed to the engine
        self._turns = Turns[Generation]()  # waiting ones
        self._idle = asyncio.Event()  # set while there is no pending one
        self._idle.set()
        self._stop = threading.Event()
        self._closing = False  # whether the engine accepts nothing any more
        self.unsaved = 0  # contexts that could not be saved when the engine was closed
        self._thread = threading.Thread(target=self._run, name=f"engine {model}", daemon=True)

    @property
    def pending(self) -> int:
        """Number of unfinished answers, including prompts that wait."""
        return len(self._generations)

    def pending_of(self, tenant: str) -> int:
        """Return the number of unfinished answers of a tenant."""
        return self._pending[tenant]

    @property
    def running(self) -> bool:
        """Whether there is an engine that accepts prompts."""
        return self._made.done() and not self._made.exception() and self._thread.is_alive() and not self._closing

    def start(self) -> None:
        """Start the thread, which loads the model."""
        self._thread.start()

    async def loaded(self) -> Engine:
        """Wait until the engine is created, and return it. Raises the exception of its construction.

        If this wait is cancelled, the construction continues.
        """
        return await asyncio.shield(asyncio.wrap_future(self._made))

    def generate(self, prompts: Sequence[Prompt], tenant: str = "") -> Answers:
        """Queue the prompts of a tenant's request, and return their answers. The iteration over them raises exceptions
        of the engine.
        """
        answers = Answers(self._model)
        for index, prompt in enumerate(prompts):
            leader = None if prompt.leader is None else answers.generations[prompt.leader]
            generation = Generation(prompt, tenant, index, leader, self._remove, self._drop, answers.events)
            answers.generations.append(generation)
            self._generations.add(generation)
            self._pending[tenant] += 1
            self._idle.clear()
            if self._thread.is_alive() and not self._closing:
                self._turns.add(tenant, generation)
            else:
                generation.receive(EngineClosedError("the engine has ended"))
        self._submit_next()
        return answers

    async def call(self, work: Callable[[Engine], _Result]) -> _Result:
        """Run `work` on the thread, between two steps of the engine. Return its result, or raise its exception. If the
        caller is cancelled before that, `work` is not called.
        """
        done: Future[_Result] = Future()
        self._call(partial(run_call, work, done))
        try:
            return await asyncio.wrap_future(done)
        finally:
            del done  # break the reference cycle: its exception has this frame in its traceback

    async def finish(self, seconds: float) -> None:
        """Wait up to `seconds` until all prompts are answered, then abandon the others."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        for generation in list(self._generations):
            generation.abandon(EngineClosedError("the server is being stopped"))

    async def stop(self) -> None:
        """Stop the engine, which saves all contexts, and wait for the end of the thread."""
        self._stop.set()
        self._wake()
        await asyncio.to_thread(self._thread.join)

    def _remove(self, generation: Generation) -> bool:
        """Remove an answer from the pending ones, and submit the next prompt. Return False if it was not pending."""
        if generation not in self._generations:
            return False
        self._generations.remove(generation)
        self._pending -= Counter({generation.tenant: 1})  # a subtraction removes tenants with a count of 0
        self._submitted.discard(generation)
        self._submit_next()
        if not self._generations:
            self._idle.set()
        return True

    def _submit_next(self) -> None:
        """Submit waiting prompts to the engine, up to PROMPTS_IN_ENGINE, one of each tenant in turn."""
        while self._turns and len(self._submitted) < PROMPTS_IN_ENGINE:
            generation = self._turns.take()
            if generation in self._generations:  # otherwise it was cancelled
                self._submitted.add(generation)
                self._call(partial(_submit, generation))

    def _drop(self, generation: Generation) -> None:
        self._call(lambda engine: _cancel(engine.agent_engine, generation))

    def _call(self, work: Callable[[Engine], None]) -> None:
        """Queue a call that the thread makes between two steps."""
        self._calls.append(work)
        self._wake()

    def _wake(self) -> None:
        if self._made.done() and not self._made.exception():
            self._made.result().agent_engine.wake()

    def _run(self) -> None:
        """Run the thread: create the engine, alternate queued calls and steps until `stop`, and close the engine."""
        try:
            engine = self._make()
        except BaseException as error:  # noqa: BLE001 - passed to the tasks that wait for the engine
            self._made.set_exception(error)
            return
        self._made.set_result(engine)
        try:
            while not self._stop.is_set() or self._calls:
                while self._calls:
                    self._calls.popleft()(engine)
                engine.agent_engine.step(IDLE_SECONDS)
        except Exception as error:
            log.exception("the engine has failed")
            for generation in list(self._generations):
                generation.receive(error)
        finally:
            self._closing = True
            self.unsaved = engine.close()
            while self._calls:  # calls that were queued meanwhile fail, because the engine is closed
                self._calls.popleft()(engine)
            for generation in list(self._generations):
                generation.receive(EngineClosedError("the engine has ended"))


def _submit(generation: Generation, engine: Engine) -> None:
    if not generation.cancelled:
        generation.context.run(_submit_to, engine.agent_engine, generation)


def _submit_to(engine: AgentEngine, generation: Generation) -> None:
    """Submit a prompt to the engine, on its thread. An exception becomes the last event of its generation."""
    prompt, constraint = generation.prompt, generation.prompt.constraint
    processors = [constraint.processor(len(prompt.tokens), prompt.end_of_reasoning)] if constraint else []
    try:
        generation.uid = engine.submit(
            prompt.agent_id,
            prompt.tokens,
            max_tokens=prompt.max_tokens,
            sampler=prompt.sampling,
            logits_processors=processors,
            stop=prompt.stop,
            stop_tokens=prompt.stop_tokens,
            continues=prompt.continues,
            logprobs=prompt.logprobs,
            keep=prompt.keep,
            label=prompt.label,
            leader=generation.leader.uid if generation.leader else None,
            lifetimes=prompt.lifetimes,
            boundaries=[boundary.steady for boundary in prompt.boundaries],
            kept_tokens=prompt.kept_tokens,
            written=prompt.written,
            on_token=generation.receive,
            on_done=generation.receive,
            on_error=generation.receive,
        )
    except Exception as error:  # noqa: BLE001 - any error is passed to the caller
        generation.receive(error)


def _cancel(engine: AgentEngine, generation: Generation) -> None:
    """Cancel a prompt in the engine, on its thread, unless it is complete."""
    if generation.uid is not None:
        with suppress(KeyError):  # it has just completed
            engine.cancel(generation.uid)
