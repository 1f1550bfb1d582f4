"""Anthropic's Messages API, with Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import (
    Message,
    OutputConfigParam,
    TextBlockParam,
    ThinkingBlockParam,
    ThinkingConfigEnabledParam,
    ToolChoiceToolParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from anthropic.types.message_create_params import MessageCreateParamsBase
from api_engines import RunningEngine, start_engine, write_caller
from documented_fields import undocumented

from engine.api.anthropic import schema
from engine.api.anthropic.schema import CountBody, MessagesBody
from engine.api.openai.errors import ApiError
from engine.api.openai.schema import RequestBody

DOCS = (Path(__file__).parents[3] / "docs" / "messages.md").read_text(encoding="utf-8")
FIVE_MINUTES, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def client_of(engine: RunningEngine, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=engine.url, api_key=key, max_retries=0, timeout=60)


def create(client: anthropic.Anthropic, model: str = "tiny", **fields: Any) -> Message:
    given: Any = {"max_tokens": 8, "messages": HELLO, "extra_body": {"temperature": 0}} | fields
    message: Message = client.messages.create(model=model, **given)
    Message.model_validate(message.model_dump())
    return message


def text(text: str, cache_control: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"cache_control": cache_control} if cache_control else {})}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": "12 degrees"}


RESULTS = {"role": "user", "content": [result("1")]}
CALLED = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {}}]},
    RESULTS,
]


@pytest.fixture(scope="module")
def messages(tenants: RunningEngine) -> Iterator[anthropic.Anthropic]:
    with client_of(tenants, "one") as client:
        yield client


def test_the_real_model_reads_a_turn_from_the_cache(smollm2: RunningEngine) -> None:
    with client_of(smollm2) as client:
        history: Any = [{"role": "user", "content": "What is the capital of France?"}]
        first = create(client, "smollm2", messages=history, max_tokens=20)
        history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And of Italy?"}]
        count = client.messages.count_tokens(model="smollm2", messages=history).input_tokens
        second = create(client, "smollm2", messages=history, max_tokens=20)
        assert [first.content[0].type, first.stop_reason, second.stop_reason] == ["text", "end_turn", "end_turn"]
        assert first.usage.input_tokens > 8  # the beginning may be that of another test's prompt
        computed = first.usage.cache_read_input_tokens + first.usage.input_tokens + first.usage.output_tokens
        assert second.usage.cache_read_input_tokens == computed + 1  # and the end of the turn
        assert second.usage.input_tokens + second.usage.cache_read_input_tokens == count
        chat = smollm2.client().chat.completions.create(model="smollm2", max_tokens=1, messages=history)
        assert chat.usage
        assert chat.usage.prompt_tokens_details
        assert chat.usage.prompt_tokens_details.cached_tokens == count - 1
        parsed = create(
            client,
            "smollm2",
            max_tokens=60,
            output_config={"format": {"type": "json_schema", "schema": {"enum": ["Rome", "Paris"]}}},
        )
        assert parsed.content[0].type == "text"
        assert json.loads(parsed.content[0].text) in ("Rome", "Paris")


def test_a_stream_has_the_events_of_the_whole_message(messages: anthropic.Anthropic) -> None:
    whole = create(messages)
    with messages.messages.stream(
        model="tiny", max_tokens=8, messages=[{"role": "user", "content": "Hello"}], extra_body={"temperature": 0}
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert streamed.content[0].type == whole.content[0].type == "text"
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.stop_reason == whole.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 8
    assert (
        streamed.usage.cache_read_input_tokens
        == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) - 1
    )


def test_a_stop_sequence_is_named(messages: anthropic.Anthropic) -> None:
    whole = create(messages).content[0]
    assert whole.type == "text"
    stop = whole.text[3:5]
    stopped = create(messages, stop_sequences=["never", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == whole.text[: whole.text.index(stop)]


def test_a_tool_is_called_and_its_result_is_read(tmp_path: Path) -> None:
    with start_engine(write_caller(tmp_path / "caller")) as engine, client_of(engine) as client:
        options: Any = {"model": "caller", "max_tokens": 20, "tools": [WEATHER], "messages": HELLO}
        answer = create(client, "caller", **{name: options[name] for name in ("max_tokens", "tools")})
        assert answer.stop_reason == "tool_use"
        call = answer.content[-1]
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Oslo"})
        with client.messages.stream(**options, extra_body={"temperature": 0}) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            streamed = stream.get_final_message()
        assert json.loads("".join(pieces)) == call.input
        assert streamed.content[-1].type == "tool_use"
        assert streamed.content[-1].input == call.input
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
        history: Any = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        second = create(client, "caller", max_tokens=2, tools=[WEATHER], messages=history)
        first = answer.usage.input_tokens
        assert (second.usage.cache_read_input_tokens or 0) >= first - 1
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
            forced = create(client, "caller", max_tokens=60, tools=[WEATHER], tool_choice=choice)
            assert {block.type for block in forced.content} == {"tool_use"}
        silent = create(client, "caller", max_tokens=20, tools=[WEATHER], tool_choice={"type": "none"})
        assert [block.type for block in silent.content] == ["text"]


def test_a_prompt_of_no_answer_is_computed_for_the_next_request(messages: anthropic.Anthropic) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "Prepare this prompt"}], "cache_control": HOUR}
    warmed = create(messages, max_tokens=0, **asked)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    assert warmed.usage.cache_creation
    written = warmed.usage.cache_creation.ephemeral_1h_input_tokens
    assert written == warmed.usage.cache_creation_input_tokens
    used = create(messages, **asked).usage
    assert used.cache_read_input_tokens == written + (warmed.usage.cache_read_input_tokens or 0) - 1


def test_tokens_are_counted_up_to_each_breakpoint(messages: anthropic.Anthropic) -> None:
    """The tiny model's tokens are letters, and its template writes `role:content` on a line."""
    asked: Any = {
        "system": [text("first", HOUR), text("second")],
        "messages": [
            {"role": "user", "content": [text("third", FIVE_MINUTES), text("fourth")]},
            {"role": "assistant", "content": "fifth"},
            {"role": "user", "content": "sixth"},
        ],
    }
    usage = create(messages, **asked).usage
    assert usage.cache_creation
    read = usage.cache_read_input_tokens or 0
    hour = len("system:first\n") - read
    assert usage.cache_creation.ephemeral_1h_input_tokens == hour
    assert usage.cache_creation.ephemeral_5m_input_tokens == len("second\nuser:third\n")
    assert usage.input_tokens == len("fourth\nassistant:fifth\nuser:sixth\nassistant:")


