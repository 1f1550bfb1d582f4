"""Parts of the batch engine: requests, their blocks, and the model runner, which also detects a changed model.

This module has the turns of tenants, for prompts and for the threads that prepare them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")


class Turns(Generic[_Result]):
    """The waiting items of tenants, taken in turn: one of each tenant, and those of a tenant in their order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Result]] = {}  # by tenant; the first tenant has the next turn

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tenant: str, item: _Result) -> None:
        """Add an item of a tenant."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> _Result:
        """Remove and return the next item. There must be one."""
        tenant, waiting = next(iter(self._waiting.items()))
        del self._waiting[tenant]
        item = waiting.popleft()
        if waiting:
            self._waiting[tenant] = waiting
        return item


class TenantThread:
    """A thread that does the work of tenants in turn. `executor` has the thread, and is used for nothing else."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._turns = Turns[tuple[Callable[[], Any], Future[Any]]]()
        self._lock = threading.Lock()  # of `_turns`

    def submit(self, tenant: str, work: Callable[[], _Result]) -> Future[_Result]:
        """Queue work of a tenant, and return its future. If that is cancelled first, the work is not done."""
        done: Future[_Result] = Future()
        with self._lock:
            self._turns.add(tenant, (work, done))
        self._executor.submit(self._do_next)
        return done

    def _do_next(self) -> None:
        with self._lock:
            work, done = self._turns.take()
        run_call(work, done)


def run_call(work: Callable[..., _Result], done: Future[_Result], *args: object) -> None:
    """Call `work`, and set its result or its exception in `done`, unless that is cancelled."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(work(*args))
    except Exception as error:  # noqa: BLE001 - passed to the waiting task
        done.set_exception(error)
    finally:
        del done  # break the reference cycle: its exception has this frame in its traceback
