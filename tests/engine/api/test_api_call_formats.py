"""Grammars of calls in every format of mlx-lm: their texts are valid calls, read as they arrive, and by mlx-lm, too."""

from __future__ import annotations

import json
import pkgutil
import random
from dataclasses import replace
from importlib import import_module
from typing import Any

import mlx_lm.tool_parsers
import numpy as np
import pytest
from engine_models import letter_tokenizer

# isort: split
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken

from engine.agent_engine import Answer, Reuse
from engine.api.anthropic.shapes import MessageEnvelope, MessageShape
from engine.api.openai.calls import FORCED, INSTEAD, MARKED, CallError, Calls, OfferedTool, Written, compile_calls
from engine.api.openai.reading import AnswerPart, Markup, Reader
from engine.generation.structure import Constraints
from engine.scheduling.request import Token

KINDS = [module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)]
TOKENS = {  # marks that the models of a format have as tokens
    "function_gemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "glm47": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "json_tools": ["<tool_call>", "</tool_call>"],
    "kimi_k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>"],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "pythonic": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
}
END = 96  # the id of the letter tokenizer's end of a text
TEXT = {"type": "string", "maxLength": 4}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": TEXT,
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "near": {"anyOf": [TEXT, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]$"},
        "open": {"type": "boolean"},
        "level": {"$ref": "#/$defs/Level"},
    },
    "required": ["city", "unit"],
    "$defs": {"Level": {"enum": [1, 2.5]}},
}
TOOLS = [OfferedTool("weather", PARAMETERS, 0), OfferedTool("ping", {}, 1)]
formats = pytest.mark.parametrize(("kind", "marks"), [(kind, marks) for kind in KINDS for marks in (True, False)])


def tokenizer_of(kind: str, *, marks: bool = True, thinks: bool = False) -> TokenizerWrapper:
    """A tokenizer of letters and, with `marks`, of the marks in TOKENS."""
    parser, letters = import_module(f"mlx_lm.tool_parsers.{kind}"), letter_tokenizer()
    letters.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>") if thinks])
    letters.add_tokens([AddedToken(mark, normalized=False) for mark in TOKENS.get(kind, []) if marks])
    around = {"tool_call_start": parser.tool_call_start, "tool_call_end": parser.tool_call_end}
    return TokenizerWrapper(letters._tokenizer, BPEStreamingDetokenizer, **around, tool_parser=parser.parse_tool_call)


def written(tokenizer: TokenizerWrapper, matcher: Any, seed: int, most: int = 600) -> tuple[str, bool]:
    """A text of random tokens that a grammar permits, and whether it ended by itself."""
    draw, tokens = random.Random(seed), []
    matcher = matcher.deep_copy()
    while not matcher.is_stopped() and len(tokens) < most:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token = int(draw.choice(np.flatnonzero(bits[: len(tokenizer)])))
        if token == END:
            return tokenizer.decode(tokens), True
        assert matcher.consume_token(token)
        tokens.append(token)
    return tokenizer.decode(tokens), matcher.is_stopped()


def read(tokenizer: TokenizerWrapper, calls: Written, pieces: list[str] | str) -> list[tuple[str, str]]:
    """The names and the arguments of calls, without the rest of an answer that was cut."""
    reader = Reader(Markup(tokenizer), [1, 2], [], written=calls)
    streamed = AnswerPart()
    for piece in pieces:
        streamed += reader.read(Token(0, 5, piece, False))
    streamed += reader.finish("length")
    assert streamed.calls == reader.parsed.calls
    assert not reader.parsed.text
    return [(call["function"]["name"], call["function"]["arguments"]) for call in streamed.calls]


def is_valid(name: str, arguments: dict[str, Any]) -> bool:
    if name == "ping":
        return arguments == {}
    return (
        {"city", "unit"} <= arguments.keys() <= PARAMETERS["properties"].keys()
        and len(arguments["city"]) <= 4
        and arguments["unit"] in ("c", "f")
        and arguments.get("days", 0) in range(100)
        and (arguments.get("near") is None or len(arguments["near"]) <= 4)
        and len(arguments.get("code", "xx-1")) == 4
        and arguments.get("open", True) in (True, False)
        and arguments.get("level", 1) in (1, 2.5)
    )