def test_a_diagnosis_names_the_first_part_that_differs(messages: anthropic.Anthropic, tenants: RunningEngine) -> None:
    asked: Any = {"system": "Be brief.", "messages": HELLO}
    earlier = create(messages, **asked)

    def reason(client: anthropic.Anthropic = messages, **changes: Any) -> dict[str, Any] | None:
        message = create(client, **{**asked, "diagnostics": {"previous_message_id": earlier.id}, **changes})
        found = message.diagnostics
        reason = found.cache_miss_reason.model_dump() if found and found.cache_miss_reason else {}
        return {
            name: value for name, value in reason.items() if name not in ("seconds", "evicted_tokens", "evicted_why")
        } or None

    prompt = "system:Be brief.\nuser:Hello\nassistant:"
    more = [*HELLO, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert reason(messages=more) is None
    assert reason(diagnostics={"previous_message_id": None}) is None
    assert reason(system="Be silent.") == {
        "type": "system_changed",
        "cache_missed_input_tokens": len(prompt) - len("system:Be "),
        "reusable_input_tokens": len("system:Be "),
        "message": 0,
    }
    assert reason(messages=[{"role": "user", "content": "Help"}]) == {
        "type": "messages_changed",
        "cache_missed_input_tokens": len("lo\nassistant:"),
        "reusable_input_tokens": len("system:Be brief.\nuser:Hel"),
        "message": 1,
    }
    unknown = {"type": "previous_message_not_found"}
    assert reason(diagnostics={"previous_message_id": "msg_1"}) == unknown
    with client_of(tenants, "two") as other:
        assert reason(other) == unknown


def test_changed_tools_are_the_reason_before_the_messages(tmp_path: Path) -> None:
    with start_engine(write_caller(tmp_path / "caller")) as engine, client_of(engine) as client:
        earlier = create(client, "caller", tools=[WEATHER])
        named = {"previous_message_id": earlier.id}
        other = create(client, "caller", tools=[{**WEATHER, "name": "time"}], system="a", diagnostics=named)
        assert other.diagnostics
        assert other.diagnostics.cache_miss_reason
        assert other.diagnostics.cache_miss_reason.type == "tools_changed"


def test_the_key_of_a_tenant_is_its_token(tenants: RunningEngine) -> None:
    with client_of(tenants, "three") as stranger, pytest.raises(anthropic.AuthenticationError) as refused:
        create(stranger)
    assert refused.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "the token is not known"},
    }
    with client_of(tenants, "two") as other:
        secret: Any = [{"role": "user", "content": "A secret of the second tenant"}]
        assert create(other, messages=secret).usage.cache_read_input_tokens == 0
        assert (create(other, messages=secret).usage.cache_read_input_tokens or 0) > 40


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"model": "other"}, 404, "model: 'other' is not served here"),
        ({"max_tokens": None}, 400, "max_tokens: Field required"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "messages[0].content: block 0 is 'image'",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            400,
            "messages[0].role: Input should be 'user', 'assistant'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            400,
            "messages[0].content: block 0 is thinking, which the user cannot write",
        ),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, 400, "cache_control.ttl: Input should be '5m' or '1h'"),
        ({"system": [text("a", HOUR)] * 5}, 400, "system[4].cache_control: a request has at most 4 breakpoints, got 5"),
        (
            {"messages": [{"role": "user", "content": [text("a"), text("", HOUR)]}]},
            400,
            "messages[0].content[1].cache_control: an empty text has no breakpoint",
        ),
        ({"system": [text("", HOUR)]}, 400, "system[0].cache_control: an empty text has no breakpoint"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content: must not be empty"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "messages[0].content[0].text: must not be empty"),
        (
            {"messages": [*HELLO, CALLED[0], {"role": "user", "content": [text("a"), result("2")]}]},
            400,
            "messages[2].content[1].tool_use_id: the answer before it has no tool_use with the id '2'",
        ),
        (
            {"messages": [*HELLO, *CALLED, *HELLO, {"role": "assistant", "content": []}, RESULTS]},
            400,
            "messages[5].content[0].tool_use_id: the answer before it has no tool_use with the id '1'",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "a"}}, 400, "tool_choice: no tool has the name"),
        ({"tools": [WEATHER]}, 400, "tools: this model has no tool calling"),
        ({"tools": [{"type": "web_search_20260209", "name": "a"}]}, 400, "tools[0].type: Input should be 'custom'"),
        ({"tools": [{"input_schema": {}}]}, 400, "tools[0].name: Field required"),
        ({"tool_choice": {"type": "tool"}}, 400, "tool_choice.name: it is for the type tool, which needs it"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            400,
            "thinking: this model's chat template does not",
        ),
        ({"mcp_servers": [{}]}, 400, "mcp_servers: this engine supports only []"),
        ({"stop_sequences": [""]}, 400, "stop_sequences[0]: String should have at least 1 character"),
        ({"metadata": {"user_id": 1}}, 400, "metadata.user_id: Input should be a valid string"),
    ],
)
def test_a_wrong_field_is_named(tenants: RunningEngine, fields: dict[str, Any], status: int, said: str) -> None:
    body = {"model": "tiny", "max_tokens": 1, "messages": HELLO, **fields}
    reply = httpx.post(f"{tenants.url}/v1/messages", json=body, headers={"X-Api-Key": "one"}, timeout=60)
    error = reply.json()
    assert reply.status_code == status
    assert error["type"] == "error"
    assert error["error"]["message"].startswith(said)


