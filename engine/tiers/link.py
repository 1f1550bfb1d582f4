"""The link to a page server: a thread with an event loop, on which everything is said to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

import redis
import redis.asyncio
import uvloop
from redis.backoff import NoBackoff
from redis.retry import Retry

from engine.tiers.breaker import CircuitBreaker
from engine.tiers.worth import Rates
from kvpage_server.client import AsyncPageClient, PageClientError, Refused

T = TypeVar("T")
OUTAGES = (redis.RedisError, PageClientError, OSError, TimeoutError)  # what a server, or its absence, can do
FAILING = frozenset({"slow", "down", "garbled"})  # reasons after which it isn't asked for a while
_limit: ContextVar[asyncio.Timeout] = ContextVar("limit")  # of the attempt that is under way
AT_ONCE = 16  # things done at once, on three connections each; redis-py's pools end at a hundred


def reason(error: BaseException) -> str:
    """How an outage is counted: ``slow`` no answer in time; ``down`` no connection; ``garbled`` an answer to no
    question of ours; ``full`` no memory left; ``refused`` another error for an answer."""
    if isinstance(error, TimeoutError | redis.TimeoutError):
        return "slow"
    if isinstance(error, redis.InvalidResponse):
        return "garbled"
    if isinstance(error, redis.OutOfMemoryError) or (isinstance(error, Refused) and error.code == "OOM"):
        return "full"
    gone = isinstance(error, redis.ConnectionError | OSError) and not isinstance(error, redis.AuthenticationError)
    return "down" if gone else "refused"


class Link:
    """Blocks go through `blocks`, all else through `server`, both to be used on the link's own thread."""

    def __init__(self, url: str, deadline: float, connections: int) -> None:
        """`deadline` in seconds, for a question or a chunk of blocks; `connections` to receive over at once.

        Raises ValueError for a URL that isn't one.
        """
        self.blocks = AsyncPageClient(url, deadline=deadline)
        self.server: Any = redis.asyncio.Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=deadline, socket_connect_timeout=deadline
        )
        self.deadline = deadline
        self.connections = connections
        self.breaker = CircuitBreaker()
        self.rates = Rates()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._loop = uvloop.new_event_loop()
        self._beside = ThreadPoolExecutor(1, "kvpage-beside")
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpage-pages", daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end; what came of it. Raises RuntimeError on the link's own thread."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the page tier's own thread cannot wait for it: do this on another one")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def begin(self, work: Coroutine[Any, Any, None], over: Callable[[asyncio.Task[None]], None]) -> Callable[[], None]:
        """Start; what cancels it. `over` is called on the link's thread when it has ended, in whatever way."""
        task: asyncio.Task[None] | None = None

        def start() -> None:
            nonlocal task
            task = self._loop.create_task(work)
            task.add_done_callback(over)

        def cancel() -> None:
            assert task is not None  # calls of the loop keep their order
            task.cancel()

        self._loop.call_soon_threadsafe(start)

        def cancel_soon() -> None:
            self._loop.call_soon_threadsafe(cancel)

        return cancel_soon

    async def attempt(self, work: Coroutine[Any, Any, T], missed: Callable[[str], object]) -> T | None:
        """Do something when it is its turn, within the deadline, which `progressed` prolongs, unless the breaker is
        open. For an outage None, and `missed` is told the reason."""
        try:
            async with asyncio.timeout(self.deadline) as limit, self._turns:
                _limit.set(limit)
                if not self.breaker.allows():
                    missed("open")
                    return None
                done = await work
        except OUTAGES as error:
            why = reason(error)
            missed(why)
            if why in FAILING:
                self.breaker.failed()
            else:
                self.breaker.succeeded()
            return None
        finally:
            work.close()
        self.breaker.succeeded()
        return done

    async def beside(self, work: Callable[[], T]) -> T:
        """Have it done on a thread of its own, while bytes come and go on this one."""
        return await self._loop.run_in_executor(self._beside, work)

    def progressed(self) -> None:
        """An answer or a chunk of what is attempted has come, or a chunk has gone: the deadline counts anew."""
        limit = _limit.get()
        if not limit.expired():
            limit.reschedule(self._loop.time() + self.deadline)

    async def pipelined(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Ask several things at once. Raises what the first refusal of them is."""
        pipeline = self.server.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute()
        self.progressed()
        return replies

    def close(self) -> None:
        """Cancel what is under way, close the connections and end the thread."""
        if self._thread.is_alive():
            self.do(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._beside.shutdown()
            self._loop.close()

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.blocks.close()
        await self.server.aclose()