@formats
def test_texts_of_a_grammar_are_valid_calls(kind: str, marks: bool) -> None:
    tokenizer = tokenizer_of(kind, marks=marks)
    constraints = Constraints(tokenizer, len(tokenizer), [END])
    made = compile_calls(tokenizer, constraints, TOOLS, FORCED, several=True)
    assert made
    constraint, calls = made
    names, most = set(), 0
    for seed in range(16):
        text, ended = written(tokenizer, constraint._matcher, seed)
        found = read(tokenizer, calls, text)
        assert found == read(tokenizer, calls, [text])
        for name, arguments in found if ended else found[:-1]:
            assert is_valid(name, json.loads(arguments)), text
            names.add(name)
        for cut in range(0, len(text), 9):  # a cut text is the beginning of the whole one
            for (name, arguments), whole in zip(read(tokenizer, calls, [text[:cut]]), found, strict=False):
                assert name == whole[0]
                assert whole[1].startswith(arguments)
        most = max(most, len(found))
    assert names == {"weather", "ping"}
    assert most > 1


@formats
def test_mlx_lm_reads_the_same_calls(kind: str, marks: bool) -> None:
    tame = {"city": {"type": "string", "pattern": "^[B-Z]{3}$"}, "n": {"type": "integer", "minimum": 2, "maximum": 9}}
    schema = {"type": "object", "properties": tame, "required": ["city"]}
    tokenizer = tokenizer_of(kind, marks=marks)
    constraints = Constraints(tokenizer, len(tokenizer), [END])
    made = compile_calls(tokenizer, constraints, [OfferedTool("weather", schema, 0)], FORCED, several=True)
    assert made
    offered = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    for seed in range(6):
        text, ended = written(tokenizer, made[0]._matcher, seed)
        reader = Reader(Markup(tokenizer), [1, 2], offered)
        reader.read(Token(0, 5, text, False))
        reader.finish("stop" if ended else "length")
        theirs = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in reader.parsed.calls]
        if ended:
            ours = [(name, json.loads(arguments)) for name, arguments in read(tokenizer, made[1], text)]
            assert theirs == ours


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_texts_with_marks_are_written_or_refused(kind: str) -> None:
    """Marks of the format, and the token that ends an answer, which are plain text here."""
    tokenizer = tokenizer_of(kind)
    constraints = Constraints(tokenizer, len(tokenizer), [END])
    form = Calls(tokenizer, []).format
    tail = "" if not form.key or form.text is None else form.text[1] + form.value_end
    for text in (*TOKENS.get(kind, []), f"x{tokenizer.decode([END])}y", 'q"\\', "", *filter(None, [tail.strip("\0")])):
        schema = {"type": "object", "properties": {"a": {"enum": [text]}}, "required": ["a"]}
        offered = [OfferedTool("f", schema, 0)]
        if tail and tail.strip("\0") in text:
            with pytest.raises(CallError, match=r"enum: .* ends a text"):
                compile_calls(tokenizer, constraints, offered, FORCED, several=False)
            continue
        made = compile_calls(tokenizer, constraints, offered, FORCED, several=False)
        assert made
        call, ended = written(tokenizer, made[0]._matcher, 1)
        assert ended
        ((_, arguments),) = read(tokenizer, made[1], call)
        assert json.loads(arguments) == {"a": text}


@pytest.mark.parametrize("kind", KINDS)
def test_a_marked_call_is_one_call(kind: str) -> None:
    """Formats whose first mark is one token constrain calls from this mark on."""
    tokenizer = tokenizer_of(kind)
    constraints = Constraints(tokenizer, len(tokenizer), [END])
    made = compile_calls(tokenizer, constraints, TOOLS, MARKED, several=True)
    start = import_module(f"mlx_lm.tool_parsers.{kind}").tool_call_start
    assert bool(made) == (start in TOKENS.get(kind, []))
    for seed in range(4 if made else 0):
        assert made
        text, _ = written(tokenizer, made[0]._matcher, seed)
        assert text.startswith(start)
        assert len(read(tokenizer, replace(made[1], when=FORCED), text)) == 1


