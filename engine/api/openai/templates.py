"""Chat templates: rendered in a process of their own, which bounds their time and memory.

Contains: the input of a template, its process, and the tokens of its text. Excludes: requests, replies, and the engine.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

# -- control tokens ----------------------------------------------------------------------------------------------------
#
# Control tokens in the text of a user or of a tool, such as ``<|im_end|>``.
#
# A tokenizer makes the token of such a text, wherever it comes from. So a user can end a turn and begin the system's.
# A mark after the first character of the text keeps it apart from the template's own: the rendered conversation is
# encoded in pieces, cut at the marks, and no piece has a whole control token of a user's.

MARK = "\ufdd1"  # Unicode's for use within a program: no text has it
ROLES = ("user", "tool")
_BEFORE = "\n"  # SentencePiece adds a space before the first word of a text, and so not before a piece


class ControlTokens:
    """Keeps control tokens out of contents."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        """Control tokens are all special tokens, and other added tokens that the template, a thought or a tool call
        has. Without a template that can be read, they are all added tokens."""
        marks = (tokenizer.think_start, tokenizer.think_end, tokenizer.tool_call_start, tokenizer.tool_call_end)
        written = "\0".join(mark for mark in (template, *marks) if mark)
        added: Iterable[Any] = tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special or not template or token.content in written}
        longest_first = sorted((text for text in texts if len(text) > 1 and text.strip()), key=len, reverse=True)
        # A lookahead finds a token that begins within another one, too.
        self._found = re.compile(f"(?=({'|'.join(map(re.escape, longest_first)) or '(?!)'}))")
        self._tokenizer = tokenizer

    def marked(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message whose content has marks, if its role is one of ROLES."""
        if message["role"] not in ROLES:
            return message
        content = message["content"].replace(MARK, "\ufffd")
        cuts = [0, *(found.start() + 1 for found in self._found.finditer(content)), len(content)]
        return {**message, "content": MARK.join(content[a:b] for a, b in pairwise(cuts))}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered conversation, without its marks."""
        first, *rest = text.split(MARK)
        tokens = self._encode(first)
        if rest:
            before = self._encode(_BEFORE)
            for piece in rest:
                made = self._encode(_BEFORE + piece)
                tokens += made[len(before) :] if made[: len(before)] == before else self._encode(piece)
        return tokens

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


# -- tool arguments ----------------------------------------------------------------------------------------------------
#
# The arguments of tool calls, as a template takes them.
#
# OpenAI's API has them as a text, which is JSON. Most templates take an object, and write it as JSON or item by item.
# Others, such as DeepSeek's, join the text to other texts. A short conversation with a call shows which kind one is.

_OBJECT = {"kvpage": "probe"}
_NAME = "probe"
_ID = "probe0000"  # Mistral's have nine characters


def takes_text(render: Callable[[list[dict[str, Any]]], str], refusals: type[Exception]) -> bool:
    """Return whether a template takes the arguments of calls as a text. `render` renders messages with it, and raises
    `refusals` if that fails.
    """
    try:
        return repr(_OBJECT) in render(_conversation(_OBJECT))  # it would write Python, not JSON
    except refusals:
        pass
    try:
        render(_conversation(json.dumps(_OBJECT)))
    except refusals:
        return False
    return True


def _conversation(arguments: object) -> list[dict[str, Any]]:
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": _NAME, "tool_call_id": _ID, "content": "b"},
    ]


# -- process -----------------------------------------------------------------------------------------------------------
#
# The process that renders chat templates. It runs as a script, and imports nothing of this package.
#
# A template comes with a model, and is a program: it can loop for hours, or make a string of any length. A thread
# cannot be ended, but the system ends a process: at CPU_SECONDS of a rendering with SIGPROF, whatever it does; and
# memory beyond MEMORY bytes is refused (on Linux). It has no access to files or modules, since jinja2's sandbox gives
# it none.
#
# Each line of standard input is a request in JSON, the arguments of transformers' `render_jinja_template`. Each line
# of standard output is its reply, an object with the field `text` or `error`. The first line, `{}`, says that it is
# ready.

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


# -- Renders chat templates in another process, see `process` ----------------------------------------------------------

COMMAND = [sys.executable, "-P", __file__]
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
        """Return the text of a conversation. `arguments` are those of transformers' `render_jinja_template`.

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
            raise TemplateFailedError(f"it takes more than {CPU_SECONDS:g} second")
        raise RuntimeError(f"the process that renders chat templates ended with {code}")


def _begin() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **SETTINGS}, bufsize=-1
    )


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)  # the engine has ended; an ordinary exit would try to write again
