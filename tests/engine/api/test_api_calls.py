"""Calls of tools that a grammar writes: forced ones, those of strict tools, and how they are streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_engines import RunningEngine, start_engine, write_caller, write_offered

ASK: list[Any] = [{"role": "user", "content": "How is it in Oslo?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "near": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    },
    "required": ["city", "unit"],
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS: list[Any] = [tool("weather", WEATHER), tool("news", {"type": "object", "properties": {"n": {"enum": [1, 2]}}})]


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def is_call(call: Any) -> bool:
    """Whether a call has the arguments that its tool declares."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "news":
        return arguments in ({}, {"n": 1}, {"n": 2})
    return (
        {"city", "unit"} <= arguments.keys() <= WEATHER["properties"].keys()
        and len(arguments["city"]) <= 8
        and arguments["unit"] in ("celsius", "fahrenheit")
        and 1 <= arguments.get("days", 1) <= 14
        and (arguments.get("near") is None or len(arguments["near"]) <= 4)
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with start_engine(write_offered(tmp_path_factory.mktemp("models") / "tiny")) as engine:
        yield engine


@pytest.fixture(scope="module")
def api(engine: RunningEngine) -> Iterator[openai.OpenAI]:
    with engine.client() as client:
        yield client


def chat(api: openai.OpenAI, seed: int = 1, **more: Any) -> Any:
    options = {"model": "tiny", "messages": ASK, "tools": TOOLS, "temperature": 1, "seed": seed, "max_tokens": 300}
    return api.chat.completions.create(**{**options, **more})


def streamed(api: openai.OpenAI, **more: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Content, names and arguments, and the finish_reason of a stream, whose chunks have OpenAI's form."""
    content, calls, reason = "", [], ""
    for chunk in chat(api, stream=True, **more):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                calls.append((call.function.name, ""))
            else:
                assert (call.index, call.function.name) == (len(calls) - 1, None)
                calls[-1] = (calls[-1][0], calls[-1][1] + call.function.arguments)
    return content, calls, reason


@pytest.mark.parametrize("temperature", [0, 0.7, 1, 2])
def test_required_calls_are_valid_at_every_temperature(api: openai.OpenAI, temperature: float) -> None:
    answers = chat(api, temperature=temperature, tool_choice="required", n=6).choices
    for answer in answers:
        assert not answer.message.content
        calls = answer.message.tool_calls or []
        if answer.finish_reason == "length":
            calls = calls[:-1]
        else:
            assert answer.finish_reason == "tool_calls"
            assert calls
        assert all(map(is_call, calls))
    assert temperature == 0 or {answer.finish_reason for answer in answers} != {"length"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "function": {"name": "news"}}, {"news"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named("weather")}}, {"weather"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named("weather", "news")}}, None),
    ],
)
def test_a_choice_by_name_calls_these_tools(api: openai.OpenAI, choice: Any, names: set[str] | None) -> None:
    found = set()
    for answer in chat(api, tool_choice=choice, n=8, parallel_tool_calls=False).choices:
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert is_call(call)
        found.add(call.function.name)
    assert found == (names or {"weather", "news"})


def test_several_calls_or_one(api: openai.OpenAI) -> None:
    many = [answer.message.tool_calls for answer in chat(api, tool_choice="required", n=6).choices]
    assert max(map(len, many)) > 1
    assert all(len({call.id for call in calls}) == len(calls) for calls in many)
    one = chat(api, tool_choice="required", n=6, parallel_tool_calls=False).choices
    assert [len(answer.message.tool_calls) for answer in one] == [1] * 6


def test_a_stream_is_the_whole_answer(api: openai.OpenAI) -> None:
    for seed in range(2):
        whole = chat(api, seed, tool_choice="required").choices[0]
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert streamed(api, seed=seed, tool_choice="required") == ("", calls, whole.finish_reason)


def test_a_cut_call_is_the_beginning_of_the_whole_one(api: openai.OpenAI) -> None:
    """Its finish_reason is `length`, in a stream, too."""
    by_name: Any = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    (call,) = chat(api, **by_name).choices[0].message.tool_calls
    whole = call.function.arguments
    longest = 0
    for limit in range(1, 80, 7):
        cut = chat(api, max_tokens=limit, **by_name).choices[0]
        if cut.finish_reason == "tool_calls":
            break
        calls = [(call.function.name, call.function.arguments) for call in cut.message.tool_calls or ()]
        assert streamed(api, max_tokens=limit, **by_name) == ("", calls, "length")
        assert not cut.message.content
        for name, arguments in calls:
            assert name == "weather"
            assert whole.startswith(arguments)
            longest = max(longest, len(arguments))
    assert longest > 10


def test_a_call_that_a_stop_string_cuts_is_content(api: openai.OpenAI) -> None:
    by_name: Any = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "stop": ['"unit"']}
    cut = chat(api, **by_name).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("stop", None)
    assert cut.message.content.startswith("<tool_call>")
    assert streamed(api, **by_name) == (cut.message.content, [], "stop")
    early = chat(api, **{**by_name, "stop": ['"name"']}).choices[0]
    assert early.message.content.replace("\n", "") == "<tool_call>{"
    whole = chat(api, **{**by_name, "stop": ["never"]}).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert is_call(whole.message.tool_calls[0])


