"""Every field of a request is honoured, refused by name, or documented as one that changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import httpx
import openai.types.completion_create_params as text_params
import pytest
from api_engines import RunningEngine, start_engine, write_caller, write_tiny
from openai.types.chat import completion_create_params as chat_params
from openai.types.shared import ErrorObject
from typing_extensions import is_typeddict

from engine.api.anthropic.schema import MessagesBody
from engine.api.openai import schema
from engine.api.openai.errors import ApiError
from engine.api.openai.response_schema import ResponseBody
from engine.api.openai.schema import ChatBody, CompletionBody, RequestBody

API = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
SITE = "https://chat.example"
HELLO = [{"role": "user", "content": "Hello"}]
ORIGINAL: dict[type[RequestBody], dict[str, Any]] = {
    ChatBody: {"model": "tiny", "messages": HELLO},
    CompletionBody: {"model": "tiny", "prompt": "Hello"},
    ResponseBody: {"model": "tiny", "input": "Hello"},
    MessagesBody: {"model": "tiny", "messages": HELLO, "max_tokens": 1},
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SDK = {  # OpenAI's types of requests
    CHAT: (chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming),
    TEXT: (text_params.CompletionCreateParamsNonStreaming, text_params.CompletionCreateParamsStreaming),
}
BODIES = {CHAT: ChatBody, TEXT: CompletionBody}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def said(**more: Any) -> dict[str, Any]:
    """A body whose last message is the assistant's, with further fields."""
    return {"messages": [*HELLO, {"role": "assistant", "content": "Hi", **more}, *HELLO]}


