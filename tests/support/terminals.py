"""Terminals that processes are started at, and that can go."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any


class Terminal:
    """A pseudo-terminal. Its buffer holds some kilobytes, which no process reads."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """A process that belongs to it, in the foreground, and talks to it unless the options say otherwise."""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        belong = partial(fcntl.ioctl, self.slave, termios.TIOCSCTTY, 0)
        return subprocess.Popen(command, **{**streams, **options}, start_new_session=True, preexec_fn=belong)

    def close(self) -> None:
        for end in (self.slave, self._master):
            with suppress(OSError):
                os.close(end)


@contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal that is there until it is closed."""
    opened = Terminal()
    try:
        yield opened
    finally:
        opened.close()
