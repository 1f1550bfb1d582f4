"""OpenAI's Responses API, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import httpx
import openai
import pydantic
import pytest
import redis
from api_engines import SMOLLM2, RunningEngine, start_engine, write_caller, write_tiny
from documented_fields import undocumented
from engine_models import letter_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    Response,
    ResponseFunctionToolCallParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
)
from openai.types.responses.response_create_params import PromptCacheOptions, ResponseCreateParamsBase
from openai.types.responses.response_input_param import FunctionCallOutput, ItemReference
from openai.types.shared_params import Reasoning
from servers import RunningServer, free_port, start_server
from waiting import until

from engine.agent_engine import Answer, Reuse
from engine.api.anthropic import schema as anthropic
from engine.api.openai import response_schema as schema
from engine.api.openai.errors import invalid, renamed
from engine.api.openai.reading import Markup, Reader
from engine.api.openai.response_schema import ResponseBody
from engine.api.openai.response_shapes import Notes, ResponseReply
from engine.api.openai.schema import RequestBody

DOCS = (Path(__file__).parents[3] / "docs" / "responses.md").read_text(encoding="utf-8")
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "12 degrees"}
MARKED = {
    "role": "user",
    "content": [
        {"type": "input_text", "text": "a"},
        {"type": "input_text", "text": "b", "prompt_cache_breakpoint": {}},
    ],
}
UNKNOWN = f"resp_{32 * '0'}"
REASONING_TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}\n{% endif %}{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}<tool_call>{{ tool_call.function | tojson }}</tool_call>"
    "{# tool_call.name #}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class City(pydantic.BaseModel):
    name: str


def create(client: openai.OpenAI, model: str = "tiny", **fields: Any) -> Response:
    given: Any = {"input": "Hello", "max_output_tokens": 8, "temperature": 0, **fields}
    response: Response = client.responses.create(model=model, **given)
    Response.model_validate(response.model_dump())
    return response


def references(items: Iterable[Any]) -> list[Any]:
    return [{"type": "item_reference", "id": item.id} for item in items]


def given(client: openai.OpenAI, response: Response) -> list[Any]:
    """The items of its request, in order."""
    return [item.model_dump() for item in client.responses.input_items.list(response.id, order="asc")]


def read(response: Response) -> int:
    """The number of the prompt's tokens that were reused; the others were written."""
    assert response.usage
    details = response.usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == response.usage.input_tokens
    return details.cached_tokens


@pytest.fixture(scope="module")
def responses(tenants: RunningEngine) -> Iterator[openai.OpenAI]:
    with tenants.client("one") as client:
        yield client


def test_a_conversation_continues_at_another_engine(server: RunningServer) -> None:
    """The first engine has ended before the second one answers; the answer is that of a chat with the whole text.

    No other test asks the first question, because the store of all tests may still have its context.
    """
    question = "What is the capital of Hungary?"
    with start_engine(SMOLLM2, "--store", server.url, "--keep", "all") as engine, engine.client() as client:
        first = create(client, "smollm2", input=question, max_output_tokens=20)
        second = create(client, "smollm2", input="And of Italy?", previous_response_id=first.id, max_output_tokens=20)
        assert (first.status, read(first)) == ("completed", 0)
        assert first.usage
        assert second.usage
        assert read(second) == first.usage.total_tokens + 1  # and the end of the turn
    with start_engine(SMOLLM2, "--store", server.url) as engine, engine.client() as client:
        third = create(client, "smollm2", input="And of Spain?", previous_response_id=second.id, max_output_tokens=20)
        assert read(third) == second.usage.total_tokens + 1
        texts = [question, first, "And of Italy?", second, "And of Spain?"]
        history: Any = [
            {"role": "user", "content": one}
            if isinstance(one, str)
            else {"role": "assistant", "content": one.output_text}
            for one in texts
        ]
        chat = client.chat.completions.create(model="smollm2", messages=history, temperature=0, max_tokens=20)
        assert chat.choices[0].message.content == third.output_text
        assert client.responses.retrieve(second.id).output_text == second.output_text
        listed = client.responses.input_items.list(third.id).data
        assert [item.model_dump()["content"][0]["text"] for item in listed] == ["And of Spain?"]
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError, match="is not stored"):
            create(client, "smollm2", previous_response_id=third.id)
        parsed = client.responses.parse(model="smollm2", input="A city of Italy?", text_format=City, temperature=0)
        assert isinstance(parsed.output_parsed, City)


