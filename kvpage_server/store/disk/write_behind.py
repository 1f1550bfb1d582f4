"""Changes on their way to the disk: written by one thread, in batches, behind the backs of those who made them.

A change replaces an earlier one of the same value that has not been written yet, so a value that is written often goes
to disk as often as there is a commit. A batch is taken at one moment of the loop and committed whole: what is on disk
is always the store as it was at some moment, never half of a command or of a transaction.

Where the disk is full, what is gone from the store leaves the disk first, in a commit of its own, since that makes room
for the rest. Values that are overwritten stay until the new ones are there.

When a batch begins depends on `appendfsync`: with `always` as soon as the one before is done, with `everysec` so that
nothing waits for more than a second, as long as commits take less than that, with `no` when half of what may wait does,
or after `LONGEST`. Every commit is durable; `appendfsync` says when there is one.

Everything here happens on the loop, but for the writing itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvpage_server.page import unix_ms
from kvpage_server.store.disk.database import Change, Clear, Delete, Disk
from kvpage_server.store.disk.lmdb_file import DiskError, DiskFull

LONGEST = 30.0  # seconds
_SECOND = 0.9
_SLACK = 2.5  # a change may come when a commit has just begun, and be in the next: it waits for two of them
_SHORTEST = 0.05
RETRY_AFTER = 1.0  # seconds
_LAST_TRIES = 3
_TURN = 1_000_000  # nanoseconds
_AT_ONCE = 256  # values that are let go of together

log = logging.getLogger("kvpage")

T = TypeVar("T")


@dataclass(slots=True)
class Batch(Generic[T]):
    """The last change of each value, None for its removal, with the bytes it takes while it waits."""

    changes: dict[bytes, tuple[T | None, int]] = field(default_factory=dict)
    size: int = 0
    clears: bool = False  # before all else
    removed: dict[bytes, None] = field(default_factory=dict)  # the values that have no other change than that
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
        """Values have changed."""
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

    def forget(self, name: bytes) -> None:
        """The last change of a value was made."""
        self.size -= self.changes.pop(name)[1]
        self.removed.pop(name, None)


class WriteBehind(Generic[T]):
    """`spell` makes a change of a value, in the writing thread; `stored` is told in steps, on the loop, what was
    committed.

    When the disk is full, `make_room` is told so and how many bytes wait: it may remove values. `is_gone` says whether
    the store has no value of a name, in whatever form. `limit` is how many bytes may wait.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        mode: str,
        limit: int,
        spell: Callable[[bytes, T], Change],
        stored: Callable[[Batch[T]], Iterator[None]],
        make_room: Callable[[DiskFull, int], None],
        is_gone: Callable[[bytes], bool],
    ) -> None:
        self.mode = mode
        self.limit = limit
        self.position = 0  # changes so far
        self.durable = 0  # changes that are on disk
        self.last_commit = unix_ms()
        self.commits = 0
        self.errors = 0
        self.failing = ""  # why the last commit failed; empty when it did not
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._spell = spell
        self._stored = stored
        self._make_room = make_room
        self._is_gone = is_gone
        self._next: Batch[T] = Batch()
        self._now: Batch[T] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._hurry = False  # somebody waits for all that there is, or much waits
        self._removals: Batch[T] | None = None  # what is removed now, to make room
        self._made_room = False  # since the last commit failed
        self._turned = -1  # commits there had been when room was made the last time
        self._begun = self._tried = 0  # changes that it was begun to write, and that it was tried to
        self._took = 0.0  # seconds of the last commit
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._batches: SimpleQueue[Batch[T] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="disk-writer", daemon=True)
        self._thread.start()

    # -- what happens to values ------------------------------------------------------------------------------------

    def note(self, name: bytes, value: T | None, size: int) -> None:
        """A value has changed, or is gone. What it consists of must not change any more."""
        self._next.note(name, value, size)
        self.position += 1
        self._changed()

    def note_all(self, names: Sequence[bytes], values: Sequence[T], sizes: Sequence[int]) -> None:
        """Values have changed, as for `note`."""
        self._next.note_all(names, values, sizes)
        self.position += len(names)
        self._changed()

    def clear(self) -> None:
        """Everything is gone."""
        self._next = Batch(clears=True)
        self.position += 1
        self._changed()

    def _changed(self) -> None:
        if self._next.size > self.limit // 2 and not self._hurry:
            self.hurry()
        elif self._timer is None and self._now is None:
            self._plan()

    def waits(self, name: bytes) -> bool:
        """Whether the last change of a value is not on disk yet."""
        if self._next.clears:
            return True
        return name in self._next.changes or (self._now is not None and name in self._now.changes)

    @property
    def settled(self) -> bool:
        """Whether all changes are on disk."""
        return self.durable == self.position

    @property
    def size(self) -> int:
        """Bytes of values that wait to be written."""
        return self._next.size + (self._now.size if self._now is not None else 0)

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._now is not None

    @property
    def full(self) -> bool:
        """Whether more should wait until there is room. A disk that fails is not waited for."""
        return self.size > self.limit and not self.failing

    def when_durable(self, position: int, then: Callable[[], None]) -> None:
        """Call `then` once all changes up to `position` are on disk, or when a commit has failed."""
        self._waiting.append((position, then))

    def when_there_is_room(self, then: Callable[[], None]) -> None:
        """Call `then` after the next commit."""
        self._waiting.append((0, then))
        self.hurry()

    def hurry(self) -> None:
        """Write all that waits as soon as possible."""
        if not self.settled:
            self._hurry = True
            if self._now is None:
                self._plan()

    # -- batches ---------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Have the next batch begin in time."""
        if self._removals is not None or self._now is not None:
            return  # it is planned when that is done
        if self._timer is not None:
            if self.failing and not self._made_room:
                return  # however many ask, it is tried again in time
            self._timer.cancel()
        self._timer = self._loop.call_later(self._delay(), self._begin)

    def _delay(self) -> float:
        if self.failing and not self._made_room:
            return RETRY_AFTER
        if self._hurry or self._made_room or self.mode == "always":
            return 0.0
        if self.mode == "everysec":
            return max(_SECOND - _SLACK * self._took, _SHORTEST)
        return LONGEST

    def _begin(self) -> None:
        self._timer = None
        batch, self._next = self._next, Batch()
        batch.position, batch.began = self.position, time.monotonic()
        self._now, self._hurry, self._made_room = batch, False, False
        self._begun = batch.position
        self._batches.put(batch)

    def _write(self) -> None:
        """The thread. What it holds of a batch it has let go of when the loop hears: memory is freed there alone."""
        while (batch := self._batches.get()) is not None:
            makes_room = batch is self._removals
            error = self._error_of(batch, makes_room)
            self._loop.call_soon_threadsafe(self._room_is_made if makes_room else self._committed, error)

    def _error_of(self, batch: Batch[T], makes_room: bool) -> DiskError | DiskFull | None:
        """Commit; what went wrong, without the frames that it came through."""
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
            yield Delete(name) if value is None else self._spell(name, value)

    def _committed(self, error: DiskError | DiskFull | None) -> None:
        batch = self._now
        assert batch is not None
        if error is not None:
            self._now = None
            self._failed(batch, error)
            self._go_on()
            return
        self._took = time.monotonic() - batch.began
        self._finish(batch, chain(self._stored(batch), _freed(batch)))

    def _finish(self, batch: Batch[T], steps: Iterator[None]) -> None:
        """Note what a commit has stored, of which there may be very much; until then it counts as being written."""
        end = time.monotonic_ns() + _TURN
        for _ in steps:
            if time.monotonic_ns() > end:
                self._loop.call_soon(self._finish, batch, steps)
                return
        if self.failing:
            log.warning("writing to disk works again")
        self._now, self.failing = None, ""
        self.durable = batch.position
        self.last_commit = unix_ms()
        self.commits += 1
        self._go_on()

    def _go_on(self) -> None:
        """Plan what is next, and let those go on who waited."""
        if not self.settled:
            self._plan()
        if self._removals is None:
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Let those go on whose changes are on disk, or cannot be written."""
        waiting, self._waiting = self._waiting, []
        for position, then in waiting:
            if position <= self.durable or self.failing:
                then()
            else:
                self._waiting.append((position, then))
        if self._waiting:
            self.hurry()

    def _failed(self, batch: Batch[T], error: DiskError | DiskFull) -> None:
        """Take a batch back. Where the disk is full, what is gone is removed before the next try."""
        self.errors += 1
        newer = self._next
        if not newer.clears:
            for name, (value, size) in newer.changes.items():
                batch.note(name, value, size)
            self._next = batch
        if isinstance(error, DiskFull):
            self._removals = Batch()  # whatever is changed by that begins no other batch
            self._make_room(error, batch.size)
            self._removals = self._take_removals()
        if self._removals is None:
            self._fail(error)
        else:
            log.info("%s: %d values are removed to make room", error, len(self._removals.changes))
            self._batches.put(self._removals)

    def _take_removals(self) -> Batch[T] | None:
        """What may leave the disk before anything is written; None when that would help nobody."""
        batch, turned = self._next, self._turned
        gone = [name for name in batch.removed if self._is_gone(name)]
        if not gone and not batch.clears and turned == self.commits:
            return None
        self._turned = self.commits
        removals: Batch[T] = Batch(clears=batch.clears)
        for name in gone:
            removals.note(name, None, 0)
        return removals

    def _room_is_made(self, error: DiskError | DiskFull | None) -> None:
        removals, self._removals = self._removals, None
        assert removals is not None
        self._made_room = error is None
        if error is not None:
            self._fail(error)
        else:
            self._next.clears = self._next.clears and not removals.clears
            for name in removals.changes:
                if name in self._next.removed:
                    self._next.forget(name)
            for _ in self._stored(removals):
                pass
        self._plan()
        if error is not None:
            self._tell_waiting()

    def _fail(self, error: DiskError | DiskFull) -> None:
        if not self.failing:
            log.error("writing to disk fails, it will be tried again: %s", error)
        self.failing = str(error)
        self._tried = self._begun

    async def settle(self) -> None:
        """Write what there is by now, if that can be done. It was tried when this returns, a second later at most."""
        position, self._tried = self.position, -1
        while self.durable < position and not (self.failing and self._tried >= position):
            done = asyncio.Event()
            self.when_durable(position, done.set)
            self.hurry()
            await done.wait()

    async def close(self) -> int:
        """Write what there is, and end the thread; how many values could not be written, if it cannot be done."""
        for _ in range(_LAST_TRIES):
            await self.settle()
        if self._timer is not None:
            self._timer.cancel()
        self._batches.put(None)
        await asyncio.to_thread(self._thread.join)
        return 0 if self.settled else max(len(self._next.changes), 1)


def _freed(batch: Batch[T]) -> Iterator[None]:
    """Let go of a batch's values: here, not where the thread does."""
    changes = batch.changes
    while changes:
        for _ in range(min(len(changes), _AT_ONCE)):
            changes.popitem()
        yield
