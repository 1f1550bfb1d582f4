"""Lifetimes of contexts, with the clouds' own clients: a context with a ttl survives until its end.

A token of the tiny models is a letter, and the template writes `role:content` on a line.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import anthropic
import httpx
import openai
import pytest
import redis
from api_engines import RunningEngine, start_engine, write_family, write_tiny
from servers import start_server
from waiting import eventually

from kvpage_server.page import unix_ms

MB = 1 << 20
TEXT = "".join(Random(1).choices(ascii_lowercase, k=700))
MORE: Any = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "And?"}]


def create(engine: RunningEngine, text: str = TEXT, ttl: str | None = "1h", **fields: Any) -> anthropic.types.Message:
    """Ask for an answer to a text, with a breakpoint at the end of the prompt if there is a ttl."""
    control: Any = {"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {}
    messages: Any = [{"role": "user", "content": text}, *fields.pop("more", ())]
    token = fields.pop("token", "none")
    with anthropic.Anthropic(base_url=engine.url, api_key=token, max_retries=0, timeout=60) as client:
        asked = {"model": "tiny", "max_tokens": 2} | fields
        return client.messages.create(messages=messages, **asked, **control)


def kept(reply: Any) -> dict[str, Any]:
    found: dict[str, Any] = reply.kvpage["kept"]
    return found


def ends(server: redis.Redis) -> list[int]:
    """The ends of the lifetimes of the blocks, in unix milliseconds."""
    names = {key.decode().split(":")[1] for key in server.keys("kv:*")}
    stats = (server.execute_command("KVPAGESTAT", name, 0, 0, 0, 0) for name in names)
    return [stat[b"kept_until_ms"] for stat in stats if stat]


def press(client: redis.Redis, megabytes: int) -> None:
    """Write blocks of other clients."""
    for i in range(megabytes * 10):
        client.execute_command("KVBLOCKSET", f"other{i}", 0, 1, 1, 1, 0, 1, 0, 3, MB // 10, bytes(MB // 10))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("agent", [None, "alice"])
def test_a_kept_context_survives_ten_times_the_memory(tmp_path: Path, kind: str, agent: str | None) -> None:
    model = write_family(tmp_path / "tiny", kind)
    named: Any = {"extra_headers": {"X-Agent-Id": agent}} if agent else {}
    with start_server("--maxmemory", "4mb") as server, server.client() as client:
        with start_engine(model, "--store", server.url) as engine:
            first = create(engine, **named)
            usage = first.usage
            assert usage.cache_creation
            prompt = usage.cache_creation.ephemeral_1h_input_tokens
            assert (usage.cache_creation_input_tokens, usage.input_tokens) == (prompt, 0)
            assert kept(first) == {"tokens": prompt, "until": kept(first)["until"], "why": None}
            assert abs(kept(first)["until"] - unix_ms() / 1000 - 3600) < 10
            create(engine, "b" * 700, None)  # not kept
        press(client, 40)
        with start_engine(model, "--store", server.url) as engine:
            again = create(engine, ttl=None, more=MORE, **named)
            assert prompt - again.usage.cache_read_input_tokens <= (kind != "llama")  # the nearest state that is stored
            assert create(engine, "b" * 700, None, more=MORE).usage.cache_read_input_tokens <= len("user:")


def test_a_context_is_evicted_first_after_its_lifetime(tmp_path: Path) -> None:
    """Before an older one that never had a lifetime. A hint gives a lifetime of a second."""
    texts = ["".join(Random(i).choices(ascii_lowercase, k=700)) for i in (1, 2)]
    with start_server("--maxmemory", "4mb") as server, server.client() as client:
        with start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url, "--keep", "all") as engine:
            create(engine, texts[0], None)
            assert eventually(lambda: client.keys("kv:*"))
            older = set(client.keys("kv:*"))
            action = {"action_id": "a", "action_type": "retain", "action_version": "1", "payload": {"seconds": 1}}
            hints = {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": [action]}}
            reply: Any = create(engine, texts[1], None, extra_body={"kv_transfer_params": hints})
            assert reply.kvpage["kv_hints"] == [{"action_id": "a", "result": "done"}]
        newer = set(client.keys("kv:*")) - older
        names = {key.decode().split(":")[1] for key in newer}
        ended = [client.execute_command("KVPAGESTAT", name, 0, 0, 0, 0)[b"kept_until_ms"] for name in names]
        assert eventually(lambda: max(ended) < unix_ms())
        for i in range(100):
            name = f"other{i}"
            client.execute_command("KVBLOCKSET", name, 0, 1, 1, 1, 0, 1, 0, 3, MB // 10, bytes(MB // 10))
            if gone := (older | newer) - set(client.keys("kv:*")):
                break
        assert gone <= newer, gone & older


def test_a_hit_renews_a_lifetime(tmp_path: Path) -> None:
    """Also a hit of a prompt without a ttl, at another engine, and of an agent. It does not wait for the page server.
    A longer block in place of the last, partial one has its lifetime.
    """
    model = write_tiny(tmp_path / "tiny")
    for agent in (None, "alice"):
        named: Any = {"extra_headers": {"X-Agent-Id": agent}} if agent else {}
        with start_server() as server, server.client() as client:
            for i in range(2):
                with start_engine(model, "--store", server.url) as engine:
                    if not i:
                        create(engine, ttl="5m", **named)
                    for more in (MORE, [*MORE, *MORE]):
                        time.sleep(1)
                        end = unix_ms() + 300_000
                        reply = create(engine, ttl=None, more=more, **named)
                        assert reply.usage.cache_read_input_tokens >= len(TEXT)
                        assert kept(reply) is None
                        assert eventually(lambda end=end: sum(one >= end for one in ends(client)) >= 3)
                        assert engine.metric("kept_bytes") > 0


def test_a_hit_in_memory_renews_lifetimes_of_other_engines(tmp_path: Path) -> None:
    """The engine has computed the context itself, before the other one has kept it."""
    model = write_tiny(tmp_path / "tiny")
    with start_server() as server, server.client() as client:
        first, second = (start_engine(model, "--store", server.url, "--keep", "all") for _ in range(2))
        with first as keeping, second as hitting:
            create(hitting, ttl=None)
            create(keeping, ttl="5m")
            time.sleep(1)
            end = unix_ms() + 300_000
            assert create(hitting, ttl=None, more=MORE).usage.cache_read_input_tokens >= len(TEXT)
            assert eventually(lambda: sum(one >= end for one in ends(client)) >= 3)
            assert eventually(lambda: hitting.metric("kept_bytes") > 0)


def test_a_prompt_without_a_ttl_is_written_as_keep_says(tmp_path: Path) -> None:
    """Also one that continues a kept context, which stays kept all the same."""
    model = write_tiny(tmp_path / "tiny")
    with start_server() as server, server.client() as client:
        with start_engine(model, "--store", server.url, "--keep", "named") as engine:
            create(engine, ttl="5m")
            written = set(client.keys("kv:*"))
            for more in (MORE, [*MORE, *MORE]):
                time.sleep(1)
                end = unix_ms() + 300_000
                assert create(engine, ttl=None, more=more).usage.cache_read_input_tokens >= len(TEXT)
                assert eventually(lambda end=end: sum(one >= end for one in ends(client)) >= 3)
        assert set(client.keys("kv:*")) == written


def test_a_reused_context_that_is_written_later_stays_kept(tmp_path: Path) -> None:
    """It takes the place of the kept block that it contains, when a second prompt reuses it."""
    model = write_tiny(tmp_path / "tiny")
    asked: Any = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    with start_server() as server, server.client() as client:
        with start_engine(model, "--store", server.url) as engine, engine.client() as api:

            def ask(text: str, **fields: Any) -> None:
                api.completions.create(prompt=text, **asked, **fields)

            made: Any = api.chat.completions.create(
                messages=[{"role": "user", "content": TEXT}], prompt_cache_options={"ttl": "30m"}, **asked
            )
            assert made.kvpage["kept"]["why"] is None
            longer = f"user:{TEXT}\nassistant:" + made.choices[0].message.content + 100 * "z"
            for end in ("", "y", "x"):
                ask(longer + end)
        names = {key.decode().split(":")[1] for key in client.keys("kv:*")}
        assert len(names) == len(ends(client)) == 4
        assert sum(end > unix_ms() for end in ends(client)) == 3, "the last block has none of the kept tokens"


def test_renewals_stay_within_the_share_of_a_tenant(tmp_path: Path) -> None:
    """An engine with little memory reuses contexts that another one keeps."""
    model, tokens = write_tiny(tmp_path / "tiny"), tmp_path / "tokens"
    tokens.write_text("a one\nb two\n* all\n", encoding="utf-8")
    texts = ["".join(Random(i).choices(ascii_lowercase, k=700)) for i in range(12)]
    options = "--token-file", str(tokens), "--store"
    with start_server() as server:
        with start_engine(model, *options, server.url) as engine:
            for text in texts:
                assert kept(create(engine, text, token="one"))["why"] is None
        with start_engine(model, *options, server.url, "--memory", "4mb") as engine:
            engine.watcher = "all"
            for text in texts:
                assert create(engine, text, None, more=MORE, token="one").usage.cache_read_input_tokens >= 700
            assert eventually(lambda: engine.metric("kept_bytes") > 0)
            time.sleep(1)
            assert engine.metric("kept_bytes") <= MB // 2


@pytest.mark.parametrize("agent", [None, "alice"])
def test_a_prompt_is_kept_that_a_longer_block_contains(tmp_path: Path, agent: str | None) -> None:
    """An answered prompt is prewarmed later, and so is the beginning of its last block."""
    with start_server() as server, start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url) as engine:
        named: Any = {"extra_headers": {"X-Agent-Id": agent}} if agent else {}
        create(engine, ttl=None, max_tokens=20, **named)
        assert kept(create(engine, max_tokens=0))["tokens"] == len(f"user:{TEXT}\nassistant:")
        text = TEXT[:510]
        options: Any = {"prompt_cache_options": {"mode": "explicit"}, "model": "tiny", "max_output_tokens": 2}
        parts: Any = [{"type": "input_text", "text": text, "prompt_cache_breakpoint": {"mode": "explicit"}}]
        parts.append({"type": "input_text", "text": "Another end"})
        with engine.client() as client:
            made: Any = client.responses.create(input=[{"role": "user", "content": parts}], **options)
        end = len(f"user:{text}")
        assert made.usage.input_tokens_details.cached_tokens == end
        assert made.kvpage["kept"] == {"tokens": end, "until": made.kvpage["kept"]["until"], "why": None}


def test_a_shorter_lifetime_does_not_bring_the_end_nearer(tmp_path: Path) -> None:
    with start_server() as server, start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url) as engine:
        for ttl in ("1h", "5m"):
            assert (
                abs(kept(create(engine, ttl=ttl, extra_body={"temperature": 0}))["until"] - unix_ms() / 1000 - 3600)
                < 10
            )


def test_an_engine_without_a_store_keeps_contexts_in_its_memory(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    with start_engine(model, "--memory", "4mb") as engine:
        first = create(engine)
        prompt = kept(first)["tokens"]
        assert prompt == first.usage.cache_creation_input_tokens
        create(engine, "b" * 700, None)
        for i in range(30):
            create(engine, "".join(Random(100 + i).choices(ascii_lowercase, k=700)), None)
        assert create(engine, "b" * 700, None, more=MORE).usage.cache_read_input_tokens <= len("user:")
        assert create(engine, ttl=None, more=MORE).usage.cache_read_input_tokens == prompt


def test_a_prewarmed_prompt_is_computed_as_little_as_a_hot_one(engine: RunningEngine) -> None:
    system = "".join(Random(2).choices(ascii_lowercase, k=400))
    warm = create(engine, "a", "5m", system=system, max_tokens=0)
    assert kept(warm)["tokens"] == warm.usage.cache_creation_input_tokens
    create(engine, "b", None, system=system)  # hot
    hot = create(engine, "c", None, system=system)
    assert engine.metric("prewarmed_total") >= 1
    assert engine.metric("breakpoints_total") >= 1
    assert engine.metric("lifetimes_total") >= 1
    cold = create(engine, "d", None, system=system[::-1])
    create(engine, "a", "5m", system=system[1:], max_tokens=0)
    prewarmed = create(engine, "c", None, system=system[1:])
    assert prewarmed.usage.input_tokens == hot.usage.input_tokens < 50 < cold.usage.input_tokens


def test_the_ttls_of_a_response_are_kept(engine: RunningEngine, api: openai.OpenAI) -> None:
    def until(**fields: Any) -> float:
        made: Any = api.responses.create(model="tiny", max_output_tokens=2, input=TEXT, **fields)
        assert made.kvpage["kept"]["tokens"] == made.usage.input_tokens
        left: float = made.kvpage["kept"]["until"] - time.time()
        return left

    assert abs(until(prompt_cache_options={"ttl": "30m"}) - 1800) < 10
    assert abs(until(prompt_cache_options={"ttl": "12h"}) - 43_200) < 10
    assert abs(until(prompt_cache_retention="24h") - 86_400) < 10
    text = TEXT[::-1]
    made: Any = api.responses.create(model="tiny", input=text, prompt_cache_options={"prewarm": True})
    assert abs(made.kvpage["kept"]["until"] - time.time() - 1800) < 10
    made = api.responses.create(model="tiny", max_output_tokens=2, input=TEXT)
    assert made.kvpage["kept"] is None


def test_tokens_by_lifetime_are_those_that_got_one(tmp_path: Path) -> None:
    """The page server does not store a last block of four tokens."""
    with (
        start_server() as server,
        start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url) as engine,
        engine.client() as client,
    ):

        def respond(text: str) -> Any:
            options: Any = {"ttl": "30m"}
            return client.responses.create(model="tiny", max_output_tokens=2, input=text, prompt_cache_options=options)

        around = respond("b").usage.input_tokens - 1
        made = respond(TEXT[: 512 + 4 - around])
        details = made.usage.input_tokens_details
        assert (made.usage.input_tokens, made.kvpage["kept"]["tokens"]) == (516, 512)
        assert details.cached_tokens + details.cache_write_tokens == 516
        assert details.cached_tokens + details.cache_write_tokens_details.ttl_30m_tokens == 512


def test_a_chat_has_lifetimes_but_not_12h(engine: RunningEngine, api: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": TEXT}]
    asked: Any = {"model": "tiny", "max_tokens": 2, "messages": messages}
    made: Any = api.chat.completions.create(**asked, prompt_cache_options={"ttl": "30m"})
    assert made.kvpage["kept"]["tokens"] == made.usage.prompt_tokens
    mark = {"mode": "explicit", "ttl": "12h"}
    messages[0]["content"] = [{"type": "text", "text": TEXT, "prompt_cache_breakpoint": mark}]
    with pytest.raises(openai.BadRequestError, match="no ttl of 12h"):
        api.chat.completions.create(**asked)


def test_an_unknown_ttl_is_refused_in_the_form_of_each_api(engine: RunningEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    control = {"cache_control": {"type": "ephemeral", "ttl": "2h"}}
    body = {"model": "tiny", "max_tokens": 1, "messages": messages}
    reply = httpx.post(f"{engine.url}/v1/messages", json=body | control)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "cache_control.ttl" in reply.json()["error"]["message"]
    options = {"prompt_cache_options": {"ttl": "1h"}}
    reply = httpx.post(f"{engine.url}/v1/responses", json={"model": "tiny", "input": "Hi"} | options)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_cache_options.ttl")
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body | {"prompt_cache_retention": "1y"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_cache_retention")


def test_a_tenant_keeps_its_share_and_learns_when_it_is_used_up(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    tokens = tmp_path / "tokens"
    tokens.write_text("a one\nb two\n", encoding="utf-8")
    with (
        start_server("--maxmemory", "16mb") as server,
        server.client() as client,
        start_engine(model, "--token-file", str(tokens), "--store", server.url) as engine,
    ):
        for i in range(50):
            text = "".join(Random(i).choices(ascii_lowercase, k=700))
            refused = kept(create(engine, text, token="one"))
            if refused["why"]:
                break
        assert refused["why"] == "the share of the tenant, one of 2, is used up"
        assert refused["tokens"] < 700
        other = create(engine, token="two")
        assert kept(other) == {
            "tokens": other.usage.cache_creation_input_tokens,
            "until": kept(other)["until"],
            "why": None,
        }
        for _ in range(3):  # the share is full, and their tokens differ: none of them needs a copy
            assert kept(create(engine, "".join(Random(0).choices(ascii_lowercase, k=700)), token="one"))["why"] is None
        empty = kept(create(engine, "b" * 200, token="one"))
        assert (empty["tokens"], empty["until"]) == (0, None)
        tenants = {row["tenant"]: row for name, row in client.info("kvpage").items() if name in ("kept0", "kept1")}
        assert tenants["b"]["bytes"] < tenants["a"]["bytes"] <= 4 * MB


def test_an_outage_of_the_page_server_is_named(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    with start_server(killed=True) as server, start_engine(model, "--store", server.url, code=1) as engine:
        create(engine, ttl=None)
        server.stop(9)
        found = [kept(create(engine, str(i) * 400)) for i in "ab"]
        assert [each["why"] is not None for each in found] == [True, True]
