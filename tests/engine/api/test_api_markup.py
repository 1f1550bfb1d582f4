"""Marks of tool calls in answers, in every format that mlx-lm knows: whole, cut anywhere, and in plain text."""

from __future__ import annotations

import json
import pkgutil
import random
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx_lm.tool_parsers
import pytest
from api_engines import CALL, RunningEngine, start_engine, write_caller, write_tiny
from engine_models import letter_tokenizer

# isort: split
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

from engine.api.openai.reading import NORMAL, REASONING, AnswerPart, CallOptions, Markup, Reader
from engine.scheduling.request import Token

CALLS = {  # weather(city="Oslo"), without the marks around it
    "function_gemma": "call:weather{city:<escape>Oslo<escape>}",
    "gemma4": 'call:weather{city:<|"|>Oslo<|"|>}',
    "glm47": "weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>",
    "json_tools": '{"name": "weather", "arguments": {"city": "Oslo"}}',
    "kimi_k2": '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>',
    "kimi_k3": '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Oslo'
    "<|close|>argument<|sep|><|close|>call<|sep|>",
    "laguna": "weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>",
    "longcat": "weather<longcat_arg_key>city</longcat_arg_key><longcat_arg_value>Oslo</longcat_arg_value>",
    "minicpm5": '"weather"><param name="city">Oslo</param>',
    "minimax_m2": '<invoke name="weather"><parameter name="city">Oslo</parameter></invoke>',
    "mistral": 'weather[ARGS]{"city": "Oslo"}',
    "muse_spark": '<atem:invoke name="weather"><atem:parameter name="city">Oslo</atem:parameter></atem:invoke>',
    "pythonic": '[weather(city="Oslo")]',
    "qwen3_coder": "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>",
}
EXPECTED = ("weather", {"city": "Oslo"})
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
BEFORE, AFTER = "Let me <see>. ", "\nDone."


def markup(kind: str, *, thinks: bool = False) -> Markup:
    parser = import_module(f"mlx_lm.tool_parsers.{kind}")
    letters = letter_tokenizer()
    if thinks:
        letters.add_tokens(["<think>", "</think>"])
    marks = {"tool_call_start": parser.tool_call_start, "tool_call_end": parser.tool_call_end}
    wrapper = TokenizerWrapper(letters._tokenizer, BPEStreamingDetokenizer, **marks, tool_parser=parser.parse_tool_call)
    assert wrapper.has_thinking == thinks
    return Markup(wrapper)


def marks(kind: str) -> tuple[str, str]:
    parser = import_module(f"mlx_lm.tool_parsers.{kind}")
    return parser.tool_call_start, parser.tool_call_end


def read_pieces(
    of: Markup, pieces: Sequence[str], reason: str = "stop", *, tools: Any = TOOLS, **options: Any
) -> tuple[AnswerPart, AnswerPart]:
    """Read an answer. Returns the whole, and the sum of the parts for its pieces."""
    reader = Reader(of, [1, 2], tools, options=CallOptions(**options))
    streamed = AnswerPart()
    for piece in pieces:
        streamed += reader.read(Token(0, 5, piece, False))
    streamed += reader.finish(reason)
    return reader.parsed, streamed


