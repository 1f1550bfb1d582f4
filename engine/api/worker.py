"""The thread that runs the engine.

Only this thread uses MLX: it loads the model, and does all work with arrays. The event loop passes calls to it through
a queue, and tokens return with `call_soon_threadsafe`. Neither waits for the other.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

from ..agent_engine import AgentEngine, Answer
from ..generation.sampling import Sampling
from ..scheduling.request import EngineClosedError, Token
from ..startup import Engine

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # for which an idle engine waits before it checks whether to end
PROMPTS_IN_ENGINE = 40  # prompts passed to the engine: the 32 that its batch runs, and 8 whose contexts it loads ahead

Event = Token | Answer | Exception  # the next token, the complete answer, or an error
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine."""

    agent_id: str
    keep: bool  # whether to keep the context
    tokens: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    stop_tokens: Collection[int] = ()
    continues: bool = True  # whether its answer keeps a first space
    logprobs: int = 0
    label: str = ""  # the text that people see for a context without a name


@dataclass(slots=True, eq=False)
class Generation:
    """An unfinished answer, for use on the event loop: the caller iterates over its tokens, then reads `answer`."""

    prompt: Prompt
    tenant: str
    _ended: Callable[[Generation], bool]  # removes it from the pending ones; returns whether it was one
    _drop: Callable[[Generation], None]
    uid: int | None = None  # the engine's uid, set and read on its thread
    cancelled: bool = False
    answer: Answer | None = None
    asked_in: contextvars.Context = field(default_factory=contextvars.copy_context)  # with the request's trace
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """Wait for the next token. Raises an exception of the engine, or that of `abandon`."""
        if not self.answer:
            event = await self._events.get()
            if isinstance(event, Token):
                return event
            if isinstance(event, Exception):
                raise event
            self.answer = event
        raise StopAsyncIteration

    def tell(self, event: Event) -> None:
        """Add an event to the iteration. May be called on any thread."""
        self._loop.call_soon_threadsafe(self._arrived, event)

    def cancel(self) -> None:
        """Cancel the answer. Its blocks are freed before the engine's next step. Further calls have no effect."""
        self.cancelled = True
        if self._ended(self):
            self._drop(self)

    def abandon(self, why: Exception) -> None:
        """Cancel the answer. After the tokens that were received, the iteration raises `why`."""
        self.cancel()
        self._events.put_nowait(why)

    def _arrived(self, event: Event) -> None:
        if not isinstance(event, Token):
            self._ended(self)
        self._events.put_nowait(event)


