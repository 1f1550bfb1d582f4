"""Headers of requests and replies: ids of requests, tokens, and CORS of failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest
from api_engines import RunningEngine
from starlette.testclient import TestClient

from engine.api.metrics import Metrics
from engine.api.models import Models
from engine.api.openai.errors import ApiError
from engine.api.openai.schema import ChatBody
from engine.api.server import make_app
from engine.api.service import Service

SITE = "https://chat.example"
HELLO: Any = [{"role": "user", "content": "Hello"}]


def test_sdks_read_the_ids_of_requests(tenants: RunningEngine) -> None:
    chats = openai.OpenAI(base_url=f"{tenants.url}/v1", api_key="one", max_retries=0).chat.completions
    made = [chats.create(model="tiny", messages=HELLO, max_tokens=1)._request_id for _ in range(2)]
    messages = anthropic.Anthropic(base_url=tenants.url, api_key="one", max_retries=0).messages
    made.append(messages.create(model="tiny", messages=HELLO, max_tokens=1)._request_id)
    with pytest.raises(openai.NotFoundError) as refused:
        chats.create(model="another", messages=HELLO)
    with pytest.raises(anthropic.NotFoundError) as refused_too:
        messages.create(model="another", messages=HELLO, max_tokens=1)
    made += [refused.value.request_id, refused_too.value.request_id]
    assert all(name and name.startswith("req_") for name in made)
    assert len({*made}) == len(made)


def test_two_different_tokens_are_refused(tenants: RunningEngine) -> None:
    def status(authorization: str, key: str) -> int:
        headers = {"Authorization": authorization, "X-Api-Key": key}
        return httpx.get(f"{tenants.url}/v1/models", headers=headers).status_code

    assert status("Bearer one", "one") == 200
    assert [status(*words) for words in (("Bearer one", "two"), ("Bearer one", "x"), ("Bearer x", "one"))] == [401] * 3

    def twice(name: str, *values: str) -> int:
        given = [(name, value) for value in values]
        return httpx.get(f"{tenants.url}/v1/models", headers=given).status_code

    assert [twice("Authorization", "Bearer one", f"Bearer {token}") for token in ("one", "two")] == [200, 401]
    assert [twice("X-Api-Key", "one", token) for token in ("one", "two")] == [200, 401]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages"])
def test_a_failure_has_the_headers_of_other_replies(path: str) -> None:
    metrics = Metrics(cast(Models, SimpleNamespace(by_name={}, loaded=[])), lambda: 0)
    app = make_app(cast(Service, SimpleNamespace(metrics=metrics, tokens=None)), "localhost", [SITE])
    app.state.service = None
    client = TestClient(app, "http://localhost", raise_server_exceptions=False)
    reply = client.request("POST" if "messages" in path else "GET", path, headers={"Origin": SITE})
    assert (reply.status_code, reply.headers["Access-Control-Allow-Origin"]) == (500, SITE)
    assert reply.headers["request-id" if "messages" in path else "x-request-id"].startswith("req_")
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert "the server has failed" in reply.json()["error"]["message"]
    assert b'status="500"' in metrics.exposition(SimpleNamespace(name=""))  # type: ignore[arg-type]


def test_half_of_a_surrogate_pair_is_named() -> None:
    for half in (rb"\ud800", rb"\udc00"):
        with pytest.raises(ApiError, match="half of a surrogate pair"):
            ChatBody.parse(b'{"model": "%b"}' % half)
    with pytest.raises(ApiError, match="nested too deeply: 200 levels"):
        ChatBody.parse(b"[" * 202 + b"]" * 202)
