"""Write-behind: the queue of dirty values, and the thread that commits them in batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import chain
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from kvpage_server.page import unix_ms
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import Change, Clear, Delete, SetExpiry, Write
from kvpage_server.store.disk.lmdb_file import DiskError, DiskFull, MaxDisk
from kvpage_server.system.process import trim_malloc
from kvpage_server.system.text import Durations, LogRateLimit, plural

T = TypeVar("T")

Error = DiskError | DiskFull
Done = Callable[[Error | None], None]  # receives the error of a commit, or None
R = TypeVar("R")

_SIZE = itemgetter(1)  # of a queued change, in bytes of memory
CHANGE = 350  # approximate bytes of memory of a change: its row and objects, and the name of a page
_VALUES_PER_FREE = 256  # values that are freed in one step
# Seconds without a job after which the thread returns free memory to the system. It keeps it until then, because the
# system would have to zero the memory for the next commit.
_SPARE_FOR = 10.0

log = logging.getLogger("kvpage")


@dataclass(slots=True)
class Batch(Generic[T]):
    """Dirty values that are committed together, by their names on disk.

    A batch has one change for each value: the last one. Invariants: `size` is the sum of the sizes in `changes`, and
    CHANGE for each; `removed` has the names whose change is a removal. `position` and `began` are set when the commit
    begins.
    """

    # By name: the new value, None for a removal, and the bytes of memory that value and long names keep.
    changes: dict[bytes, tuple[T | None, int]] = field(default_factory=dict)
    size: int = 0  # bytes of memory that all changes keep
    clears: bool = False  # whether the commit first removes all values from the disk
    removed: dict[bytes, None] = field(default_factory=dict)  # names with a removal: an ordered set
    # Expiries that the commit writes, of values whose expiry in memory has changed since the commit began.
    expiries: dict[bytes, int] = field(default_factory=dict)
    coded: dict[bytes, int] = field(default_factory=dict)  # bytes of codes of committed values, by name
    position: int = 0  # number of the last change, see `WriteBehind.position`
    began: float = 0.0  # start of the commit, in monotonic seconds

    def note(self, name: bytes, value: T | None, size: int) -> None:
        """Set the change of a value, None for a removal. `size` is in bytes of memory, without CHANGE."""
        old = self.changes.get(name)
        self.size += size - (old[1] if old is not None else -CHANGE)
        self.changes[name] = (value, size)
        if value is None:
            self.removed[name] = None
        elif old is not None:
            self.removed.pop(name, None)

    def note_all(self, new: Mapping[bytes, tuple[T | None, int]], *, removed: bool = False) -> None:
        """Set the changes of several values, each with its size: all are removals if `removed`, otherwise none is."""
        changes = self.changes
        known, old = len(changes), [*map(changes.get, new)]
        changes.update(new)
        grown = sum(map(_SIZE, new.values())) - sum(map(_SIZE, filter(None, old)))
        self.size += grown + CHANGE * (len(changes) - known)
        if removed:
            self.removed.update(dict.fromkeys(new))
        elif self.removed:
            for name in new:
                self.removed.pop(name, None)

    def has_whole(self, name: bytes) -> bool:
        """Return whether the batch stores the value, and does not only remove it or change its expiry."""
        value = self.changes.get(name, (None, 0))[0]
        return value is not None and not isinstance(value, SetExpiry)

    def forget(self, name: bytes) -> None:
        """Remove a value's change, which the batch must have."""
        self.size -= self.changes.pop(name)[1] + CHANGE
        self.removed.pop(name, None)

    def freed(self) -> Iterator[None]:
        """Free the values, in steps. Runs on the loop: the thread would free all of them at once, and meanwhile keep
        the interpreter's lock from the loop.
        """
        changes = self.changes
        while changes:
            for _ in range(min(len(changes), _VALUES_PER_FREE)):
                changes.popitem()
            yield


@dataclass(frozen=True, slots=True)
class _BatchChanges(Generic[T]):
    """The changes of a batch for the disk, which each iteration creates one at a time.

    Iterations run in the thread, while the loop may add to the batch's `expiries`.
    """

    batch: Batch[T]
    change_of: Callable[[bytes, T], Change]

    def __iter__(self) -> Iterator[Change]:
        batch = self.batch
        if batch.clears:
            yield Clear()
        for name, (value, _) in batch.changes.items():
            change = Delete(name) if value is None else self.change_of(name, value)
            # `change_of` has read the value's expiry. If the loop has changed it since the commit began, `expiries` has
            # the old one. The loop notes the old one before it sets the new one, so a check after `change_of` misses
            # none.
            if name in batch.expiries and isinstance(change, Write):
                change.expires = batch.expiries[name]
            yield change