class EngineThread:
    """The thread that creates an engine with `make`, and runs it until `stop`.

    The engine answers prompts in the order of submission. So it gets a few at a time, one of each tenant in turn.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._made: Future[Engine] = Future()
        self._calls: deque[Callable[[Engine], None]] = deque()
        self._generations: set[Generation] = set()  # pending ones; used by the event loop, as the next three
        self._pending: Counter[str] = Counter()  # by tenant
        self._given: set[Generation] = set()  # passed to the engine
        self._turns: dict[str, deque[Generation]] = {}  # waiting ones, by tenant; the next in turn is the first
        self._idle = asyncio.Event()  # set if no generation is pending
        self._idle.set()
        self._stop = threading.Event()
        self._closing = False  # whether the engine accepts nothing any more
        self.unsaved = 0  # contexts that could not be saved when the engine was closed
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

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

    @property
    def loading(self) -> bool:
        return not self._made.done()

    def start(self) -> None:
        """Start to load the model."""
        self._thread.start()

    async def loaded(self) -> Engine:
        """Wait until the engine is created, and return it. Raises the exception of its construction.

        If this wait is cancelled, the construction continues.
        """
        return await asyncio.shield(asyncio.wrap_future(self._made))

    def generate(self, prompt: Prompt, tenant: str = "") -> Generation:
        """Queue a prompt of a tenant, and return its answer. Exceptions of the engine are raised by the iteration."""
        generation = Generation(prompt, tenant, self._forget, self._drop)
        self._generations.add(generation)
        self._pending[tenant] += 1
        self._idle.clear()
        if self._thread.is_alive() and not self._closing:
            self._turns.setdefault(tenant, deque()).append(generation)
            self._give()
        else:
            generation.tell(EngineClosedError("the engine has ended"))
        return generation

    async def call(self, work: Callable[[Engine], _Result]) -> _Result:
        """Run `work` on the thread, between two steps of the engine. Return its result, or raise its exception."""
        done: Future[_Result] = Future()
        self._call(partial(_do, work, done))
        try:
            return await asyncio.wrap_future(done)
        finally:
            del done  # to break the cycle: its error has a reference to this frame

    async def finish(self, seconds: float) -> None:
        """Wait up to `seconds` until all prompts are answered, then abandon the others."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        for generation in list(self._generations):
            generation.abandon(EngineClosedError("the server is being stopped"))

    async def stop(self) -> None:
        """End the thread, which saves all contexts before, and wait for its end."""
        self._stop.set()
        self._wake()
        await asyncio.to_thread(self._thread.join)

    def _forget(self, generation: Generation) -> bool:
        if generation not in self._generations:
            return False
        self._generations.remove(generation)
        self._pending -= Counter({generation.tenant: 1})  # a subtraction removes tenants with a count of 0
        self._given.discard(generation)
        self._give()
        if not self._generations:
            self._idle.set()
        return True

    def _give(self) -> None:
        """Pass waiting prompts to the engine, up to PROMPTS_IN_ENGINE, one of each tenant in turn."""
        while self._turns and len(self._given) < PROMPTS_IN_ENGINE:
            tenant, waiting = next(iter(self._turns.items()))
            del self._turns[tenant]
            generation = waiting.popleft()
            if waiting:
                self._turns[tenant] = waiting
            if generation in self._generations:  # otherwise it was cancelled
                self._given.add(generation)
                self._call(partial(_submit, generation))

    def _drop(self, generation: Generation) -> None:
        self._call(lambda engine: _cancel(engine.agents, generation))

    def _call(self, work: Callable[[Engine], None]) -> None:
        self._calls.append(work)
        self._wake()

    def _wake(self) -> None:
        if self._made.done() and not self._made.exception():
            self._made.result().agents.wake()

    def _run(self) -> None:
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
                engine.agents.step(IDLE_SECONDS)
        except Exception as error:
            log.exception("the engine has failed")
            for generation in list(self._generations):
                generation.tell(error)
        finally:
            self._closing = True
            self.unsaved = engine.close()
            while self._calls:  # they were queued meanwhile, and get the errors of a closed engine
                self._calls.popleft()(engine)
            for generation in list(self._generations):
                generation.tell(EngineClosedError("the engine has ended"))


def _do(work: Callable[[Engine], _Result], done: Future[_Result], engine: Engine) -> None:
    try:
        done.set_result(work(engine))
    except Exception as error:  # noqa: BLE001 - passed to the waiting task
        done.set_exception(error)
    finally:
        del done  # to break the cycle: its error has a reference to this frame


def _submit(generation: Generation, engine: Engine) -> None:
    if not generation.cancelled:
        generation.asked_in.run(_submit_to, engine.agents, generation)


def _submit_to(engine: AgentEngine, generation: Generation) -> None:
    prompt = generation.prompt
    try:
        generation.uid = engine.submit(
            prompt.agent_id,
            prompt.tokens,
            max_tokens=prompt.max_tokens,
            sampler=prompt.sampling,
            stop=prompt.stop,
            stop_tokens=prompt.stop_tokens,
            continues=prompt.continues,
            logprobs=prompt.logprobs,
            keep=prompt.keep,
            label=prompt.label,
            on_token=generation.tell,
            on_done=generation.tell,
            on_error=generation.tell,
        )
    except Exception as error:  # noqa: BLE001 - any error is passed to the caller
        generation.tell(error)


def _cancel(engine: AgentEngine, generation: Generation) -> None:
    if generation.uid is not None:
        with suppress(KeyError):  # it has just completed
            engine.cancel(generation.uid)