def test_the_context_of_an_agent_is_found_without_its_name(server: RunningServer, tmp_path: Path) -> None:
    """At another engine, to the token: by the next response of another client, and by its chat."""
    model = write_tiny(tmp_path / "tiny")
    question = "".join(Random(1).choices(ascii_lowercase, k=300))
    with start_engine(model, "--store", server.url) as engine, engine.client() as client:
        first = create(client, input=question, user="alice@example.com", max_output_tokens=8)
        assert first.usage
        whole = first.usage.total_tokens
    with start_engine(model, "--store", server.url) as engine, engine.client() as client:
        second = create(client, input="And then?", previous_response_id=first.id)
        assert read(second) in (whole - 1, whole, whole + 1)  # the last token of an answer that was cut is not computed
        history: Any = [{"role": "user", "content": question + "!"}]
        chat = client.chat.completions.create(model="tiny", messages=history, max_tokens=1)
        assert chat.usage
        assert chat.usage.prompt_tokens_details
        assert chat.usage.prompt_tokens_details.cached_tokens == len("user:" + question)


def test_a_stream_has_the_items_of_the_whole_response(responses: openai.OpenAI) -> None:
    whole = create(responses)
    stream = responses.responses.create(model="tiny", input="Hello", max_output_tokens=8, temperature=0, stream=True)
    events = list(stream)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert text == whole.output_text == last.response.output_text
    assert last.response.incomplete_details
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert responses.responses.retrieve(last.response.id).output_text == text


def test_an_empty_answer_is_a_message_of_the_next_turn() -> None:
    async def store(*_: object) -> None: ...

    body = ResponseBody.of({"model": "tiny", "input": "Hello"})
    reader = Reader(Markup(TokenizerWrapper(letter_tokenizer()._tokenizer)), [1], [])
    reply = ResponseReply("resp_1", body, None, reader, Notes([], lambda _: None), store)
    answer = Answer(0, "nobody", "", (), "stop", None, 1, Reuse())
    assert [event["type"].removeprefix("response.") for event in reply.closing(answer)] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    items = asyncio.run(reply.whole([], [answer], [answer]))["output"]
    earlier = [{"type": "message", "role": "user", "content": "Hello"}, *items]
    following = ResponseBody.of({"model": "tiny", "input": "More"}).chat(earlier)
    assert [(one.role, one.content) for one in following.messages] == [
        ("user", "Hello"),
        ("assistant", ""),
        ("user", "More"),
    ]


