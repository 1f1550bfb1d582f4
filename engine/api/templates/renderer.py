"""Renders chat templates in another process, see `process`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from engine.api.templates import process

COMMAND = [sys.executable, "-P", process.__file__]
SETTINGS = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TRANSFORMERS_VERBOSITY": "error", "OPENBLAS_NUM_THREADS": "1"}


class TemplateFailedError(ValueError):
    """A chat template refused its messages, or failed; the message says why."""


class Renderer:
    """Renders one template after the other. Its methods wait, so one thread other than the event loop's calls them."""

    def __init__(self) -> None:
        """Starts the process, which takes a second to be ready."""
        self._process = _begin()
        self._ready = False

    def render(self, messages: list[dict[str, Any]], template: str, arguments: Mapping[str, Any]) -> str:
        """The text of a conversation. `arguments` are those of transformers' `render_jinja_template`.

        Raises TemplateFailedError.
        """
        request = {"messages": messages, "chat_template": template, **arguments}
        if not self._ready:
            self._ask(b"")
            self._ready = True
        reply = self._ask(json.dumps(request).encode() + b"\n")
        if "text" not in reply:
            raise TemplateFailedError(reply["error"])
        return reply["text"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: bytes) -> dict[str, str]:
        """Send a line, and return the next reply."""
        to, back = self._process.stdin, self._process.stdout
        assert to
        assert back
        try:
            to.write(line)
            to.flush()
            if reply := back.readline():
                found: dict[str, str] = json.loads(reply)
                return found
        except BrokenPipeError:
            pass  # it ended before it read all of the line
        code = self._process.wait()
        self.close()
        self._process, self._ready = _begin(), False
        if code == -signal.SIGPROF:
            raise TemplateFailedError(f"it takes more than {process.CPU_SECONDS:g} second")
        raise RuntimeError(f"the process that renders chat templates ended with {code}")


def _begin() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **SETTINGS}, bufsize=-1
    )
