"""The event loop of the server: asyncio's own, with a selector that asks the world for the next event."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from tests.simulation.world import threads

Ready = list[tuple[selectors.SelectorKey, int]]


class Selector(selectors.BaseSelector):
    """Real sockets, asked without waiting; `wait` has the world go on instead, for so many seconds at the most."""

    def __init__(self, wait: Callable[[float | None], bool], shuffle: Callable[[Ready], None]) -> None:
        self._real = selectors.DefaultSelector()
        self._wait = wait
        self._shuffle = shuffle
        self._numbers = count()
        self._order: dict[int, int] = {}  # of registration, by descriptor

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Register as selectors do."""
        key = self._real.register(fileobj, events, data)
        self._order[key.fd] = next(self._numbers)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Unregister as selectors do."""
        key = self._real.unregister(fileobj)
        self._order.pop(key.fd, None)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Modify as selectors do."""
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> Ready:
        """Return readable and writable descriptors. If there are none, time advances."""
        if self._wait(0.0):  # due events
            timeout = 0.0
        while True:
            found = self._real.select(0)
            if found:
                found.sort(key=lambda one: self._order[one[0].fd])
                if len(found) > 1:
                    self._shuffle(found)
                return found
            if timeout == 0.0 or not self._wait(timeout):
                return []
            timeout = 0.0  # something happened, which may have given the loop something to do

    def close(self) -> None:
        """Close as selectors do."""
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the map as selectors do."""
        return self._real.get_map()


class Loop(asyncio.SelectorEventLoop):
    """A loop whose time is the world's, and whose threads are. Signals come from the world as well."""

    def __init__(self, selector: selectors.BaseSelector, now: Callable[[], int]) -> None:
        self._now = now
        super().__init__(selector)
        self.set_debug(False)  # ignores PYTHONASYNCIODEBUG, which would forbid calls of the world's threads
        self._clock_resolution = 1e-6
        self.on_signal: dict[int, Callable[[], Any]] = {}

    def time(self) -> float:
        """Seconds of the world."""
        return self._now() / 1e9

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """Only one thread runs at a time."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """By a thread of the world."""
        done = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - passed to the caller
                self.call_soon_threadsafe(_notify, done, None, error)
            else:
                self.call_soon_threadsafe(_notify, done, result, None)

        threads.Thread(target=work, name="executor").start()
        return done

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        """Note the callback of a signal."""
        self.on_signal[sig] = lambda: callback(*args)


class ThreadSelector(selectors.DefaultSelector):
    """Selector of a thread's loop: while nothing is ready, the thread gives up its turn."""

    _waiting: threads.Thread | None = None

    def select(self, timeout: float | None = None) -> Ready:
        """Return readable and writable descriptors."""
        found = super().select(0)
        thread = threads.turns.mine()
        if found or timeout == 0.0 or thread is None:
            return found
        self._waiting = thread
        if timeout is not None:
            thread.wake(max(int(timeout * 1e9), 1_000))
        thread.give_turn()
        self._waiting = None
        return super().select(0)

    def wake(self) -> None:
        """Something is ready, or there is something to do."""
        thread, self._waiting = self._waiting, None
        if thread is not None:
            thread.wake(0)


class ThreadLoop(Loop):
    """A loop that a thread runs, and others give work to."""

    _selector: ThreadSelector

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """Also when it waits."""
        handle = self.call_soon(callback, *args, context=context)
        self._selector.wake()
        return handle


def _notify(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
