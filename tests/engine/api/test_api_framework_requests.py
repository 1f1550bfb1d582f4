"""The requests of agent frameworks, as they sent them, with the real small model: stubs of `make test-frameworks`.

`framework_requests.jsonl` has bodies of openai, openai-agents, pydantic-ai and langchain-openai, in the versions of
tests/frameworks/frameworks.txt: structured answers, a tool, and the turn after its result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_engines import RunningEngine
from openai.types.chat import ChatCompletion

RECORDED = Path(__file__).parents[2] / "support" / "framework_requests.jsonl"
REQUESTS = [json.loads(line) for line in RECORDED.read_text(encoding="ascii").splitlines()]
VALUES = {"city": ("Oslo", "Paris"), "sky": ("sunny", "rainy")}


def answer(smollm2: RunningEngine, body: dict[str, Any]) -> ChatCompletion:
    constrained = "response_format" in body or "tool_choice" in body
    sent = {**body, "model": "smollm2", "temperature": 0, "max_tokens": 60 if constrained else 24}
    reply = httpx.post(f"{smollm2.url}/v1/chat/completions", json=sent, timeout=120)
    assert reply.status_code == 200, reply.text
    return ChatCompletion.model_validate(reply.json(), strict=True)


def is_filled(arguments: str, properties: dict[str, Any]) -> bool:
    """Whether JSON has exactly the properties of a schema, with values that it allows."""
    found = json.loads(arguments)
    return found.keys() == properties.keys() and all(found[name] in VALUES[name] for name in found)


@pytest.mark.parametrize(("name", "body"), REQUESTS, ids=[f"{name} {i}" for i, (name, _) in enumerate(REQUESTS)])
def test_the_request_of_a_framework_is_answered(smollm2: RunningEngine, name: str, body: dict[str, Any]) -> None:
    (choice,) = answer(smollm2, body).choices
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body.get("tools", [])}
    for call in choice.message.tool_calls or []:
        assert call.type == "function"
        assert is_filled(call.function.arguments, tools[call.function.name]["properties"])
    if body.get("tool_choice", "auto") != "auto":
        assert choice.message.tool_calls
    elif "response_format" in body and not choice.message.tool_calls:
        schema = body["response_format"]["json_schema"]["schema"]
        assert is_filled(choice.message.content or "", schema["properties"])
    assert choice.message.tool_calls or choice.message.content


def test_the_turn_after_a_tool_reuses_the_turn_before(smollm2: RunningEngine) -> None:
    turns = [body for name, body in REQUESTS if name == "langchain tools"]
    first, second = (answer(smollm2, body).usage for body in turns)
    assert first
    assert second
    assert second.prompt_tokens_details
    assert (second.prompt_tokens_details.cached_tokens or 0) > 0.9 * first.prompt_tokens
