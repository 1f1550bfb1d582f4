"""Signals of a server. docs/operations.md has the same as a table.

Every signal that normally ends a process is a request to stop: acknowledged writes are saved first. SIGHUP has two
meanings. For a process with a terminal, the terminal has been closed, and the process stops. For a service, which has
none, its log file and certificates are to be reloaded. If SIGHUP was ignored at the start, as under nohup, it stays
ignored. Signals that mean nothing to a server are ignored, so that they don't end it. Signals of a crash are left as
they are.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable
from functools import partial

_LOOK_SECONDS = 1.0


def _those(*names: str) -> list[int]:
    """The signals with these names that the system has."""
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


STOP = _those("SIGTERM", "SIGINT", "SIGQUIT", "SIGXCPU", "SIGPWR")
IGNORED = _those("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGSTKFLT", "SIGPIPE", "SIGXFSZ")
if hasattr(signal, "SIGRTMIN"):
    IGNORED += range(signal.SIGRTMIN, signal.SIGRTMAX + 1)


def begin() -> None:
    """Ignore the signals that mean nothing to the server. Until `attend`, the others end it at once."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be cleaned up, so no traceback


def attend(loop: asyncio.AbstractEventLoop, stop: Callable[[int], None], renew: Callable[[], None]) -> None:
    """Let a loop call `stop` with the number of a signal to stop, and `renew` when a service gets SIGHUP."""
    for number in STOP:
        loop.add_signal_handler(number, stop, number)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return
    terminal = _terminal()
    if terminal is None:
        loop.add_signal_handler(signal.SIGHUP, renew)
        return
    hang_up = partial(stop, signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    watch = select.poll()
    watch.register(terminal, 0)  # a hangup is reported unasked
    _look(loop, terminal, watch, hang_up, True)


def finish(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore all signals. A process that has done all it had to is not to be ended by one: its exit code says so.

    A loop that is closed would give the signals that it attends to their usual meaning.
    """
    for number in (*STOP, signal.SIGHUP):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _terminal() -> int | None:
    """The controlling terminal of the process, wherever its input and output go. A service has none."""
    try:
        return os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None


def _look(
    loop: asyncio.AbstractEventLoop, terminal: int, watch: select.poll, hang_up: Callable[[], None], in_front: bool
) -> None:
    """Check periodically whether the terminal has been closed.

    The system notifies only the first process of a terminal. A shell passes it on. make does not, if a window or an ssh
    runs nothing else, and waits for the server. A server in the background of its terminal goes on.
    """
    if watch.poll(0):
        if in_front:
            hang_up()
        return
    in_front = os.tcgetpgrp(terminal) == os.getpgrp()
    loop.call_later(_LOOK_SECONDS, _look, loop, terminal, watch, hang_up, in_front)
