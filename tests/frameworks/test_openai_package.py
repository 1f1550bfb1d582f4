"""OpenAI's own client: chat, streams, tools, structured answers, and reuse from turn to turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from recorder import WITHIN, Recorder
from weather import INSTRUCTIONS, QUESTION, SKY, Weather

pytestmark = pytest.mark.model
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HELLO: Any = [{"role": "user", "content": "Hello"}]
ASKED: Any = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
OPTIONS: Any = {"model": "smollm2", "temperature": 0, "max_tokens": 32}
BRIEF: Any = {**OPTIONS, "max_tokens": 6}


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WITHIN) as client:
        yield client


def test_a_chat_and_its_second_turn(client: openai.OpenAI, recorder: Recorder) -> None:
    first = client.chat.completions.create(messages=HELLO, **BRIEF)
    assert first.choices[0].message.content
    again = [*HELLO, first.choices[0].message, {"role": "user", "content": "And now?"}]
    assert client.chat.completions.create(messages=again, **BRIEF).choices[0].message.content
    recorder.check_reuse()


def test_a_stream_has_the_text_of_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, **OPTIONS).choices[0].message.content
    with client.chat.completions.stream(messages=HELLO, stream_options={"include_usage": True}, **OPTIONS) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert deltas == final.choices[0].message.content == whole
    assert final.usage


def test_an_agent_loop_with_a_tool(client: openai.OpenAI, recorder: Recorder) -> None:
    messages = [*ASKED]
    answer = client.chat.completions.create(messages=messages, tools=[TOOL], **OPTIONS).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": SKY}]
    answer = client.chat.completions.create(messages=messages, tools=[TOOL], **OPTIONS).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content
    recorder.check_reuse()


def test_a_tool_call_in_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=ASKED, tools=[TOOL], **OPTIONS) as stream:
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "weather"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "weather"}}],
            },
        },
    ],
    ids=["required", "name", "allowed_tools"],
)
def test_a_forced_tool(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(messages=HELLO, tools=[TOOL], tool_choice=choice, **OPTIONS).choices[0]
    (call, *_) = answer.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, {*json.loads(call.function.arguments)}) == ("weather", {"city"})
    assert not answer.message.content


def test_parse_returns_a_structure(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(messages=HELLO, response_format=Weather, **{**OPTIONS, "max_tokens": 64})
    weather = parsed.choices[0].message.parsed
    assert isinstance(weather, Weather)
    assert weather.skies
    assert -50 <= weather.degrees <= 50


def test_a_stream_is_parsed_too(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "max_tokens": 64}
    with client.chat.completions.stream(messages=HELLO, response_format=Weather, **options) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)
    assert len(partial) > 2


def test_a_structure_that_is_cut_raises_the_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(messages=HELLO, response_format=Weather, **{**OPTIONS, "max_tokens": 2})


def test_json_mode(client: openai.OpenAI) -> None:
    # Without a schema the small model may write a long object, so that the text may be cut.
    answer = client.chat.completions.create(messages=HELLO, response_format={"type": "json_object"}, **OPTIONS)
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_text_and_its_continuation(client: openai.OpenAI, recorder: Recorder) -> None:
    options = {**OPTIONS, "max_tokens": 4}
    prompt = "One, two, three,"
    text = client.completions.create(prompt=prompt, **options).choices[0].text
    chunks = client.completions.create(
        prompt=prompt + text, stream=True, stream_options={"include_usage": True}, **options
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    recorder.check_reuse()


def test_errors_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=HELLO, modalities=["audio"], **OPTIONS)
    assert (caught.value.param, caught.value.code) == ("modalities", "unsupported_value")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(messages=HELLO, **{**OPTIONS, "model": "gpt"})
