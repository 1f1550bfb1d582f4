"""Threads of which one runs at a time, and no other than the world chose.

The server's threads are real ones, and their code is as it is. But whoever waits, in a queue, for an event or for a
thread's end, gives the turn back to the loop's thread, and is given it again at a moment of the world's own time. So
the same seed gives the same order, always.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_RealThread, _RealEvent = threading.Thread, threading.Event


class Killed(BaseException):
    """The process that the thread belonged to is dead."""


class Turns:
    """Who runs. `later` calls something after so many nanoseconds of the world; `pace` says how long a thread waits."""

    def __init__(self, later: Callable[[int, Callable[[], None]], None], pace: Callable[[str], int]) -> None:
        self.later = later
        self.pace = pace
        self.current: Thread | None = None
        self.threads: list[Thread] = []

    def kill_all(self) -> None:
        """End every thread where it stands."""
        for thread in self.threads:
            if thread.begun and not thread.over:
                thread.killed = True
                thread.run_on()
        self.threads.clear()


turns = Turns(lambda after, do: None, lambda name: 0)  # of the world that is running


class Thread(_RealThread):
    """A thread of the server's; any other is a real one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._of_server = getattr(kwargs.get("target"), "__module__", "").startswith(
            ("kvpage_server", "tests.simulation")
        )
        self.begun = self.over = self.killed = False
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._due = False
        self._joined: list[Thread] = []

    def start(self) -> None:
        """Begin, at some moment."""
        if not self._of_server:
            super().start()
            return
        self.daemon = True
        turns.threads.append(self)
        self.wake(turns.pace(self.name))

    def wake(self, after: int) -> None:
        """Have it go on after so many nanoseconds."""
        if not self._due and not self.over:
            self._due = True
            turns.later(after, self._wake)

    def _wake(self) -> None:
        self._due = False
        self.run_on()

    def run_on(self) -> None:
        """Let it run until it waits. The loop's thread alone calls this."""
        if self.over:
            return
        before, turns.current = turns.current, self
        if self.begun:
            self._go.release()
        else:
            self.begun = True
            super().start()
        self._back.acquire()
        turns.current = before

    def run(self) -> None:
        """Its work."""
        if not self._of_server:
            super().run()
            return
        try:
            super().run()
        except Killed:
            pass
        finally:
            self.over = True
            for waiting in self._joined:
                waiting.wake(0)
            self._back.release()

    def give_turn(self) -> None:
        """Let the loop's thread go on, until somebody wakes this one."""
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
        if not self._of_server:
            super().join(timeout)
        elif turns.current is not None:
            while not self.over:
                self._joined.append(turns.current)
                turns.current.give_turn()
        elif not self.over:
            raise RuntimeError("the loop would wait for a thread for ever")


class SimpleQueue:
    """What threads wait for."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Thread] = deque()

    def __class_getitem__(cls, _: Any) -> type[SimpleQueue]:
        return cls

    def put(self, item: Any) -> None:
        """Somebody who waits goes on."""
        self._items.append(item)
        if self._waiting:
            thread = self._waiting.popleft()
            thread.wake(turns.pace(thread.name))

    def get(self) -> Any:
        """Wait for something."""
        while not self._items:
            thread = turns.current
            assert thread is not None, "the loop waits for a queue"
            self._waiting.append(thread)
            thread.give_turn()
        return self._items.popleft()

    def qsize(self) -> int:
        """How much is there."""
        return len(self._items)

    def empty(self) -> bool:
        """Whether nothing is."""
        return not self._items


class Event(_RealEvent):
    """An event; a thread of the world waits for it in the world's time."""

    def set(self) -> None:
        """It has happened."""
        super().set()
        waiting, self._simulated = getattr(self, "_simulated", []), []
        for thread in waiting:
            thread.wake(0)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has happened by then."""
        thread = turns.current
        if thread is None or thread is not threading.current_thread():
            return super().wait(timeout)
        if not self.is_set():
            self._simulated = [*getattr(self, "_simulated", []), thread]
            if timeout is not None:
                thread.wake(int(timeout * 1e9))
            thread.give_turn()
        return self.is_set()


def install() -> None:
    """Be the threads of everything that is imported from now on."""
    vars(threading).update(Thread=Thread, Event=Event)
    vars(queue).update(SimpleQueue=SimpleQueue)
