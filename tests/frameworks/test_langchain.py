"""LangChain: messages, streams, tools, and all methods of structured output."""

from __future__ import annotations

from typing import Any

import pytest
from recorder import WITHIN, Recorder
from weather import INSTRUCTIONS, QUESTION, SKY, Weather

langchain = pytest.importorskip("langchain_openai", reason="`make test-frameworks` runs it")
pytestmark = pytest.mark.model


@pytest.fixture
def model(url: str) -> Any:
    return langchain.ChatOpenAI(
        model="smollm2", base_url=url, api_key="none", max_retries=0, timeout=WITHIN, temperature=0, max_tokens=64
    )


def weather(city: str) -> str:
    """The weather in a city."""
    return SKY if city == "Paris" else "unknown"


def test_a_chat_and_its_second_turn(model: Any, recorder: Recorder) -> None:
    first = model.invoke("Hello")
    assert first.content
    second = model.invoke([("user", "Hello"), first, ("user", "And now?")])
    assert second.content
    assert second.usage_metadata["input_token_details"]["cache_read"] >= first.usage_metadata["input_tokens"]
    recorder.check_reuse()


def test_a_stream(model: Any) -> None:
    assert "".join(chunk.content for chunk in model.stream("Hello")) == model.invoke("Hello").content


def run_loop(model: Any, **options: Any) -> list[Any]:
    """Return the messages of a loop that calls the tool until there is an answer."""
    from langchain_core.messages import ToolMessage

    messages: list[Any] = [("system", INSTRUCTIONS), ("user", QUESTION)]
    bound = model.bind_tools([weather], **options)
    while True:
        answer = bound.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            return messages
        messages += [ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        bound = model.bind_tools([weather])


def test_a_tool_in_a_loop(model: Any, recorder: Recorder) -> None:
    *_, call, result, answer = run_loop(model)
    assert call.tool_calls[0]["args"] == {"city": "Paris"}
    assert result.content == SKY
    assert answer.content
    recorder.check_reuse()


@pytest.mark.parametrize("choice", ["any", "required", "weather", True])
def test_a_forced_tool_in_a_loop(model: Any, choice: Any) -> None:
    *_, call, result, answer = run_loop(model, tool_choice=choice)
    assert call.tool_calls
    assert result.content
    assert answer.content


@pytest.mark.parametrize("strict", [None, True, False])
def test_structured_output_by_a_schema(model: Any, strict: bool | None) -> None:
    structured = model.with_structured_output(Weather, method="json_schema", strict=strict)
    assert isinstance(structured.invoke("Hello"), Weather)


def test_structured_output_by_a_dictionary(model: Any) -> None:
    structured = model.with_structured_output(Weather.model_json_schema(), method="json_schema")
    assert Weather.model_validate(structured.invoke("Hello"))


@pytest.mark.parametrize("strict", [None, True, False])
def test_structured_output_by_a_tool(model: Any, strict: bool | None) -> None:
    structured = model.with_structured_output(Weather, method="function_calling", strict=strict)
    assert isinstance(structured.invoke("Hello"), Weather)


def test_structured_output_in_json_mode(model: Any) -> None:
    """JSON mode knows no schema, so that the answer is an object, or one that was cut."""
    structured = model.with_structured_output(None, method="json_mode", include_raw=True)
    found = structured.invoke("Hello")
    assert found["raw"].content.startswith("{")
    assert isinstance(found["parsed"], dict) or found["raw"].response_metadata["finish_reason"] == "length"


def test_structured_output_with_its_raw_message(model: Any) -> None:
    found = model.with_structured_output(Weather, include_raw=True).invoke("Hello")
    assert isinstance(found["parsed"], Weather)
    assert found["parsing_error"] is None
