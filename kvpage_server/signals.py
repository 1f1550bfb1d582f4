"""What signals mean to a server. docs/operations.md has the same as a table.

Whatever ends a process in order is an order to stop: what was acknowledged is written first. SIGHUP says two things. To
who has a terminal it says that the terminal is gone, and is such an order; to a service, which has none, it says that
its log file and certificates are new ones. Where it was ignored when the process began, as under nohup, it stays so.
What means nothing to a server is ignored rather than left to end it. What tells of a crash is left as it is.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial


def _those(*names: str) -> list[int]:
    """The signals of these names that the system has."""
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


STOP = _those("SIGTERM", "SIGINT", "SIGQUIT", "SIGXCPU", "SIGPWR")
IGNORED = _those("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGSTKFLT", "SIGPIPE", "SIGXFSZ")
if hasattr(signal, "SIGRTMIN"):
    IGNORED += range(signal.SIGRTMIN, signal.SIGRTMAX + 1)


def begin() -> None:
    """Let no signal end the process that means nothing to it. Until it attends to them, the others end it at once."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be cleaned up, so no traceback


def attend(loop: asyncio.AbstractEventLoop, stop: Callable[[int], None], renew: Callable[[], None]) -> None:
    """Have a loop call `stop` with the number of a signal that asks for an end, `renew` when a service gets SIGHUP."""
    for number in STOP:
        loop.add_signal_handler(number, stop, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, partial(stop, signal.SIGHUP) if has_terminal() else renew)


def has_terminal() -> bool:
    """Whether the process belongs to a terminal, wherever its input and output go. A service does not."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
