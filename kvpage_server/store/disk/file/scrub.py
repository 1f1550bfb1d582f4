"""Reads all that is on disk, at a limited rate, to find damage before somebody asks for the value."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from kvpage_server.store.disk.file.database import Disk
from kvpage_server.store.disk.file.lmdb_file import DiskError
from kvpage_server.store.records.record import Damaged

_AT_ONCE = 16  # database records that are looked up in one transaction

log = logging.getLogger("kvpage")


class Scrubber:
    """Reads `rate` bytes a second, round after round. Calls `damaged` with names, on the loop on which it was made."""

    def __init__(self, disk: Disk, rate: int, damaged: Callable[[bytes], None]) -> None:
        self.rate = rate
        self.rounds = 0
        self.checked = 0  # bytes
        self.failing = ""
        self._disk = disk
        self._damaged = damaged
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-scrubber", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._round()
                self.rounds += not self._stopping.is_set()
            except DiskError as error:
                self.failing = str(error)
                log.error("the scrubber stops: %s", error)
                return
            self._stopping.wait(max(began + 1 - time.monotonic(), 0))

    def _round(self) -> None:
        after = b""
        while not self._stopping.is_set():
            found = list(self._disk.records(after, _AT_ONCE))
            if not found:
                return
            after = found[-1][0]
            for key, record in found:
                if isinstance(record, Damaged):
                    self._report(key)
                elif not self._check(record.name) or self._stopping.is_set():
                    return

    def _check(self, name: bytes) -> bool:
        """Read one value. Returns whether to go on."""
        try:
            size = self._disk.check(name)
        except Damaged:
            self._report(name)
            size = 0
        self.checked += size
        return not self._stopping.wait((size + 1) / self.rate)

    def _report(self, name: bytes) -> None:
        self._loop.call_soon_threadsafe(self._damaged, name)

    async def close(self) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)
