"""Several tenants at one engine: places in its queue, pages, forks, and names of agents that contradict each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_engines import RunningEngine, start_engine, write_tiny
from engine_models import letter_tokenizer, tiny_llama
from waiting import eventually

# isort: split
from engine.api.openai.prompts import Prompts
from engine.generation.templates import Renderer
from engine.scheduling import TenantThread
from engine.spec import ModelCacheSpec

QUEUE = 8
SECRETS = {"acme": "acme-secret", "umbrella": "umbrella-secret"}
LONG = 3000  # tokens: nobody waits for the end of these answers


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    directory = tmp_path_factory.mktemp("shares")
    lines = [f"{name} {secret}" for name, secret in SECRETS.items()]
    (directory / "tokens").write_text("\n".join([*lines, "* watcher-secret"]), encoding="utf-8")
    model = write_tiny(directory / "tiny")
    with start_engine(model, "--token-file", str(directory / "tokens"), "--max-queue", str(QUEUE)) as engine:
        engine.watcher = "watcher-secret"
        yield engine
        assert eventually(lambda: engine.metric("pending") == 0)


def client_of(engine: RunningEngine, tenant: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {SECRETS[tenant]}"}
    return httpx.AsyncClient(base_url=engine.url, headers=headers, timeout=120)


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hello", "max_tokens": tokens, "temperature": 0, **more}


async def refused(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/completions", json=body(1))


def test_a_request_with_more_answers_than_the_queue_is_refused(engine: RunningEngine) -> None:
    """It never has room, so a client must not try it again."""
    headers = {"Authorization": f"Bearer {SECRETS['acme']}"}
    several = body(1, prompt=["a", "b", "c"])
    with httpx.Client(base_url=engine.url, headers=headers, timeout=120) as client:
        replies = [client.post("/v1/completions", json=several | {"n": n}) for n in (2, 3)]
    assert [reply.status_code for reply in replies] == [200, 400]
    message = "n: a request has at most 8 answers here, the length of the queue, got 9"
    assert replies[1].json()["error"]["message"] == message


def test_full_queue_has_places_for_tenants_below_their_share(engine: RunningEngine) -> None:
    async def ask() -> None:
        async with client_of(engine, "acme") as acme, client_of(engine, "umbrella") as umbrella:
            long = [asyncio.create_task(acme.post("/v1/completions", json=body(LONG))) for _ in range(QUEUE)]
            assert await asyncio.to_thread(eventually, lambda: engine.metric("pending") == QUEUE)
            over = await refused(acme)
            assert over.status_code == 429
            assert over.headers["Retry-After"] == "1"
            assert "8 of them yours" in over.json()["error"]["message"]
            answers = await asyncio.gather(*(refused(umbrella) for _ in range(QUEUE // 2)))
            assert [answer.status_code for answer in answers] == [200] * (QUEUE // 2)
            for task in long:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)

    asyncio.run(ask())


def test_pages_are_shared_among_tenants(engine: RunningEngine) -> None:
    async def watch() -> None:
        async with client_of(engine, "acme") as acme, client_of(engine, "umbrella") as umbrella:
            open_ones = []

            async def shown(client: httpx.AsyncClient) -> int:
                response = await client.send(client.build_request("GET", "/page/events"), stream=True)
                parts = response.aiter_bytes()
                open_ones.append((response, parts))
                if response.status_code == 200:
                    await anext(parts)
                return response.status_code

            assert [await shown(acme) for _ in range(64)] == [200] * 64
            assert await shown(acme) == 503
            assert [await shown(umbrella) for _ in range(32)] == [200] * 32
            assert await shown(umbrella) == 503
            for response, _ in open_ones:
                await response.aclose()

    asyncio.run(watch())


@pytest.fixture
def acme(engine: RunningEngine) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {SECRETS['acme']}"}
    with httpx.Client(base_url=engine.url, headers=headers, timeout=60) as client:
        yield client


def test_fork_replaces_an_agent_only_when_asked_to(acme: httpx.Client) -> None:
    for name, prompt in (("first", "Hello"), ("second", "Hello, who is there?")):
        assert acme.post("/v1/completions", json=body(1, agent_id=name, prompt=prompt)).status_code == 200
    before = acme.get("/v1/agents/second").json()["tokens"]
    conflict = acme.post("/v1/agents/first/fork", json={"to": "second"})
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "agent_exists")
    assert acme.post("/v1/agents/first/fork", json={"to": "first"}).status_code == 409
    assert acme.get("/v1/agents/second").json()["tokens"] == before
    replaced = acme.post("/v1/agents/first/fork", json={"to": "second", "replace": True})
    assert (replaced.status_code, replaced.json()["tokens"]) == (201, acme.get("/v1/agents/first").json()["tokens"])
    assert acme.post("/v1/agents/nobody/fork", json={"to": "third"}).status_code == 404


def test_header_and_field_that_name_two_agents_are_refused(acme: httpx.Client) -> None:
    headers = {"X-Agent-Id": "alice"}
    reply = acme.post("/v1/completions", json=body(1, agent_id="bob"), headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "agent_id")
    assert "'bob' and 'alice'" in reply.json()["error"]["message"]
    for more in ({}, {"agent_id": "alice"}, {"user": "bob"}):
        reply = acme.post("/v1/completions", json=body(1, **more), headers=headers)
        assert (reply.status_code, reply.json()["kvpage"]["agent_id"]) == (200, "alice")


def test_a_queue_takes_turns_between_tenants(tmp_path: Path) -> None:
    """A tenant with one prompt does not wait for all earlier prompts of another tenant."""
    lines = [f"{name} {secret}" for name, secret in SECRETS.items()]
    (tmp_path / "tokens").write_text("\n".join(lines), encoding="utf-8")
    options = ["--token-file", str(tmp_path / "tokens"), "--max-queue", "200"]
    with start_engine(write_tiny(tmp_path / "tiny"), *options) as engine:

        async def ask() -> list[str]:
            ended: list[str] = []
            begun = asyncio.Event()

            async def one(client: httpx.AsyncClient, name: str) -> None:
                assert (await client.post("/v1/completions", json=body(40))).status_code == 200
                ended.append(name)
                begun.set()

            async with client_of(engine, "acme") as acme, client_of(engine, "umbrella") as umbrella:
                many = [asyncio.create_task(one(acme, "acme")) for _ in range(150)]
                await begun.wait()
                await one(umbrella, "umbrella")
                await asyncio.gather(*many)
            return ended

        ended = asyncio.run(ask())
        assert ended.index("umbrella") < 120


def test_tenants_take_turns_in_tokenising_long_prompts() -> None:
    spec = replace(ModelCacheSpec.probe(tiny_llama(), letter_tokenizer()), context=None)
    ended: list[str] = []

    async def one(prompts: Prompts, tenant: str, text: str) -> None:
        await prompts.of_text(text, tenant=tenant)
        ended.append(tenant)

    async def ask(prompts: Prompts) -> None:
        many = [one(prompts, "acme", "ab" * 20_000) for _ in range(30)]
        await asyncio.gather(*many, one(prompts, "umbrella", "a"))

    with closing(Renderer()) as renderer:
        asyncio.run(ask(Prompts(letter_tokenizer(), spec, renderer)))
    assert ended.index("umbrella") < 15


def test_tenants_take_turns_on_a_thread() -> None:
    thread, begins, done = TenantThread(ThreadPoolExecutor(1)), threading.Event(), list[str]()
    first = thread.submit("acme", begins.wait)
    work = [thread.submit(name, partial(done.append, name)) for name in ("acme", "acme", "acme", "umbrella", "zorg")]
    work[1].cancel()
    begins.set()
    assert first.result(60)
    wait([work[0], *work[2:]], 60)
    assert done == ["acme", "umbrella", "zorg", "acme"]


def test_a_failure_of_work_is_that_of_its_future() -> None:
    thread = TenantThread(ThreadPoolExecutor(1))
    with pytest.raises(ZeroDivisionError):
        thread.submit("acme", lambda: 1 // 0).result(60)
    assert thread.submit("acme", lambda: 1).result(60) == 1