def read(of: Markup, text: str, reason: str = "stop", **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, thoughts and calls of an answer: the same whole, in single characters and in pieces of random length."""
    draw = random.Random(text)
    cuts = sorted(draw.choices(range(len(text) + 1), k=5))
    random_pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = []
    for pieces in ([text], list(text), random_pieces):
        for part in read_pieces(of, pieces, reason, **options):
            calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in part.calls]
            assert [call["index"] for call in part.calls] == list(range(len(calls)))
            found.append((part.text, part.reasoning, calls))
    assert all(one == found[0] for one in found)
    return found[0]


kinds = pytest.mark.parametrize("kind", CALLS)


def test_every_format_of_mlx_lm_is_tested() -> None:
    assert {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)} == CALLS.keys()


@kinds
def test_a_call_is_read(kind: str) -> None:
    start, end = marks(kind)
    after = AFTER if end else ""
    assert read(markup(kind), BEFORE + start + CALLS[kind] + end + after) == (BEFORE + after, "", [EXPECTED])


def test_a_call_of_more_than_100_levels_is_text() -> None:
    """A client could not send it back: a body has 200 levels."""
    for levels, is_call in ((99, True), (150, False), (2000, False)):
        value = "[" * levels + "]" * levels
        text = f'<tool_call>{{"name": "weather", "arguments": {{"city": {value}}}}}</tool_call>'
        expected = ("", "", [("weather", {"city": json.loads(value)})]) if is_call else (text, "", [])
        assert read(markup("json_tools"), text) == expected


def test_each_call_of_a_conversation_has_an_id_of_its_own() -> None:
    """The model's own, unless an earlier call has it: clients assign results by ids."""
    start, end = marks("kimi_k2")
    text = start + 2 * CALLS["kimi_k2"] + CALLS["kimi_k2"].replace(":0", ":1") + end
    for pieces in ([text], list(text)):
        ids = [call["id"] for call in read_pieces(markup("kimi_k2"), pieces)[0].calls]
        assert ids[::2] == ["functions.weather:0", "functions.weather:1"]
        assert ids[1].startswith("call_")
        later = [call["id"] for call in read_pieces(markup("kimi_k2"), pieces, ids=ids)[0].calls]
        assert all(one.startswith("call_") for one in later)
        assert len({*ids, *later}) == 6


@kinds
def test_an_answer_cut_anywhere_loses_no_text(kind: str) -> None:
    """A call that max_tokens cut is text, with its marks."""
    start, end = marks(kind)
    call = start + CALLS[kind] + end
    text, complete = BEFORE + call + AFTER, len(BEFORE + call)
    of = markup(kind)
    for cut in range(len(text) + 1):
        whole = end and cut >= complete
        after = text[complete:cut]
        expected = (BEFORE + after if after.strip() else BEFORE, "", [EXPECTED]) if whole else (text[:cut], "", [])
        assert read(of, text[:cut], "length") == expected


@kinds
def test_an_answer_that_ends_anywhere_loses_no_text(kind: str) -> None:
    """Where a model leaves out the end mark, its call counts if it is JSON."""
    start, end = marks(kind)
    text = BEFORE + start + CALLS[kind] + end
    last = len(BEFORE + start + CALLS[kind])
    of = markup(kind)
    for cut in range(len(text) + 1):
        content, _, calls = read(of, text[:cut], "stop")
        if calls:
            assert (content, calls) == (BEFORE, [EXPECTED])
            assert cut in (last, len(text))
        else:
            assert content == text[:cut]
            assert cut < len(text)


@kinds
def test_without_tools_marks_are_text(kind: str) -> None:
    start, end = marks(kind)
    text = BEFORE + start + CALLS[kind] + end + AFTER
    assert read(markup(kind), text, tools=[]) == (text, "", [])


@kinds
def test_marks_around_other_text_stay(kind: str) -> None:
    start, end = marks(kind)
    of = markup(kind)
    for inner in ("", " ", "to call", "{}", "[[", '{"name": "weather"', f"{start}{start}"):
        text = BEFORE + start + inner + end + AFTER
        assert read(of, text) == (text, "", [])
        assert read(of, BEFORE + start + inner) == (BEFORE + start + inner, "", [])


@kinds
def test_a_call_of_a_tool_that_is_not_offered_is_text(kind: str) -> None:
    start, end = marks(kind)
    text = BEFORE + start + CALLS[kind].replace("weather", "launch") + end
    assert read(markup(kind), text) == (text, "", [])


def offered(*names: str) -> list[Any]:
    return [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in names]


@kinds
@pytest.mark.parametrize("name", ["delete-file", "ns.file", "my_file"])
def test_a_name_is_read_as_a_whole(kind: str, name: str) -> None:
    start, end = marks(kind)
    call = CALLS[kind].replace("weather", name).replace("Oslo", f"of {name}")
    text = start + call + end
    expected = ("", "", [(name, {"city": f"of {name}"})])
    assert read(markup(kind), text, tools=offered(name)) == expected
    assert read(markup(kind), text, tools=offered("file", name)) == expected
    assert read(markup(kind), text, tools=offered("file")) == (text, "", [])
    argument = f"a file, {name}, kvpage_0_, kvpage__0_"
    text, expected = text.replace(f"of {name}", argument), ("", "", [(name, {"city": argument})])
    assert read(markup(kind), text, tools=offered("file", name)) == expected


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("json_tools", '{"name": "weather", "parameters": {"city": "Oslo"}}'),
        ("json_tools", '{"name": ["weather"], "arguments": {}}'),
        ("pythonic", '[weather("Oslo")]'),
        ("pythonic", '[weather("Oslo", days=3)]'),
        ("pythonic", '[weather(**{"city": "Oslo"})]'),
        ("pythonic", "[weather(Oslo Norway)]"),
        ("pythonic", "[weather(city='Oslo's, harbour')]"),
        ("pythonic", "[weather(city=Oslo, days=[1, 2])]"),
        ("pythonic", "[weather(city=Oslo), weather(city=Rome)]"),
        ("pythonic", '[weather(city="Oslo"), [weather(city="Rome")]]'),
    ],
)
def test_a_call_with_lost_arguments_is_text(kind: str, call: str) -> None:
    start, end = marks(kind)
    assert read(markup(kind), start + call + end) == (start + call + end, "", [])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("city=Oslo", {"city": "Oslo"}),
        ("city=Oslo Norway, days=3", {"city": "Oslo Norway", "days": 3}),
        ("city='Oslo's harbour'", {"city": "'Oslo's harbour'"}),
        ('city="Oslo,\nNorway", days=3', {"city": "Oslo,\nNorway", "days": 3}),
        ('city="Oslo", days=[1, -2], snow=true', {"city": "Oslo", "days": [1, -2], "snow": True}),
    ],
)
def test_python_with_bare_words_is_a_call(arguments: str, expected: Any) -> None:
    start, end = marks("pythonic")
    assert read(markup("pythonic"), f"{start}[weather({arguments})]{end}") == ("", "", [("weather", expected)])


