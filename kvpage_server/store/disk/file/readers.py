"""Threads that read values from disk, so that the loop does not wait for it.

A thread fills memory that it is given, or finds and checks values where they lie. It does not know slots. Whoever asked
keeps the memory meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

from kvpage_server.store.disk.file.bodies import Found, Outcome
from kvpage_server.store.disk.file.database import Disk
from kvpage_server.store.disk.file.lmdb_file import DiskError

T = TypeVar("T")

THREADS = 2

Wanted = Sequence[tuple[bytes, memoryview]]  # names, and the memory for their bodies


class DiskReader:
    """Reads for the loop on which it was made. `fetch` and `find` each cost a thread's turn."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._tickets = count()
        self._callers: dict[int, Callable[[Any], None]] = {}
        self._jobs: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"disk-reader-{i}", daemon=True) for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def fetch(self, wanted: Wanted, done: Callable[[list[Outcome]], None]) -> None:
        """Fill all that memory, then call `done` with the outcomes, on the loop."""
        self._begin(partial(self._outcomes, wanted), done)

    def find(self, wanted: Sequence[tuple[bytes, int]], done: Callable[[tuple[object, list[Found]]], None]) -> None:
        """Find values and check them, then call `done` with the result of `Disk.find`, on the loop."""
        self._begin(partial(self._found, wanted), done)

    def _begin(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        ticket = next(self._tickets)
        self._callers[ticket] = done
        self._jobs.put((ticket, work))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            ticket, work = job
            told = partial(self._deliver, ticket, work())
            del job, work  # only `told` refers to the memory now
            self._loop.call_soon_threadsafe(told)
            del told

    def _outcomes(self, wanted: Wanted) -> list[Outcome]:
        try:
            return self._disk.read(wanted)
        except DiskError as error:
            return [error.with_traceback(None)] * len(wanted)

    def _found(self, wanted: Sequence[tuple[bytes, int]]) -> tuple[object, list[Found]]:
        try:
            return self._disk.find(wanted)
        except DiskError as error:
            return None, [error.with_traceback(None)] * len(wanted)

    def _deliver(self, ticket: int, result: Any) -> None:
        self._callers.pop(ticket)(result)

    async def close(self) -> None:
        """End the threads when they have done what they began."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)  # the last outcomes are delivered
