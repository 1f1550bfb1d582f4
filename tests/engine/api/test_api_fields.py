"""Every field of a request is honoured, refused by name, or documented as one that changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import openai.types.chat as chats
import pytest
from api_engines import RunningEngine, start_engine, write_tiny
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.shared_params import FunctionDefinition

from engine.api.openai import schema
from engine.api.openai.errors import ApiError
from engine.api.openai.schema import ChatBody, CompletionBody, RequestBody

API = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
SITE = "https://chat.example"
HELLO = [{"role": "user", "content": "Hello"}]
ORIGINAL: dict[type[RequestBody], dict[str, Any]] = {
    ChatBody: {"model": "tiny", "messages": HELLO},
    CompletionBody: {"model": "tiny", "prompt": "Hello"},
}
MESSAGES = ("Assistant", "Developer", "System", "Tool", "User")
SDK: list[tuple[Any, type[RequestBody]]] = [  # OpenAI's types, and ours
    (chat_params.CompletionCreateParamsBase, ChatBody),
    (CompletionCreateParamsBase, CompletionBody),
    *((getattr(chats, f"ChatCompletion{role}MessageParam"), schema.Message) for role in MESSAGES),
    (chats.ChatCompletionFunctionToolParam, schema.Tool),
    (FunctionDefinition, schema.FunctionTool),
    (chats.ChatCompletionMessageFunctionToolCallParam, schema.ToolCall),
    (chats.ChatCompletionStreamOptionsParam, schema.StreamOptions),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("acme acme-secret\n", encoding="utf-8")
    model = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    with start_engine(model, "--allow-origin", SITE, "--token-file", str(tokens)) as engine:
        yield engine


def post(engine: RunningEngine, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    kind = ChatBody if "chat" in path else CompletionBody
    options: Any = {"headers": {"Authorization": "Bearer acme-secret"}, "timeout": 60}
    return httpx.post(engine.url + path, json={**ORIGINAL[kind], "max_tokens": 2, **body}, **options)


@pytest.mark.parametrize(("theirs", "ours"), SDK, ids=lambda kind: kind.__name__)
def test_no_field_of_openais_types_is_silently_ignored(theirs: Any, ours: type[RequestBody]) -> None:
    handled = {*ours.model_fields, *ours.unsupported}
    _, ignored = API.split("change nothing here and are ignored:")
    documented = ignored.split("\n\n")[0]
    for field in get_type_hints(theirs):
        assert (field in handled) != (f"`{field}`" in documented), f"{theirs.__name__}.{field}"


def refusal(kind: type[RequestBody], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        kind.parse(json.dumps({**ORIGINAL[kind], **fields}).encode())
    return caught.value


@pytest.mark.parametrize("kind", ORIGINAL)
def test_unsupported_fields_are_refused_by_name(kind: type[RequestBody]) -> None:
    for name, allowed in kind.unsupported.items():
        for value in ("never", 17, {"a": "b"}, ["b"]):
            error = refusal(kind, **{name: value})
            assert (error.status, error.param, error.code) == (400, name, "unsupported_value")
            assert error.message.startswith(f"{name}: this engine ")
        for value in (*allowed, None):
            kind.parse(json.dumps({**ORIGINAL[kind], name: value}).encode())


def test_the_issues_fields_are_among_them() -> None:
    assert "thinking_budget" in ChatBody.unsupported
    assert {"presence_context_size", "frequency_context_size"} <= CompletionBody.unsupported.keys()
    for name in schema.Message.unsupported:
        messages = [*HELLO, {"role": "assistant", "content": "Hm", name: "thoughts"}]
        assert refusal(ChatBody, messages=messages).param == f"messages[1].{name}"


def test_null_is_no_field_at_any_depth() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "Hi", "refusal": None, "audio": None, "tool_calls": None}
    body = ChatBody.parse(
        json.dumps(
            {
                **ORIGINAL[ChatBody],
                "messages": [{**HELLO[0], "name": None}, message],
                "stream_options": {"include_usage": None},
                "tools": [{"type": "function", "function": {"name": "f", "strict": None, "parameters": None}}],
                "response_format": None,
            }
        ).encode()
    )
    assert not body.stream_options.include_usage


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"refusal": "I will not."}, "I will not."),
        ({"content": "", "refusal": "I will not."}, "I will not."),
        ({"content": "Well.", "refusal": None}, "Well."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
    ],
)
def test_a_refusal_in_the_history_is_text(message: dict[str, Any], content: str) -> None:
    messages = [*HELLO, {"role": "assistant", **message}]
    body = ChatBody.parse(json.dumps({**ORIGINAL[ChatBody], "messages": messages}).encode())
    assert body.messages[1].content == content
    assert "refusal" not in body.messages[1].model_dump()


def test_a_prompt_may_be_a_list_of_one_list(engine: RunningEngine) -> None:
    plain, nested = (post(engine, "/v1/completions", prompt=p, temperature=0) for p in ([10, 11], [[10, 11]]))
    assert plain.json()["choices"] == nested.json()["choices"]
    assert plain.json()["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("user", ["alice@example.com", "Alice B. Example", "a/b\n", "é🦭", "x" * 5000, ".dot"])
def test_user_may_be_any_text(engine: RunningEngine, user: str) -> None:
    first, second = (post(engine, user=user, temperature=0).json()["kvpage"] for _ in range(2))
    assert first["agent_id"] == second["agent_id"]
    assert first["agent_id"].startswith("user-")
    assert second["tier"] == "hot"
    other = post(engine, user=user + "!").json()["kvpage"]
    assert other["agent_id"] != first["agent_id"]
    assert other["tier"] != "hot", "it has no context of its own"
    shown = httpx.get(
        f"{engine.url}/v1/agents/{first['agent_id']}", headers={"Authorization": "Bearer acme-secret"}
    ).json()
    assert shown["id"] == first["agent_id"]


def test_user_that_is_an_agents_name_is_that_agent(engine: RunningEngine) -> None:
    assert post(engine, user="carol").json()["kvpage"]["agent_id"] == "carol"
    assert post(engine, user="").json()["kvpage"]["agent_id"] is None
    assert post(engine, user="dave", agent_id="carol").json()["kvpage"] | {"agent_id": "carol"}
    assert post(engine, agent_id="alice@example.com").json()["error"]["param"] == "agent_id"


def test_openais_javascript_client_may_ask_from_a_page(engine: RunningEngine) -> None:
    names = ("arch", "lang", "os", "package-version", "retry-count", "runtime", "runtime-version", "timeout")
    asked = ["authorization", "content-type", *(f"x-stainless-{name}" for name in names), "x-agent-id"]
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ",".join(asked)}
    reply = httpx.options(f"{engine.url}/v1/chat/completions", headers={"Origin": SITE, **preflight})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, SITE)
    allowed = {name.strip().lower() for name in reply.headers["access-control-allow-headers"].split(",")}
    assert {*asked} <= allowed
    stranger = httpx.options(
        f"{engine.url}/v1/chat/completions", headers={"Origin": "https://other.example", **preflight}
    )
    assert "access-control-allow-origin" not in stranger.headers