@pytest.mark.parametrize("value", ["[" * 300, "[" * 300 + "]" * 300, "1" * 5000])
def test_a_call_that_cannot_be_parsed_has_empty_input(value: str) -> None:
    """In a message, whose input is an object: its grammar allows the text, and the message says that it was cut."""
    tokenizer = tokenizer_of("json_tools")
    constraints = Constraints(tokenizer, len(tokenizer), [END])
    tools = [OfferedTool("ping", {"properties": {"a": {}}}, 0)]
    made = compile_calls(tokenizer, constraints, tools, FORCED, several=False)
    assert made
    text = f'<tool_call>\n{{"name": "ping", "arguments": {{"a": {value}'
    matcher = made[0]._matcher.deep_copy()
    assert all(map(matcher.consume_token, tokenizer.encode(text, add_special_tokens=False)))
    envelope = MessageEnvelope("msg_1", "tiny", None, 1, (), lambda answer: None)
    shape = MessageShape(envelope, Reader(Markup(tokenizer), [1, 2], [], written=made[1]), silent=False)
    shape.add(Token(0, 5, text, False))
    message = shape.choice(Answer(0, "a", text, (5,), "stop", None, 1, Reuse()))
    assert (message["content"][-1]["input"], message["stop_reason"]) == ({}, "max_tokens")
    assert envelope.encoded([message])


def test_calls_or_json() -> None:
    tokenizer = tokenizer_of("json_tools")
    constraints = Constraints(tokenizer, len(tokenizer), [END])
    schema = {"type": "boolean"}
    made = compile_calls(tokenizer, constraints, TOOLS, INSTEAD, several=True, answer=schema)
    assert made
    texts = {written(tokenizer, made[0]._matcher, seed)[0] for seed in range(30)}
    assert {text for text in texts if not text.startswith("<tool_call>")} == {"true", "false"}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_after_a_thought_may_follow_line_ends(kind: str) -> None:
    """Chat templates write them, so the next prompt begins with the answer."""
    tokenizer = tokenizer_of(kind, thinks=True)
    prompt = tokenizer.encode("a<think>", add_special_tokens=False)
    constraints = Constraints(tokenizer, len(tokenizer), [END])
    start = import_module(f"mlx_lm.tool_parsers.{kind}").tool_call_start
    more: Any
    for when, more in ((FORCED, {}), (INSTEAD, {"answer": {"type": "boolean"}})):
        made = compile_calls(tokenizer, constraints, TOOLS[1:], when, several=False, thought=True, **more)
        assert made
        spaces = set()
        for seed in range(40):
            text, ended = written(tokenizer, made[0]._matcher, seed)
            assert ended
            spaces.add(text[: len(text) - len(text.lstrip("\n"))])
            reader = Reader(Markup(tokenizer), prompt, [], written=made[1])
            for piece in ("hm", "</think>", *text):
                reader.read(Token(0, 5, piece, False))
            reader.finish("stop")
            called = text.lstrip("\n").startswith(start)
            assert reader.parsed.reasoning == "hm"
            assert [call["function"]["name"] for call in reader.parsed.calls] == ["ping"] * called
            assert reader.parsed.text in (("",) if called else ("true", "false"))
        assert {"", "\n", "\n\n", "\n\n\n"} <= spaces <= {"\n" * count for count in range(5)}


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "format": "date"}}}, "'a': format: .*'qwen3_coder'"),
        ("qwen3_coder", {"anyOf": [{"properties": {}}]}, "anyOf: .*'qwen3_coder'"),
        ("minimax_m2", {"properties": {"a": {"$ref": "#/nowhere"}}}, r"\$ref"),
        ("gemma4", {"properties": {"a": {"type": "array"}}}, "'a': .*'gemma4'"),
        ("glm47", {"properties": {"a": {"anyOf": [TEXT, {"enum": ["b"]}]}}}, "anyOf"),
        ("json_tools", {"properties": {"a": {"uniqueItems": True}}}, "uniqueItems"),
    ],
)
def test_a_schema_without_a_grammar_is_refused(kind: str, parameters: dict[str, Any], message: str) -> None:
    tokenizer = tokenizer_of(kind)
    constraints = Constraints(tokenizer, len(tokenizer), [END])
    tools = [*TOOLS, OfferedTool("odd", parameters, 2)]
    with pytest.raises(CallError, match=message) as caught:
        compile_calls(tokenizer, constraints, tools, FORCED, several=True)
    assert caught.value.param == "tools[2].function.parameters"
    if kind != "gemma4":
        assert compile_calls(tokenizer, constraints, tools, MARKED, several=True)


def test_a_format_without_a_grammar_is_named() -> None:
    around = {"tool_call_start": "<call>", "tool_call_end": "</call>"}
    tokenizer = TokenizerWrapper(
        letter_tokenizer()._tokenizer, BPEStreamingDetokenizer, **around, tool_parser=json.loads
    )
    with pytest.raises(CallError, match="no grammar: this model's is 'json'") as caught:
        Calls(tokenizer, TOOLS)
    assert caught.value.param == "tool_choice"
