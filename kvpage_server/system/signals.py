"""Signals of a server. docs/operations.md has a table of them.

A signal in `STOP` stops the server after it has written all acknowledged writes. SIGHUP stops a server with a terminal,
too, because it means that the terminal was closed. A service has no terminal: SIGHUP makes it open its log file again
and reload its certificates. SIGHUP stays ignored if it was ignored at the start, as under nohup. Signals without a
meaning for a server are ignored, because by default they would end it. Signals of a crash keep their default action.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable
from functools import partial

_CHECK_SECONDS = 1.0  # seconds between two checks of the terminal


def _numbers_of(*names: str) -> list[int]:
    """Return the numbers of the signals with these names, without signals that the system lacks."""
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


STOP = _numbers_of("SIGTERM", "SIGINT", "SIGQUIT", "SIGXCPU", "SIGPWR")
IGNORED = _numbers_of(
    "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGSTKFLT", "SIGPIPE", "SIGXFSZ"
)
if hasattr(signal, "SIGRTMIN"):
    IGNORED += range(signal.SIGRTMIN, signal.SIGRTMAX + 1)


def begin() -> None:
    """Ignore the signals that have no meaning for a server. The others end the process until `attend` is called."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to clean up yet, so no traceback


def attend(loop: asyncio.AbstractEventLoop, stop: Callable[[int], None], renew: Callable[[], None]) -> None:
    """Make the event loop handle signals.

    `stop(number)` is called for a signal of `STOP`; with a terminal, also for SIGHUP, and when the terminal was closed.
    Without a terminal, `renew()` is called for SIGHUP.
    """
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
    watch.register(terminal, 0)  # poll reports a hangup even without events
    _check_terminal(loop, terminal, watch, hang_up, True)


def finish(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore all signals, so that none changes the exit code of a server that has finished its work.

    Without this, closing the loop would restore the default action of its signals.
    """
    for number in (*STOP, signal.SIGHUP):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _terminal() -> int | None:
    """Return a descriptor of the controlling terminal, even if the streams are redirected; None in a service."""
    try:
        return os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None


def _check_terminal(
    loop: asyncio.AbstractEventLoop, terminal: int, watch: select.poll, hang_up: Callable[[], None], in_front: bool
) -> None:
    """Check every second whether the terminal was closed. Then call `hang_up` if the server was in the foreground.

    This is necessary because the system sends SIGHUP only to the session leader. A shell forwards it. If make is the
    session leader, as in a window or an ssh session that runs only make, it forwards nothing, and waits for the server.
    A server in the background continues to run. `in_front` is whether the server was in the foreground at the last
    check.
    """
    if watch.poll(0):
        if in_front:
            hang_up()
        return
    in_front = os.tcgetpgrp(terminal) == os.getpgrp()
    loop.call_later(_CHECK_SECONDS, _check_terminal, loop, terminal, watch, hang_up, in_front)