def part(**part: Any) -> dict[str, Any]:
    """A body with a message of one part."""
    return {"messages": [{"role": "user", "content": [part]}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # bodies that the SDK's types allow, and the fields in the refusals
    "audio": ({"audio": {"format": "wav", "voice": "alloy"}}, "audio"),
    "function_call": ({"function_call": {"name": "f"}}, "function_call"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "messages[].audio": (said(audio={"id": "a"}), "messages[1].audio"),
    "messages[].content[].file": (part(type="file", file={"file_id": "f"}), "messages[0].content"),
    "messages[].content[].image_url": (part(type="image_url", image_url={"url": IMAGE}), "messages[0].content"),
    "messages[].content[].input_audio": (
        part(type="input_audio", input_audio={"data": "", "format": "wav"}),
        "messages[0].content",
    ),
    "messages[].function_call": (said(function_call={"name": "f", "arguments": "{}"}), "messages[1].function_call"),
    "messages[].tool_calls[].custom": (
        said(tool_calls=[{"type": "custom", "id": "c", "custom": {"name": "f", "input": ""}}]),
        "messages[1].tool_calls[0].type",
    ),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "moderation": ({"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
    "tools[].custom": ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    "verbosity": ({"verbosity": "low"}, "verbosity"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options"),
}
IGNORED: dict[str, dict[str, Any]] = {
    "metadata": {"metadata": {"a": "b"}},
    "prediction": {"prediction": {"type": "content", "content": "Hello"}},
    "prompt_cache_key": {"prompt_cache_key": "key"},
    "safety_identifier": {"safety_identifier": "user"},
    "service_tier": {"service_tier": "flex"},
    "store": {"store": True},
    "stream_options.include_obfuscation": {"stream_options": {"include_obfuscation": True}},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("acme acme-secret\n", encoding="utf-8")
    model = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    with start_engine(model, "--allow-origin", SITE, "--token-file", str(tokens)) as engine:
        yield engine


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with start_engine(write_caller(tmp_path_factory.mktemp("models") / "caller")) as engine:
        yield engine


def post(engine: RunningEngine, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    kind = ChatBody if "chat" in path else CompletionBody
    options: Any = {"headers": {"Authorization": "Bearer acme-secret"}, "timeout": 60}
    return httpx.post(engine.url + path, json={**ORIGINAL[kind], "max_tokens": 2, **body}, **options)


def table() -> dict[str, str]:
    """Return the table of fields in docs/api.md: honoured, ignored or refused, by field."""
    rows = re.findall(r"^\| (`.*`) \| (honoured|ignored|refused) \|", API, re.MULTILINE)
    return {field: status for fields, status in rows for field in re.findall("`(.*?)`", fields)}


def sdk_fields(kind: Any, path: str = "") -> Iterator[str]:
    """Yield the fields of one of the SDK's types, and the fields within them."""
    if is_typeddict(kind):
        for name, hint in get_type_hints(kind).items():
            yield path + name
            yield from sdk_fields(hint, f"{path}{name}.")
    elif get_origin(kind) is not dict:
        many = get_origin(kind) in (list, Iterable, Sequence)
        for inner in get_args(kind):
            yield from sdk_fields(inner, f"{path[:-1]}[]." if many else path)


def has(schema: Any, field: str, definitions: dict[str, Any]) -> bool:
    """Return whether a JSON Schema has a field, which may be within others."""
    if reference := schema.get("$ref"):
        return has(definitions[reference.rpartition("/")[2]], field, definitions)
    if alternatives := schema.get("anyOf"):
        return any(has(one, field, definitions) for one in alternatives)
    name, _, rest = field.partition(".")
    found = schema.get("properties", {}).get(name.removesuffix("[]"), {"description": "Not supported."})
    if not rest:
        return found.get("description") != "Not supported."
    inner = [one.get("items", one) if name.endswith("[]") else one for one in (found, *found.get("anyOf", ()))]
    return any(has(one, rest, definitions) for one in inner)


def test_the_table_has_every_field_of_openais_types() -> None:
    status, every = table(), {field for kinds in SDK.values() for kind in kinds for field in sdk_fields(kind)}
    assert status.keys() <= every
    for field in every:
        rows = [row for row in status if field == row or field.startswith((f"{row}.", f"{row}[]."))]
        assert rows, field
    assert {row for row in status if status[row] == "refused"} == REFUSED.keys()
    assert {row for row in status if status[row] == "ignored"} == IGNORED.keys()


def test_the_schema_has_the_fields_that_are_honoured() -> None:
    schemas = [kind.model_json_schema() for kind in BODIES.values()]
    for row, status in table().items():
        found = any(has(schema, row, schema["$defs"]) for schema in schemas)
        assert found == (status == "honoured"), row


@pytest.mark.parametrize("field", REFUSED)
def test_refused_fields_are_400_with_their_name(engine: RunningEngine, field: str) -> None:
    body, param = REFUSED[field]
    reply = post(engine, **body)
    assert reply.status_code == 400
    error = ErrorObject.model_validate(reply.json()["error"])
    assert (error.type, error.param) == ("invalid_request_error", param)
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize("field", IGNORED)
def test_ignored_fields_change_nothing(caller: RunningEngine, field: str) -> None:
    body = IGNORED[field]
    without = {"tools": TOOLS} if "tools" in body else {}
    answers = [post(caller, model="caller", temperature=0, **fields).json() for fields in (body, without)]
    assert [answer["choices"] for answer in answers[:1]] == [answer["choices"] for answer in answers[1:]]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


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


def test_a_schema_in_another_apis_form_is_honoured_or_refused() -> None:
    of = {"type": "object", "properties": {"a": {"const": 1}}}
    for kind in ("json_object", "json_schema"):  # llama.cpp's form
        body = ChatBody.of({**ORIGINAL[ChatBody], "response_format": {"type": kind, "schema": of}})
        assert body.constraints.keys() == {"response_format.json_schema.schema"}
        found = ResponseBody.of({**ORIGINAL[ResponseBody], "text": {"format": {"type": kind, "schema": of}}})
        assert found.chat([]).constraints.keys() == {"response_format.json_schema.schema"}
    earlier = MessagesBody.of({**ORIGINAL[MessagesBody], "output_format": {"type": "json_schema", "schema": of}})
    assert earlier.chat().constraints.keys() == {"response_format.json_schema.schema"}
    nested = {"format": {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}}
    error = refusal(ResponseBody, text=nested)
    assert (error.param, error.code) == ("text.format.schema", "missing_required_parameter")
    assert refusal(ResponseBody, response_format={"type": "json_object"}).param == "response_format"
    assert refusal(ChatBody, instructions="Be brief.").param == "instructions"


# Fields of other APIs that change no answer of an API.
HARMLESS = {"cache_control", "diagnostics", "metadata", "prompt_cache_key", "prompt_cache_options"}
HARMLESS |= {"prompt_cache_retention", "store", "stream_options", "user", "xtc_threshold"}
OF_TEMPLATES = {"add_generation_prompt", "chat_template_kwargs", "continue_final_message", "enable_thinking"}
OF_TEMPLATES |= {"parallel_tool_calls"}


def own_fields(kind: type[RequestBody]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


@pytest.mark.parametrize("kind", ORIGINAL)
def test_fields_of_other_apis_are_honoured_or_refused(kind: type[RequestBody]) -> None:
    harmless = HARMLESS | (OF_TEMPLATES if kind is CompletionBody else set())
    names = set().union(*map(own_fields, ORIGINAL))
    if kind is not CompletionBody:
        names |= ChatBody.unsupported.keys()
    for name in names - harmless:
        assert (name in own_fields(kind)) != (name in kind.unsupported), name


def test_calls_and_thoughts_in_a_chats_form_are_refused() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for name, value in (("tool_calls", [call]), ("reasoning_content", "Hm")):
        messages = [*HELLO, {"role": "assistant", "content": "Hi", name: value}]
        assert refusal(MessagesBody, messages=messages).param == f"messages[1].{name}"
        assert refusal(ResponseBody, input=messages).param == f"input[1].{name}"


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


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_fields_of_other_servers_are_refused_by_name(kind: type[RequestBody]) -> None:
    given: dict[str, Any] = {
        "thinking_token_budget": 1,
        "repetition_detection": {"min_count": 2},
        "return_token_ids": True,
        "vllm_xargs": {"a": 1},
        "samplers": ["top_k"],
        "top_n_sigma": 1,
        "custom_logit_processor": "x",
    }
    given |= {"include_reasoning": False, "reasoning_format": "none"} if kind is ChatBody else {"prompt_embeds": "x"}
    given["add_special_tokens"] = kind is ChatBody
    for field, value in given.items():
        with pytest.raises(ApiError, match=f"^{field}: this engine ") as refused:
            kind.of(ORIGINAL[kind] | {field: value})
        assert refused.value.param == field
    neutral = {"return_token_ids": False, "top_n_sigma": -1, "vllm_xargs": {}, "include_reasoning": True}
    assert kind.of(ORIGINAL[kind] | neutral | {"add_special_tokens": kind is not ChatBody})


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponseBody, MessagesBody])
def test_an_error_names_no_type_of_this_program(kind: type[RequestBody]) -> None:
    said: list[str] = []
    for field in kind.model_fields:
        values: list[Any] = [1, "x", [1], {}, [{}], {"type": "x"}, [{"type": "function", "function": 1}], {"format": 1}]
        for value in values:
            try:
                kind.of(ORIGINAL[kind] | {field: value})
            except ApiError as error:
                said.append(str(error))
    assert [text for text in said if re.search("instance of|dictionary|[a-z][A-Z]", text)] == []
    assert any("should be an object" in text for text in said)
