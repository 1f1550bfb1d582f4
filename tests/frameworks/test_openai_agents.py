"""OpenAI's Agents SDK, over chat completions and Responses: runs, streamed runs, tools and output types."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from recorder import WITHIN, Recorder
from weather import INSTRUCTIONS, QUESTION, SKY, STRUCTURED, Weather

agents = pytest.importorskip("agents", reason="`make test-frameworks` runs it")
pytestmark = pytest.mark.model


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def model(url: str, request: pytest.FixtureRequest) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=WITHIN)
    return getattr(agents, request.param)("smollm2", openai_client=client)


def agent(model: Any, **options: Any) -> Any:
    settings = agents.ModelSettings(temperature=0, max_tokens=64, **options.pop("settings", {}))
    return agents.Agent("weather", model=model, model_settings=settings, **options)


def weather_tool() -> Any:
    @agents.function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return SKY if city == "Paris" else "unknown"

    return weather


def test_a_run_and_its_second_turn(model: Any, recorder: Recorder) -> None:
    first = agents.Runner.run_sync(agent(model), "Hello")
    assert first.final_output
    again = [*first.to_input_list(), {"role": "user", "content": "And now?"}]
    assert agents.Runner.run_sync(agent(model), again).final_output
    recorder.check_reuse()


def test_a_streamed_run(model: Any) -> None:
    async def run() -> tuple[str, str]:
        result = agents.Runner.run_streamed(agent(model), "Hello")
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return "".join(deltas), result.final_output

    deltas, final = asyncio.run(run())
    assert deltas == final
    assert final == agents.Runner.run_sync(agent(model), "Hello").final_output


def test_a_tool_in_a_loop(model: Any, recorder: Recorder) -> None:
    result = agents.Runner.run_sync(agent(model, instructions=INSTRUCTIONS, tools=[weather_tool()]), QUESTION)
    assert [item.output for item in result.new_items if item.type == "tool_call_output_item"] == [SKY]
    assert result.final_output
    recorder.check_reuse()


def test_a_tool_in_a_streamed_loop(model: Any) -> None:
    async def run() -> Any:
        result = agents.Runner.run_streamed(agent(model, instructions=INSTRUCTIONS, tools=[weather_tool()]), QUESTION)
        assert [event async for event in result.stream_events()]
        return result

    result = asyncio.run(run())
    assert [item.output for item in result.new_items if item.type == "tool_call_output_item"] == [SKY]


@dataclass
class Place:
    """A city, as a dataclass."""

    city: Literal["Oslo", "Paris"]


class Free(BaseModel):
    """A structure that is not strict, because a field has a default."""

    city: Literal["Oslo", "Paris"]
    degrees: Literal[0, 10] = 0


@pytest.mark.parametrize("output", [Weather, Place, Literal["yes", "no"], bool], ids=str)
def test_output_types(model: Any, output: Any) -> None:
    result = agents.Runner.run_sync(agent(model, output_type=output), "Hello")
    assert agents.AgentOutputSchema(output).validate_json(result.raw_responses[0].output[0].content[0].text)
    if isinstance(output, type):
        assert isinstance(result.final_output, output)


def test_an_output_type_that_is_not_strict(model: Any) -> None:
    output = agents.AgentOutputSchema(Free, strict_json_schema=False)
    assert agents.Runner.run_sync(agent(model, output_type=output), "Hello").final_output.degrees in (0, 10)


def test_a_structured_answer_after_a_tool(model: Any, recorder: Recorder) -> None:
    asked = agent(model, instructions=STRUCTURED, tools=[weather_tool()], output_type=Weather)
    assert isinstance(agents.Runner.run_sync(asked, QUESTION).final_output, Weather)
    recorder.check_reuse()
    assert len(recorder.requests) == 2


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_forced_tool_in_a_loop(model: Any, recorder: Recorder, choice: str) -> None:
    asked = agent(model, instructions=INSTRUCTIONS, tools=[weather_tool()], settings={"tool_choice": choice})
    result = agents.Runner.run_sync(asked, QUESTION)
    assert [item.output for item in result.new_items if item.type == "tool_call_output_item"] == [SKY]
    assert recorder.requests[0]["tool_choice"] != "auto"
    recorder.check_reuse()
