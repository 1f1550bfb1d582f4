"""The process and its system: signals, file descriptors, usable memory, and glibc's malloc."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

log = logging.getLogger("kvpage")

# -- Signals: docs/operations.md has a table of them -------------------------------------------------------------------
#
# A signal in `STOP` stops the server after it has written all acknowledged writes. SIGHUP stops a server with a
# terminal, too, because it means that the terminal was closed. A service has no terminal: SIGHUP makes it open its log
# file again and reload its certificates. SIGHUP stays ignored if it was ignored at the start, as under nohup. Signals
# without a meaning for a server are ignored, because by default they would end it. Signals of a crash keep their
# default action.

_CHECK_SECONDS = 1.0  # seconds between two checks of the terminal
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def _numbers_of(*names: str) -> list[int]:
    """Return the numbers of the signals with these names, without signals that the system lacks."""
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


STOP = _numbers_of("SIGTERM", "SIGINT", "SIGQUIT", "SIGXCPU", "SIGPWR")
IGNORED = _numbers_of(
    "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGSTKFLT", "SIGPIPE", "SIGXFSZ"
)
if hasattr(signal, "SIGRTMIN"):
    IGNORED += range(signal.SIGRTMIN, signal.SIGRTMAX + 1)


def ignore_signals() -> None:
    """Ignore the signals without a meaning for a server. Others end the process until `handle_signals` is called."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to clean up yet, so no traceback


def exit_on_signals() -> None:
    """Log a signal of `STOP` and exit with 0, until `handle_signals` is called. A start has nothing to write. Ignored
    signals stay ignored.
    """

    def stop(number: int, _: object) -> None:
        log.info("%s: stopping before the start is complete", signal.Signals(number).name)
        os._exit(0)

    for number in STOP:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)


def handle_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[int], None], renew: Callable[[], None]) -> None:
    """Make the event loop handle signals.

    `stop(number)` is called for a signal of `STOP`; with a terminal, also for SIGHUP, and when the terminal was closed.
    Without a terminal, `renew()` is called for SIGHUP.
    """
    for number in STOP:
        loop.add_signal_handler(number, stop, number)
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    terminal = None if is_ignored else _terminal()
    hang_up = partial(stop, signal.SIGHUP)
    if not is_ignored:
        loop.add_signal_handler(signal.SIGHUP, renew if terminal is None else hang_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])  # `kvpage_server.__main__` has blocked it
    if terminal is None:
        return
    watch = select.poll()
    watch.register(terminal, 0)  # poll reports a hangup even without events
    _check_terminal(loop, terminal, watch, hang_up, True)


def ignore_all_signals(loop: asyncio.AbstractEventLoop) -> None:
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


def end_with_parent() -> None:
    """Let Linux kill this process, even a stopped one, when its parent has ended. Has no effect on other systems."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# -- File descriptors: their limit, and passing them to another process ------------------------------------------------


def raise_descriptor_limit(connections: int, others: int) -> int:
    """Raise the limit of file descriptors for `connections` and `others`, as far as the system allows.

    Return the number of connections that fit into the limit; below 1 if not even `others` and one do.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + others
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return min(allowed - others, connections)


# -- Passing of sockets, each with a short text, over a channel: a pair of unix sockets --------------------------------

_TEXT_BYTES = 128  # bytes of the text, which is cut or padded with zeros


def send_socket(channel: socket.socket, sock: socket.socket, words: str) -> None:
    """Send a socket and a text to the other process. The caller closes its own descriptor. Raises OSError."""
    message = words.encode("utf-8", "surrogateescape")[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    if socket.send_fds(channel, [message], [sock.fileno()]) < _TEXT_BYTES:
        raise OSError("the channel is full")


def receive_socket(channel: socket.socket) -> tuple[socket.socket, str] | None:
    """Receive the next socket and its text; return None if the other process has ended. Raises OSError."""
    message, descriptors, _, _ = socket.recv_fds(channel, _TEXT_BYTES, 1)
    if not message or not descriptors:
        return None
    return socket.socket(fileno=descriptors[0]), message.rstrip(b"\0").decode("utf-8", "surrogateescape")


# -- The memory that this process may use ------------------------------------------------------------------------------

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_LIMIT_FILES = (
    "memory.max",
    "memory.high",
    "memory.limit_in_bytes",
)  # files of cgroups: two of version 2, one of version 1


def usable_memory(own: Path = _OWN_CGROUPS, groups: Path = _CGROUPS) -> int:
    """Return the bytes of memory that this process may use: the machine's, or a smaller limit of a control group.

    `own` is the file that lists the control groups of the process, `groups` the directory of all control groups.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_group_limits(own, groups)])


def _group_limits(own: Path, groups: Path) -> Iterator[int]:
    """Yield the limits of the process's control groups and of their parents, in bytes."""
    try:
        lines = own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # macOS has no control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        roots = (groups / "memory",) if controllers else (groups, groups / "unified")
        if controllers in ("", "memory"):
            for root in roots:
                inner = root / path.lstrip("/")
                for group in (inner, *inner.parents):
                    if group.is_relative_to(root):
                        yield from _limits_of_group(group)


def _limits_of_group(group: Path) -> Iterator[int]:
    for name in _LIMIT_FILES:
        try:
            content = (group / name).read_text(encoding="utf-8").strip()
        except OSError:  # a file of another version, or a group outside of the container
            continue
        if content.isdecimal():  # "max" means no limit
            yield int(content)


# -- glibc's malloc over freed memory; with another C library, these functions have no effect --------------------------

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)

_libc = ctypes.CDLL(None)
HAS_GLIBC = hasattr(_libc, "gnu_get_libc_version")


def tune_malloc(settings: Mapping[int, int]) -> bool:
    """Set parameters of mallopt(3) for this process, by their numbers. Return whether all were set."""
    return HAS_GLIBC and all(_libc.mallopt(setting, value) for setting, value in settings.items())


def trim_malloc() -> None:
    """Return free memory to the system, including memory in the middle of the heap."""
    if HAS_GLIBC:
        _libc.malloc_trim(0)
