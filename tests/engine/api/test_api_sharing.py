"""Clients without agent ids over HTTP: the reused tokens, the figures in the answer, and the stored keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from api_engines import RunningEngine, start_engine, write_tiny
from servers import RunningServer
from waiting import eventually

SYSTEM = {"role": "system", "content": "The keeper minds the light. " * 20}
TOKENS = "acme one\nacme two\nother three\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    (tmp_path / "tokens").write_text(TOKENS, encoding="utf-8")
    return str(tmp_path / "tokens")


def chat(engine: RunningEngine, text: str, token: str = "none", **more: Any) -> tuple[int, int]:
    """How many tokens of a prompt were reused, and how many it has."""
    messages = [SYSTEM, {"role": "user", "content": text}]
    return asked(engine, "chat/completions", {"messages": messages, **more}, token)


def text(engine: RunningEngine, prompt: str, token: str = "none") -> tuple[int, int]:
    return asked(engine, "completions", {"prompt": prompt}, token)


def asked(engine: RunningEngine, path: str, body: dict[str, Any], token: str) -> tuple[int, int]:
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0, **body}
    reply = httpx.post(f"{engine.url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)
    assert reply.status_code == 200, reply.text
    completion = reply.json()
    usage, kvpage = completion["usage"], completion["kvpage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert kvpage["tokens_reused"] == cached
    assert (kvpage["tier"] == "none") == (cached == 0)
    assert (kvpage["why"] is None) == (cached > 0)
    return cached, usage["prompt_tokens"]


def test_the_reused_tokens_are_exact_for_chats_texts_and_streams(model: Path) -> None:
    with start_engine(model) as engine:
        assert chat(engine, "Hello there")[0] == 0
        cached, prompt = chat(engine, "Hello there")
        assert cached == prompt - 1
        assert text(engine, "Once upon a time")[0] <= 1
        cached, prompt = text(engine, "Once upon a time")
        assert cached == prompt - 1
        with engine.client() as client:
            messages: Any = [SYSTEM, {"role": "user", "content": "Hello there"}]
            *_, last = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
        assert last.usage
        assert last.usage.prompt_tokens_details
        assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens - 1


def test_with_share_none_only_the_same_client_reuses(model: Path, tokens: str) -> None:
    with start_engine(model, "--token-file", tokens, "--share", "none") as engine:
        for ask in (chat, text):
            assert ask(engine, "Hello there", "one")[0] == 0
            cached, prompt = ask(engine, "Hello there", "one")
            assert cached == prompt - 1
            assert ask(engine, "Hello there", "two")[0] == 0, "another token of the tenant"
            assert ask(engine, "Hello there", "three")[0] == 0
        assert chat(engine, "Hello there", "one", agent_id="alice")[0] == 0
        cached, prompt = chat(engine, "Hello there", "two", agent_id="alice")
        assert cached == prompt - 1


def test_with_share_system_all_clients_reuse_the_system_message(model: Path, tokens: str) -> None:
    with start_engine(model, "--token-file", tokens, "--share", "system") as engine:
        assert chat(engine, "Hello there", "one")[0] == 0
        cached, prompt = chat(engine, "Hello there", "two")
        assert cached == 512 < prompt - 1
        assert chat(engine, "Hello there", "three")[0] == 0, "another tenant"
        assert text(engine, "Hello there" * 40, "one")[0] == 0
        assert text(engine, "Hello there" * 40, "two")[0] == 0


@pytest.mark.parametrize(
    ("options", "label"),
    [
        (["all"], "A secret question"),
        (["none"], "#"),
        (["system"], "#"),
        (["none", "--labels", "words"], "A secret question"),
    ],
)
def test_page_hides_words_of_other_clients(model: Path, tokens: str, options: list[str], label: str) -> None:
    with start_engine(model, "--token-file", tokens, "--share", *options) as engine:
        chat(engine, "A secret question", "one")
        with httpx.stream("GET", f"{engine.url}/page/events", headers={"Authorization": "Bearer two"}) as reply:
            lines = reply.iter_lines()
            assert "event: answers" in lines
            (answer,) = json.loads(next(lines).removeprefix("data: "))
    assert answer["label"].startswith(label)


def test_an_agent_cannot_be_called_like_a_prompt_without_a_name(model: Path) -> None:
    with start_engine(model) as engine:
        body = {"model": "tiny", "prompt": "a", "agent_id": f"anon-{16 * '0'}-{32 * '0'}"}
        reply = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "agent_id"


def test_labels_and_kept_contexts_are_configurable(model: Path, server: RunningServer, client: redis.Redis) -> None:
    def stored(pattern: str) -> list[bytes]:
        found: list[bytes] = client.keys(pattern)
        return found

    with start_engine(model, "--store", server.url, "--keep", "all", "--labels", "hash") as engine:
        chat(engine, "A secret question")
        assert eventually(lambda: bool(stored("label:*")))
    labels = {client.get(key) for key in stored("label:*")}
    assert len(labels) == 1
    assert all(label and label.startswith(b"#") and len(label) == 9 for label in labels)
    client.flushall()
    with start_engine(model, "--store", server.url, "--keep", "named") as engine:
        chat(engine, "A secret question")
        assert engine.metric("unnamed_total") == 2
        assert not stored("seal:*")
        chat(engine, "A named one", agent_id="alice")
        assert eventually(lambda: bool(stored("manifest:*")))
    assert not stored("label:*")