@kinds
def test_a_call_after_a_mark_in_plain_text_is_read(kind: str) -> None:
    start, end = marks(kind)
    mention = f"I use {start} now: "
    assert read(markup(kind), mention + start + CALLS[kind] + end) == (mention, "", [EXPECTED])


@kinds
def test_a_mark_within_a_thought_does_not_hide_the_answer(kind: str) -> None:
    start, end = marks(kind)
    of = markup(kind, thinks=True)
    thought = f"I might use {start} here."
    assert read(of, f"<think>{thought}</think>The answer.") == ("The answer.", thought, [])
    call = f"{start}{CALLS[kind]}{end}"
    expected = ("", thought, [EXPECTED]) if end else (call, thought, [])
    assert read(of, f"<think>{thought}</think>{call}", "length") == expected
    assert read(of, f"<think>Hm.{call}") == ("", "Hm.", [EXPECTED])


@kinds
def test_several_calls_or_the_first_alone(kind: str) -> None:
    start, end = marks(kind)
    call = start + CALLS[kind] + end
    second = call.replace("Oslo", "Rome") if end else CALLS[kind].replace("Oslo", "Rome")
    text = BEFORE + call + "\n" + second
    both = [EXPECTED, ("weather", {"city": "Rome"})]
    assert read(markup(kind), text) == (BEFORE, "", both)
    assert read(markup(kind), call + call.replace("Oslo", "Rome")) == ("", "", both)
    assert read(markup(kind), text, several=False) == (BEFORE, "", [EXPECTED])


@kinds
def test_white_space_beside_a_call_is_no_text(kind: str) -> None:
    """A text keeps its own white space, except the separator that the template writes between it and a call."""
    start, end = marks(kind)
    of, call = markup(kind, thinks=True), start + CALLS[kind] + end
    after = "\n " if end else ""
    calls = [EXPECTED, EXPECTED]
    assert read(of, f"<think>Hm.</think>\n\n{call}\n{call}{after}") == ("", "Hm.", calls)
    assert read(of, f" a \n{call}") == (" a \n", "", [EXPECTED])
    assert read(of, f" a \n\n{call}", separator="\n") == (" a \n", "", [EXPECTED])
    assert read(of, "<think>Hm.</think>\n\n") == ("\n\n", "Hm.", [])
    assert read(of, f"\n{start}?\n") == (f"\n{start}?\n", "", [])
    if end:
        assert read(of, f"a\n{call}\n\nb\n{call}\n", separator="\n") == ("a\n\nb\n", "", calls)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('"{\\"city\\": \\"Oslo\\"}"', {"city": "Oslo"}),
        ('""', {}),
        ("null", {}),
        ("{}", {}),
        ('"Oslo"', None),
        ("[1]", None),
        ("7", None),
        ('{"city": NaN}', None),
        ('{"city": "\\ud800"}', None),
        ('"' + "[" * 5000 + '"', None),
        ('{"city": ' + "[" * 5000 + "]" * 5000 + "}", None),
    ],
)
def test_arguments_are_an_object_encoded_once(arguments: str, expected: Any) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    found = ("", "", [("weather", expected)]) if expected is not None else (text, "", [])
    reader = read_pieces(markup("json_tools"), [text])[0]
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in reader.calls]
    assert (reader.text, reader.reasoning, calls) == found


