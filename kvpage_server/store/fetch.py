"""Values from disk to memory, by threads, so that the loop waits for no disk.

The loop says where a body belongs and is told what became of it. Who has asked keeps the memory meanwhile: a thread
knows nothing of slots, only of the bytes it fills.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import count
from queue import SimpleQueue

from kvpage_server.store.disk import Disk, Outcome
from kvpage_server.store.lmdb_file import DiskError

THREADS = 2

Wanted = Sequence[tuple[bytes, memoryview]]  # names, and the memory for their bodies


class Fetcher:
    """Reads for one loop, which it is made on. Costs: a thread's turn for each call of `fetch`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._tickets = count()
        self._callers: dict[int, Callable[[list[Outcome]], None]] = {}
        self._jobs: SimpleQueue[tuple[int, Wanted] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, name=f"disk-reader-{i}", daemon=True) for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def fetch(self, wanted: Wanted, done: Callable[[list[Outcome]], None]) -> None:
        """Fill all that memory; then call `done` with the outcomes, on the loop."""
        ticket = next(self._tickets)
        self._callers[ticket] = done
        self._jobs.put((ticket, wanted))

    def _read(self) -> None:
        while (job := self._jobs.get()) is not None:
            ticket, wanted = job
            self._loop.call_soon_threadsafe(self._deliver, ticket, self._outcomes(wanted))

    def _outcomes(self, wanted: Wanted) -> list[Outcome]:
        try:
            return self._disk.read(wanted)
        except DiskError as error:
            return [error.with_traceback(None)] * len(wanted)

    def _deliver(self, ticket: int, outcomes: list[Outcome]) -> None:
        self._callers.pop(ticket)(outcomes)

    async def close(self) -> None:
        """End the threads, after what they have begun."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)  # the last outcomes are delivered
