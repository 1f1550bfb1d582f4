"""Values from disk to memory, by threads, so that the loop waits for no disk.

The loop says where a body belongs and is told what became of it. Who has asked keeps the memory meanwhile: a thread
knows nothing of slots, only of the bytes it fills. Or values are only found there, and read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

from kvpage_server.store.disk.file.database import Disk, Found, Outcome
from kvpage_server.store.disk.file.lmdb_file import DiskError

T = TypeVar("T")

THREADS = 2

Wanted = Sequence[tuple[bytes, memoryview]]  # names, and the memory for their bodies


class DiskReader:
    """Reads for one loop, which it is made on. Costs: a thread's turn for each call of `fetch` and `find`."""

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
        """Fill all that memory; then call `done` with the outcomes, on the loop."""
        self._begin(partial(self._outcomes, wanted), done)

    def find(self, wanted: Sequence[tuple[bytes, int]], done: Callable[[tuple[object, list[Found]]], None]) -> None:
        """Find values and check them where they lie; then call `done` with what `Disk.find` says, on the loop."""
        self._begin(partial(self._found, wanted), done)

    def _begin(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        ticket = next(self._tickets)
        self._callers[ticket] = done
        self._jobs.put((ticket, work))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            ticket, work = job
            told = partial(self._deliver, ticket, work())
            del job, work  # who hears of it has the memory to himself
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
        """End the threads, after what they have begun."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)  # the last outcomes are delivered
