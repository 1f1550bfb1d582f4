"""Tool calls that a grammar writes: the markup of each format, the grammar of the calls, and the reader of their text.

A request that forces a call, or offers a `strict` tool, constrains the text of calls to this grammar. So the text of a
call needs no guesses: its reader returns the name and pieces of the arguments as they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...generation.structure import Constraint, ConstraintError, Constraints, escaped, lark_of_json, of_json, of_lark

# -- Formats -----------------------------------------------------------------------------------------------------------

_LINE = "\0"  # in the texts of a format: a line end that may be absent
_NUMBER = "\1"  # a number, which may be any
_ID = ("\2", "\3")  # around the id of the call


@dataclass(frozen=True, slots=True)
class Format:
    """The text of a call between the marks of calls. Arguments are a JSON object, or items: a text for each key."""

    head: tuple[str, str]  # around the name of the tool
    end: str = ""  # after the arguments
    key: tuple[str, str] | None = None  # around the name of an argument; None: the arguments are a JSON object
    text: tuple[str, str] | None = ("", "")  # around an argument that is a text; None: it is a JSON string
    value_end: str = ""  # after the value of an argument
    between: str = ""  # between two arguments
    section: tuple[str, str] = ("", "")  # around all calls between two marks
    next_call: str | None = None  # between two calls; None: each call has marks of its own
    plain: str = r"(?s:.*)"  # regular expression of an argument that is a text
    nested: bool = True  # whether lists and objects in arguments are JSON


def _xml(tag: str) -> Format:
    return Format(
        (f'<{tag}invoke name="', '">\n'),
        f"</{tag}invoke>\n",
        (f'<{tag}parameter name="', '">'),
        value_end=f"</{tag}parameter>\n",
        section=("\n", ""),
        next_call="",
    )


def _glm(prefix: str) -> Format:
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    return Format(("", _LINE), key=(f"<{key}>", f"</{key}>{_LINE}<{value}>"), value_end=f"</{value}>{_LINE}")


# By the name of mlx-lm's parser.
FORMATS: dict[str, Format] = {
    "json_tools": Format((f'{_LINE}{{"name": "', '", "arguments": '), f"}}{_LINE}"),
    "mistral": Format(("", "[ARGS]")),
    "mistral without [ARGS]": Format(('{"name": "', '", "arguments": '), "}", section=("[", "]"), next_call=", "),
    "kimi_k2": Format(
        (f"<|tool_call_begin|>{_ID[0]}functions.", f":{_NUMBER}{_ID[1]}<|tool_call_argument_begin|>"),
        "<|tool_call_end|>",
        next_call="",
    ),
    "kimi_k3": Format(
        ('<|open|>call tool="', f'" index="{_NUMBER}"<|sep|><|open|>json type="object"<|sep|>'),
        "<|close|>json<|sep|><|close|>call<|sep|>",
        next_call="",
    ),
    "qwen3_coder": Format(
        ("\n<function=", ">\n"), "</function>\n", ("<parameter=", ">\n"), value_end="\n</parameter>\n"
    ),
    "glm47": _glm(""),
    "longcat": _glm("longcat_"),
    "minicpm5": Format(('"', '">'), key=('<param name="', '">'), value_end="</param>", plain=r"[^<&\n]*"),
    "minimax_m2": _xml(""),
    "muse_spark": _xml("atem:"),
    "function_gemma": Format(
        ("call:", "{"), "}", ("", ":"), ("<escape>", "<escape>"), between=",", plain=r"[^}]*", nested=False
    ),
    "gemma4": Format(("call:", "{"), "}", ("", ":"), ('<|"|>', '<|"|>'), between=",", nested=False),
    "pythonic": Format(("", "("), ")", ("", "="), None, between=", ", section=("[", "]"), next_call=", "),
}


# Keywords with which an object may have properties that `properties` does not declare.
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}


class CallError(ValueError):
    """Error: calls of a tool cannot be written in the model's format. `param` is the field of the request."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of the request: its name, the JSON Schema of its arguments, and its index in `tools`."""

    name: str
    schema: Mapping[str, Any]
    index: int
    strict: bool = False

    @property
    def loosened(self) -> OfferedTool:
        """The same tool without constraints of its arguments but their names."""
        named = self.schema.get("properties")
        properties: dict[str, Any] = {name: {} for name in named} if isinstance(named, dict) else {}
        return replace(self, schema={"type": "object", "properties": properties, "additionalProperties": True})

    @property
    def parameters(self) -> dict[str, Any]:
        """Schema of the object with the arguments. It has only declared properties, unless the schema allows others.

        Raises CallError.
        """
        if self.schema.get("type", "object") != "object":
            raise self.refused("type: arguments are an object")
        closed = {} if self.schema.keys() & _OPEN else {"properties": {}, "additionalProperties": False}
        return {"type": "object", **closed, **self.schema}

    def refused(self, reason: str) -> CallError:
        """Return the error for a schema that cannot be written."""
        return CallError(f"tools[{self.index}].function.parameters", f"of {self.name!r:.100}: {reason}")