def test_a_format_or_a_call_with_marks_of_several_tokens(tmp_path: Path) -> None:
    with start_engine(write_offered(tmp_path / "tiny", marks=())) as engine, engine.client() as api:
        test_a_format_or_a_call(api)


def test_a_format_or_a_call(api: openai.OpenAI) -> None:
    """With tools and a format the answer has one of both; a forced call is no matter of the format."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    formatted: Any = {
        "max_tokens": 130,  # some calls are longer
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "it", "schema": schema | {"additionalProperties": False}},
        },
    }
    kinds = set[bool]()
    for number, seed in enumerate((14, 4, 5, *range(16))):  # the first three have both kinds in each model, usually
        if number > 2 and len(kinds) == 2:
            break
        answer = chat(api, seed, **formatted).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
        assert streamed(api, seed=seed, **formatted) == (answer.message.content or "", calls, answer.finish_reason)
        if calls:
            assert answer.message.content is None
            assert answer.finish_reason == "length" or all(map(is_call, answer.message.tool_calls))
        else:
            assert answer.finish_reason == "length" or json.loads(answer.message.content) in (
                {"ok": True},
                {"ok": False},
            )
        kinds.add(bool(calls))
    assert kinds == {True, False}
    assert chat(api, tool_choice="required", **formatted).choices[0].message.tool_calls
    none = chat(api, tool_choice="none", **formatted).choices[0]
    assert json.loads(none.message.content) in ({"ok": True}, {"ok": False})


def test_strict_tools_are_constrained_from_their_mark_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    """This model would call with a wrong unit."""
    said = '{"name": "weather", "arguments": {"city": "Oslo", "unit": "kelvin"}}'
    model = write_caller(tmp_path_factory.mktemp("models") / "tiny", said)
    with start_engine(model) as engine, engine.client() as api:
        loose = chat(api, temperature=0).choices[0].message.tool_calls
        assert json.loads(loose[0].function.arguments)["unit"] == "kelvin"
        for seed in range(6):
            strict = chat(api, seed, tools=[tool("weather", WEATHER, strict=True)])
            answer = strict.choices[0]
            assert answer.finish_reason == "tool_calls"
            assert all(map(is_call, answer.message.tool_calls))


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "any"}, "tool_choice", "required"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type", "function"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", ""),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", ""),
    ({"tool_choice": {"type": "function", "function": {"name": "launch"}}}, "tool_choice", "launch"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", ""),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "tools"),
    ({"tool_choice": "required", "tools": [tool("a b", {})]}, "tools[0].function.name", ""),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", ""),
    ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex", "one constraint"),
    (
        {"tool_choice": "required", "tools": [*TOOLS, tool("x", {"type": "array"})]},
        "tools[2].function.parameters",
        "type",
    ),
    (
        {"tool_choice": "required", "tools": [*TOOLS, tool("x", {"properties": {"a": {"uniqueItems": True}}})]},
        "tools[2].function.parameters",
        "uniqueItems",
    ),
    (
        {"tools": [*TOOLS, tool("x", {"properties": {"a": {"not": {}}}}, strict=True)]},
        "tools[2].function.parameters",
        "not",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD)
def test_a_wrong_choice_is_refused_by_name(
    engine: RunningEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 4, **fields}
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert message in error["message"]


def test_a_loose_tool_may_have_any_schema(api: openai.OpenAI) -> None:
    """Only its name is constrained, if another tool is strict."""
    odd = tool("odd", {"type": "object", "properties": {"a": {"not": {}}}})
    answer = chat(api, tools=[tool("weather", WEATHER, strict=True), odd], max_tokens=20)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_forbidden_tokens_have_openais_lowest_logprob(api: openai.OpenAI) -> None:
    for more in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        options: Any = {"logprobs": True, "top_logprobs": 20, "max_tokens": 4, **more}
        entries = chat(api, **options).choices[0].logprobs.content
        chunks = [chunk.choices[0].logprobs for chunk in chat(api, stream=True, **options)]
        assert [entry for likelihoods in chunks if likelihoods for entry in likelihoods.content] == entries
        assert min(likely.logprob for entry in entries for likely in entry.top_logprobs) == -9999.0
        assert all(entry.logprob > -9999.0 for entry in entries)


def test_forced_calls_reuse_the_prompt(api: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "How is it in Oslo? " * 20}]
    first = chat(api, messages=long, tool_choice="required").usage
    again = chat(api, messages=long, tool_choice={"type": "function", "function": {"name": "news"}}).usage
    assert again.prompt_tokens == first.prompt_tokens
    assert again.prompt_tokens_details.cached_tokens > 300


def test_the_real_model_calls_tools_in_a_loop(smollm2: RunningEngine) -> None:
    """The second turn has the result of the tool, and reuses the context of the first."""
    with smollm2.client() as api:
        first = chat(api, model="smollm2", temperature=0, tool_choice="required", parallel_tool_calls=False)
        message = first.choices[0].message
        (call,) = message.tool_calls
        assert is_call(call)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain, 9 degrees."}
        turns = [*ASK, message.model_dump(exclude_none=True), result]
        second = chat(api, model="smollm2", temperature=0, messages=turns, max_tokens=20)
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
        assert second.choices[0].message.content
