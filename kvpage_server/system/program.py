"""How our programs end: one line for a person, an exit code for a script, and never a traceback for what may happen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvpage_server.system.printable import printable
from kvpage_server.system.streams import fit_streams

INTERRUPTED = 130  # 128 + SIGINT, as shells count
PIPE_CLOSED = 141  # 128 + SIGPIPE


@contextmanager
def ends_quietly(program: str) -> Iterator[None]:
    """Wraps a program. Ctrl-C ends it with one line, and a closed pipe on its output with none. Characters that the
    terminal's encoding lacks are replaced."""
    fit_streams()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(say(program, "interrupted", INTERRUPTED))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what the interpreter still flushes
        sys.exit(PIPE_CLOSED)


def say(program: str, message: str, code: int) -> int:
    """Print on stderr, in one line, why a program ends. Returns the exit code."""
    print(f"{program}: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def missing_extra(error: ModuleNotFoundError, extra: str) -> str:
    """The message for a missing package of an extra. Raises the error if the missing module is our own."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "kvpage_server", "engine"):
        raise error
    return f"{package} is not installed: pip install '.[{extra}]' in a checkout of kvpage"