# -- Values of arguments -----------------------------------------------------------------------------------------------

TEXT, JSON, EITHER = "text", "json", "either"

_OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength", "pattern"}
_NOTES = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "nullable"}
_NOT_TEXT = {  # JSON values by type, as the beginning of a text: a text with it is not of the type "string"
    "null": r"null",
    "boolean": r"(true|false)",
    "integer": r"-?[0-9](?s:.*)",
    "number": r"-?[0-9](?s:.*)",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}


@dataclass(frozen=True, slots=True)
class Value:
    """How the value of an argument is written."""

    kind: str  # TEXT, JSON or EITHER
    text: dict[str, Any] = field(default_factory=dict)  # schema of the texts
    json: Any = None  # schema of the JSON values
    others: tuple[str, ...] = ()  # for EITHER, the types of the JSON values

    @property
    def fixed(self) -> Sequence[str]:
        """The only texts; empty if all are allowed that match the schema."""
        fixed: Sequence[str] = [self.text["const"]] if "const" in self.text else self.text.get("enum", ())
        return fixed

    def is_json(self, written: str) -> bool:
        """Return whether a written value is JSON, and not a text."""
        return self.kind == JSON or any(re.fullmatch(_NOT_TEXT[other], written) for other in self.others)


def value_of(schema: Any, definitions: Mapping[str, Any]) -> Value:
    """Return how values of a schema are written in a format whose texts are not JSON. Raises ConstraintError."""
    plain = _resolved(schema, definitions)
    kinds = _types(plain)
    if "string" not in kinds:
        return Value(JSON, json=schema)
    alternatives = plain.get("anyOf") or plain.get("oneOf")
    if kinds == {"string"} and not alternatives:
        return Value(TEXT, plain)
    members = alternatives or [{**plain, "type": kind} for kind in sorted(kinds)]
    members = [_resolved(member, definitions) for member in members]
    texts = [member for member in members if "string" in _types(member)]
    others = [member for member in members if "string" not in _types(member)]
    if len(texts) != 1 or _types(texts[0]) != {"string"} or "enum" in plain or "const" in plain:
        raise ConstraintError("a text or another value is written by one `anyOf`, with one text in it")
    if not others:
        return Value(TEXT, texts[0])
    kinds = set().union(*map(_types, others))
    return Value(EITHER, texts[0], {"anyOf": others}, tuple(sorted(kinds)))


