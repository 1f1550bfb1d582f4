"""The exit of programs: a line on stderr, an exit code, and no traceback for expected errors."""

from __future__ import annotations

import argparse
import codecs
import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING

from kvpage_server.system.text import printable

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

    from _typeshed import SupportsWrite

# -- Standard streams in an encoding other than UTF-8, such as ASCII or Latin-1 ----------------------------------------

_ERRORS = "kvpage-terminal"
_SIMILAR = {**dict(zip("▁▂▃▄▅▆▇█", ".:-=+*%#", strict=True)), "…": "~"}  # as wide, so that columns stay aligned


def fit_streams() -> None:
    """Open standard streams that the parent process has closed on the null device, so that the program runs as usual,
    and no file of the store gets their descriptors, to which a library may print. Make output streams replace
    characters that their encoding lacks, and read ASCII input as UTF-8.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one, which is that of the closed stream
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    if isinstance(sys.stdin, TextIOWrapper) and _codec(sys.stdin) == "ascii":
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def prints_every_character() -> bool:
    """Return whether standard output can encode every character, because it uses a UTF."""
    return not isinstance(sys.stdout, TextIOWrapper) or _codec(sys.stdout).startswith("utf")


def as_printed(text: str) -> str:
    """Return a text as standard output prints it: with JSON's escapes for characters that its encoding lacks."""
    if prints_every_character():
        return text
    return text.encode(sys.stdout.encoding, _ERRORS).decode(sys.stdout.encoding)


def _codec(stream: TextIOWrapper) -> str:
    return codecs.lookup(stream.encoding).name


def _similar(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII text for characters that an encoding lacks: a similar character, or else JSON's escape.

    This is a codec error handler, which `fit_streams` installs.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_SIMILAR.get(letter) or json.dumps(letter)[1:-1] for letter in lacking), error.end


codecs.register_error(_ERRORS, _similar)


INTERRUPTED = 130  # 128 + SIGINT, as in shells
PIPE_CLOSED = 141  # 128 + SIGPIPE


@contextmanager
def ends_quietly(program: str) -> Iterator[None]:
    """Run the caller's ``with`` block without tracebacks for Ctrl-C and errors of standard output.

    On Ctrl-C, exit with a line on stderr and INTERRUPTED; on a closed pipe of standard output, with PIPE_CLOSED; on
    another OSError, with a line on stderr and 1. Characters that the encoding of the output lacks are replaced.
    """
    fit_streams()
    sys.unraisablehook = _repeat_lost_interrupt
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # `kvpage_server.__main__` has set it for its own imports
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the exit
        sys.exit(say(program, "interrupted", INTERRUPTED))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        sys.exit(PIPE_CLOSED)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(say(program, reason_of(error), 1))


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Run the caller's ``with`` block, which imports modules, to its end. Raise KeyboardInterrupt then if Ctrl-C was
    pressed meanwhile.

    An extension module whose import is interrupted may raise another error, ignore the interrupt, or crash.
    """
    before, pressed = signal.getsignal(signal.SIGINT), list[int]()
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _repeat_lost_interrupt(dropped: UnraisableHookArgs) -> None:
    """Interrupt the main thread again if Ctrl-C interrupted a finalizer, because Python drops exceptions of finalizers:
    otherwise `kvpage top` would go on. Report other exceptions as usual.
    """
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    main = threading.get_ident()  # only the main thread raises KeyboardInterrupt
    again = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))  # after the end of this function
    again.daemon = True
    again.start()


class ProgramParser(argparse.ArgumentParser):
    """A parser of a command line that does not ignore errors of standard output when it prints its help or version."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if message and file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)


def not_empty(word: str) -> str:
    """Return an argument that must not be empty, as that of a shell's variable without a value is. Raises
    ArgumentTypeError.
    """
    if not word:
        raise argparse.ArgumentTypeError("must not be empty: give a value, or leave the option out")
    return word


def say(program: str, message: str, code: int) -> int:
    """Print a message on stderr, in one line after the name of the program. Return `code`, for the exit."""
    if not report_line(f"{program}: {printable(' '.join(message.split()))}"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # for the interpreter's last flush
    return code


def report_line(line: str) -> bool:
    """Print a line on stderr. Return False if that fails, for example because the disk is full or the pipe is closed:
    this is no reason to end a program.
    """
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        return False
    return True


def reason_of(error: OSError) -> str:
    """Return the text of an error, with its file if it has one: "trace.jsonl: No such file or directory"."""
    if error.filename is None or error.strerror is None:
        return error.strerror or str(error)
    return f"{os.fsdecode(error.filename)}: {error.strerror}"


def cannot_listen(where: str, error: Exception) -> str:
    """Return the message for an address or a port on which a program cannot listen."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:  # asyncio adds the address to the error's text
        why = f"{os.strerror(error.errno)}: stop the program that has it (`ss -ltnp` lists all), or set another port"
    else:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"cannot listen on {where}: {why}"


def missing_extra(error: ModuleNotFoundError, extra: str) -> str:
    """Return the message for a missing package that pip's extra `extra` installs.

    Raise `error` again if the missing module belongs to this project.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "kvpage", "kvpage_server", "engine"):
        raise error
    return f"{package} is not installed: pip install '.[{extra}]' in a checkout of kvpage"
