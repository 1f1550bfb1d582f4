"""The process that renders chat templates. It runs as a script, and imports nothing of this package.

A template comes with a model, and is a program: it can loop for hours, or make a string of any length. A thread cannot
be ended, but the system ends a process: at CPU_SECONDS of a rendering with SIGPROF, whatever it does; and memory beyond
MEMORY bytes is refused (on Linux). It has no access to files or modules, since jinja2's sandbox gives it none.

Each line of standard input is a request in JSON, the arguments of transformers' `render_jinja_template`. Each line of
standard output is its reply, an object with the field `text` or `error`. The first line, `{}`, says that it is ready.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

CPU_SECONDS = 1.0  # of a rendering; a conversation of a megabyte takes a tenth of it
MEMORY = 512 << 20  # bytes, for all that templates need
MOST_TEXT = 16 << 20  # characters of a conversation
SHOWN = 500  # characters of an error


def _bound_memory() -> None:
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _reply(request: dict[str, Any], render: Any) -> dict[str, str]:
    try:
        (text,), _ = render(conversations=[request.pop("messages")], **request)
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MB of memory"}
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        shown = str(error)[:SHOWN]
        plain = type(error).__name__ == "TemplateError"  # the template's own words
        return {"error": shown if plain and shown else f"{type(error).__name__}: {shown}"}
    return {"text": text} if len(text) <= MOST_TEXT else {"error": f"it makes more than {MOST_TEXT:,} characters"}


def main() -> None:
    """Serve until the end of standard input. Signals for the engine, from a terminal or a service manager, are
    ignored: the engine answers running requests after them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the engine's thread blocks signals
    from transformers.utils.chat_template_utils import render_jinja_template

    _bound_memory()
    _send({})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = _reply(request, render_jinja_template)
        _send(reply)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _send(reply: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)  # the engine has ended; an ordinary exit would try to write again
