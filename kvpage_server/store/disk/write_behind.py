"""Write-behind: the queue of changes, and the thread that commits them in batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from kvpage_server.page import unix_ms
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import Change, Clear, Delete, Retime, Write
from kvpage_server.store.disk.lmdb_file import DiskError, DiskFull
from kvpage_server.system import malloc
from kvpage_server.system.text import Durations

T = TypeVar("T")

Error = DiskError | DiskFull
Done = Callable[[Error | None], None]

_VALUES_PER_FREE = 256  # values that are freed together
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
        """Queue a changed or removed value."""
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
        """Return whether it has a value, and not only its removal or another expiry."""
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
            for _ in range(min(len(changes), _VALUES_PER_FREE)):
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
        """Start a commit of removals only, because the disk is full."""
        self._jobs.put((batch, True, done))

    def _run(self) -> None:
        """Run the thread. It keeps no reference to a batch when it calls back, because only the loop frees memory."""
        while (job := self._next_job()) is not None:
            batch, makes_room, done = job
            error = self._error_of(batch, makes_room)
            del batch, job
            self._loop.call_soon_threadsafe(done, error)

    def _next_job(self) -> tuple[Batch[T], bool, Done] | None:
        """Return the next job. If there is none for a while, memory is returned to the system."""
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
        """Stop the thread after its current job."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)


# -- write behind ------------------------------------------------------------------------------------------------------
#
# Changes on their way to the disk. A thread writes them in batches; the callers do not wait.
#
# A change replaces an earlier one of the same value that is not written yet, so a value that changes often is written
# once a commit. A batch is the store at one moment, between two turns of the loop, and is committed whole. So there
# is never half of a command or transaction on disk.
#
# If the disk is full, values that were removed from the store are removed from the disk first, to make space: in one
# commit, or in several if `maxdisk` has no space for one. If the process is killed in between, a part of the batch is
# on disk; under `always` no client has received a reply for it. Values that are overwritten stay until the new ones are
# there.
#
# `appendfsync` says when a batch begins. `always`: when the batch before is done. `everysec` and `no`: so that nothing
# waits for more than a second, if commits take less. A commit is durable, except with `no`: there the operating
# system has the values, and writes them to the disk when it likes.
#
# The states, and their transitions. Any other event is an error:
#
#     IDLE         nothing waits           CHANGED, HURRIED -> PLANNED
#     PLANNED      a timer runs            TIME -> WRITING; HURRIED makes it sooner
#     WRITING      the thread has a batch  COMMITTED -> NOTING; FAILED -> RETRYING; FULL -> MAKING_ROOM
#     NOTING       the loop goes through   NOTED -> IDLE; NOTED_SOME, with new changes, -> PLANNED
#                  the committed batch
#     MAKING_ROOM  the loop evicts, then   COMMITTED -> PLANNED; FAILED -> RETRYING
#                  the thread deletes
#                  removed values
#     RETRYING     a timer runs after a    TIME -> WRITING; nothing makes it sooner
#                  failure
#
# CHANGED and HURRIED may occur in every state. They change nothing in a state without a row for them.
#
# Everything runs on the loop, except the writing itself.

_SECOND = 0.9
_SLACK = 2.5  # a change right after the start of a commit is in the next one, so it waits for two
_SHORTEST = 0.05
RETRY_AFTER = 1.0  # seconds
_LAST_TRIES = 3
_TURN = 1_000_000  # nanoseconds


class State(Enum):
    """See the module."""

    IDLE = auto()
    PLANNED = auto()
    WRITING = auto()
    NOTING = auto()
    MAKING_ROOM = auto()
    RETRYING = auto()


class Event(Enum):
    """Event that changes the state."""

    CHANGED = auto()  # a value has changed
    HURRIED = auto()  # somebody waits for all changes, or many wait
    TIME = auto()  # the timer's
    COMMITTED = auto()
    FAILED = auto()
    FULL = auto()  # the disk is full
    NOTED = auto()  # and all is written
    NOTED_SOME = auto()  # and there is more to write


_WAITING = {Event.CHANGED, Event.HURRIED}  # may occur at any time

MOVES: dict[State, dict[Event, State]] = {
    State.IDLE: {Event.CHANGED: State.PLANNED, Event.HURRIED: State.PLANNED},
    State.PLANNED: {Event.TIME: State.WRITING},
    State.WRITING: {
        Event.COMMITTED: State.NOTING,
        Event.FAILED: State.RETRYING,
        Event.FULL: State.MAKING_ROOM,
    },
    State.NOTING: {Event.NOTED: State.IDLE, Event.NOTED_SOME: State.PLANNED},
    State.MAKING_ROOM: {
        Event.COMMITTED: State.PLANNED,
        Event.FAILED: State.RETRYING,
    },
    State.RETRYING: {Event.TIME: State.WRITING},
}