def test_a_tool_is_called_and_its_result_is_read(tmp_path: Path) -> None:
    with start_engine(write_caller(tmp_path / "caller")) as engine, engine.client() as client:
        options: Any = {"model": "caller", "tools": [WEATHER], "temperature": 0, "max_output_tokens": 20}
        response = client.responses.create(input="Hello", **options)
        call = response.output[-1]
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments), response.status) == ("weather", {"city": "Oslo"}, "completed")
        with client.responses.stream(input="Hello", **options) as stream:
            pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            streamed = stream.get_final_response().output[-1]
        assert streamed.type == "function_call"
        assert "".join(pieces) == streamed.arguments == call.arguments
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
        continued = client.responses.create(input=[result], previous_response_id=response.id, **options)
        assert response.usage
        assert read(continued) >= response.usage.input_tokens - 1
        named = {"type": "function", "name": "weather"}
        for choice in ("required", named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
            forced = client.responses.create(input="Hello", tool_choice=choice, **{**options, "max_output_tokens": 60})
            assert {item.type for item in forced.output} == {"function_call"}
        whole: Any = [{"role": "user", "content": "Hello"}, *(item.model_dump() for item in response.output), result]
        again = client.responses.create(input=whole, **options)
        assert again.usage
        assert read(again) == again.usage.input_tokens - 1


def test_a_reference_has_the_prompt_of_the_whole_item(tmp_path: Path) -> None:
    """In a tool loop with reasoning, as Vercel's AI SDK asks, and in the next turn, for items of requests, too."""
    model = write_caller(tmp_path / "caller", before="<think> hm </think>", template=REASONING_TEMPLATE)
    with start_engine(model) as engine, engine.client() as client:
        options: Any = {"model": "caller", "tools": [WEATHER], "temperature": 0, "max_output_tokens": 20}
        asked: Any = {"role": "user", "content": "Hello"}
        first = client.responses.create(input=[asked], **options)
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        call: Any = first.output[-1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
        whole = client.responses.create(input=[asked, *(item.model_dump() for item in first.output), result], **options)
        second = client.responses.create(input=[asked, *references(first.output), result], **options)
        assert second.usage
        assert whole.usage
        assert read(second) == second.usage.input_tokens - 1 == whole.usage.input_tokens - 1
        items = [[{**item, "id": None} for item in given(client, response)] for response in (whole, second)]
        assert items[0] == items[1]
        assert [item["type"] for item in items[1]] == ["message", "reasoning", "function_call", "function_call_output"]
        more: Any = {"role": "user", "content": "More"}
        earlier: Any = [{"id": item["id"]} for item in given(client, second)]  # OpenAI's type needs no "type"
        third = client.responses.create(input=[*earlier, *references(second.output), result, more], **options)
        continued = client.responses.create(input=[result, more], previous_response_id=second.id, **options)
        assert third.usage
        assert read(continued) == third.usage.input_tokens - 1


def test_a_reference_needs_a_stored_item(responses: openai.OpenAI, tenants: RunningEngine) -> None:
    first = create(responses)
    ours = references(first.output)
    asked: Any = {"role": "user", "content": "Hello"}
    forgotten = str(create(responses, store=False).output[0].id)
    for absent in (forgotten, "msg_1", "a:b", f"msg_r{48 * '0'}", 300 * "a"):
        items = [asked, *ours, {"type": "item_reference", "id": absent}]
        with pytest.raises(openai.NotFoundError, match=f"Item with id '{absent[:100]}.*' not found") as raised:
            create(responses, input=items)
        assert (raised.value.param, raised.value.code) == ("input", "item_not_found")
    with tenants.client("two") as other, pytest.raises(openai.NotFoundError, match="not found"):
        create(other, input=ours)
    for twice in ({"input": [*ours, *ours]}, {"input": ours, "previous_response_id": first.id}):
        with pytest.raises(openai.BadRequestError, match=f"Duplicate item found with id '{ours[0]['id']}'"):
            create(responses, **twice)
    second = create(responses, input=[asked, *ours, asked])
    responses.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        create(responses, input=ours)
    assert create(responses, previous_response_id=second.id).output


def test_a_reference_is_known_at_another_engine(server: RunningServer, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    asked: Any = {"role": "user", "content": "".join(Random(2).choices(ascii_lowercase, k=300))}
    with start_engine(model, "--store", server.url, "--keep", "all") as engine, engine.client() as client:
        first = create(client, input=[asked])
        assert first.usage
    with start_engine(model, "--store", server.url) as engine, engine.client() as client:
        second = create(client, input=[asked, *references(first.output), {"role": "user", "content": "More"}])
        assert read(second) >= first.usage.total_tokens - 1
        assert given(client, second)[1]["content"][0]["text"] == first.output_text


def test_a_response_that_is_not_stored_cannot_be_found(responses: openai.OpenAI) -> None:
    forgotten = create(responses, store=False)
    with pytest.raises(openai.NotFoundError):
        responses.responses.retrieve(forgotten.id)
    with pytest.raises(openai.NotFoundError):
        responses.responses.delete(UNKNOWN)


def test_items_of_a_request_are_listed_in_pages(responses: openai.OpenAI) -> None:
    texts = [f"Text {i}" for i in range(5)]
    items: Any = [{"role": "user", "content": text} for text in texts]
    stored = create(responses, input=items).id

    def listed(**options: Any) -> list[str]:
        return [
            item.model_dump()["content"][0]["text"] for item in responses.responses.input_items.list(stored, **options)
        ]

    assert listed() == listed(limit=2) == texts[::-1]
    assert listed(order="asc", limit=1) == texts
    for options in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "item_1"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(options))):
            listed(**options)
    with pytest.raises(openai.BadRequestError, match="stream"):
        responses.responses.retrieve(stored, stream=True)


def test_a_response_is_found_by_its_tenant_only(responses: openai.OpenAI, tenants: RunningEngine) -> None:
    secret = create(responses, input="A secret")
    with tenants.client("two") as other:
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask(secret.id)
        with pytest.raises(openai.BadRequestError, match="is not stored"):
            create(other, previous_response_id=secret.id)
        compared = create(other, prompt_cache_options={"comparison_response_id": secret.id})
        assert compared.prompt_cache_diagnostics
        assert compared.prompt_cache_diagnostics.type == "comparison_response_not_found"
    assert responses.responses.retrieve(secret.id).id == secret.id


def test_a_prompt_of_no_answer_is_computed_for_the_next_request(responses: openai.OpenAI) -> None:
    asked: Any = {"input": "Prepare this prompt", "instructions": "Be brief."}
    warmed = create(responses, **asked, prompt_cache_options={"prewarm": True, "ttl": "12h"})
    assert warmed.usage
    assert (warmed.output, warmed.status, warmed.usage.output_tokens) == ([], "completed", 0)
    details = warmed.usage.input_tokens_details.cache_write_tokens_details
    assert details
    assert details.ttl_12h_tokens == warmed.usage.input_tokens_details.cache_write_tokens
    assert read(create(responses, **asked)) == warmed.usage.input_tokens - 1


def test_a_diagnosis_names_the_difference(responses: openai.OpenAI) -> None:
    asked: Any = {"input": "Hello", "instructions": "Be brief."}
    earlier = create(responses, **asked)

    def diagnosis(**changes: Any) -> Any:
        options = {"comparison_response_id": earlier.id}
        found = create(responses, **{**asked, **changes}, prompt_cache_options=options).prompt_cache_diagnostics
        assert found
        return found.model_dump(exclude_none=True, exclude={"seconds", "evicted_tokens"})

    same = len("system:Be brief.\nuser:Hel")
    assert diagnosis(input="Help") == {
        "type": "cache_miss",
        "reason": "input_changed",
        "cache_missed_tokens": len("system:Be brief.\nuser:Hello\nassistant:") - same,
        "comparison_reusable_tokens": same,
        "message": 1,
    }
    assert diagnosis(instructions="No")["message"] == 0
    assert diagnosis() == {"type": "cache_hit"}
    assert diagnosis(previous_response_id=earlier.id, input="More") == {"type": "cache_hit"}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": None}, "input", "Field required"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": [MARKED], "instructions": "Be brief."}, "input[0].content[1].prompt_cache_breakpoint.mode", "mode"),
        (
            {"input": [CALL, {**RESULT, "output": MARKED["content"]}]},
            "input[1].output[1].prompt_cache_breakpoint.mode",
            "",
        ),
        ({"input": [CALL, RESULT, {**RESULT, "call_id": "2"}]}, "input[2].call_id", "no function_call before it has"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name", "Field required"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "all", "tools": [WEATHER]}},
            "tool_choice.mode",
            "'required'",
        ),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}}, "tool_choice.tools[0].name", ""),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools", "Field required"),
        (
            {"text": {"format": {"type": "json_schema", "name": 65 * "a", "schema": {}}}},
            "text.format.name",
            "at most 64",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": 1}}}}, "text.format.schema", ""),
        ({"input": 100_000 * "a"}, "input", "leave no room"),
        ({"input": [{"type": "web_search_call"}]}, "input", "item 0 is 'web_search_call'; this engine takes"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content",
            "part 0 is 'input_image'",
        ),
        ({"previous_response_id": UNKNOWN}, "previous_response_id", "is not stored"),
        ({"previous_response_id": "a:b"}, "previous_response_id", "is not stored"),
        ({"conversation": "conv_1", "store": False}, "conversation", "is stored: store is true"),
        ({"conversation": {"id": "a"}, "previous_response_id": "b"}, "conversation", "takes no previous_response_id"),
        ({"background": True}, "background", "this engine supports only false"),
        ({"truncation": "auto"}, "truncation", 'this engine supports only "disabled"'),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", 'this engine supports only "auto"'),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "this engine does not support it"),
        ({"prompt_cache_options": {"mode": "other"}}, "prompt_cache_options.mode", "Input should be 'implicit'"),
        ({"include": ["message.output_text.logprobs"]}, "include", "this engine supports only"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "Input should be 'function'"),
        ({"tools": [WEATHER]}, "tools", "this model has no tool calling"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "this model's chat template does not use it"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "Input should be 'user', 'assistant'"),
        ({"metadata": {"a": 513 * "b"}}, "metadata.a", "String should have at most 512 characters"),
        ({"metadata": {"a": 1}}, "metadata.a", "Input should be a valid string"),
    ],
)
def test_a_wrong_field_is_named(tenants: RunningEngine, fields: dict[str, Any], param: str, said: str) -> None:
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 1, **fields}
    reply = httpx.post(f"{tenants.url}/v1/responses", json=body, headers={"Authorization": "Bearer one"}, timeout=60)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert said in error["message"]


