"""The machine: the order of events, and everything that the server would request from a real one."""

from __future__ import annotations

import heapq
import os
import random
import shutil
import socket
from collections.abc import Callable
from itertools import count
from typing import Any

import lmdb
import uvloop

from tests.simulation.world import threads
from tests.simulation.world.clock import Clock
from tests.simulation.world.disk import SimulatedDisk
from tests.simulation.world.loop import Loop, Selector, ThreadLoop, ThreadSelector

_PROCESS = 4711
ROUND = 3_000  # nanoseconds that a round of the loop takes at least


class ServerDied(BaseException):
    """The process of the server was killed: nothing of it goes on."""


class Idle(Exception):
    """Nothing will ever happen any more, though somebody waits."""


class Machine:
    """One for each run. Its random numbers are drawn from the run's seed."""

    def __init__(self, clock: Clock, seed: str) -> None:
        self.clock = clock
        self.rng = random.Random(f"machine {seed}")
        self.disk = SimulatedDisk(self.pause, random.Random(f"disk {seed}"))
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._tickets = count()
        self.after_round: Callable[[], None] = lambda: None
        self.attend: Callable[[int, Callable[[], None]], None]  # call that when a descriptor can be read
        self.thread_pace = 50_000  # nanoseconds that a thread needs to get going, at most
        threads.turns = self.turns = threads.Turns(lambda: clock.now, self.later, self._pace)
        random.seed(f"server {seed}")
        _random = random.Random(f"os {seed}")
        os.urandom = _random.randbytes
        current.append(self)

    def later(self, nanoseconds: int, do: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self._agenda, (self.clock.now + nanoseconds, next(self._tickets), do))

    def pause(self, nanoseconds: int) -> None:
        """Let the thread that asks wait; the loop's own goes on at once."""
        if threads.turns.current is not None and nanoseconds:
            threads.turns.current.pause(nanoseconds)

    def _pace(self, name: str) -> int:
        return self.rng.randrange(1_000, self.thread_pace)

    def new_loop(self) -> Loop:
        """The loop of a process."""
        return Loop(Selector(self._wait, self.rng.shuffle), lambda: self.clock.now)

    def _wait(self, timeout: float | None) -> bool:
        """Let the next thing happen, within so many seconds; whether something did."""
        clock, agenda = self.clock, self._agenda
        if timeout == 0.0:
            clock.advance(clock.now + ROUND)
            self.after_round()
        until = None if timeout is None else clock.now + max(int(timeout * 1e9) + 1, 0)
        if not agenda or (until is not None and agenda[0][0] > until):
            if until is None:
                raise Idle
            clock.advance(until)
            return False
        when, _, do = heapq.heappop(agenda)
        clock.advance(when)
        do()
        return True

    def new_thread_loop(self) -> ThreadLoop:
        """A loop that a thread is to run."""
        selector = ThreadSelector()
        self.attend(selector.fileno(), selector.wake)
        return ThreadLoop(selector, lambda: self.clock.now)


current: list[Machine] = []  # the last is the one that runs
_open, _disk_usage = lmdb.open, shutil.disk_usage


def _lmdb_open(path: str, **options: Any) -> Any:
    env = _open(path, **options)
    return current[-1].disk.environment(env) if current else env


def install(clock: Clock) -> None:
    """Be the machine of everything that is imported from now on."""
    clock.install()
    threads.install()
    lmdb.open = _lmdb_open
    uvloop.new_event_loop = lambda: current[-1].new_thread_loop()
    os.getpid, socket.gethostname = lambda: _PROCESS, lambda: "machine"  # engines write them down
    shutil.disk_usage = lambda path: current[-1].disk.usage(path) if current else _disk_usage(path)