def test_a_number_that_no_parser_takes_is_text() -> None:
    """mlx-lm's parser for Qwen's format raises OverflowError."""
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "int"}}}}}]
    text = "<tool_call><function=f><parameter=n>1e999</parameter></function></tool_call>"
    assert read(markup("qwen3_coder"), text, tools=tools) == (text, "", [])


def test_an_answer_full_of_marks_is_read_in_linear_time() -> None:
    """Every mark might begin a call: none is parsed more than a few times."""
    of = markup("json_tools")
    parsed = []
    parse = of.parse
    of.parse = lambda text, tools: parsed.append(len(text)) or parse(text, tools)  # type: ignore[method-assign]
    text = "<tool_call>" * 4000
    assert read_pieces(of, [text])[0].text == text
    assert sum(parsed) < 6 * len(text)


def test_long_calls_are_parsed_off_the_event_loop() -> None:
    """Some of mlx-lm's parsers take seconds for 16 KB that are no call."""
    reader = Reader(markup("gemma4"), [1, 2], TOOLS)
    slow = []
    for piece in ("Long text. " * 1000, "<|tool_call>", "call:weather{cit" * 100, "<tool_call|>", "Done."):
        slow.append(reader.may_take_long)
        reader.read(Token(0, 5, piece, False))
    assert slow == [False, False, False, True, False]
    assert reader.parsed.text.endswith("<tool_call|>Done.")


@pytest.mark.parametrize("kind", ["glm47", "longcat", "minimax_m2", "qwen3_coder", "minicpm5"])
@pytest.mark.parametrize("parameters", [None, {"properties": {"city": True}}, {"properties": None}])
def test_tools_may_leave_out_their_schema(kind: str, parameters: Any) -> None:
    function: dict[str, Any] = {"name": "weather", **({"parameters": parameters} if parameters else {})}
    start, end = marks(kind)
    tools = [{"type": "function", "function": function}]
    assert read(markup(kind), start + CALLS[kind] + end, tools=tools) == ("", "", [EXPECTED])


LONG = '{"name": "weather", "arguments": {"city": "Oslo", "why": "' + "x" * 3000 + '"}}'


@pytest.fixture(scope="module", params=[CALL, LONG, '{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}'])
def caller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = write_caller(tmp_path_factory.mktemp("models") / "caller", request.param)
    with start_engine(model) as engine:
        yield engine, request.param


QUESTION: list[Any] = [{"role": "user", "content": "How is it in Oslo?"}]


def ask(engine: RunningEngine, **options: Any) -> Any:
    options = {"model": "caller", "messages": QUESTION, "temperature": 0, **options}
    with engine.client() as client:
        whole = client.chat.completions.create(**options).choices[0]
        *chunks, last = client.chat.completions.create(**options, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == (whole.message.content or "")
    calls: list[dict[str, Any]] = []
    for call in [call for delta in deltas for call in delta.tool_calls or ()]:
        if call.index == len(calls):
            assert (call.type, call.function.arguments) == ("function", "")
            calls.append(call.function.model_dump())
        else:
            assert (call.id, call.type, call.function.name) == (None, None, None)
            calls[-1]["arguments"] += call.function.arguments
    assert calls == [call.function.model_dump() for call in whole.message.tool_calls or ()]
    assert last.choices[0].finish_reason == whole.finish_reason
    return whole


def test_offered_tools_are_called_over_http(caller: tuple[RunningEngine, str]) -> None:
    engine, _ = caller
    for more in ({}, {"parallel_tool_calls": False}, {"tool_choice": "auto"}):
        choice = ask(engine, tools=TOOLS, **more)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments)["city"] == "Oslo"