def test_an_error_of_a_tool_has_its_path_in_the_request() -> None:
    error = invalid("tools[3].function.parameters: of 'f': no", "tools[3].function.parameters")
    for names, path in ((schema.NAMES, "tools[3].parameters"), (anthropic.NAMES, "tools[3].input_schema")):
        found = renamed(error, names)
        assert (found.param, found.message) == (path, f"{path}: of 'f': no")


def test_a_call_that_was_cut_is_continued(responses: openai.OpenAI) -> None:
    cut: Any = {**CALL, "arguments": '{"city": ' + 2000 * "["}
    first = create(responses, input=[cut, RESULT])
    assert given(responses, first)[0]["arguments"] == cut["arguments"]
    assert create(responses, previous_response_id=first.id).output
    assert create(responses, input=[cut, RESULT, *first.output]).output


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (ResponseCreateParamsBase, ResponseBody),
        (EasyInputMessageParam, schema.MessageItem),
        (ResponseFunctionToolCallParam, schema.FunctionCallItem),
        (FunctionCallOutput, schema.FunctionResultItem),
        (ResponseReasoningItemParam, schema.ReasoningItem),
        (ItemReference, schema.ItemReference),
        (FunctionToolParam, schema.ResponseTool),
        (ResponseTextConfigParam, schema.TextConfig),
        (PromptCacheOptions, schema.PromptCacheOptions),
        (Reasoning, schema.Reasoning),
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_field_of_openais_types_is_documented(theirs: Any, ours: type[RequestBody]) -> None:
    assert undocumented(DOCS, theirs, ours, whole=ours is ResponseBody) == []


