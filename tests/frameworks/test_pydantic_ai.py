"""Pydantic AI: runs, streams, tools, all modes of output, and message histories."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from recorder import WITHIN, Recorder
from weather import INSTRUCTIONS, QUESTION, SKY, STRUCTURED, Weather

pydantic_ai = pytest.importorskip("pydantic_ai", reason="`make test-frameworks` runs it")
pytestmark = pytest.mark.model


@pytest.fixture
def model(url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=WITHIN)
    settings = {"temperature": 0.0, "max_tokens": 64}
    return OpenAIChatModel("smollm2", provider=OpenAIProvider(openai_client=client), settings=settings)


def agent(model: Any, **options: Any) -> Any:
    return pydantic_ai.Agent(model, **options)


def weather(city: str) -> str:
    """The weather in a city."""
    return SKY if city == "Paris" else "unknown"


class Place(BaseModel):
    """A city."""

    city: Literal["Oslo", "Paris"]


def test_a_run_and_its_second_turn(model: Any, recorder: Recorder) -> None:
    first = agent(model).run_sync("Hello")
    assert first.output
    second = agent(model).run_sync("And now?", message_history=first.all_messages())
    assert second.output
    assert second.usage.cache_read_tokens >= first.usage.input_tokens
    recorder.check_reuse()


def test_a_stream(model: Any) -> None:
    async def run() -> tuple[str, str]:
        async with agent(model).run_stream("Hello") as stream:
            deltas = [delta async for delta in stream.stream_text(delta=True, debounce_by=None)]
            return "".join(deltas), await stream.get_output()

    deltas, output = asyncio.run(run())
    assert output == agent(model).run_sync("Hello").output
    assert deltas in ("", output)  # with delta=True the whole text is not kept


def test_a_tool_in_a_loop(model: Any, recorder: Recorder) -> None:
    result = agent(model, instructions=INSTRUCTIONS, tools=[weather]).run_sync(QUESTION)
    parts = [part for message in result.all_messages() for part in message.parts]
    assert [part.content for part in parts if part.part_kind == "tool-return"] == [SKY]
    assert result.output
    recorder.check_reuse()


@pytest.mark.parametrize(
    "output",
    [
        lambda: pydantic_ai.NativeOutput(Weather),
        lambda: pydantic_ai.NativeOutput([Weather, Place]),
        lambda: pydantic_ai.NativeOutput(Weather, strict=True),
    ],
)
def test_native_output(model: Any, output: Any) -> None:
    assert isinstance(agent(model, output_type=output()).run_sync("Hello").output, Weather | Place)


class Anything(BaseModel):
    """Any object."""


def test_prompted_output(model: Any) -> None:
    """The prompt has the schema, and the server ensures that the answer is an object."""
    asked = agent(model, output_type=pydantic_ai.PromptedOutput(Anything))
    assert asked.run_sync("Hello", model_settings={"max_tokens": 256}).output == Anything()


@pytest.mark.parametrize(
    "output",
    [
        lambda: Weather,
        lambda: pydantic_ai.ToolOutput(Weather, name="answer", strict=True),
        lambda: [Weather, Place],
        lambda: bool,
        lambda: Literal["yes", "no"],
    ],
)
def test_output_by_a_tool(model: Any, output: Any) -> None:
    asked = agent(model, output_type=output())
    assert isinstance(asked.run_sync("Hello").output, Weather | Place | bool | str)


def test_a_structured_answer_after_a_tool(model: Any, recorder: Recorder) -> None:
    asked = agent(model, instructions=STRUCTURED, tools=[weather], output_type=pydantic_ai.NativeOutput(Weather))
    assert isinstance(asked.run_sync(QUESTION).output, Weather)
    assert len(recorder.requests) == 2
    recorder.check_reuse()
