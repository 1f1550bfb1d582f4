"""Threads of which one runs at a time, and no other than the world chose.

The server's threads are real ones, and their code is as it is. But a thread that waits, for a queue, for an event or
for a thread's end, gives its turn back to the loop's thread, and receives it again at a moment of the world's own time.
So the same seed gives the same order, always.
"""

from __future__ import annotations

import _thread
import logging
import queue
import select
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_RealThread, _real_poll = threading.Thread, select.poll
_LONGEST_LOOK = 2_000_000  # nanoseconds between two looks at a socket
SERVER = "server"


class Killed(BaseException):
    """The process that the thread belonged to is dead."""


class Turns:
    """Who runs. `later` calls something after so many nanoseconds of the world; `pace` says how long a thread waits."""

    def __init__(
        self, now: Callable[[], int], later: Callable[[int, Callable[[], None]], None], pace: Callable[[str], int]
    ) -> None:
        self.now = now
        self.later = later
        self.pace = pace
        self.current: Thread | None = None
        self.threads: list[Thread] = []
        self.broke: Callable[[str], None] = lambda text: None  # called with an exception that ends a thread
        self._owner = SERVER

    @property
    def owner(self) -> str:
        """The process to which a thread belongs that is started now."""
        return self._owner if self.current is None else self.current.owner

    @contextmanager
    def of(self, owner: str) -> Iterator[None]:
        """Assign threads that the loop's thread starts to that process."""
        self._owner = owner
        try:
            yield
        finally:
            self._owner = SERVER

    def mine(self) -> Thread | None:
        """The thread of the world that asks, if one does."""
        thread = self.current
        return thread if thread is not None and thread.works and thread.ident == _thread.get_ident() else None

    def kill(self, owner: str) -> None:
        """End every thread of a process where it stands."""
        for thread in [thread for thread in self.threads if thread.owner == owner]:
            self.threads.remove(thread)
            thread.killed = True
            if thread.begun and not thread.over:
                thread.run_on()


_nobodys = turns = Turns(lambda: 0, lambda after, do: None, lambda name: 0)  # of the world that is running


