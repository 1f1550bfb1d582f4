"""The event loop of an engine's tiers, on a thread of its own.

Waits for the page server, for files and for time are coroutines on this loop. docs/architecture.md has a table of the
engine's threads.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

log = logging.getLogger(__name__)

T = TypeVar("T")
FILE_THREADS = 2  # files that are read or written concurrently


class EventLoop:
    """Event loop on a thread of its own, and the threads for its blocking work. Thread-safe, except for coroutines,
    which run on the loop.

    A disk that hangs delays no request to the page server, because files have threads of their own. The client's
    calls of `asyncio.to_thread` use the loop's default executor: they encode, decode and copy bodies.
    """

    def __init__(self, owner: str) -> None:
        """Start the loop's thread. The other threads start with their first work. `owner` is a part of the threads'
        names: a model's name.
        """
        self.files = ThreadPoolExecutor(FILE_THREADS, f"kvpage-files {owner}")
        self._blocks = ThreadPoolExecutor(1, f"kvpage-blocks {owner}")
        self._loop = uvloop.new_event_loop()
        self._open = True
        self._lock = threading.Lock()  # of `_open`
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"kvpage-loop {owner}", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # for a program that ends early: a destroyed task that is pending is an error

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop, and return its result. Raises RuntimeError on the loop's own thread."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the page tier's own thread cannot wait for it: do this on another one")
        return self._submit(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop, and return its future without waiting. An exception of `work` is also logged."""
        future = self._submit(work)
        future.add_done_callback(_log_failure)
        return future

    def call(self, callback: Callable[[], object]) -> bool:
        """Call `callback` on the loop soon, after earlier calls. Return False, and do nothing, after `close`."""
        with self._lock:
            if self._open:
                self._loop.call_soon_threadsafe(callback)
            return self._open

    async def on_file_thread(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads or writes a file, on one of FILE_THREADS threads."""
        return await self._loop.run_in_executor(self.files, work)

    async def on_block_thread(self, work: Callable[[], T]) -> T:
        """Run `work`, which hashes or collects blocks, on a thread of its own."""
        return await self._loop.run_in_executor(self._blocks, work)

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel all coroutines, run `last`, and end the threads. It may be called again."""
        with self._lock:
            was_open, self._open = self._open, False
        atexit.unregister(self.close)
        if was_open:
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            for threads in (self.files, self._blocks):
                threads.shutdown(cancel_futures=True)
            self._loop.close()
        elif last:
            last.close()

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # a task may start others when it is cancelled
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        if last:
            await last

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._open:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the event loop is closed")


def _log_failure(future: Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()):
        log.error("an operation in the background failed", exc_info=error)
