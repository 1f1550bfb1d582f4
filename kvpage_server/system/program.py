"""Exit of our programs: one line for a person, an exit code for a script, and no traceback for expected errors."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from kvpage_server.system.text import printable

# -- Standard streams of a terminal whose encoding is not UTF-8, such as ASCII or Latin-1 ------------------------------

_ERRORS = "kvpage-terminal"
_SIMILAR = {**dict(zip("▁▂▃▄▅▆▇█", ".:-=+*%#", strict=True)), "…": "~"}  # as wide, so that columns stay in line


def fit_streams() -> None:
    """Make every character printable, and let ASCII input be UTF-8, which contains it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    if isinstance(sys.stdin, TextIOWrapper) and _codec(sys.stdin) == "ascii":
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def prints_every_character() -> bool:
    """Whether standard output encodes in one of the UTFs."""
    return not isinstance(sys.stdout, TextIOWrapper) or _codec(sys.stdout).startswith("utf")


def _codec(stream: TextIOWrapper) -> str:
    return codecs.lookup(stream.encoding).name


def _similar(error: UnicodeError) -> tuple[str, int]:
    """ASCII for characters that the encoding lacks: a similar one for a decoration, and JSON's escape for others."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_SIMILAR.get(letter) or json.dumps(letter)[1:-1] for letter in lacking), error.end


codecs.register_error(_ERRORS, _similar)


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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest that the interpreter flushes
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