class Thread(_RealThread):
    """A thread of the world; outside of a world, a real one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._simulated = turns is not _nobodys
        self.owner = turns.owner
        self.begun = self.over = self.killed = False
        self.works = False  # before and after that it is Python's own: then its waits are real
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._waits = 0  # how often it has waited so far
        self._joined: list[Thread] = []

    def start(self) -> None:
        """Begin, at some moment."""
        if not self._simulated:
            super().start()
            return
        self.daemon = True
        work, self.run = self.run, lambda: self._run(work)  # type: ignore[method-assign]
        turns.threads.append(self)
        self.wake(turns.pace(self.name))

    def wake(self, after: int) -> None:
        """Have it go on after so many nanoseconds, unless it has gone on by then."""
        wait = self._waits
        turns.later(after, lambda: self._wake(wait))

    def _wake(self, wait: int) -> None:
        if wait == self._waits:
            self.run_on()

    def run_on(self) -> None:
        """Let it run until it waits. The loop's thread alone calls this."""
        if self.over or (self.killed and not self.begun):
            return
        self._waits += 1
        before, turns.current = turns.current, self
        if self.begun:
            self._go.release()
        else:
            self.begun = True
            super().start()
        self._back.acquire()
        turns.current = before

    def _run(self, work: Callable[[], None]) -> None:
        self.works = True
        try:
            work()
        except Killed:
            pass
        except Exception:  # noqa: BLE001 - whatever it is, the thread ends by it
            if not self.killed:
                turns.broke(f"{self.name} ends: {traceback.format_exc()}")
        finally:
            self.works, self.over = False, True
            for waiting in self._joined:
                waiting.wake(0)
            self._back.release()

    def give_turn(self) -> None:
        """Let the loop's thread go on, until somebody wakes this one."""
        if not self.killed:
            self._back.release()
            self._go.acquire()
        if self.killed:
            raise Killed

    def pause(self, nanoseconds: int) -> None:
        """Let so much time pass."""
        self.wake(nanoseconds)
        self.give_turn()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end: another of these threads does."""
        if not self._simulated:
            super().join(timeout)
        elif turns.current is not None:
            while not self.over:
                self._joined.append(turns.current)
                turns.current.give_turn()
        elif not self.over:
            raise RuntimeError("the loop would wait for a thread for ever")


class SimpleQueue:
    """Queue that threads of the world wait for."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Thread] = deque()

    def __class_getitem__(cls, _: Any) -> type[SimpleQueue]:
        return cls

    def put(self, item: Any) -> None:
        """Add an item, and wake a waiting thread."""
        self._items.append(item)
        if self._waiting:
            thread = self._waiting.popleft()
            thread.wake(turns.pace(thread.name))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Wait for something."""
        ends = None if timeout is None else turns.now() + int(timeout * 1e9) + 1
        while not self._items:
            if not block or (ends is not None and turns.now() >= ends):
                raise queue.Empty
            thread = turns.current
            assert thread is not None, "the loop waits for a queue"
            self._waiting.append(thread)
            if ends is not None:
                thread.wake(ends - turns.now())
            thread.give_turn()
            if thread in self._waiting:
                self._waiting.remove(thread)  # it was woken by the time
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """Something that is there."""
        return self.get(block=False)

    def qsize(self) -> int:
        """How much is there."""
        return len(self._items)

    def empty(self) -> bool:
        """Whether nothing is."""
        return not self._items


class Lock:
    """A lock. A thread of the world that cannot have it gives up its turn; so conditions and events wait, too."""

    def __init__(self) -> None:
        self._real = _thread.allocate_lock()
        self._waiting: list[Thread] = []

    def locked(self) -> bool:
        """Return as locks do."""
        return self._real.locked()

    def _at_fork_reinit(self) -> None:
        self._real = _thread.allocate_lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire as locks do."""
        if self._real.acquire(False):
            return True
        if not blocking:
            return False
        thread = turns.mine()
        return self._real.acquire(True, timeout) if thread is None else self._wait(thread, timeout)

    __enter__ = acquire

    def _wait(self, thread: Thread, timeout: float) -> bool:
        ends = turns.now() + int(timeout * 1e9) + 1  # or less than a nanosecond would take no time, ever again
        self._waiting.append(thread)
        try:
            while not self._real.acquire(False):
                if timeout >= 0:
                    if turns.now() >= ends:
                        return False
                    thread.wake(ends - turns.now())
                thread.give_turn()
            return True
        finally:
            self._waiting.remove(thread)

    def release(self) -> None:
        """Release as locks do."""
        self._real.release()
        for thread in self._waiting:
            thread.wake(0)

    def __exit__(self, *error: object) -> None:
        self.release()


class Poll:
    """select.poll; a thread of the world polls repeatedly."""

    def __init__(self) -> None:
        self._real = _real_poll()
        self.register, self.modify, self.unregister = self._real.register, self._real.modify, self._real.unregister

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """Return ready descriptors within `timeout` milliseconds."""
        thread = turns.mine()
        if thread is None:
            return self._real.poll(timeout)
        ends, look = turns.now() + int((1e9 if timeout is None else timeout) * 1e6), 20_000
        while not (found := self._real.poll(0)) and turns.now() < ends:
            thread.pause(min(look, ends - turns.now()))
            look = min(2 * look, _LONGEST_LOOK)
        return found


def install() -> None:
    """Be the threads of everything that is imported from now on."""
    timer = {name: value for name, value in vars(threading.Timer).items() if name not in ("__dict__", "__weakref__")}
    vars(threading).update(Thread=Thread, Timer=type("Timer", (Thread,), timer))
    vars(threading).update(Lock=Lock, RLock=threading._PyRLock, _allocate_lock=Lock)
    vars(queue).update(SimpleQueue=SimpleQueue)
    vars(select).update(poll=Poll)
    logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL + 1)  # it speaks of every thread that is killed
