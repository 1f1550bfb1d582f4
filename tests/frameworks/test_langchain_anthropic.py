"""LangChain with Anthropic's client: a tool loop, the second turn from the cache, and the diagnosis of a miss."""

from __future__ import annotations

from typing import Any

import pytest
from recorder import WITHIN, Recorder
from weather import INSTRUCTIONS, QUESTION, SKY

langchain = pytest.importorskip("langchain_anthropic", reason="`make test-frameworks` runs it")
pytestmark = pytest.mark.model


@pytest.fixture
def model(url: str) -> Any:
    return langchain.ChatAnthropic(
        model="smollm2",
        base_url=url.removesuffix("/v1"),
        api_key="none",
        max_retries=0,
        timeout=WITHIN,
        temperature=0,
        max_tokens=48,
    )


def weather(city: str) -> str:
    """The weather in a city."""
    return SKY if city == "Paris" else "unknown"


def test_a_tool_in_a_loop_and_a_diagnosis(model: Any, recorder: Recorder) -> None:
    from langchain_core.messages import ToolMessage

    marked = [{"type": "text", "text": INSTRUCTIONS, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    messages: list[Any] = [("system", marked), ("user", QUESTION)]
    bound = model.bind_tools([weather])
    call = bound.invoke(messages)
    assert call.tool_calls[0]["args"] == {"city": "Paris"}
    messages += [call, ToolMessage(weather("Paris"), tool_call_id=call.tool_calls[0]["id"])]
    assert bound.invoke(messages).content
    recorder.check_reuse()
    earlier = call.response_metadata["id"]
    changed = [("system", f"Today is Monday.\n{INSTRUCTIONS}"), *messages[1:]]
    bound.invoke(changed, diagnostics={"previous_message_id": earlier})
    reason = recorder.replies[-1]["diagnostics"]["cache_miss_reason"]
    assert (reason["type"], reason["message"]) == ("system_changed", 0)
    assert reason["cache_missed_input_tokens"] > 100


def test_a_stream(model: Any) -> None:
    assert "".join(chunk.text for chunk in model.stream("Hello")) == model.invoke("Hello").text
