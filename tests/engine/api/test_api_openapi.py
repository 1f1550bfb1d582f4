"""/openapi.json describes the requests that the server accepts, and /docs shows it without files of other sites."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import openapi_spec_validator
import pytest
from api_engines import RunningEngine

from engine.api.anthropic.schema import MessagesBody
from engine.api.openai.errors import ApiError
from engine.api.openai.response_schema import ResponseBody
from engine.api.openai.schema import ChatBody, CompletionBody, RequestBody

ORIGINAL: dict[type[RequestBody], dict[str, Any]] = {
    ChatBody: {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]},
    CompletionBody: {"model": "tiny", "prompt": "Hello"},
    ResponseBody: {"model": "tiny", "input": "Hello"},
    MessagesBody: {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]},
}
VALUES: list[Any] = [-101, -1, 33, 1 << 70, 0.3, 1.5, "", "a", "x" * 300, [], ["a"], [3], {}, {"a": 1}]
# The server's rules that JSON Schema does not have: fields that need another one, or tokens and schemas that are
# checked when the prompt is made.
RULES = {
    "input",
    "best_of",
    "echo",
    "logit_bias",
    "top_logprobs",
    "prompt",
    "tool_choice",
    "guided_json",
    "response_format",
}


@pytest.fixture(scope="module")
def document(engine: RunningEngine) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{engine.url}/openapi.json").json()
    return found


def test_the_description_is_valid(document: dict[str, Any]) -> None:
    openapi_spec_validator.validate(document)


def test_each_route_is_described(engine: RunningEngine, document: dict[str, Any]) -> None:
    known = {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/agents/{agent}/fork",
        "/metrics",
        "/docs",
    }
    assert known <= document["paths"].keys()
    for path, operations in document["paths"].items():
        url = engine.url + re.sub(r"\{\w+\}", "tiny", path)
        for method, operation in operations.items():
            assert operation["summary"], path
            reply = httpx.request(method, url, timeout=60)
            assert "unknown_url" not in reply.text, path
        assert httpx.request("PATCH", url).status_code == 405


@pytest.mark.parametrize("kind", ORIGINAL)
def test_server_and_description_accept_the_same_requests(document: dict[str, Any], kind: type[RequestBody]) -> None:
    schema = {**document, "$ref": f"#/components/schemas/{kind.__name__}"}
    validator = jsonschema.Draft202012Validator(schema)
    for name in document["components"]["schemas"][kind.__name__]["properties"].keys() - RULES:
        numbers = [] if name in kind.unsupported else [True, 0, 1]  # of them, 0 is false there as it is in Python
        for value in (*VALUES, *numbers):
            body = {**ORIGINAL[kind], name: value}
            try:
                kind.parse(json.dumps(body).encode())
                accepted = True
            except ApiError:
                accepted = False
            assert accepted == validator.is_valid(body), (name, value)


def test_the_page_shows_it_without_other_sites(engine: RunningEngine, document: dict[str, Any]) -> None:
    reply = httpx.get(f"{engine.url}/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script" not in reply.text
    assert all(link[0] in "/#" for link in re.findall(r'(?:href|src)="([^"]*)"', reply.text))
    for path in document["paths"]:
        assert path in reply.text
    for name, schema in document["components"]["schemas"].items():
        assert f'id="{name}"' in reply.text
        for field in schema.get("properties", ()):
            assert f"<code>{field}</code>" in reply.text