def test_a_text_before_a_call_is_reused(tmp_path: Path) -> None:
    """The template writes a newline between a text and a call, as those of Qwen and Hermes."""
    call = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    calls = "{% for c in m.tool_calls or [] %}{% if m.content %}{{ '\\n' }}{% endif %}" + call + "{% endfor %}"
    messages = "{% for m in messages %}{{ m.role }}:{{ m.content }}" + calls + "{{ eos_token }}{% endfor %}"
    template = messages + "{% if add_generation_prompt %}assistant:{% endif %}{# tool_call.name #}"
    with (
        start_engine(write_caller(tmp_path / "caller", before="Well.\n", template=template)) as engine,
        engine.client() as client,
    ):
        first = ask(engine, tools=TOOLS).message
        assert first.content == "Well."
        told: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
        more: Any = {"model": "caller", "tools": TOOLS, "max_tokens": 1}
        second = client.chat.completions.create(messages=[*QUESTION, first.model_dump(), told], **more)
        assert second.kvpage["tokens_reused"] == second.usage.prompt_tokens - len("tool:rain") - len("assistant:") - 1


@pytest.mark.parametrize("more", [{"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "none"}, {}])
def test_without_offered_tools_the_call_is_content(caller: tuple[RunningEngine, str], more: dict[str, Any]) -> None:
    engine, said_between = caller
    choice = ask(engine, **more)
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == f"<tool_call>{said_between}</tool_call>"


def test_a_call_cut_by_max_tokens_is_content(caller: tuple[RunningEngine, str]) -> None:
    engine, said_between = caller
    choice = ask(engine, tools=TOOLS, max_tokens=2)
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == f"<tool_call>{said_between}"


def test_tools_stay_in_the_prompt_with_tool_choice_none(caller: tuple[RunningEngine, str]) -> None:
    engine, _ = caller
    with engine.client() as client:
        auto, none = (
            client.chat.completions.create(
                model="caller", messages=QUESTION, tools=TOOLS, tool_choice=choice, max_tokens=1
            ).usage.prompt_tokens
            for choice in ("auto", "none")
        )
    assert auto == none


def test_a_mark_within_a_message_opens_no_thought() -> None:
    letters = letter_tokenizer()
    letters.add_tokens(["<think>", "</think>", "<|end|>"])
    of = Markup(TokenizerWrapper(letters._tokenizer, BPEStreamingDetokenizer))
    for prompt, state in (
        ("What is <think>?<|end|>\n", NORMAL),
        ("What is <think>?<|end|>\n<think>\n", REASONING),
        ("What is <think>?<|end|>\n<think>\n\n</think>", NORMAL),
        ("What is </think>?<|end|>\n<think>\nIt is", REASONING),
    ):
        assert of.start(letters.encode(prompt, add_special_tokens=False)) == state


def test_ordinary_text_after_a_mark_ends_its_message() -> None:
    """Templates such as Vicuna's have no control token between a message and the answer."""
    letters = letter_tokenizer()
    letters.add_tokens(["<think>", "</think>"])
    of = Markup(TokenizerWrapper(letters._tokenizer, BPEStreamingDetokenizer))
    for prompt, continued, state in (
        ("USER: What is <think>? ASSISTANT:", "", NORMAL),
        ("USER: What is <think>? ASSISTANT:", None, REASONING),
        ("USER: <think> ASSISTANT: Sure", "Sure", NORMAL),
        ("USER: What? ASSISTANT: <think>\n", "", REASONING),
        ("USER: What? ASSISTANT: <think>\nIt is", "<think>\nIt is ", REASONING),
        ("USER: What? ASSISTANT: <think>\nIt is</think>", "<think>\nIt is</think>", NORMAL),
    ):
        tokens = letters.encode(prompt, add_special_tokens=False)
        assert of.start(tokens, continued) == state
        assert Reader(of, tokens, [], options=CallOptions(continued=continued)).reasons == (state == REASONING)


def test_a_mark_of_a_user_does_not_lift_a_constraint(tmp_path: Path) -> None:
    letters = letter_tokenizer()
    letters.add_tokens(["<think>", "</think>"])
    letters.chat_template = "{% for m in messages %}USER: {{ m.content }} ASSISTANT:{% endfor %}"
    directory = write_tiny(tmp_path / "plain", vocab_size=len(letters))
    letters.save_pretrained(directory)
    with start_engine(directory) as engine:
        answer = engine.client().chat.completions.create(
            model="plain",
            messages=[{"role": "user", "content": "Give JSON, no <think> please."}],
            max_tokens=8,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"const": "b"}, "strict": True},
            },
        )
    assert answer.choices[0].message.content == '"b"'