def test_a_stored_response_is_not_called_absent_during_an_outage(tmp_path: Path) -> None:
    """While the page server is away, new responses stay in memory, and nothing is said of others."""
    port = free_port()
    with (
        ExitStack() as servers,  # they end after the engine, which saves its contexts
        start_engine(write_tiny(tmp_path / "tiny"), "--store", f"redis://127.0.0.1:{port}") as engine,
        engine.client() as client,
    ):
        kept = create(client)
        assert create(client, previous_response_id=kept.id).output
        assert create(client, input=references(kept.output)).output
        for ask in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.InternalServerError, match="does not answer"):
                ask(UNKNOWN)
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            client.responses.delete(kept.id)
        servers.enter_context(start_server(port=port))
        until(lambda: httpx.get(f"{engine.url}/v1/responses/{UNKNOWN}").status_code == 404, "the server's reply")
        assert client.responses.retrieve(kept.id).output_text == kept.output_text
        client.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept.id)


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_response_of_an_outage_is_stored_after_it(tmp_path: Path, stopped: bool) -> None:
    """The engine stores it on the page server when that answers again, or at its own end."""
    port, model = free_port(), write_tiny(tmp_path / "tiny")
    store = f"redis://127.0.0.1:{port}"
    with ExitStack() as servers:
        code = 0 if stopped else -signal.SIGKILL
        with start_engine(model, "--store", store, code=code) as engine, engine.client() as client:
            kept = create(client)
            server = servers.enter_context(start_server(port=port))
            if not stopped:
                with server.client() as raw:
                    until(lambda: raw.exists(f"response::{kept.id}"), "the response on the server")
                engine.stop(signal.SIGKILL)
        with start_engine(model, "--store", store) as other, other.client() as client:
            assert client.responses.retrieve(kept.id).output_text == kept.output_text
            assert create(client, previous_response_id=kept.id).output


