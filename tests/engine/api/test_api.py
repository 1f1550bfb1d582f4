"""The engine over HTTP: OpenAI's own client, plain sockets, and invalid requests."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_engines import CALL, RunningEngine, start_engine, write_caller, write_tiny
from servers import RunningServer
from waiting import PATIENCE, eventually

TOKENS = "# who may ask\n\nacme acme-secret\numbrella umbrella-secret\n* watcher-secret\n"
HELLO = [{"role": "user", "content": "Hello"}]
QUEUE = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def engine(tiny: Path, server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(TOKENS, encoding="utf-8")
    limits = ["--max-queue", str(QUEUE), "--max-body", "1mb"]
    with start_engine(tiny, "--token-file", str(tokens), "--store", server.url, *limits) as engine:
        engine.token, engine.watcher = "acme-secret", "watcher-secret"
        yield engine
        assert eventually(lambda: engine.metric("pending") == 0)


@pytest.fixture(scope="module")
def client(engine: RunningEngine) -> Iterator[openai.OpenAI]:
    with engine.client("acme-secret") as client:
        yield client


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """Start an engine with a model that calls a tool; a request has a limit of a second."""
    model = write_caller(tmp_path_factory.mktemp("models") / "caller")
    with start_engine(model, "--timeout", "1", "--max-tokens", "7") as engine:
        yield engine


def chat(client: openai.OpenAI, content: str = "Hello", **more: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12, **more}
    )


def test_a_chat_completion_suits_openais_client(client: openai.OpenAI) -> None:
    answer = chat(client)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "length", None)
    assert len(choice.message.content) == 12, "a letter a token"
    usage = answer.usage
    assert (usage.completion_tokens, usage.total_tokens) == (12, usage.prompt_tokens + 12)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert answer.kvpage["tier"] == "none"
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_a_stream_gives_the_same_text_in_chunks(client: openai.OpenAI) -> None:
    whole = chat(client, "Stream it", logprobs=True, top_logprobs=2)
    chunks = list(
        chat(client, "Stream it", stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2)
    )
    first, *deltas, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in deltas) == whole.choices[0].message.content
    entries = [token for chunk in deltas for token in chunk.choices[0].logprobs.content]
    assert [token.token for token in entries] == [token.token for token in whole.choices[0].logprobs.content]
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in entries)
    assert [bytes(token.bytes).decode() for token in entries] == list(whole.choices[0].message.content)
    assert last.choices[0].finish_reason == "length"
    assert last.kvpage.keys() == whole.kvpage.keys()
    assert usage.choices == []
    assert usage.usage.completion_tokens == 12
    assert {chunk.id for chunk in chunks} == {first.id}


def test_a_stream_ends_with_done(engine: RunningEngine) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "stream": True}
    reply = post(engine, "/v1/chat/completions", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


async def test_the_asynchronous_client_gets_the_same(engine: RunningEngine, client: openai.OpenAI) -> None:
    expected = chat(client, "Both ways").choices[0].message.content
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="acme-secret", max_retries=0) as other:
        options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Both ways"}], "max_tokens": 12}
        whole = await other.chat.completions.create(**options, temperature=0)
        stream = await other.chat.completions.create(**options, temperature=0, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == streamed == expected


def test_a_text_is_completed_with_the_likelihood_of_each_token(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": "Once there was", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options, logprobs=3)
    (choice,) = whole.choices
    assert whole.object == "text_completion"
    assert (choice.finish_reason, len(choice.text)) == ("length", 6)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(6))
    found = choice.logprobs
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == max(top.values()) == logprob
    stream = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == choice.text
    tokens = client.completions.create(**{**options, "prompt": [10, 11, 12]})
    assert tokens.usage.prompt_tokens == 3


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    text = chat(client, "Stop here", max_tokens=30).choices[0].message.content
    stop = text[10:13]
    expected = text[: text.index(stop)]
    whole = chat(client, "Stop here", max_tokens=30, stop=stop)
    streamed = list(chat(client, "Stop here", max_tokens=30, stop=["\x00", stop], stream=True))
    assert whole.choices[0].message.content == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
    assert streamed[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


async def test_a_seed_gives_the_same_text_in_any_batch(engine: RunningEngine) -> None:
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="acme-secret", max_retries=0) as client:

        async def draw(seed: int | None) -> str:
            answer = await client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=16, temperature=1.3, top_p=0.9, seed=seed
            )
            return answer.choices[0].message.content

        alone = await draw(5)
        crowd = await asyncio.gather(*(draw(seed) for seed in (5, 6, None, None, 5)))
    assert crowd[0] == crowd[4] == alone
    assert len({*crowd}) == 4


async def test_thirty_two_concurrent_answers_equal_single_ones(engine: RunningEngine, client: openai.OpenAI) -> None:
    questions = [f"Question {i}" for i in range(32)]
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="acme-secret", max_retries=0) as crowd:

        async def ask(question: str, i: int) -> str:
            options: Any = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 8}
            options |= {"temperature": 0, "extra_body": {"agent_id": f"one-of-{i}"}}
            if i % 2:
                answer = await crowd.chat.completions.create(**options)
                return answer.choices[0].message.content
            stream = await crowd.chat.completions.create(**options, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*map(ask, questions, range(32)))
    for i in (0, 1, 30, 31):
        assert chat(client, questions[i], max_tokens=8).choices[0].message.content == together[i]
    assert len({*together}) > 16


async def test_a_full_queue_returns_429(engine: RunningEngine) -> None:
    headers = {"Authorization": "Bearer acme-secret"}
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 60}
    async with httpx.AsyncClient(base_url=engine.url, headers=headers, timeout=60) as client:
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(QUEUE + 15)))
    refused = [reply for reply in replies if reply.status_code == 429]
    assert len(refused) + sum(reply.status_code == 200 for reply in replies) == QUEUE + 15
    assert refused
    assert {reply.headers["retry-after"] for reply in refused} == {"1"}
    assert refused[0].json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_the_engine_at_once(engine: RunningEngine, stream: bool) -> None:
    cancelled = engine.metric("cancelled_total")
    assert eventually(lambda: engine.metric("pending") == 0)
    before = engine.metric("pool_used_blocks")
    endless = {"model": "tiny", "messages": HELLO, "max_tokens": 3900, "temperature": 0, "stream": stream}
    body = json.dumps(endless).encode()
    host, _, port = engine.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer acme-secret\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        if stream:
            received = b""
            while received.count(b"data: ") < 5:
                received += sock.recv(4096)
        assert eventually(lambda: engine.metric("pending") == 1)
        assert eventually(lambda: engine.metric("pool_used_blocks") > before + 8)  # it has left the queue
        used = engine.metric("pool_used_blocks")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not a goodbye
    assert eventually(lambda: engine.metric("pending") == 0)
    assert eventually(lambda: engine.metric("pool_used_blocks") < used - 8), "3,900 tokens were reserved"
    assert engine.metric("cancelled_total") == cancelled + 1


def post(engine: RunningEngine, path: str, body: Any, token: str = "acme-secret") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.post(engine.url + path, content=content, headers=headers, timeout=60)


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "max_tokens": 2, **changes}


IMAGE = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
BAD = {
    "no JSON": (b"{", None, 400),
    "no object": (b"[]", None, 400),
    "no UTF-8": (b'{"model": "\xff"}', None, 400),
    "half a character": (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', None, 400),
    "nested without end": (b"[" * 100_000, None, 400),
    "too long": (b" " * (1 << 20) + b"{}", None, 413),
    "nothing asked": ({}, "model", 400),
    "another model": (asked(model="gpt-17"), "model", 404),
    "a model that is no text": (asked(model=7), "model", 400),
    "no messages": ({"model": "tiny"}, "messages", 400),
    "an empty list": (asked(messages=[]), "messages", 400),
    "messages that are none": (asked(messages="Hello"), "messages", 400),
    "an unknown role": (asked(messages=[{"role": "king", "content": "Hello"}]), "messages[0].role", 400),
    "an image": (asked(messages=[*HELLO, {"role": "user", "content": IMAGE}]), "messages[1].content", 400),
    "a number for a text": (asked(messages=[{"role": "user", "content": 5}]), "messages[0].content", 400),
    "a negative temperature": (asked(temperature=-0.1), "temperature", 400),
    "too hot": (asked(temperature=2.1), "temperature", 400),
    "a temperature in letters": (asked(temperature="warm"), "temperature", 400),
    "a temperature that is no number": (b'{"model": "tiny", "messages": [], "temperature": NaN}', None, 400),
    "a top_p above 1": (asked(top_p=1.5), "top_p", 400),
    "no tokens": (asked(max_tokens=0), "max_tokens", 400),
    "tokens by the half": (asked(max_tokens=1.5), "max_tokens", 400),
    "no answer": (asked(n=0), "n", 400),
    "too many answers": (asked(n=33), "n", 400),
    "an empty stop": (asked(stop=""), "stop[0]", 400),
    "too many logprobs": (asked(logprobs=True, top_logprobs=21), "top_logprobs", 400),
    "top logprobs without logprobs": (asked(top_logprobs=3), "top_logprobs", 400),
    "the best of two": (asked(best_of=2), "best_of", 400),
    "an enormous seed": (asked(seed=1 << 64), "seed", 400),
    "a penalty above 2": (asked(frequency_penalty=2.5), "frequency_penalty", 400),
    "a bias above 100": (asked(logit_bias={"5": 101}), "logit_bias[5]", 400),
    "a bias of a word": (asked(logit_bias={"five": 1}), "logit_bias", 400),
    "a bias of Arabic digits": (asked(logit_bias={"\u0665": 1}), "logit_bias", 400),
    "biases in a list": (asked(logit_bias=[1]), "logit_bias", 400),
    "a bias beyond the vocabulary": (asked(logit_bias={"999999999": 1}), "logit_bias", 400),
    "a stop token beyond the vocabulary": (asked(stop_token_ids=[999999999]), "stop_token_ids", 400),
    "a negative stop token": (asked(stop_token_ids=[-1]), "stop_token_ids[0]", 400),
    "more tokens than the limit": (asked(min_tokens=3), "min_tokens", 400),
    "a top_k below -1": (asked(top_k=-2), "top_k", 400),
    "a min_p above 1": (asked(min_p=1.1), "min_p", 400),
    "an XTC threshold above one half": (asked(xtc_threshold=0.6), "xtc_threshold", 400),
    "a repetition penalty of 0": (asked(repetition_penalty=0), "repetition_penalty", 400),
    "a penalty of llama.cpp": (asked(repeat_penalty=1.1), "repeat_penalty", 400),
    "a function to be called": (asked(function_call={"name": "weather"}), "function_call", 400),
    "tools for a model without": (
        asked(tools=[{"type": "function", "function": {"name": "weather"}}]),
        "tools",
        400,
    ),
    "a tool without a name": (asked(tools=[{"type": "function", "function": {}}]), "tools[0].function.name", 400),
    "an agent with a slash": (asked(agent_id="../alice"), "agent_id", 400),
    "an agent of another tenant": (asked(agent_id="alice@umbrella"), "agent_id", 400),
    "an agent without a name": (asked(agent_id=""), "agent_id", 400),
    "an agent of 10 KB": (asked(agent_id="a" * 10_240), "agent_id", 400),
    "a prompt beyond the context": (asked(messages=[{"role": "user", "content": "a" * 5000}]), "messages", 400),
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_names_the_wrong_parameter(engine: RunningEngine, name: str) -> None:
    body, param, status = BAD[name]
    reply = post(engine, "/v1/chat/completions", body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), reply.text
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(reply.content) < 2000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["one", 2]}, "prompt[0]"),
        ({"prompt": ["a"] * 33}, "prompt"),
        ({"prompt": ["a"] * 11, "n": 3}, "prompt"),
        ({"prompt": ["a", "b"], "agent_id": "alice"}, "agent_id"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [97]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [[5, -1]]}, "prompt[0][1]"),
        ({"prompt": [[5], []]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[[5]]]}, "prompt[0][0]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a" * 4096}, "prompt"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_an_error_names_the_wrong_text(engine: RunningEngine, body: dict[str, Any], param: str) -> None:
    reply = post(engine, "/v1/completions", {"model": "tiny", **body})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_the_allowed_values_of_a_field_are_shown_as_json(engine: RunningEngine) -> None:
    reply = post(engine, "/v1/completions", {"model": "tiny", "prompt": "a", "grammar": "b"})
    assert reply.json()["error"]["message"] == 'grammar: this engine supports only ""'


def test_openais_client_raises_its_usual_exceptions(engine: RunningEngine, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        chat(client, model="gpt-17")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=-1)
    assert caught.value.param == "temperature"
    for token in ("wrong", "acme", "acme-secret-more"):
        with engine.client(token) as stranger, pytest.raises(openai.AuthenticationError):
            chat(stranger)


def test_fields_that_change_nothing_are_ignored(client: openai.OpenAI) -> None:
    options: Any = {"metadata": {"a": "b"}, "service_tier": "auto", "store": False, "parallel_tool_calls": True}
    assert chat(client, **options, extra_body={"unheard_of": 1, "stop": None, "seed": None}).choices


@pytest.mark.parametrize("path", ["/nope", "/v1/nope", "/v1/chat/completions", "/v1/models/other"])
def test_there_is_no_such_page(engine: RunningEngine, path: str) -> None:
    reply = httpx.get(engine.url + path, headers={"Authorization": "Bearer acme-secret"})
    assert (reply.status_code, reply.headers.get("allow")) in ((404, None), (405, "POST"))
    assert path in reply.json()["error"]["message"] or "'other' is not served here" in reply.text


def test_nothing_can_be_had_without_a_token_but_its_health(engine: RunningEngine) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/v1/agents", "/v1/agents/alice"):
        assert httpx.get(engine.url + path).status_code == 401, path
    assert post(engine, "/v1/chat/completions", asked(), token="").headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/health/live", "/health/ready"):
        assert httpx.get(engine.url + path).json().items() <= {"status": "ok", "store": "ok"}.items()
    assert httpx.get(engine.url + "/metrics").status_code == 401
    metrics = httpx.get(engine.url + "/metrics", headers={"Authorization": "Bearer watcher-secret"}).text
    assert 'kvpage_engine_requests_total{endpoint="chat",status="401"}' in metrics
    assert "secret" not in metrics
    assert post(engine, "/v1/chat/completions", asked(), token="watcher-secret").status_code == 403


def test_a_tenant_sees_metrics_of_its_own_answers_only(engine: RunningEngine) -> None:
    def metrics_of(token: str) -> str:
        return httpx.get(engine.url + "/metrics", headers={"Authorization": f"Bearer {token}"}).text

    def answers(token: str) -> float:
        return sum(
            map(float, re.findall(r"^kvpage_engine_answers_total\{.*\} (\S+)$", metrics_of(token), re.MULTILINE))
        )

    before = answers("acme-secret"), answers("umbrella-secret"), answers("watcher-secret")
    post(engine, "/v1/chat/completions", asked(), token="acme-secret").raise_for_status()
    assert answers("acme-secret") == before[0] + 1
    assert answers("umbrella-secret") == before[1]
    assert answers("watcher-secret") == before[2] + 1
    assert "kvpage_engine_pool_used_bytes" in metrics_of("watcher-secret")
    for of_all in ("pool", "requests", "hot_agents", "pending", "tier_hits"):
        assert f"kvpage_engine_{of_all}" not in metrics_of("umbrella-secret")


def test_tenants_share_nothing(engine: RunningEngine) -> None:
    """Neither agents nor common blocks."""

    def ask(agent: str, token: str) -> Any:
        with engine.client(token) as client:
            return chat(client, "A secret of our own. " * 40, extra_body={"agent_id": agent})

    def agents(method: str, path: str, token: str, body: Any = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.request(method, f"{engine.url}/v1/agents{path}", headers=headers, json=body)

    first = ask("alice", "acme-secret")
    cousin = ask("bob", "acme-secret")
    stranger = ask("alice", "umbrella-secret")
    assert first.choices == cousin.choices == stranger.choices
    assert cousin.kvpage["tokens_reused"] >= 512
    assert (stranger.kvpage["tier"], stranger.kvpage["tokens_reused"]) == ("none", 0)
    listed = [agents("GET", "", token).json()["data"] for token in ("acme-secret", "umbrella-secret")]
    acme, umbrella = ({agent["id"] for agent in found} for found in listed)
    assert {"alice", "bob"} <= acme
    assert umbrella == {"alice"}
    assert agents("GET", "/bob", "umbrella-secret").status_code == 404
    assert agents("DELETE", "/bob", "umbrella-secret").status_code == 404
    assert agents("POST", "/bob/fork", "umbrella-secret", {"to": "mine"}).status_code == 404
    assert agents("DELETE", "/alice", "umbrella-secret").status_code == 200
    assert ask("alice", "acme-secret").kvpage["tier"] == "hot"
    assert "secret" not in engine.log


def weather(engine: RunningEngine, **more: Any) -> Any:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "How is it in Oslo?"}]
    with engine.client() as client:
        answer = client.chat.completions.create(model="caller", messages=messages, temperature=0, tools=tools, **more)
        return list(answer) if more else answer


def test_a_cut_call_can_be_sent_back(caller: RunningEngine) -> None:
    """`max_tokens` cuts the arguments of a forced call. A client sends them with the error as the tool's result."""
    call: Any = {"id": "a", "type": "function", "function": {"name": "weather"}}
    result = {"role": "tool", "content": "the arguments are not JSON", "tool_call_id": "a"}

    def tokens(client: openai.OpenAI) -> int:
        sent: Any = [*HELLO, {"role": "assistant", "tool_calls": [call]}, result]
        return client.chat.completions.create(model="caller", messages=sent).usage.prompt_tokens  # type: ignore[union-attr]

    found = set()
    with caller.client() as client:
        for arguments in ("{}", "", "null", "[1]", '{"ci'):
            call["function"]["arguments"] = arguments
            found.add(tokens(client))
    assert len(found) == 1


