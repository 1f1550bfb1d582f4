"""The thread that runs the engine, and what the event loop sees of it.

MLX belongs to one thread: the model is loaded in it, and everything that touches an array happens there. The event
loop hands it calls through a queue and wakes it; tokens come back by `call_soon_threadsafe`. Neither waits for the
other.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

from engine.agent_engine import AgentEngine, Answer
from engine.generation.sampling import sampler
from engine.scheduling.request import EngineClosedError, Token
from engine.startup import Engine

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # the engine waits for something to do, before it looks whether it should end

Event = Token | Answer | Exception  # an answer's next token, all of it, or why there is none
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is asked."""

    agent_id: str
    keep: bool  # the context afterwards, under the agent's id
    tokens: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: int = 0


@dataclass(slots=True, eq=False)
class Generation:
    """One answer on its way, seen from the event loop: iterate over it, then it has an `answer`."""

    prompt: Prompt
    _ended: Callable[[Generation], bool]  # forgets it; whether it was still known
    _drop: Callable[[Generation], None]
    uid: int | None = None  # the engine's, set and read in its thread
    cancelled: bool = False
    answer: Answer | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """The next token, when it comes. Raises what the engine raised, or the reason for which it was abandoned."""
        if not self.answer:
            event = await self._events.get()
            if isinstance(event, Token):
                return event
            if isinstance(event, Exception):
                raise event
            self.answer = event
        raise StopAsyncIteration

    def tell(self, event: Event) -> None:
        """Deliver the result. May be called on any thread."""
        self._loop.call_soon_threadsafe(self._arrived, event)

    def cancel(self) -> None:
        """Nobody wants it any more: its blocks are free before the engine's next step. May be called again."""
        self.cancelled = True
        if self._ended(self):
            self._drop(self)

    def abandon(self, why: Exception) -> None:
        """Cancel it; after the tokens that are there already, whoever iterates is told why."""
        self.cancel()
        self._events.put_nowait(why)

    def _arrived(self, event: Event) -> None:
        if not isinstance(event, Token):
            self._ended(self)
        self._events.put_nowait(event)


class EngineThread:
    """Runs what `make` makes until it is told to stop."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._made: Future[Engine] = Future()
        self._calls: deque[Callable[[Engine], None]] = deque()
        self._generations: set[Generation] = set()  # the event loop's
        self._idle = asyncio.Event()  # there are none
        self._idle.set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def pending(self) -> int:
        """Answers that are on their way or wait for their turn."""
        return len(self._generations)

    @property
    def running(self) -> bool:
        """Whether there is an engine that takes prompts."""
        return self._made.done() and not self._made.exception() and self._thread.is_alive()

    @property
    def loading(self) -> bool:
        """Whether there is no engine yet."""
        return not self._made.done()

    def start(self) -> None:
        """Start to load the model."""
        self._thread.start()

    async def loaded(self) -> Engine:
        """What was made, once it is. Raises what making it raised. Whoever gives up waiting stops nothing."""
        return await asyncio.shield(asyncio.wrap_future(self._made))

    def generate(self, prompt: Prompt) -> Generation:
        """Have a prompt answered. What the engine has against it is raised by the iteration."""
        generation = Generation(prompt, self._forget, self._drop)
        self._generations.add(generation)
        self._idle.clear()
        if self._thread.is_alive():
            asked_in = contextvars.copy_context()  # with the trace that it belongs to
            self._call(lambda engine: asked_in.run(_submit, engine.agents, generation))
        else:
            generation.tell(EngineClosedError("the engine has ended"))
        return generation

    async def call(self, work: Callable[[Engine], _Result]) -> _Result:
        """Do `work` between two steps of the engine."""
        done: Future[_Result] = Future()
        self._call(partial(_do, work, done))
        try:
            return await asyncio.wrap_future(done)
        finally:
            del done  # its error has this frame

    async def finish(self, seconds: float) -> None:
        """Wait until everything is answered, for so long; what is left then is cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        for generation in list(self._generations):
            generation.abandon(EngineClosedError("the server is being stopped"))

    async def stop(self) -> None:
        """End the thread; it returns when everything that is to be kept is."""
        self._stop.set()
        self._wake()
        await asyncio.to_thread(self._thread.join)

    def _forget(self, generation: Generation) -> bool:
        known = generation in self._generations
        self._generations.discard(generation)
        if not self._generations:
            self._idle.set()
        return known

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
        except BaseException as error:  # noqa: BLE001 - it is told to whoever waits for the engine
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
            engine.close()


def _do(work: Callable[[Engine], _Result], done: Future[_Result], engine: Engine) -> None:
    try:
        done.set_result(work(engine))
    except Exception as error:  # noqa: BLE001 - it is told to whoever waits
        done.set_exception(error)
    finally:
        del done  # the error has this frame


def _submit(engine: AgentEngine, generation: Generation) -> None:
    if generation.cancelled:
        return
    prompt = generation.prompt
    try:
        generation.uid = engine.submit(
            prompt.agent_id,
            prompt.tokens,
            max_tokens=prompt.max_tokens,
            sampler=sampler(prompt.temperature, prompt.top_p, prompt.seed),
            stop=prompt.stop,
            logprobs=prompt.logprobs,
            keep=prompt.keep,
            on_token=generation.tell,
            on_done=generation.tell,
            on_error=generation.tell,
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes to whoever asked
        generation.tell(error)


def _cancel(engine: AgentEngine, generation: Generation) -> None:
    if generation.uid is not None:
        with suppress(KeyError):  # it was completed in the meantime
            engine.cancel(generation.uid)