def test_lost_responses_are_logged_and_fail_the_exit(tmp_path: Path) -> None:
    store = f"redis://127.0.0.1:{free_port()}"
    with (
        start_engine(write_tiny(tmp_path / "tiny"), "--store", store, "--keep", "named", code=1) as engine,
        engine.client() as client,
    ):
        first = create(client)
        create(client, previous_response_id=first.id)
        client.conversations.create(items=[{"type": "message", "role": "user", "content": "Hello"}])
        assert httpx.get(f"{engine.url}/health").json()["waiting"] == 2 + 2 + 1 + 1
    lost = "2 responses, 1 conversation, 1 item could not be written to the page server (down)"
    assert lost in engine.final_log
    assert engine.final_log.count("responses and conversations wait in memory for the page server (down)") == 1


def test_a_response_that_another_engine_has_deleted_is_absent(server: RunningServer, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    with start_engine(model, "--store", server.url) as first, start_engine(model, "--store", server.url) as second:
        stored = create(first.client())
        second.client().responses.delete(stored.id)
        with pytest.raises(openai.NotFoundError):
            first.client().responses.retrieve(stored.id)
        with pytest.raises(openai.BadRequestError, match="is not stored"):
            create(first.client(), previous_response_id=stored.id)


def test_a_deleted_response_frees_its_context(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    """Blocks that another context continues stay, in memory and on the page server."""
    common = 600 * "a"
    model = write_tiny(tmp_path / "tiny")
    with start_engine(model, "--store", server.url, "--keep", "all") as engine, engine.client() as api:
        first = create(api, input=common + 300 * "b")
        until(lambda: len(client.keys("seal:*")) == 4, "the blocks of the first")
        seals = {*client.keys("seal:*")}
        other = create(api, input=common + 300 * "c")
        until(lambda: len(client.keys("seal:*")) == 6, "the blocks of both")
        api.responses.delete(other.id)
        assert {*client.keys("seal:*")} == seals
        assert read(create(api, input=common + 310 * "c", store=False)) == len("user:" + common)
        again = create(api, input=common + 300 * "b", max_output_tokens=1, store=False)
        assert read(again) == len("user:" + common) + 300 + len("\nassistant:") - 1
        api.responses.delete(first.id)
        until(lambda: client.keys("seal:*") == [], "the end of the blocks")
        assert client.keys("tails:*") == []


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "store"])
@pytest.mark.parametrize("question", ["Hello", 600 * "a"], ids=["short", "long"])
def test_a_deleted_response_leaves_contexts_of_others(
    server: RunningServer, client: redis.Redis, tmp_path: Path, stored: bool, question: str
) -> None:
    """The first response's context is a part of those of the second and the third, and is freed with the last one."""
    model = write_tiny(tmp_path / "tiny")
    options = ["--store", server.url, "--keep", "all"] if stored else []
    with start_engine(model, *options) as engine, engine.client() as api:
        first = create(api, input=question)
        assert first.usage
        prompt = first.usage.input_tokens
        chat: Any = [{"role": "user", "content": question}, {"role": "assistant", "content": first.output_text}]
        others = [
            create(api, previous_response_id=first.id, input=300 * "b"),
            create(api, input=[*chat, {"role": "user", "content": 300 * "c"}]),
            create(api, input=question),
        ]
        for other in others:
            api.responses.delete(other.id)
            assert read(create(api, input=question, max_output_tokens=1, store=False)) == prompt - 1
        if stored:
            with start_engine(model, *options) as second:
                assert read(create(second.client(), input=question, store=False)) == prompt - 1
        api.responses.delete(first.id)
        if stored:
            until(lambda: client.keys("seal:*") == [], "the end of the blocks")
            assert client.keys("end:*") == []
        assert read(create(api, input=question, max_output_tokens=1, store=False)) < 10


def test_a_response_that_is_not_stored_leaves_nothing(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    """It stays in the engine's memory, also when a second one continues it."""
    model = write_tiny(tmp_path / "tiny")
    with start_engine(model, "--store", server.url, "--keep", "all") as engine, engine.client() as api:
        first = create(api, input=600 * "a", store=False)
        second = create(api, input=600 * "a", store=False)
        named = create(api, input=600 * "b", user="alice", store=False)
        assert first.usage
        assert read(second) == first.usage.input_tokens - 1
        assert read(named) < 10
    assert [key for key in client.keys("*") if not key.startswith((b"kvpage:", b"stats"))] == []
