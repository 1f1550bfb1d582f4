"""Batches of changes, and the thread that commits one after another."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from kvpage_server.store.disk.file.change import Change, Clear, Delete, Retime, Write
from kvpage_server.store.disk.file.database import Disk
from kvpage_server.store.disk.file.lmdb_file import DiskError, DiskFull
from kvpage_server.system import malloc

T = TypeVar("T")

Error = DiskError | DiskFull
Done = Callable[[Error | None], None]

_AT_ONCE = 256  # values that are freed together
_SPARE_FOR = 10.0  # seconds for which LMDB's memory is kept for the next commit, since fresh memory has to be zeroed

log = logging.getLogger("kvpage")


@dataclass(slots=True)
class Batch(Generic[T]):
    """The last change of each value, None for a removal, with the bytes that it takes."""

    changes: dict[bytes, tuple[T | None, int]] = field(default_factory=dict)
    size: int = 0
    clears: bool = False  # before all else
    removed: dict[bytes, None] = field(default_factory=dict)  # values whose only change is their removal
    expiries: dict[bytes, int] = field(default_factory=dict)  # of values whose own is another since it was begun
    position: int = 0  # of the last change
    began: float = 0.0  # monotonic

    def note(self, name: bytes, value: T | None, size: int) -> None:
        """A value has changed, or is gone."""
        old = self.changes.get(name)
        self.size += size - (old[1] if old is not None else 0)
        self.changes[name] = (value, size)
        if value is None:
            self.removed[name] = None
        elif old is not None:
            self.removed.pop(name, None)

    def note_all(self, names: Sequence[bytes], values: Sequence[T], sizes: Sequence[int]) -> None:
        changes = self.changes
        get, grown = changes.get, sum(sizes)
        for name, value, size in zip(names, values, sizes, strict=True):
            if (old := get(name)) is not None:
                grown -= old[1]
            changes[name] = (value, size)
        self.size += grown
        if self.removed:
            for name in names:
                self.removed.pop(name, None)

    def has_whole(self, name: bytes) -> bool:
        """Whether it has a value, and not only its removal or another expiry."""
        value = self.changes.get(name, (None, 0))[0]
        return value is not None and not isinstance(value, Retime)

    def forget(self, name: bytes) -> None:
        """Remove a value's change, which has been made."""
        self.size -= self.changes.pop(name)[1]
        self.removed.pop(name, None)

    def freed(self) -> Iterator[None]:
        """Free the values in steps, on the loop and not in the thread."""
        changes = self.changes
        while changes:
            for _ in range(min(len(changes), _AT_ONCE)):
                changes.popitem()
            yield


class DiskWriter(Generic[T]):
    """Writes for the loop on which it was made. `spell` turns a value into a change, in the thread."""

    def __init__(self, disk: Disk, spell: Callable[[bytes, T], Change]) -> None:
        self._disk = disk
        self._spell = spell
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Batch[T], bool, Done] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="disk-writer", daemon=True)
        self._thread.start()

    def commit(self, batch: Batch[T], done: Done) -> None:
        """Write a batch, then call `done` with the error, if any, on the loop."""
        self._jobs.put((batch, False, done))

    def remove(self, batch: Batch[T], done: Done) -> None:
        """The same for removals, when the disk has no room for anything else."""
        self._jobs.put((batch, True, done))

    def _run(self) -> None:
        """The thread holds nothing of a batch when it calls back, since memory is freed on the loop only."""
        while (job := self._next_job()) is not None:
            batch, makes_room, done = job
            error = self._error_of(batch, makes_room)
            del batch, job
            self._loop.call_soon_threadsafe(done, error)

    def _next_job(self) -> tuple[Batch[T], bool, Done] | None:
        """The next job. If there is none for a while, memory is returned to the system."""
        try:
            return self._jobs.get(timeout=_SPARE_FOR)
        except Empty:
            malloc.trim()
            return self._jobs.get()

    def _error_of(self, batch: Batch[T], makes_room: bool) -> Error | None:
        """Commit, and return the error, without its frames."""
        try:
            (self._disk.make_room if makes_room else self._disk.write)(self._changes(batch))
        except (DiskFull, DiskError) as error:
            return type(error)(str(error))
        except Exception as error:
            log.exception("what is to be stored cannot be written")
            return DiskError(repr(error))
        return None

    def _changes(self, batch: Batch[T]) -> Iterable[Change]:
        if batch.clears:
            yield Clear()
        for name, (value, _) in batch.changes.items():
            change = Delete(name) if value is None else self._spell(name, value)
            if name in batch.expiries and isinstance(change, Write):  # looked up once the value's own is read
                change.expires = batch.expiries[name]
            yield change

    async def close(self) -> None:
        """End the thread when it has done what it began."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