def _resolved(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without references at its top. Raises ConstraintError."""
    seen = 0
    while isinstance(schema, dict) and "$ref" in schema:
        kind, _, name = str(schema["$ref"]).rpartition("/")
        if kind not in ("#/$defs", "#/definitions") or name not in definitions or seen > len(definitions):
            raise ConstraintError(f"$ref: {schema['$ref']!r:.100} is no definition of the schema")
        schema, seen = definitions[name], seen + 1
    return schema if isinstance(schema, dict) else {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of a schema's values. A schema without a type has that of its values, or all types."""
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if isinstance(values, list):
        return {_type(value) for value in values}
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return set(kinds)
    members = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if isinstance(members, list):
        return set().union(*(_types(member) if isinstance(member, dict) else set(_NOT_TEXT) for member in members))
    return {"string", *_NOT_TEXT} - {"number"}


def _type(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


# -- Grammar -----------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "strict"}
_DEFINITIONS = ("$defs", "definitions")
_OPENED, _MORE = "opened", "more"  # names of rules: items after none, and after others


class Calls:
    """The calls that an answer may contain, in the format of a model: their grammar, and how to read them."""

    def __init__(self, tokenizer: TokenizerWrapper, tools: Sequence[OfferedTool]) -> None:
        """Describe the calls of some tools. Raises CallError if the model's format cannot write them by a grammar."""
        self.start, self.end = tokenizer.tool_call_start, tokenizer.tool_call_end or ""
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        name = tokenizer.tool_parser.__module__.rpartition(".")[2]
        if name == "mistral" and "[ARGS]" not in added:
            name = "mistral without [ARGS]"
        if name not in FORMATS:
            known = f"this model's is {name!r:.50}; those with a grammar are {', '.join(FORMATS)}"
            raise CallError("tool_choice", f"its format of calls has no grammar: {known}. auto and none work")
        self.name, self.format, self._tools = name, FORMATS[name], tools
        for tool in tools:
            if not _NAME.fullmatch(tool.name):
                raise CallError(f"tools[{tool.index}].function.name", "a name consists of A-Z a-z 0-9 _ . -")
        self.values = {} if self.format.key is None else {tool.name: self._values(tool) for tool in tools}

    def grammar(
        self, constraints: Constraints, *, several: bool, answer: Mapping[str, Any] | None = None, thought: bool = False
    ) -> str:
        """Return the grammar of one call; with `several`, of one or more. With `answer`, JSON texts that match this
        schema are alternatives to calls. After a `thought` there may be line ends, as the model's template writes them.
        """
        start = "start: BLANK? text\nBLANK: /\\n{1,4}/\ntext: " if thought else "start: "
        lark = self._lark(constraints, self._tools, several=several)
        if answer is not None:
            start, lark = f"{start}answer | ", f"{lark}answer: {lark_of_json(answer)}\n"
        return of_lark(f"{start}calls\n{lark}")

    def _lark(self, constraints: Constraints, tools: Sequence[OfferedTool], *, several: bool) -> str:
        of, rules = self.format, {"calls": "section"}
        call = f"({' | '.join(f'call_{tool.index}' for tool in tools)})"
        if several and of.next_call is None:
            rules["calls"] = r'section ("\n"? section)*' if self.end else "section+"
        elif several and of.next_call is not None:
            call += f" ({_literal(constraints, of.next_call)} {call})*"
        opening, closing = self.start + of.section[0], of.section[1] + self.end
        rules["section"] = f"{_literal(constraints, opening)} {call} {_literal(constraints, closing)}"
        items: dict[str, str] = {}  # rules of the values of arguments, by their schemas: many tools share them
        for tool in tools:
            before, after, end = (_literal(constraints, text) for text in (*of.head, of.end))
            rules[f"call_{tool.index}"] = f'{before} "{tool.name}" {after} arguments_{tool.index} {end}'
            rules |= self._arguments(constraints, tool, items)
        return "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _arguments(self, constraints: Constraints, tool: OfferedTool, items: dict[str, str]) -> dict[str, str]:
        """Return the rules of a tool's arguments, and add those of their values to `items`."""
        top, of, key = f"arguments_{tool.index}", self.format, self.format.key
        if key is None:
            return {top: lark_of_json(tool.parameters)}
        required, values = tool.parameters.get("required", ()), self.values[tool.name]
        rules = {top: f"{_OPENED}_{tool.index}_0"}
        more = _MORE if of.between else _OPENED  # without a text between arguments, one state is enough
        for j, (name, value) in enumerate(values.items()):
            text = {word: part for word, part in value.text.items() if word not in _NOTES}
            definitions = [tool.parameters.get(key) for key in _DEFINITIONS]
            depends = json.dumps([value.kind, text, value.json, value.others, definitions])
            if depends not in items:
                items[depends] = f"item_{tool.index}_{j}"
                rules |= self._item(constraints, tool, items[depends], value)
            item = items[depends]
            for state, between in {_OPENED: "", more: of.between}.items():
                before, after = (_literal(constraints, text) for text in (between + key[0], key[1]))
                written = f'{before} "{name}" {after} {item} {more}_{tool.index}_{j + 1}'
                skipped = "" if name in required else f" | {state}_{tool.index}_{j + 1}"
                rules[f"{state}_{tool.index}_{j}"] = written + skipped
        for state in {_OPENED, more}:
            rules[f"{state}_{tool.index}_{len(values)}"] = '""'
        return rules

    def _values(self, tool: OfferedTool) -> dict[str, Value]:
        """Return how a tool's arguments are written, for a format of items. Raises CallError."""
        schema = tool.parameters
        if unknown := sorted(schema.keys() - _OBJECT - _NOTES):
            raise tool.refused(f"{unknown[0]}: the format {self.name!r} writes arguments one by one, by `properties`")
        properties = dict(schema["properties"]) if isinstance(schema.get("properties"), dict) else {}
        properties |= {name: {} for name in schema.get("required", ()) if name not in properties}
        definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}
        values = {}
        for name, property_ in properties.items():
            try:
                if not _NAME.fullmatch(name):
                    raise ConstraintError("a name of an argument consists of A-Z a-z 0-9 _ . -")
                value = value_of(property_, definitions) if self.format.text else Value(JSON, json=property_)
                self._check(value, definitions)
            except ConstraintError as error:
                raise tool.refused(f"{name!r:.100}: {error}") from error
            values[name] = value
        return values

    def _check(self, value: Value, definitions: Mapping[str, Any]) -> None:
        """Raise ConstraintError for a value that the format cannot write."""
        if unknown := sorted(value.text.keys() - _OF_TEXTS - _NOTES):
            raise ConstraintError(f"{unknown[0]}: the format {self.name!r} has no constraint of texts by it")
        tail = ((self.format.text or ("",))[-1] + self.format.value_end).rstrip(_LINE)
        for text in value.fixed:
            if (text + tail).find(tail) < len(text):
                ends = f"{text!r:.100} contains {tail!r}, which ends a text in the format {self.name!r}"
                raise ConstraintError(f"{'const' if 'const' in value.text else 'enum'}: {ends}")
        others = set() if value.kind == TEXT else _types(_resolved(value.json, definitions))
        if not self.format.nested and others & {"array", "object"}:
            raise ConstraintError(f"the format {self.name!r} has no grammar for lists and objects in arguments")

    def _item(self, constraints: Constraints, tool: OfferedTool, rule: str, value: Value) -> dict[str, str]:
        """Return the rules of the value of an argument, and of the text after it."""
        of, written, rules = self.format, [], {}
        if value.kind != JSON:
            assert of.text is not None
            tail = of.text[1] + of.value_end
            if value.fixed:
                # The spelling of a token, such as that which ends an answer, is plain text here.
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value.fixed)
                text = f"({texts}) {_literal(constraints, tail)}"
            else:
                rules[rule.upper()], text = self._free_text(constraints, value, tail, rule.upper())
            written.append(f"{_literal(constraints, of.text[0])} {text}")
        if value.kind != TEXT:
            schema = value.json if isinstance(value.json, dict) else {}
            named: dict[str, Any] = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
            rules[f"{rule}_json"] = lark_of_json({**named, **schema})
            written.append(f"{rule}_json {_literal(constraints, of.value_end)}")
        return rules | {rule: " | ".join(written)}

    def _free_text(self, constraints: Constraints, value: Value, tail: str, name: str) -> tuple[str, str]:
        """Return a terminal `name` of the texts of an argument, and a rule with it and the `tail` after a text.

        The tail ends the text where it is first written. A part of it before its first special token is in the
        terminal, because a terminal takes as many characters as it can.
        """
        written = tail.rstrip(_LINE)
        first, *tokens = constraints.pieces(written) or [""]
        if isinstance(first, int):
            first, tokens = "", [first, *tokens]
        ended = f"(?s:.*){escaped(written)}(?s:{'.*' if tokens else '.+'})"
        least, most, pattern = (value.text.get(word) for word in ("minLength", "maxLength", "pattern"))
        matching = [self.format.plain, f"(?s:.{{{least or 0},{'' if most is None else most}}})"]
        if pattern is not None:
            matching.append(_searched(pattern))
        if self.format.text == ("", ""):
            ended = "|".join([ended, *(f"({_NOT_TEXT[other]}){escaped(first)}" for other in value.others)])
        after = "".join(f" {constraints.of_piece(piece)}" for piece in tokens) + (r' "\n"?' if tail != written else "")
        both = " & ".join(_regex(f"({regex}){escaped(first)}") for regex in matching)
        if first:
            return f"{both} & ~{_regex(ended)}", name + after
        return f"{both} & ~{_regex(ended)} & {_regex('(?s:.+)')}", f"{name}?{after}" if _allows_empty(
            value
        ) else name + after