_Job = tuple[Callable[[], Any], Callable[[Any], None]]


class DiskWriter(Generic[T]):
    """Thread that commits batches for the running event loop.

    `change_of(name, value)` returns the change that stores a value. It runs in the thread.
    """

    def __init__(self, disk: Disk, change_of: Callable[[bytes, T], Change]) -> None:
        self._disk = disk
        self._change_of = change_of
        self._loop = asyncio.get_running_loop()
        # Functions for the thread, and the callbacks for their results. None stops the thread.
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="disk-writer", daemon=True)
        self._thread.start()

    def commit(self, batch: Batch[T], done: Done) -> None:
        """Commit a batch in the thread, then call `done` on the loop."""
        self.run(partial(self._error_of, batch, makes_room=False), done)

    def remove(self, batch: Batch[T], done: Done) -> None:
        """Commit removals in the thread, because the disk is full, then call `done` on the loop."""
        self.run(partial(self._error_of, batch, makes_room=True), done)

    def run(self, work: Callable[[], R], done: Callable[[R], None]) -> None:
        """Call `work`, which raises nothing, in the thread, then `done` with its result on the loop."""
        self._jobs.put((work, done))

    def _run(self) -> None:
        """Run the thread.

        It drops its references to a batch before the callback, so that the loop drops the last ones (`Batch.freed`).
        """
        while (job := self._next_job()) is not None:
            work, done = job
            result = work()
            del work, job
            self._loop.call_soon_threadsafe(done, result)
            del done, result

    def _next_job(self) -> _Job | None:
        """Wait for the next job, and return it. After `_SPARE_FOR` seconds without a job, trim the heap once."""
        try:
            return self._jobs.get(timeout=_SPARE_FOR)
        except Empty:
            trim_malloc()
            return self._jobs.get()

    def _error_of(self, batch: Batch[T], *, makes_room: bool) -> Error | None:
        """Commit a batch, and return None or the error.

        The error has no traceback, which would keep the batch in memory.
        """
        try:
            if makes_room:
                self._disk.commit_removals(_BatchChanges(batch, self._change_of))
            else:
                batch.coded = self._disk.write(_BatchChanges(batch, self._change_of))
        except (DiskFull, DiskError) as error:
            return type(error)(str(error))
        except Exception as error:
            log.exception("queued values cannot be written")
            return DiskError(repr(error))
        return None

    async def close(self) -> None:
        """Stop the thread after all its jobs."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)


# -- The queue and its states ------------------------------------------------------------------------------------------
#
# Commands queue their changes and do not wait for the disk. A thread commits the changes in batches. All other code of
# this module runs on the event loop. Costs: O(1) to queue a change; one pass over a batch to write it, to note it, and
# to free it, in steps of at most a millisecond on the loop.
#
# There are at most two batches. `_next` collects new changes. When a commit begins, `_next` becomes `_now`, which the
# thread writes, and a new `_next` is empty. A change replaces the change of the same value in `_next`, so a value that
# changes often is written once per commit. The exchange happens between two steps of commands, and a batch is one LMDB
# transaction. So the disk has the store as it was between two steps, and never half of a MULTI transaction.
#
# When a commit fails, the changes in `_now` return to `_next`, unless `_next` has newer changes of the same values. The
# next attempt follows after RETRY_AFTER.
#
# When the disk is full, the owner evicts first. Then the removals of the queue are committed before its other changes,
# to free space: in one commit, or in several if `maxdisk` has no space for one. A process that is killed in between
# leaves a part of the batch on disk; with `always`, no client has received a reply for it. Values that are replaced
# stay on disk until the new values are committed.
#
# With `always`, the clients of all changes in the queue receive an error when a commit fails. A value that is too large
# for the disk would let all later commits fail, although there is space for others: so if space was freed since the
# disk was full, and a commit fails again, the owner drops the largest queued values that replace nothing on disk.
#
# `appendfsync` determines when a commit begins. With `always`, it begins as soon as the commit before it is done. With
# `everysec` and `no`, it is delayed by `_delay`, so that a change is committed within a second if commits are fast
# enough. A commit is durable, except with `no`, where the operating system writes the data later.
#
# The states, and their transitions. Any other event is an error:
#
#     IDLE         `_next` is empty        CHANGED, HURRIED -> PLANNED
#     PLANNED      a timer runs            TIME -> WRITING; HURRIED shortens the timer
#     WRITING      the thread has `_now`   COMMITTED -> NOTING; FAILED -> RETRYING; FULL -> MAKING_ROOM
#     NOTING       the owner notes the     NOTED -> IDLE; NOTED_SOME, with new changes, -> PLANNED
#                  committed batch
#     MAKING_ROOM  the owner evicts, then  COMMITTED -> PLANNED; FAILED -> RETRYING
#                  the thread commits
#                  removals
#     RETRYING     a timer runs after a    TIME -> WRITING; nothing shortens the timer
#                  failure
#
# CHANGED and HURRIED may occur in every state. They change nothing in a state without a row for them.

_SECOND = 0.9  # seconds from a change to the end of its commit, with `everysec` and `no`
_SLACK = 2.5  # durations of a commit to subtract, because a change right after the start of a commit waits for two
_SHORTEST = 0.05  # seconds: the least delay
RETRY_AFTER = 1.0  # seconds from a failure to the next attempt
_LAST_TRIES = 3  # attempts to write everything at the end
_TURN = 1_000_000  # nanoseconds of steps, after which other tasks of the loop run


class State(Enum):
    """A state of the queue, see the table above."""

    IDLE = auto()
    PLANNED = auto()
    WRITING = auto()
    NOTING = auto()
    MAKING_ROOM = auto()
    RETRYING = auto()


class Event(Enum):
    """An event that may change the state."""

    CHANGED = auto()  # a value has changed
    HURRIED = auto()  # a client waits for a commit, or many bytes wait
    TIME = auto()  # the timer has expired
    COMMITTED = auto()  # the thread has committed
    FAILED = auto()  # the commit failed, for another reason than a full disk
    FULL = auto()  # the disk is full
    NOTED = auto()  # the batch is noted, and no change waits
    NOTED_SOME = auto()  # the batch is noted, and changes wait


_WAITING = {Event.CHANGED, Event.HURRIED}  # events that may occur in every state

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
    """The interface of the store, as the write-behind uses it."""

    def change_of(self, name: bytes, value: T) -> Change:
        """Return the change that stores a value. Runs in the thread."""

    def note_stored(self, batch: Batch[T]) -> Iterator[None]:
        """Note that a batch was committed. Runs on the loop, and yields after each step."""

    def evict_for_full_disk(self, error: DiskFull, size: int) -> Iterator[None]:
        """Evict values, because the disk is full and `size` bytes are queued.

        Runs on the loop; yields after each step.
        """

    def find_refused(self) -> Iterator[None]:
        """Find queued values that have to be dropped, so that others fit on the full disk. Yields after each step."""

    def drop_refused(self) -> None:
        """Drop the values that `find_refused` has found, in one step."""

    def is_removed(self, name: bytes) -> bool:
        """Return whether the store has no value with this name, so that its removal may be committed early."""


class WriteBehind(Generic[T]):
    """The queue of dirty values. `mode` is a value of `appendfsync`; above `limit` queued bytes it is `full`.

    Invariants: `durable` <= `position`. `_now` is None, except in WRITING, NOTING and MAKING_ROOM. `_timer` is set in
    PLANNED and RETRYING.
    """

    def __init__(self, disk: Disk, owner: Owner[T], mode: str, limit: int) -> None:
        self.mode = mode
        self.limit = limit
        self.state = State.IDLE
        self.position = 0  # number of changes since the start: the position of the last one
        self.durable = 0  # position up to which all changes are committed
        self.last_commit = unix_ms()
        self.commits = 0  # number of commits since the start, without those of removals only
        self.times = Durations()  # durations of commits
        # Failures of the disk since the start. Retries count no more until one succeeds, and `maxdisk` is no failure.
        self.errors = 0
        self._has_failed = False  # whether the disk has failed since the last commit
        self.failing = ""  # the error of the last commit; empty if it succeeded
        self._seldom = LogRateLimit(log)
        self._owner = owner
        self._writer = DiskWriter(disk, owner.change_of)
        self._next: Batch[T] = Batch()  # changes since the last commit began
        self._now: Batch[T] | None = None  # the batch that the thread writes, or that is being noted
        self._timer: asyncio.TimerHandle | None = None  # starts the next commit
        self._hurries = False  # whether the next commit begins without a delay
        self._room_made_at = -1  # value of `commits` at the last commit of removals that freed space
        self._begun = self._tried = 0  # positions of the last commit that began, and of the last failed one
        self._took = 0.0  # seconds of the last commit
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # positions, and the callbacks that wait for them

    # -- changes of values ---------------------------------------------------------------------------------------------

    def note(self, name: bytes, value: T | None, size: int) -> None:
        """Queue a changed value, or None for a removed one, see `Batch.note`. The bytes of the value must not change
        afterwards.
        """
        self._next.note(name, value, size)
        self.position += 1
        self._changed()

    def note_all(self, new: Mapping[bytes, tuple[T | None, int]], *, removed: bool = False) -> None:
        """Queue several changes, see `Batch.note_all`."""
        self._next.note_all(new, removed=removed)
        self.position += len(new)
        self._changed()

    def divided(self, names: Iterable[bytes], on_disk: Container[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Divide the names of removed values into those whose removal must be written, and those whose queued change
        may be dropped, see `may_cancel`. Values that are neither on disk nor queued are in neither list.
        """
        if self._next.clears:
            return [], [*names]
        queued, writing = self._next.changes, self._now.changes if self._now is not None else {}
        written, dropped = list[bytes](), list[bytes]()
        for name in names:
            if name in on_disk or name in writing:
                written.append(name)
            elif name in queued:
                dropped.append(name)
        return written, dropped

    def may_cancel(self, name: bytes, *, is_on_disk: bool) -> bool:
        """Return whether the change of a removed value may be dropped, because the value is not and will not be on
        disk.
        """
        return self._next.clears or not (is_on_disk or (self._now is not None and name in self._now.changes))

    def cancel(self, names: Sequence[bytes]) -> None:
        """Drop the queued changes of removed values, if any, see `may_cancel`."""
        for name in names:
            if name in self._next.changes:
                self._next.forget(name)
        self.position += len(names)
        self._changed()

    def clear(self) -> tuple[dict[bytes, Any], ...]:
        """Queue the removal of all values, which replaces all queued changes. Return these, to be freed in steps."""
        old, self._next = self._next, Batch(clears=True)
        self.position += 1
        self._changed()
        return old.changes, old.removed

    def _changed(self) -> None:
        """Plan a commit; without a delay if the queued bytes exceed half of the limit."""
        if self._next.size > self.limit // 2 and not self._hurries:
            self.commit_soon()
        elif self.state is State.IDLE:
            self._move(Event.CHANGED)
            self._plan(self._delay())

    def waits(self, name: bytes) -> bool:
        """Return whether a change of a value is queued or being written."""
        if self._next.clears:
            return True
        return name in self._next.changes or (self._now is not None and name in self._now.changes)

    def waiting(self, name: bytes) -> tuple[T | None, int] | None:
        """Return a value's queued change (None: a removal) and its bytes; None if no change is queued."""
        found = self._next.changes.get(name)
        if found is not None or self._next.clears or self._now is None:
            return found
        return self._now.changes.get(name)

    def note_old_expiry(self, name: bytes, value: object, expires: int) -> None:
        """Note the old expiry of a value before it changes, so that the commit in progress writes this old one,
        `expires`.
        """
        if self._now is not None and (change := self._now.changes.get(name)) is not None and change[0] is value:
            self._now.expiries.setdefault(name, expires)

    def waits_again(self, name: bytes) -> bool:
        """Return whether a value, and not only its expiry, was changed since the last commit began."""
        change = self._next.changes.get(name)
        return self._next.clears or (change is not None and not isinstance(change[0], SetExpiry))

    @property
    def settled(self) -> bool:
        """Whether all changes were committed."""
        return self.durable == self.position

    @property
    def size(self) -> int:
        """Bytes of memory that dirty values keep."""
        return self._next.size + (self._now.size if self._now is not None else 0)

    @property
    def refuses(self) -> bool:
        """Whether the clients of all queued changes have received an error, or receive it now: `always`, and commits
        fail.
        """
        return bool(self.failing) and self.mode == "always"

    @property
    def queued(self) -> Mapping[bytes, tuple[T | None, int]]:
        """The queued changes, by name: the new value, None for a removal, and bytes of memory."""
        return self._next.changes

    @property
    def busy(self) -> bool:
        """Whether a batch is being written or noted."""
        return self.state in (State.WRITING, State.NOTING)

    @property
    def full(self) -> bool:
        """Whether writes should wait because the queue exceeds its limit. They do not wait while the disk fails."""
        size = self._next.size + (self._now.size if self._now is not None else 0)  # without the cost of a call
        return size > self.limit and not self.failing

    def when_durable(self, position: int, then: Callable[[], None]) -> None:
        """Call `then` when all changes up to `position` were committed, or when a commit has failed."""
        self._waiting.append((position, then))

    def when_not_full(self, then: Callable[[], None]) -> None:
        """Call `then` after the next commit."""
        self._waiting.append((0, then))
        self.commit_soon()

    def commit_soon(self) -> None:
        """Begin the next commit without a delay, because a client waits for it, or many bytes are queued."""
        if not self.settled:
            self._hurries = True
            self._move(Event.HURRIED)
            if self.state is State.PLANNED:
                self._plan(0)

    # -- batches ---------------------------------------------------------------------------------------------------

    def _move(self, event: Event) -> None:
        self.state = after(self.state, event)

    def _plan(self, delay: float) -> None:
        """Set the timer for the next commit to `delay` seconds from now."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, self._begin)

    def _delay(self, noting: float = 0.0) -> float:
        """Return the seconds until the next commit begins. They depend on `mode` and the last commit, which took
        `_took` seconds, and whose values the owner noted in `noting` seconds if the changes waited for that.
        """
        if self._hurries or self.mode == "always":
            return 0.0
        return max(_SECOND - _SLACK * self._took - noting, _SHORTEST)

    def _begin(self) -> None:
        """Begin a commit: pass the batch of queued changes to the thread, and begin an empty one."""
        self._timer = None
        self._move(Event.TIME)
        batch, self._next = self._next, Batch()
        batch.position, batch.began = self.position, time.monotonic()
        self._now, self._hurries, self._begun = batch, False, batch.position
        self._writer.commit(batch, self._committed)

    def _committed(self, error: Error | None) -> None:
        """Continue on the loop after the thread has committed `_now`, or failed to."""
        batch = self._now
        assert batch is not None
        if error is not None:
            self._now = None
            self._failed(batch, error)
            return
        self._move(Event.COMMITTED)
        self._took = time.monotonic() - batch.began
        self.times.note(int(1e9 * self._took))
        # `_now` stays set until the owner has noted all values, so `waits` is true for them until then.
        self._in_turns(chain(self._owner.note_stored(batch), batch.freed()), self._finish_commit)

    def _in_turns(self, steps: Iterator[None], then: Callable[[], None]) -> None:
        """Run steps, at most `_TURN` at a time, with other tasks of the loop in between; then call `then`."""
        end = time.monotonic_ns() + _TURN
        for _ in steps:
            if time.monotonic_ns() > end:
                asyncio.get_running_loop().call_soon(self._in_turns, steps, then)
                return
        then()

    def _finish_commit(self) -> None:
        """Finish a commit, after the owner has noted its values."""
        batch = self._now
        assert batch is not None
        if self.failing:
            log.warning("writing to disk works again")
        self._now, self.failing, self._has_failed = None, "", False
        self.durable = batch.position
        self.last_commit = unix_ms()
        self.commits += 1
        self._move(Event.NOTED if self.settled else Event.NOTED_SOME)
        if self.state is State.PLANNED:
            noting = time.monotonic() - batch.began - self._took  # changes since the commit have waited for this, too
            self._plan(self._delay(noting))
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Call the callbacks whose changes were committed, or all after a failure. Hurry if others remain."""
        waiting, self._waiting = self._waiting, []
        for position, then in waiting:
            if position <= self.durable or self.failing:
                then()
            else:
                self._waiting.append((position, then))
        if self._waiting:
            self.commit_soon()

    # -- failures ------------------------------------------------------------------------------------------------------

    def _failed(self, batch: Batch[T], error: Error) -> None:
        """Return the changes of a failed batch to the queue. If the disk is full, make room before the next attempt."""
        self._count(error)
        newer = self._next
        # A newer change of a value replaces the batch's. If the newer batch clears, it replaces the whole batch.
        if not newer.clears:
            batch.expiries.clear()  # the next attempt writes the current expiries
            for name, (value, size) in newer.changes.items():
                # If the batch stores the value, its expiry needs no change: `change_of` reads the current one.
                if not (isinstance(value, SetExpiry) and batch.has_whole(name)):
                    batch.note(name, value, size)
            self._next = batch
        if isinstance(error, DiskFull):
            self._move(Event.FULL)
            steps = chain(self._owner.evict_for_full_disk(error, batch.size), self._owner.find_refused())
            self._in_turns(steps, lambda: self._remove(error))
        else:
            self._fail(error)

    def _count(self, error: Error) -> None:
        if not (self._has_failed or isinstance(error, MaxDisk)):
            self._has_failed = True
            self.errors += 1

    def _remove(self, error: DiskFull) -> None:
        """Commit removals alone, to free space for the rest of the queue."""
        if self.refuses:
            self._wake_waiters()  # with the error: their changes since the last attempt may be dropped, too
            self._owner.drop_refused()
        removals = self._take_removals()
        if removals is None:
            self._fail(error)
            return
        if removals.changes:  # for each commit while the disk is full
            values = plural(len(removals.changes), "value")
            self._seldom.log(logging.INFO, "%s: remove %s to make room", error, values)
        self._now = removals
        self._writer.remove(removals, self._space_freed)

    def _take_removals(self) -> Batch[T] | None:
        """Return a batch of the removals that may be committed first.

        Return None if there are none, and there was no commit since the last attempt to free space. Otherwise even an
        empty batch may help: its commit frees lost pieces, and the pages of the last commit.
        """
        batch, made_at = self._next, self._room_made_at
        # A removed page whose block exists was replaced by an extent, and stays on disk until that is committed.
        gone = sorted(name for name in batch.removed if self._owner.is_removed(name))
        if not gone and not batch.clears and made_at == self.commits:
            return None
        self._room_made_at = self.commits
        removals: Batch[T] = Batch(clears=batch.clears)
        for name in gone:
            removals.note(name, None, 0)
        return removals

    def _space_freed(self, error: Error | None) -> None:
        """Continue on the loop after the thread has committed removals, or failed to."""
        removals = self._now
        assert removals is not None
        if error is not None:
            self._count(error)
            self._now = None
            self._fail(error)
            return
        # Remove committed removals from the queue, unless the values were stored again meanwhile.
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
        """Plan the next attempt after RETRY_AFTER, and call all waiting callbacks."""
        if not self.failing:
            log.error("writing to disk fails, it will be tried again: %s", error)
        self.failing = str(error)
        self._tried = self._begun
        self._move(Event.FAILED)
        self._plan(RETRY_AFTER)
        self._wake_waiters()

    async def run(self, work: Callable[[], R]) -> R | Error:
        """Call `work` in the thread, between two commits, and return its result, or the error."""
        done: asyncio.Future[R | Error] = asyncio.get_running_loop().create_future()

        def tried() -> R | Error:
            try:
                return work()
            except (DiskFull, DiskError) as error:
                return type(error)(str(error))  # without the traceback, which refers to memory
            except Exception as error:
                log.exception("a task of the thread that writes to disk failed")
                return DiskError(repr(error))

        self._writer.run(tried, done.set_result)
        return await done

    # -- the end ---------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Commit all changes that are queued now.

        If commits fail, return after an attempt that included all of them.
        """
        position, self._tried = self.position, -1
        while self.durable < position and not (self.failing and self._tried >= position):
            done = asyncio.Event()
            self.when_durable(position, done.set)
            self.commit_soon()
            await done.wait()

    async def close(self) -> int:
        """Commit all changes, and stop the thread. Return the number of values that could not be written."""
        for _ in range(_LAST_TRIES):
            await self.settle()
        if self._timer is not None:
            self._timer.cancel()
        await self._writer.close()
        return 0 if self.settled else max(len(self._next.changes), 1)
