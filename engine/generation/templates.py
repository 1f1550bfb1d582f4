"""Rendering of chat templates in a separate process, with limits of time and memory.

Three parts: control tokens in the text of a conversation, the format of tool arguments, and the process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

# -- control tokens ----------------------------------------------------------------------------------------------------
#
# The text of a user or a tool may contain the text of a control token, such as ``<|im_end|>``. A tokenizer encodes it
# as the control token, so a user could end the turn and begin a turn of the system. To prevent that, a mark is inserted
# after the first character of such a text before the conversation is rendered. The rendered conversation is split at
# the marks, and each piece is encoded separately, so that no piece has a complete control token of a user.
#
# Some tokenizers search for control tokens in normalized text, such as lower case or NFKC. Then other texts become
# control tokens, too. Only the tokenizer knows these texts, so it encodes each piece, until it finds no such token.
#
# A template may change a text, or write two next to each other, so that a control token appears only then. So the
# conversation is rendered a second time, with a mark after each character with which a control token can begin. If
# fewer control tokens have no mark then, the second rendering is used, without the marks outside of control tokens.

MARK = "\ufdd1"  # a noncharacter, which Unicode reserves for use within a program
ROLES = ("user", "tool")
_Object = dict[str, Any]  # a message, or the variables of a template


class ControlTokens:
    """Encoder of conversations that encodes control tokens in the content of users and tools as text."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        """Find the control tokens of a tokenizer: all special tokens, and added tokens that are in the template or are
        marks of reasoning and tool calls. If `template` is None, all added tokens are control tokens.
        """
        marks = (tokenizer.think_start, tokenizer.think_end, tokenizer.tool_call_start, tokenizer.tool_call_end)
        written = "\0".join(mark for mark in (template, *marks) if mark)
        added: Iterable[Any] = tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special or not template or token.content in written}
        longest_first = sorted((text for text in texts if len(text) > 1 and text.strip()), key=len, reverse=True)
        self._fast: Any = getattr(
            tokenizer, "backend_tokenizer", None
        )  # None in a tokenizer that is not of `tokenizers`
        searched = set(longest_first)
        controls = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content in searched}
        self._ids = controls.keys()
        self._normalizes = bool(self._fast and self._fast.normalizer and any(it.normalized for it in controls.values()))
        # A lookahead also finds a token that begins within another one.
        self._found = re.compile(f"(?=({'|'.join(map(re.escape, longest_first)) or '(?!)'}))")
        first = {form for text in longest_first for form in (text[0], *text[0].lower(), *text[0].upper())}
        self._begun = re.compile(f"({'|'.join(map(re.escape, sorted(first))) or '(?!)'})(?!{MARK})")
        self._tokenizer = tokenizer

    def rendered(
        self, render: Callable[[list[_Object], _Object], str], messages: list[_Object], variables: _Object
    ) -> str:
        """Return a conversation with MARK after the first character of each control token in the content of messages
        with a role in ROLES, and in variables of the template.

        `render` renders messages and variables.
        """
        marked = self._each(self._marked, messages, variables)
        text = render(*marked)
        begun = self._each(lambda text: self._begun.sub(rf"\1{MARK}", text), *marked)
        if begun == marked:
            return text
        other = render(*begun)
        if self._without_mark(text) == self._without_mark(other):
            return text
        if self._normalizes:  # other marks are within forms of control tokens that only the tokenizer knows
            return other
        whole, marks = _joined(other)
        within = {
            at
            for start, end in self._spans(whole)
            for at in marks[bisect_right(marks, start) : bisect_left(marks, end)]
        }
        return MARK.join(whole[a:b] for a, b in pairwise([0, *sorted(within), len(whole)]))

    def _each(
        self, mark: Callable[[str], str], messages: list[_Object], variables: _Object
    ) -> tuple[list[_Object], _Object]:
        """Return messages and variables with the texts of users and tools as `mark` returns them. Lists and objects in
        variables are returned as marked JSON.
        """

        def marked_value(value: Any) -> Any:
            if isinstance(value, list | dict):
                value = json.dumps(value)
            return mark(value) if isinstance(value, str) else value

        contents = [
            {**message, "content": mark(message["content"])} if message["role"] in ROLES else message
            for message in messages
        ]
        return contents, {name: marked_value(value) for name, value in variables.items()}

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return the positions of all control tokens in a text without marks."""
        return [found.span(1) for found in self._found.finditer(text)]

    def _without_mark(self, text: str) -> list[str]:
        """Return the control tokens in a rendered conversation that have no MARK within."""
        whole, marks = _joined(text)
        return [
            whole[start:end]
            for start, end in self._spans(whole)
            if bisect_right(marks, start) == bisect_left(marks, end)
        ]

    def _marked(self, text: str) -> str:
        text = text.replace(MARK, "\ufffd")
        cuts = [0, *(found.start() + 1 for found in self._found.finditer(text)), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        return MARK.join([part for piece in pieces for part in self._split(piece)] if self._normalizes else pieces)

    def _split(self, piece: str) -> list[str]:
        """Return the parts of a piece, in each of which the tokenizer finds no control token. A character that is a
        control token by itself, once normalized, is replaced.
        """
        parts: list[str] = []
        left = [piece]
        while left:
            letters = list(left.pop())
            encoded = self._fast.encode("".join(letters), add_special_tokens=False)
            cuts, replaced = [0], False
            for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
                while start < end and letters[start].isspace():  # which a token with `lstrip` contains
                    start += 1
                if token in self._ids and start < end:
                    if end - start > 1:
                        cuts.append(start + 1)
                    else:
                        letters[start], replaced = "\ufffd", True
            text = "".join(letters)
            if len(cuts) > 1 or replaced:
                left += reversed([text[a:b] for a, b in pairwise([*cuts, len(text)])])
            else:
                parts.append(text)
        return parts

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered conversation: split it at the marks, remove them, and encode each
        piece.
        """
        from .tokens import encode_after, encode_part  # the process below imports nothing of this package

        first, *rest = text.split(MARK)
        tokens = encode_part(self._tokenizer, first)
        for piece in rest:
            tokens += encode_after(self._tokenizer, piece)
        return tokens


def _joined(text: str) -> tuple[str, list[int]]:
    """Return a text without its marks, and their positions in it."""
    pieces = text.split(MARK)
    return "".join(pieces), [*accumulate(map(len, pieces[:-1]))]


# -- tool calls --------------------------------------------------------------------------------------------------------
#
# In OpenAI's API, the arguments of a tool call are a text with JSON. Most templates expect an object, and write it as
# JSON or item by item. Others, such as DeepSeek's, expect the text. Mistral's refuse ids of calls that are not nine
# letters and digits. `call_format` detects that: it renders a short conversation with a call. Many templates write a
# newline between a text and a call. An answer does not show it, so that the next prompt has it once. Some, as MiniMax
# M2's, write the newlines around a thought, too, which an answer shows. They are removed from a message before.

_OBJECT = {"kvpage": "probe"}
_NAME = "probe"
_SHORT_ID = "probe0000"
_TEXT = "probe text"
_THOUGHT = "probe thought"
OF_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning in templates
_PROPERTIES = {"kvpage": {"type": "string", "description": "A word."}}
_TOOL = {  # the same for each request, because the result is kept
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Do nothing.",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["kvpage"]},
    },
}


def short_id(id_: str) -> str:
    """Return the id of a call for a template that takes only short ones: as it is, or nine characters of its hash."""
    if len(id_) == len(_SHORT_ID) and id_.isascii() and id_.isalnum():
        return id_
    return hashlib.sha256(id_.encode(errors="replace")).hexdigest()[: len(_SHORT_ID)]


class CallFormat(NamedTuple):
    """The format of tool calls that a template expects."""

    text: bool = False  # the arguments as a text, and not as an object
    short_ids: bool = False
    separator: str = ""  # white space between a text and the first call after it
    thought: tuple[str, str, str] = ("", "", "")  # white space before and after a thought, and after its end mark


def call_format(
    render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str],
    refusals: type[Exception],
    mark: str,
    thought: tuple[str, str],
) -> CallFormat:
    """Return the format of tool calls that a template expects, and the white space that it writes.

    `render` renders messages and tools with the template. `refusals` is the class of its exceptions. `mark` is the
    first mark of a call. `thought` are the marks around a thought, empty if the model has none.
    """
    for id_ in (f"call_{'0' * 24}", _SHORT_ID):
        for arguments in (_OBJECT, json.dumps(_OBJECT)):
            with suppress(refusals):
                text = render(_conversation(arguments, id_), [_TOOL])
                # With an object, a template that expects text writes Python instead of JSON.
                found = CallFormat(arguments is not _OBJECT or repr(_OBJECT) in text, id_ == _SHORT_ID)
                with suppress(refusals):
                    after = render(_conversation(arguments, id_, _TEXT), [_TOOL]).partition(_TEXT)[2]
                    if mark and after.lstrip().startswith(mark.strip()):
                        found = found._replace(separator=after[: len(after) - len(after.lstrip())])
                if all(thought):
                    thoughts = dict.fromkeys(OF_THOUGHTS, _THOUGHT)
                    with suppress(refusals):
                        text = render(_conversation(arguments, id_, _TEXT, thoughts), [_TOOL])
                        found = found._replace(thought=_around_thought(text, *thought))
                return found
    return CallFormat()


def _around_thought(text: str, opening: str, closing: str) -> tuple[str, str, str]:
    """Return the white space around the thought in a conversation, and after its end mark."""
    before, found, rest = text.partition(_THOUGHT)
    if not (found and before.rstrip().endswith(opening.strip())):
        return "", "", ""
    end, _, after = rest.partition(closing.strip())
    following, found, _ = after.partition(_TEXT)
    start = before[len(before.rstrip()) :]
    return start, "" if end.strip() else end, "" if following.strip() or not found else following


def _conversation(
    arguments: object, id_: str, text: str = "", thoughts: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    call = {"id": id_, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": text, "tool_calls": [call], **thoughts},
        {"role": "tool", "name": _NAME, "tool_call_id": id_, "content": "b"},
    ]


# -- process -----------------------------------------------------------------------------------------------------------
#
# The process that renders chat templates. It runs as a script, and imports nothing of this package.
#
# A template is a program that is part of a model: it can loop for hours, or make a string of any length. A thread
# cannot be ended from outside, but a process can: the system sends it SIGPROF after CPU_SECONDS of a rendering. On
# Linux, the system also refuses memory beyond MEMORY bytes. jinja2's sandbox gives a template no access to files or
# modules.
#
# Each line of standard input is a request: the arguments of transformers' `render_jinja_template` as JSON. Each line of
# standard output is a reply: an object with the field `text` or `error`. The first line is `{}`, when the process is
# ready.

CPU_SECONDS = 1.0  # CPU time of a rendering; a conversation of a megabyte takes a tenth of it
MEMORY = 512 << 20  # bytes of a rendering, in addition to the memory of the process at its start
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
        plain = type(error).__name__ == "TemplateError"  # raised by the template itself, with a message for the user
        return {"error": shown if plain and shown else f"{type(error).__name__}: {shown}"}
    return {"text": text} if len(text) <= MOST_TEXT else {"error": f"it makes more than {MOST_TEXT:,} characters"}


def main() -> None:
    """Run the process: render templates until the end of standard input.

    SIGINT, SIGTERM and SIGHUP are ignored: a service manager sends them to the engine as well, which still answers
    running requests after them.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the engine's thread blocks signals
    render = _render_function()
    _bound_memory()
    _send({})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = _reply(request, render)
        _send(reply)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _render_function() -> Any:
    """Return transformers' `render_jinja_template`.

    Its module is loaded without its package, whose import takes 0.7 s of CPU time. Modules that it imports of the
    package, and numpy, are replaced by a few names: the process renders JSON, which has no objects of theirs. If
    another version of transformers needs more names, the package is imported.
    """
    try:
        path = Path(str(cast(ModuleSpec, find_spec("transformers")).origin)).parent / "utils" / "chat_template_utils.py"
        log = SimpleNamespace(get_logger=logging.getLogger)
        checks = {f"is_{name}_available": lambda found=name == "jinja": found for name in ("jinja", "torch", "vision")}
        numpy = {"generic": type("generic", (), {})}
        names: dict[str, dict[str, Any]] = {
            "templates": {"logging": log},
            "templates.import_utils": checks,
            "numpy": numpy,
        }
        for name, values in names.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(values)
        spec = cast(ModuleSpec, spec_from_file_location("templates.chat_template_utils", path))
        module = module_from_spec(spec)
        cast(Loader, spec.loader).exec_module(module)
        return module.render_jinja_template
    except Exception:  # noqa: BLE001 - any part of the module may differ
        sys.modules.pop("numpy", None)
        from transformers.utils.chat_template_utils import render_jinja_template

        return render_jinja_template


def _send(reply: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


# -- client of the process ---------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-P", __file__]
SETTINGS = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TRANSFORMERS_VERBOSITY": "error", "OPENBLAS_NUM_THREADS": "1"}


class TemplateFailedError(ValueError):
    """Error: a chat template refused its messages, or failed. The message has the reason."""


class Renderer:
    """Client of the process that renders the templates of all models, one at a time. Its methods block, so they must
    be called on a thread other than the event loop's.
    """

    def __init__(self) -> None:
        """Start the process. It is ready after a tenth of a second, for which the first `render` waits."""
        self._process = _begin()
        self._ready = False
        self._turn = threading.Lock()

    def render(self, messages: list[dict[str, Any]], template: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a conversation. `arguments` are further arguments of transformers'
        `render_jinja_template`.

        Raises TemplateFailedError if the template fails or takes too long, RuntimeError if the process has ended.
        """
        request = {"messages": messages, "chat_template": template, **arguments}
        line = json.dumps(request).encode() + b"\n"
        with self._turn:
            if not self._ready:
                self._ask(b"")
                self._ready = True
            reply = self._ask(line)
        if "text" not in reply:
            raise TemplateFailedError(reply["error"])
        return reply["text"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: bytes) -> dict[str, str]:
        """Send a line to the process, and return its reply.

        If the process has ended, start another one, and raise TemplateFailedError if the rendering took too long,
        otherwise RuntimeError.
        """
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
            pass  # the process ended before it had read the whole line
        code = self._process.wait()
        self.close()
        self._process, self._ready = _begin(), False
        if code == -signal.SIGPROF:
            raise TemplateFailedError(f"it takes more than {CPU_SECONDS:g} second")
        raise RuntimeError(f"the process that renders chat templates ended with {code}")


def _begin() -> subprocess.Popen[bytes]:
    """Start a process, in a group of its own: Ctrl-C in a terminal would interrupt it while it starts."""
    environment = {**os.environ, **SETTINGS}
    return subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=-1, process_group=0
    )


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)  # the engine has ended; an ordinary exit would try to write again
