"""Threads that read values from disk, so that the event loop does not wait for it.

A thread copies values into memory of the caller, or finds and checks them in the map.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from kvpage_server.lossless import decode_body
from kvpage_server.page import PageError, checksum
from kvpage_server.store.disk.database import Disk, Found, Outcome, joined
from kvpage_server.store.disk.lmdb_file import DiskError
from kvpage_server.store.records import Damaged

T = TypeVar("T")

THREADS = 2

Coded = tuple[Sequence[memoryview], int]  # the parts of a code in memory, and the XXH3-64 of its body
Reads = Sequence[tuple[bytes, memoryview, Coded | None]]  # names, the memory for their bodies, and their codes


class DiskReader:
    """Reader threads for the running event loop. Each call of `fetch` or `find` is a job of one thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._tickets = count()
        # Callbacks by ticket, a number of the job. A thread has only the ticket: a callback refers to objects of the
        # loop, and the loop should drop the last references to them.
        self._callers: dict[int, Callable[[Any], None]] = {}
        self._jobs: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"disk-reader-{i}", daemon=True) for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def fetch(self, values: Reads, done: Callable[[list[Outcome]], None]) -> None:
        """Copy bodies into memory, or decode them if they are coded in memory, then call `done` on the loop with the
        outcomes.

        The caller keeps the memory alive.
        """
        self._begin(partial(self._outcomes, values), done)

    def find(
        self, values: Sequence[tuple[bytes, int, Coded | None]], done: Callable[[tuple[object, list[Found]]], None]
    ) -> None:
        """Find values in the map and check them, then call `done` on the loop with the result of `Disk.find`. Values
        that are coded in memory are decoded instead.
        """
        self._begin(partial(self._found, values), done)

    def _begin(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        ticket = next(self._tickets)
        self._callers[ticket] = done
        self._jobs.put((ticket, work))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            ticket, work = job
            deliver = partial(self._deliver, ticket, work())
            del job, work  # so that the loop drops the last references to the memory, at a time of its own
            self._loop.call_soon_threadsafe(deliver)
            del deliver

    def _outcomes(self, values: Reads) -> list[Outcome]:
        outcomes: list[Outcome] = [code is not None and _decodes(code, body) for _, body, code in values]
        rest = [at for at, outcome in enumerate(outcomes) if outcome is False]
        read: list[Outcome] = []
        if rest:
            try:
                read = self._disk.read([values[at][:2] for at in rest])
            except DiskError as error:
                read = [DiskError(str(error))] * len(rest)  # without the traceback, which refers to memory
        for at, outcome in zip(rest, read, strict=True):
            outcomes[at] = outcome
        return outcomes

    def _found(self, values: Sequence[tuple[bytes, int, Coded | None]]) -> tuple[object, list[Found]]:
        found: list[Found] = [False if code is None else _decoded(code, size) for _, size, code in values]
        rest = [at for at, pieces in enumerate(found) if pieces is False]
        txn, read = None, list[Found]()
        if rest:
            try:
                txn, read = self._disk.find([values[at][:2] for at in rest])
            except DiskError as error:
                read = [DiskError(str(error))] * len(rest)  # without the traceback, which refers to memory
        for at, pieces in zip(rest, read, strict=True):
            found[at] = pieces
        return txn, found

    def _deliver(self, ticket: int, result: Any) -> None:
        self._callers.pop(ticket)(result)

    async def close(self) -> None:
        """Stop the threads after all jobs are done and delivered."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)  # let the loop deliver the last outcomes


def _decoded(code: Coded, size: int) -> Found:
    """Return a decoded body; False if its code is damaged."""
    body = np.empty(size, np.uint8).data
    return [body] if _decodes(code, body) else False


def _decodes(code: Coded, into: memoryview) -> bool:
    """Decode a body into memory. Return False if it does not match its checksum: then it is read from disk."""
    parts, digest = code
    try:
        decode_body(parts[0] if len(parts) == 1 else joined(parts), into)
    except PageError:
        return False
    return checksum(into) == digest


# -- Scrubbing: reads of all values at a limited rate, to find damage before a client reads the value ------------------

_RECORDS_PER_TRANSACTION = 16  # database records that one transaction reads
# Checks and seconds before the thread waits. Each wait is an exchange of the interpreter's lock with the event loop.
_CHECKS_PER_WAIT, _LEAST_WAIT = 16, 0.05
_PAUSE = 60.0  # seconds without a check after the disk has failed
_LEAST_READ = 4096  # bytes of a check for the rate: it reads at least a page of the file

log = logging.getLogger("kvpage")


class Scrubber:
    """Thread that checks all values, `rate` bytes per second, again and again; none if `rate` is 0. A value counts with
    at least _LEAST_READ bytes.

    It calls `damaged` on the running event loop with the name of each damaged value, or the database key of a damaged
    record.
    """

    def __init__(self, disk: Disk, rate: int, damaged: Callable[[bytes], None]) -> None:
        self.rate = rate
        self.rounds = 0  # complete passes over all values
        self.checked = 0  # bytes
        self._disk = disk
        self._damaged = damaged
        self._loop = asyncio.get_running_loop()
        self._checks, self._wait = 0, 0.0  # since the thread has waited: checks, and the seconds that it has to wait
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-scrubber", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.rate and not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._round()
                self.rounds += not self._stopping.is_set()
            except DiskError as error:
                log.error("the scrubber stops for %d s: %s", _PAUSE, error)
                self._stopping.wait(_PAUSE)
            self._stopping.wait(max(began + 1 - time.monotonic(), 0))

    def _round(self) -> None:
        after = b""
        while not self._stopping.is_set():
            found = list(self._disk.records(after, _RECORDS_PER_TRANSACTION))
            if not found:
                return
            after = found[-1][0]
            for key, record in found:
                if isinstance(record, Damaged):
                    self._report(key)
                elif not self._check(record.name) or self._stopping.is_set():
                    return

    def _check(self, name: bytes) -> bool:
        """Check one value, and wait to keep the rate. Return False if the scrubber has to stop."""
        try:
            size = self._disk.check(name)
        except Damaged:
            self._report(name)
            size = 0
        self.checked += size
        self._checks += 1
        self._wait += max(size, _LEAST_READ) / self.rate
        if self._checks < _CHECKS_PER_WAIT and self._wait < _LEAST_WAIT:
            return not self._stopping.is_set()
        wait, self._checks, self._wait = self._wait, 0, 0.0
        return not self._stopping.wait(wait)

    def _report(self, name: bytes) -> None:
        self._loop.call_soon_threadsafe(self._damaged, name)

    async def close(self) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)