def after(state: State, event: Event) -> State:
    """Return the state after an event. Raises RuntimeError if the event cannot happen in this state."""
    to = MOVES[state].get(event)
    if to is None:
        if event not in _WAITING:
            raise RuntimeError(f"{event.name} cannot happen while {state.name}")
        return state
    return to


class Owner(Protocol[T]):
    """The store whose values these are."""

    def spell(self, name: bytes, value: T) -> Change:
        """Return the change that stores a value. Called in the writing thread."""

    def note_stored(self, batch: Batch[T]) -> Iterator[None]:
        """Yield after each step, on the loop, of noting a committed batch."""

    def make_room(self, error: DiskFull, size: int) -> Iterator[None]:
        """Steps, on the loop, that may evict values, since the disk is full and so many bytes wait."""

    def is_removed(self, name: bytes) -> bool:
        """Return whether the store has nothing of that name."""


class WriteBehind(Generic[T]):
    """See the module. At most `limit` bytes may wait."""

    def __init__(self, disk: Disk, owner: Owner[T], mode: str, limit: int) -> None:
        self.mode = mode
        self.limit = limit
        self.state = State.IDLE
        self.position = 0  # changes so far
        self.durable = 0  # changes that were committed
        self.last_commit = unix_ms()
        self.commits = 0
        self.times = Durations()  # of commits
        self.errors = 0
        self.failing = ""  # why the last commit failed; empty when it did not
        self._owner = owner
        self._writer = DiskWriter(disk, owner.spell)
        self._next: Batch[T] = Batch()
        self._now: Batch[T] | None = None  # the batch that the thread writes, or that is being noted
        self._timer: asyncio.TimerHandle | None = None
        self._hurries = False
        self._room_made_at = -1  # the number of commits when room was made last
        self._begun = self._tried = 0  # changes that are being written, and that were tried
        self._took = 0.0  # seconds of the last commit
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    # -- changes of values ---------------------------------------------------------------------------------------------

    def note(self, name: bytes, value: T | None, size: int) -> None:
        """Queue a changed or removed value. The value must not change any more."""
        self._next.note(name, value, size)
        self.position += 1
        self._changed()

    def note_all(self, names: Sequence[bytes], values: Sequence[T], sizes: Sequence[int]) -> None:
        """Queue several changed values."""
        self._next.note_all(names, values, sizes)
        self.position += len(names)
        self._changed()

    def clear(self) -> None:
        self._next = Batch(clears=True)
        self.position += 1
        self._changed()

    def _changed(self) -> None:
        if self._next.size > self.limit // 2 and not self._hurries:
            self.hurry()
        elif self.state is State.IDLE:
            self._move(Event.CHANGED)
            self._plan(self._delay())

    def waits(self, name: bytes) -> bool:
        """Return whether a value's last change is not on disk yet."""
        if self._next.clears:
            return True
        return name in self._next.changes or (self._now is not None and name in self._now.changes)

    def waiting(self, name: bytes) -> tuple[T | None, int] | None:
        """Return a value's last change, None for a removal, if it is not on disk yet; and its size."""
        found = self._next.changes.get(name)
        if found is not None or self._next.clears or self._now is None:
            return found
        return self._now.changes.get(name)

    def retimes(self, name: bytes, value: object, expires: int) -> None:
        """Prepare a change of a value's expiry. The write in progress keeps the old expiry."""
        if self._now is not None and (change := self._now.changes.get(name)) is not None and change[0] is value:
            self._now.expiries.setdefault(name, expires)

    def waits_again(self, name: bytes) -> bool:
        """Return whether a value, and not only its expiry, has changed since the batch was begun that is being
        written.
        """
        change = self._next.changes.get(name)
        return self._next.clears or (change is not None and not isinstance(change[0], Retime))

    @property
    def settled(self) -> bool:
        """Whether all changes are on disk."""
        return self.durable == self.position

    @property
    def size(self) -> int:
        """Bytes that wait to be written."""
        return self._next.size + (self._now.size if self._now is not None else 0)

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self.state in (State.WRITING, State.NOTING)

    @property
    def full(self) -> bool:
        """Whether new changes should wait until there is room. If the disk fails, nothing waits for it."""
        return self.size > self.limit and not self.failing

    def when_durable(self, position: int, then: Callable[[], None]) -> None:
        """Call `then` when all changes up to `position` are on disk, or when a commit has failed."""
        self._waiting.append((position, then))

    def when_not_full(self, then: Callable[[], None]) -> None:
        """Call `then` after the next commit."""
        self._waiting.append((0, then))
        self.hurry()

    def hurry(self) -> None:
        """Write all that waits as soon as possible."""
        if not self.settled:
            self._hurries = True
            self._move(Event.HURRIED)
            if self.state is State.PLANNED:
                self._plan(0)

    # -- batches ---------------------------------------------------------------------------------------------------

    def _move(self, event: Event) -> None:
        self.state = after(self.state, event)

    def _plan(self, delay: float) -> None:
        """Begin the next batch after `delay` seconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, self._begin)

    def _delay(self) -> float:
        if self._hurries or self.mode == "always":
            return 0.0
        return max(_SECOND - _SLACK * self._took, _SHORTEST)

    def _begin(self) -> None:
        self._timer = None
        self._move(Event.TIME)
        batch, self._next = self._next, Batch()
        batch.position, batch.began = self.position, time.monotonic()
        self._now, self._hurries, self._begun = batch, False, batch.position
        self._writer.commit(batch, self._committed)

    def _committed(self, error: Error | None) -> None:
        batch = self._now
        assert batch is not None
        if error is not None:
            self._now = None
            self._failed(batch, error)
            return
        self._move(Event.COMMITTED)
        self._took = time.monotonic() - batch.began
        self.times.note(int(1e9 * self._took))
        # Until all is noted, it counts as being written.
        self._in_turns(chain(self._owner.note_stored(batch), batch.freed()), self._noted)

    def _in_turns(self, steps: Iterator[None], then: Callable[[], None]) -> None:
        """Go through steps, and let others have their turn between them."""
        end = time.monotonic_ns() + _TURN
        for _ in steps:
            if time.monotonic_ns() > end:
                asyncio.get_running_loop().call_soon(self._in_turns, steps, then)
                return
        then()

    def _noted(self) -> None:
        batch = self._now
        assert batch is not None
        if self.failing:
            log.warning("writing to disk works again")
        self._now, self.failing = None, ""
        self.durable = batch.position
        self.last_commit = unix_ms()
        self.commits += 1
        self._move(Event.NOTED if self.settled else Event.NOTED_SOME)
        if self.state is State.PLANNED:
            self._plan(self._delay())
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Let those go on whose changes are on disk, or cannot be written."""
        waiting, self._waiting = self._waiting, []
        for position, then in waiting:
            if position <= self.durable or self.failing:
                then()
            else:
                self._waiting.append((position, then))
        if self._waiting:
            self.hurry()

    # -- when that fails -------------------------------------------------------------------------------------------

    def _failed(self, batch: Batch[T], error: Error) -> None:
        """Take a batch back. If the disk is full, make room before the next try."""
        self.errors += 1
        newer = self._next
        if not newer.clears:
            batch.expiries.clear()  # values have theirs
            for name, (value, size) in newer.changes.items():
                if not (isinstance(value, Retime) and batch.has_whole(name)):
                    batch.note(name, value, size)
            self._next = batch
        if isinstance(error, DiskFull):
            self._move(Event.FULL)
            self._in_turns(self._owner.make_room(error, batch.size), lambda: self._remove(error))
        else:
            self._fail(error)

    def _remove(self, error: DiskFull) -> None:
        """Delete removed values from the disk, to make space."""
        removals = self._take_removals()
        if removals is None:
            self._fail(error)
            return
        log.info("%s: %d values are removed to make room", error, len(removals.changes))
        self._now = removals
        self._writer.remove(removals, self._space_freed)

    def _take_removals(self) -> Batch[T] | None:
        """Return the removals that may be written before anything else; None if they would not help."""
        batch, made_at = self._next, self._room_made_at
        gone = sorted(name for name in batch.removed if self._owner.is_removed(name))
        if not gone and not batch.clears and made_at == self.commits:
            return None
        self._room_made_at = self.commits
        removals: Batch[T] = Batch(clears=batch.clears)
        for name in gone:
            removals.note(name, None, 0)
        return removals

    def _space_freed(self, error: Error | None) -> None:
        removals = self._now
        assert removals is not None
        if error is not None:
            self._now = None
            self._fail(error)
            return
        self._next.clears = self._next.clears and not removals.clears
        for name in removals.changes:
            if name in self._next.removed:
                self._next.forget(name)
        self._in_turns(self._owner.note_stored(removals), self._noted_removals)

    def _noted_removals(self) -> None:
        self._now = None
        self._move(Event.COMMITTED)
        self._plan(0)

    def _fail(self, error: Error) -> None:
        """Try again after a while, even if somebody hurries. Waiting clients continue."""
        if not self.failing:
            log.error("writing to disk fails, it will be tried again: %s", error)
        self.failing = str(error)
        self._tried = self._begun
        self._move(Event.FAILED)
        self._plan(RETRY_AFTER)
        self._wake_waiters()

    # -- the end ---------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Write all that there is now, if possible. It has been tried when this returns, after a second at most."""
        position, self._tried = self.position, -1
        while self.durable < position and not (self.failing and self._tried >= position):
            done = asyncio.Event()
            self.when_durable(position, done.set)
            self.hurry()
            await done.wait()

    async def close(self) -> int:
        """Write all that there is, and end the thread. Returns how many values could not be written."""
        for _ in range(_LAST_TRIES):
            await self.settle()
        if self._timer is not None:
            self._timer.cancel()
        await self._writer.close()
        return 0 if self.settled else max(len(self._next.changes), 1)