def test_a_tool_is_called(caller: RunningEngine) -> None:
    (choice,) = weather(caller).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == json.loads(CALL)["arguments"]
    spoken = [*HELLO, choice.message.model_dump(), {"role": "tool", "content": "Rain", "tool_call_id": call.id}]
    with caller.client() as client:
        assert client.chat.completions.create(model="caller", messages=spoken, temperature=0).choices


def test_a_tool_is_called_in_a_stream(caller: RunningEngine) -> None:
    *chunks, last = weather(caller, stream=True)
    call, arguments = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name, call.function.arguments) == (0, "weather", "")
    assert (arguments.index, arguments.id, json.loads(arguments.function.arguments)) == (0, None, {"city": "Oslo"})
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert last.choices[0].finish_reason == "tool_calls"


def test_a_body_has_its_time(caller: RunningEngine) -> None:
    """A byte now and then does not keep a connection."""
    with socket.create_connection(("127.0.0.1", caller.port), timeout=10) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n{")
        sock.settimeout(0.2)
        received = b""
        deadline = time.monotonic() + PATIENCE
        with suppress(ConnectionError):  # a byte that the server no longer reads resets the connection
            while time.monotonic() < deadline:
                try:
                    if not (part := sock.recv(4096)):
                        break
                    received += part
                except TimeoutError:
                    sock.sendall(b" ")
    assert received.startswith(b"HTTP/1.1 408 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
    assert time.monotonic() < deadline
    assert 'endpoint="chat",status="408"' in httpx.get(f"{caller.url}/metrics").text


def test_time_is_up(caller: RunningEngine) -> None:
    endless = {"model": "caller", "prompt": "a", "max_tokens": 4000, "temperature": 0}
    before = caller.metric("pool_used_blocks")
    reply = post(caller, "/v1/completions", endless)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
    *chunks, last, _ = post(caller, "/v1/completions", endless | {"stream": True}).text.split("\n\n")
    assert len(chunks) > 3
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    with caller.client() as client, pytest.raises(openai.APIError, match="within 1 seconds"):
        list(client.completions.create(**endless, stream=True))
    assert eventually(lambda: (caller.metric("pending"), caller.metric("pool_used_blocks")) == (0, before))
