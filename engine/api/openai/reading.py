"""Parser of an answer: it splits the text of the model into content, reasoning and tool calls."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...scheduling.request import Token
from .calls import FORCED, INSTEAD, MARKED, CallReader, Closed, Event, Opened, Written

# -- The marks of reasoning and tool calls in a model's text, which mlx-lm's tokenizer wrapper has --------------------

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"  # states of mlx-lm; other states are headers, without content
# Further states: calls by a grammar, a beginning of these or of JSON, and JSON.
WRITTEN, UNDECIDED, ANSWER = "written", "undecided", "answer"


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks that end a state of the parser, each with the next state."""

    following: dict[str, str]  # each mark's next state
    pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        longest_first = sorted(self.following, key=len, reverse=True)
        never = "(?!)"
        object.__setattr__(self, "pattern", re.compile("|".join(map(re.escape, longest_first)) or never))

    def partial_length(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a proper prefix of a mark; 0 if there is none."""
        longest = max(map(len, self.following), default=0)
        lengths = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in self.following)), 0)


class Markup:
    """A tokenizer's marks of reasoning and tool calls, by state, and its parser of tool calls."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._with_calls = {state: Marks(following) for state, following in _transitions(tokenizer).items()}
        self._without_calls = {
            state: Marks({mark: next_ for mark, next_ in marks.following.items() if next_ != TOOL})
            for state, marks in self._with_calls.items()
        }
        self.endless = not tokenizer.tool_call_end  # whether calls have no end mark
        marks = f"{tokenizer.think_start}{tokenizer.think_end}"
        added = tokenizer.added_tokens_decoder.items()
        # Tokens that end a message or begin an answer. A mark of reasoning before one of them is a part of a message.
        self._turns = {id_ for id_, token in added if token.content.strip() and token.content not in marks}

    def marks(self, state: str, *, calls: bool) -> Marks:
        """Return the marks that end `state`. Without `calls`, marks of tool calls are plain text."""
        return (self._with_calls if calls else self._without_calls).get(state) or Marks({})

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the tool calls in a text between the marks of a call. `tools` are the request's tools.

        Raises the exceptions of mlx-lm's parsers, of any class.
        """
        parser: Callable[[str, Any], Any] = self._tokenizer.tool_parser
        check = _CHECKS.get(getattr(parser, "__module__", "").rpartition(".")[2])
        if check:
            check(text)
        parsed = parser(text, list(tools))
        return parsed if isinstance(parsed, list) else [parsed]

    def start(self, prompt: Sequence[int], continued: str | None = None) -> str:
        """Return the state in which the answer to `prompt` (token ids) begins: REASONING if the prompt ends within
        reasoning that its last turn opens, usually NORMAL.

        `continued` is the beginning of the answer in a conversation; None for a text. In a conversation only white
        space or a part of that beginning follows the mark. Other text between them, such as ``ASSISTANT:``, ends the
        message that has the mark.
        """
        if initial := self._tokenizer.response_initial_state:
            return str(initial)
        if not self._tokenizer.has_thinking:
            return NORMAL
        opened, closed = self._tokenizer.rfind_think_start(prompt), self._tokenizer.rfind_think_end(prompt)
        if opened <= closed or not self._turns.isdisjoint(prompt[opened:]):
            return NORMAL
        following = prompt[opened + len(self._tokenizer.think_start_tokens) :]
        text = self._tokenizer.decode(list(following), clean_up_tokenization_spaces=False)
        return REASONING if continued is None or continued.strip().endswith(text.strip()) else NORMAL


def _transitions(tokenizer: TokenizerWrapper) -> dict[str, dict[str, str]]:
    """Return the marks of mlx-lm's make_text_state_machine, by state, each with its next state."""
    following: dict[str, dict[str, str]] = {NORMAL: {}}
    if tokenizer.has_thinking:
        following[NORMAL][tokenizer.think_start] = REASONING
        following[REASONING] = {tokenizer.think_end: NORMAL}
    if tokenizer.has_tool_calling:
        formats = tokenizer.response_transitions.values()
        if not any(next_ == TOOL for edges in formats for _, next_ in edges):
            following[NORMAL][tokenizer.tool_call_start] = TOOL
        if tokenizer.has_thinking:
            following[REASONING][tokenizer.tool_call_start] = TOOL
        # Calls without an end mark are ended by the next one.
        end = tokenizer.tool_call_end
        following[TOOL] = {end: NORMAL} if end else {tokenizer.tool_call_start: TOOL}
    for mark in tokenizer.structural_markers:
        following[NORMAL][mark] = NORMAL
    for state, edges in tokenizer.response_transitions.items():
        following.setdefault(state, {}).update(edges)
    return following


SHORT_CALL = 1000  # characters of a call that is parsed in some milliseconds; a parser's time may be quadratic


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer, as a chunk of a stream shows it. Fields without content are empty."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # OpenAI's tool_calls of a chunk
    tokens: list[Token] = field(default_factory=list)  # the tokens of this part

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def __iadd__(self, more: AnswerPart) -> AnswerPart:
        self.text += more.text
        self.reasoning += more.reasoning
        for call in more.calls:
            if call["index"] == len(self.calls):
                self.calls.append({**call, "function": {**call["function"]}})
            else:
                self.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        self.tokens += more.tokens
        return self


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How a reader returns the calls of an answer."""

    several: bool = True  # False: the answer ends after its first call
    streams: bool = True  # False: calls by a grammar are returned when complete, because a stop string may cut them
    separator: str = ""  # white space that the chat template writes between a text and a call after it
    continued: str | None = None  # the beginning of the answer in the prompt; None if that is a text
    ids: Collection[str] = ()  # of earlier calls in the conversation


class Reader:
    """Parser of one answer, token by token.

    Calls are parsed if the request offers tools. A call has to name one of them, to have an object as arguments, and to
    be complete: the model wrote its end mark, or ended the answer with the last character of the call's JSON. All other
    text between the marks of a call is plain text, and so are the marks. Text next to a call is lost if mlx-lm's parser
    skips it. White space alone next to a call is no text, and neither is the separator before the first call.

    The arguments of a call that a grammar writes are returned as they arrive.
    """

    def __init__(
        self,
        markup: Markup,
        prompt: Sequence[int],
        tools: Sequence[dict[str, Any]],
        *,
        written: Written | None = None,
        options: CallOptions = CallOptions(),
    ) -> None:
        """Start to parse the answer to `prompt`, token ids. `tools` are offered, in OpenAI's format. `written` are
        calls that are written by a grammar.
        """
        self.parsed = AnswerPart()  # the whole answer so far
        self.cut = False  # True after the first call without `several`: the rest of the answer is omitted
        self._markup = markup
        self._tools = [_with_parameters(tool) for tool in tools]
        self._names = {tool["function"]["name"] for tool in tools}
        longest_first = sorted(filter(_ODD.search, self._names), key=len, reverse=True)
        self._odd_names = re.compile("|".join(map(_whole, longest_first)) or "(?!)")
        self._several = options.several
        self._written = written
        self._streams = options.streams
        self._separator = options.separator
        self._space: list[str] = []  # white space at the end of the text, which is no text if a call follows it
        self._spoke = False  # whether there is a text since the beginning of the answer, or since the last call
        self._normal = {FORCED: WRITTEN, INSTEAD: UNDECIDED}.get(written.when, NORMAL) if written else NORMAL
        self._state = markup.start(prompt, options.continued)
        if self._state != REASONING and self._normal != NORMAL:
            self._state = self._normal
        self._marked = 0  # tokens that begin calls by a grammar, whose text has not been read
        self._calls_begun = 0
        self._ids = {*options.ids}  # of calls: a model may write one again
        self._calls_by_grammar = CallReader(written.calls) if written else None
        self._incomplete: list[Event] = []  # of the current call by a grammar, without `streams`
        self._incomplete_text = ""
        self._held = ""  # the end of the text that may be the beginning of a mark
        self._header = ""
        self._before = NORMAL  # the state before the current call
        self._opened = ""  # the call's first mark
        self._call: list[str] = []  # pieces of the text after it
        self._call_length = 0

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._state == REASONING

    @property
    def may_take_long(self) -> bool:
        """Whether the next call of `read` or `finish` may parse a call of more than SHORT_CALL characters."""
        return self._state == TOOL and self._call_length > SHORT_CALL

    def read(self, token: Token) -> AnswerPart:
        """Parse the next token, and return the part of the answer that it completes. The part is empty within a call,
        and within a text that may become a mark.
        """
        part = AnswerPart(tokens=[] if token.ends_text else [token])
        self._marked += self._written is not None and token.token == self._written.mark
        self._split(token.text, part, calls=bool(self._names) and self._normal == NORMAL)
        self.parsed += part
        return part

    def finish(self, reason: str) -> AnswerPart:
        """End the answer, and return the part that was held back.

        `reason` is the answer's finish_reason. A call without an end mark is a call if it is "stop", otherwise plain
        text.
        """
        part = AnswerPart()
        self._add_held(part)
        if self._state == TOOL:
            self._close("", part, whole=reason == "stop", ended=False)
        if not self.cut:
            self._add_text(self._header, part)
            if not self._streams and (self._incomplete or not self._calls_begun):
                self._add_text(self._incomplete_text, part)
            if self._spoke or not self._calls_begun:
                part.text += "".join(self._space)
        self.parsed += part
        return part

    def _split(self, text: str, part: AnswerPart, *, calls: bool) -> None:
        """Split a text at its marks, and add it to `part`. Hold back the end if it may be the beginning of a mark."""
        text, self._held = self._held + text, ""
        if self._state == UNDECIDED:
            text = text.lstrip()  # line ends after a thought
            self._decide(text)
        if self._state == UNDECIDED:
            self._held = text
            return
        if self._state == WRITTEN:
            text = self._read_written(text, part)
        at = 0
        marks = self._markup.marks(self._state, calls=calls)
        while found := marks.pattern.search(text, at):
            self._add(text[at : found.start()], part)
            at = found.end()
            self._change_state(found[0], marks.following[found[0]], part)
            if self._state in (UNDECIDED, WRITTEN):
                mark = found[0] if calls else ""  # the reader of calls reads their mark
                self._split(mark + text[at:], part, calls=calls)
                return
            marks = self._markup.marks(self._state, calls=calls)
        partial_length = marks.partial_length(text[at:])
        self._add(text[at : len(text) - partial_length], part)
        self._held = text[len(text) - partial_length :]

    def _decide(self, text: str) -> None:
        """Set the state of an answer of calls or JSON by its beginning, unless that is too short."""
        assert self._written
        start = self._written.calls.start
        if text.startswith(start):
            self._state = WRITTEN
        elif not start.startswith(text):
            self._state = ANSWER

    def _read_written(self, text: str, part: AnswerPart) -> str:
        """Add the text of calls by a grammar to `part`. Return the text after the calls."""
        assert self._written
        while True:
            reader = self._calls_by_grammar
            assert reader
            self._incomplete_text += text
            for event in reader.read(text):
                self._add_event(event, part)
            if reader.rest is None:
                return ""
            self._calls_by_grammar = CallReader(self._written.calls)
            if self._written.when == MARKED:
                self._state = NORMAL
                return reader.rest
            text = reader.rest  # it may be the beginning of the next call

    def _add_event(self, event: Event, part: AnswerPart) -> None:
        """Add an event of a call by a grammar to `part`. Without `streams`, hold it back until the call is complete."""
        self._incomplete.append(event)
        if self._streams or isinstance(event, Closed):
            if not self.cut:
                part.calls += [self._delta(one, part) for one in self._incomplete if not isinstance(one, Closed)]
            self._incomplete = []
        if isinstance(event, Closed):
            self._incomplete_text = ""
            self.cut = self.cut or not self._several

    def _delta(self, event: Opened | str, part: AnswerPart) -> dict[str, Any]:
        """Return OpenAI's chunk of a call. At its beginning, add the white space before it to `part`, if it belongs to
        a text.
        """
        if isinstance(event, str):
            return {"index": self._calls_begun - 1, "function": {"arguments": event}}
        if self._spoke:
            space = "".join(self._space)
            part.text += space if self._calls_begun else space.removesuffix(self._separator)
        self._space, self._spoke = [], False
        self._calls_begun += 1
        opened = _opened(event.name, None if event.id in self._ids else event.id)
        self._ids.add(opened["id"])
        return {"index": self._calls_begun - 1, **opened}

    def _change_state(self, mark: str, next_state: str, part: AnswerPart) -> None:
        """Change to the state after a mark. If the mark ends a call, add the call to `part`."""
        self._header = ""
        if next_state == NORMAL and self._normal != NORMAL:
            next_state = self._normal
        elif next_state == TOOL and self._marked:
            self._marked -= 1
            next_state = WRITTEN
        if self._state == TOOL:
            self._close("" if next_state == TOOL else mark, part)
            if next_state != TOOL:
                return
        if next_state == TOOL:
            self._before, self._opened = self._state, mark
        self._state = next_state

    def _add_held(self, part: AnswerPart) -> None:
        held, self._held = self._held, ""
        self._add(held, part)

    def _add(self, text: str, part: AnswerPart) -> None:
        """Add a text without marks to the field of `part` for the current state."""
        if self.cut:
            return
        if self._state == TOOL:
            self._call.append(text)
            self._call_length += len(text)
        elif self._state == REASONING:
            part.reasoning += text
        elif self._state in (NORMAL, ANSWER, UNDECIDED):
            self._add_text(text, part)
        elif self._state != WRITTEN:
            self._header += text

    def _add_text(self, text: str, part: AnswerPart) -> None:
        """Add a text to `part`, without the white space at its end if a call may follow."""
        end = len(text.rstrip()) if self._names else len(text)
        if end:
            part.text += "".join(self._space) + text[:end]
            self._space, self._spoke = [], True
        if text[end:]:
            self._space.append(text[end:])

    def _close(self, mark: str, part: AnswerPart, *, whole: bool = True, ended: bool = True) -> None:
        """End a call, or a text between the marks of a call, and add it to `part`.

        `mark` is its end mark; "" without one. `ended` is whether a mark has ended it, and not the end of the answer.
        Without `whole`, it is plain text in any case.
        """
        text, self._call, self._call_length = "".join(self._call), [], 0
        self._state = self._before if self._before == REASONING else NORMAL
        plain, inner, last = text.rpartition(self._opened)
        calls = self._calls(last, ended=ended) if whole else []
        if calls and inner:  # the first mark was plain text
            plain = self._opened + plain
        elif inner and whole:  # the inner mark may be a part of an argument
            calls, plain = self._calls(text, ended=ended), ""
        self._split(plain if calls else self._opened + text + mark, part, calls=False)
        self._add_held(part)
        if not calls or self.cut:
            return
        self._state = NORMAL
        for name, id_, arguments in calls if self._several else calls[:1]:
            part.calls += [self._delta(Opened(name, id_), part), self._delta(arguments, part)]
        self.cut = not self._several

    def _calls(self, text: str, *, ended: bool) -> list[tuple[str, str | None, str]]:
        """Return the calls in a text; [] if it is not a complete call of an offered tool. `ended` is as for
        `_close`.
        """
        if not ended and (self._parse(text.rstrip()[:-1]) or not (self._markup.endless or _is_json(text))):
            return []  # some of mlx-lm's parsers accept incomplete calls
        calls = self._parse(text)
        return calls if all(name in self._names for name, _, _ in calls) else []

    def _parse(self, text: str) -> list[tuple[str, str | None, str]]:
        """Return the calls in a text, also of tools that are not offered; [] if it is no call.

        Some of mlx-lm's parsers know no names with dots or hyphens. Then they get other names, which are not in the
        text.
        """
        calls = self._parse_with(text, self._tools)
        odd = {found[0] for found in self._odd_names.finditer(text)}
        if not odd or (calls and all(name in self._names for name, _, _ in calls)):
            return calls
        prefix = "kvpage_"
        while prefix in text:
            prefix += "_"
        aliases = {name: f"{prefix}{i}_" for i, name in enumerate(odd)}
        tools = [
            {**tool, "function": {**tool["function"], "name": aliases.get(name := tool["function"]["name"], name)}}
            for tool in self._tools
        ]
        found = self._parse_with(self._odd_names.sub(lambda found: aliases[found[0]], text), tools)
        names = {alias: name for name, alias in aliases.items()}

        def named(part: str) -> str:
            return re.sub("|".join(names), lambda found: names[found[0]], part)

        return [(named(name), id_ and named(id_), named(arguments)) for name, id_, arguments in found]

    def _parse_with(self, text: str, tools: Sequence[dict[str, Any]]) -> list[tuple[str, str | None, str]]:
        try:
            return [_call(parsed) for parsed in self._markup.parse(text, tools)]
        except Exception:  # noqa: BLE001 - mlx-lm's parsers raise all kinds of errors
            return []


_ODD = re.compile(r"\W")  # in names of tools


def _whole(name: str) -> str:
    """Return a pattern of a tool's name that is no part of a longer one; Kimi's calls have `functions.` before it."""
    return rf"(?:(?<![\w.-])|(?<=\bfunctions\.)){re.escape(name)}(?![\w.-])"


def _check_python(text: str) -> None:
    """Raise ValueError for calls of which mlx-lm's parser of Python would leave out arguments or parts of them: those
    without names, and the rest of a text that is no list of calls with literals.
    """
    try:
        listed = getattr(ast.parse(text[text.find("[") : text.rfind("]") + 1], mode="eval").body, "elts", [])
    except (SyntaxError, ValueError):
        listed = []
    calls = [one for one in listed if isinstance(one, ast.Call)]
    if any(call.args or any(word.arg is None for word in call.keywords) for call in calls):
        raise ValueError("arguments have names")
    literal = listed == calls and all(_is_literal(word.value) for call in calls for word in call.keywords)
    if not (calls and literal) and (found := _PYTHON_CALL.search(text)) and _PYTHON_ARGUMENT.sub("", found[1]).strip():
        raise ValueError("all of the text is arguments")


def _is_literal(value: ast.expr) -> bool:
    """Return whether an expression of Python is a literal, also with JSON's words."""
    literals = (ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.Set, ast.UnaryOp, ast.unaryop, ast.expr_context)
    nodes = [*ast.walk(value)]
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    return words <= {"true", "false", "null"} and all(isinstance(node, (*literals, ast.Name)) for node in nodes)


# A call, and each of its arguments, as mlx-lm's parser finds them in texts that are no Python.
_PYTHON_CALL = re.compile(r"\[[\w.]+\((.*?)\)\]", re.DOTALL)
_PYTHON_ARGUMENT = re.compile(r"""\w+=(?:"[^"]*"|'[^']*'|[^,]+)(?:,\s*|$)""")


def _check_mistral(text: str) -> None:
    """Raise ValueError for a name of which mlx-lm's parser of Mistral's calls would take the end: one with a dot."""
    if _CUT_NAME.search(text):
        raise ValueError("a name has letters, digits, _ and -")


_CUT_NAME = re.compile(r"[^\s\w}-][\w-]+\s*\[ARGS\]")  # before a name are the beginning, white space or other arguments
_CHECKS: dict[str, Callable[[str], None]] = {"pythonic": _check_python, "mistral": _check_mistral}  # by parser


def _call(parsed: dict[str, Any]) -> tuple[str, str | None, str]:
    """Return name, id and arguments of a call from mlx-lm's parsers. Raises ValueError or another exception if it is
    invalid.
    """
    if "arguments" not in parsed and "parameters" in parsed:
        raise ValueError("a call has arguments, not parameters")
    if not isinstance(parsed["name"], str):
        raise ValueError("the name is a text")
    return parsed["name"], parsed.get("id"), _arguments(parsed.get("arguments"))


def _opened(name: str, given: object) -> dict[str, Any]:
    """Return the beginning of a call in OpenAI's format. `given` is the model's id of the call, if it has one."""
    id_ = given if given and isinstance(given, str) else f"call_{uuid.uuid4().hex[:24]}"
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": ""}}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _arguments(given: Any) -> str:
    """Return the arguments of a call as JSON. `given` is an object, a string with JSON, or None, as the model wrote
    them.

    Raises ValueError for anything else, and for more than 100 levels.
    """
    arguments = json.loads(given) if isinstance(given, str) and given.strip() else given or {}
    if not isinstance(arguments, dict) or levels(arguments) > 100:  # a client sends them back within a body of 200
        raise ValueError("arguments are an object of at most 100 levels")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises ValueError for half of a surrogate pair, which UTF-8 cannot represent
    return text


def levels(value: Any) -> int:
    """Return the number of levels of nested lists and objects in a JSON value."""
    count, inner = 0, [value]
    while inner := [one for one in inner if isinstance(one, dict | list)]:
        count += 1
        inner = [item for one in inner for item in (one.values() if isinstance(one, dict) else one)]
    return count


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool for mlx-lm's parsers, with an object as the schema of each parameter.

    In JSON Schema, `true` is a schema, too, but the parsers need an object.
    """
    function = tool["function"]
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties")
    schemas = properties.items() if isinstance(properties, dict) else ()
    known = {name: schema if isinstance(schema, dict) else {} for name, schema in schemas}
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": known}}}