def _literal(constraints: Constraints, text: str) -> str:
    """Return Lark for a text of a format."""
    made = {_LINE: r'"\n"?', _NUMBER: "/[0-9]{1,3}/"}
    parts = re.split(f"([{_LINE}{_NUMBER}])", text.replace(_ID[0], "").replace(_ID[1], ""))
    return " ".join(made.get(part) or constraints.literal(part) for part in parts if part) or '""'


def _regex(regex: str) -> str:
    """Return Lark for a regular expression, in which a slash or the end of a line may stand as they are."""
    made = {"/": r"\/", "\n": r"\n"}
    return "/" + re.sub(r"(?s:\\.)|/|\n", lambda found: made.get(found[0], found[0]), regex) + "/"


def _searched(pattern: Any) -> str:
    """Return the regular expression of texts in which a JSON Schema's `pattern` is found."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern[1 if begins else 0 : -1 if ends else None]
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _allows_empty(value: Value) -> bool:
    try:
        return not value.text.get("minLength") and bool(re.search(value.text.get("pattern", ""), ""))
    except re.error:
        return False


FORCED, INSTEAD, MARKED = "forced", "instead", "marked"


@dataclass(frozen=True, slots=True)
class Written:
    """Calls that an answer writes by a grammar: FORCED, the answer has nothing else; INSTEAD, it has calls or JSON;
    MARKED, each call that begins with the token `mark`.
    """

    calls: Calls
    when: str
    mark: int | None = None


def compile_calls(
    tokenizer: TokenizerWrapper,
    constraints: Constraints,
    tools: Sequence[OfferedTool],
    when: str,
    *,
    several: bool,
    answer: Mapping[str, Any] | None = None,
    thought: bool = False,
) -> tuple[Constraint, Written] | None:
    """Return the constraint of an answer with calls of some tools; None for MARKED calls in a format without a mark of
    one token. `answer` is the schema of JSON INSTEAD of calls. `thought` is whether the answer begins with one.

    If the schema of a tool cannot be constrained, raise CallError for a `strict` tool and for FORCED calls, otherwise
    constrain only the names of its arguments.
    """
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    mark = added.get(tokenizer.tool_call_start) if when == MARKED else None
    if when == MARKED and mark is None:
        return None

    def made(tools: Sequence[OfferedTool], answer: Mapping[str, Any] | None = None) -> tuple[Constraint, Written]:
        calls = Calls(tokenizer, tools)
        several_calls, after_thought = several and when != MARKED, thought and when != MARKED
        grammar = calls.grammar(constraints, several=several_calls, answer=answer, thought=after_thought)
        return constraints.compile(grammar, mark), Written(calls, when, mark)

    try:
        return made(tools, answer)
    except (CallError, ConstraintError):
        usable = []
    for tool in tools:
        try:
            made([tool])
        except (CallError, ConstraintError) as error:
            if tool.strict or when == FORCED or (isinstance(error, CallError) and error.param == "tool_choice"):
                raise (
                    error if isinstance(error, CallError) else tool.refused(_reason(constraints, tool, error))
                ) from error
            tool = tool.loosened
        usable.append(tool)
    return made(usable, answer)


def _reason(constraints: Constraints, tool: OfferedTool, error: ConstraintError) -> str:
    """Return the reason for an error in the grammar of a tool.

    The tool's parameters are compiled alone, because their error does not quote other parts of the grammar. If they
    compile, the reason is that of `error`.
    """
    try:
        constraints.compile(of_json(tool.parameters))
    except ConstraintError as alone:
        error = alone
    return str(error)


# -- Reader ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """Event: the beginning of a call. `id` is None if the format has none."""

    name: str
    id: str | None


@dataclass(frozen=True, slots=True)
class Closed:
    """Event: the end of a call, whose arguments are complete."""


Event = Opened | str | Closed  # a string is a piece of the arguments, which are JSON


class CallReader:
    """Reader of the text of calls that was written by their grammar, from the first mark on."""

    def __init__(self, calls: Calls) -> None:
        self.rest: str | None = None  # the text after the calls; None before their end
        of, name = calls.format, r"(?P<name>[A-Za-z0-9_.-]+)(?=[^A-Za-z0-9_.-])"
        head = _pattern(of.head[0]) + name + _pattern(of.head[1])
        closing, end = _pattern(of.section[1] + calls.end), _pattern(of.end)
        following = closing if of.next_call is None else f"(?:{_pattern(of.next_call)}{head}|{closing})"
        self._first = re.compile(_pattern(calls.start + of.section[0]) + head)
        self._following = re.compile(end + following)
        if of.key:
            key = rf"(?:{_pattern(of.between)})?{_pattern(of.key[0])}(?P<key>[A-Za-z0-9_.-]+){_pattern(of.key[1])}"
            self._item = re.compile(rf"\s*(?:{key}|(?={end or closing}))")
        self._calls = calls
        self._buffer = ""
        self._events: list[Event] = []
        self._run = self._read()

    def read(self, text: str) -> list[Event]:
        """Read the next text of the answer, and return its events."""
        self._buffer += text
        self._events = []
        if next(self._run, True):
            self.rest, self._buffer = self._buffer, ""
        return self._events

    # The generators below parse the buffer. They yield where they need more text.

    def _read(self) -> Iterator[None]:
        found = yield from self._find(self._first)
        while found.groupdict().get("name"):
            self._events.append(Opened(found["name"], found.groupdict().get("id")))
            if self._calls.format.key is None:
                yield from self._json()
            else:
                yield from self._items(self._calls.values[found["name"]])
            self._events.append(Closed())
            found = yield from self._find(self._following)

    def _find(self, pattern: re.Pattern[str]) -> Generator[None, None, re.Match[str]]:
        """Drop the text up to the end of a pattern."""
        while not (found := pattern.search(self._buffer)):
            yield
        self._buffer = self._buffer[found.end() :]
        return found

    def _items(self, values: Mapping[str, Value]) -> Iterator[None]:
        """Read arguments that are written one by one, and return them as an object."""
        before = "{"
        while key := (yield from self._find(self._item))["key"]:
            self._events.append(f"{before}{json.dumps(key)}: ")
            before = ", "
            yield from self._value(values[key])
        self._events.append("{}" if before == "{" else "}")

    def _value(self, value: Value) -> Iterator[None]:
        of = self._calls.format
        quote, kind = (of.text or ("",))[0], value.kind
        yield from self._hold(len(quote) or 1)
        if kind == EITHER and quote:
            kind = TEXT if self._buffer.startswith(quote) else JSON
        elif kind == EITHER and self._buffer[0] not in "tfn" and value.is_json(self._buffer):
            kind = JSON  # a number, a list or an object: their first character is enough
        if kind == JSON:
            yield from self._json()
        elif kind == TEXT:
            assert of.text
            self._buffer = self._buffer[len(quote) :]
            yield from self._text((of.text[1] + of.value_end).rstrip(_LINE))
        else:  # a text, true, false or null
            end = of.value_end.rstrip(_LINE)
            while end not in self._buffer:
                yield
            written, _, self._buffer = self._buffer.partition(end)
            self._events.append(written if value.is_json(written) else _quoted(written))

    def _hold(self, length: int) -> Iterator[None]:
        """Wait for some characters."""
        while len(self._buffer) < length:
            yield

    def _json(self) -> Iterator[None]:
        """Return JSON as it is written, up to its end."""
        depth, quoted, escape, some = 0, False, False, False
        while True:
            self._buffer = self._buffer if some else self._buffer.lstrip()
            end = None
            for i, letter in enumerate(self._buffer):
                if quoted:
                    quoted = escape or letter != '"'
                    escape = letter == "\\" and not escape
                elif letter == '"':
                    quoted = True
                elif letter in "[{":
                    depth += 1
                elif letter in "]}" and depth:
                    depth -= 1
                elif not depth and not (letter.isalnum() or letter in "+-."):
                    end = i  # of a number, true, false or null
                    break
                else:
                    continue
                if not depth and not quoted:
                    end = i + 1
                    break
            piece, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
            some = some or bool(piece)
            if piece:
                self._events.append(piece)
            if end is not None:
                return
            yield

    def _text(self, end: str) -> Iterator[None]:
        """Return a text up to `end` as a JSON string."""
        self._events.append('"')
        while end not in self._buffer:
            lengths = range(min(len(end) - 1, len(self._buffer)), 0, -1)
            held = next((n for n in lengths if end.startswith(self._buffer[-n:])), 0)
            sure, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
            if sure:
                self._events.append(_quoted(sure)[1:-1])
            yield
        last, _, self._buffer = self._buffer.partition(end)
        self._events.append(_quoted(last)[1:])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """Return the regular expression of a text of a format."""
    made = {_LINE: r"\n?", _NUMBER: "[0-9]{1,3}", _ID[0]: "(?P<id>", _ID[1]: ")"}
    return "".join(made.get(letter) or re.escape(letter) for letter in text)