def test_an_unknown_path_is_refused_in_the_format_of_its_api(tenants: RunningEngine) -> None:
    reply = httpx.get(f"{tenants.url}/v1/messages/batches")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


def test_consecutive_messages_of_a_role_become_one() -> None:
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
    body = MessagesBody.of(
        {
            "model": "tiny",
            "max_tokens": 1,
            "system": [text("a"), text("b")],
            "messages": [
                {"role": "user", "content": [text("c"), text("d")]},
                {"role": "user", "content": "e"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "f", "signature": ""}, text("g")]},
                {"role": "assistant", "content": [text("h"), call]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": [text("i")]}, text("j")],
                },
            ],
        }
    )
    found = [message.model_dump(exclude_none=True) for message in body.chat().messages]
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert found == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c\nd\ne"},
        {
            "role": "assistant",
            "content": "gh",
            "reasoning_content": "f",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "i"},
        {"role": "user", "content": "j"},
    ]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (MessageCreateParamsBase, MessagesBody),
        (TextBlockParam, schema.TextBlock),
        (ThinkingBlockParam, schema.ThinkingBlock),
        (ToolUseBlockParam, schema.ToolUseBlock),
        (ToolResultBlockParam, schema.ToolResultBlock),
        (ToolParam, schema.AnthropicTool),
        (ToolChoiceToolParam, schema.ToolChoice),
        (ThinkingConfigEnabledParam, schema.Thinking),
        (OutputConfigParam, schema.OutputConfig),
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_field_of_anthropics_types_is_documented(theirs: Any, ours: type[RequestBody]) -> None:
    assert undocumented(DOCS, theirs, ours, whole=ours is MessagesBody) == []


def test_a_prompt_that_is_too_long_is_counted(messages: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": 100_000 * "a"}]
    count = messages.messages.count_tokens(model="tiny", messages=long).input_tokens
    assert count == len("user:\nassistant:") + 100_000


def test_a_body_of_a_count_has_no_limit_of_tokens() -> None:
    CountBody.of({"model": "tiny", "messages": HELLO})
    with pytest.raises(ApiError, match="max_tokens: Field required"):
        MessagesBody.of({"model": "tiny", "messages": HELLO})
