"""Hints of an orchestrator on contexts, in vLLM's envelope: by themselves and in requests.

A token of the tiny model is a letter, and a block has 256 of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from random import Random
from string import ascii_lowercase
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
import redis
from api_engines import RunningEngine, start_engine, write_family, write_tiny
from contexts import SPEC, made, some_tokens
from pools import pool_of
from servers import RunningServer, start_server
from waiting import PATIENCE, eventually

from engine.api import hints
from engine.api.hints import Contexts
from engine.api.worker import EngineThread
from engine.pool import BlockPool
from engine.tiers.store import AgentCacheStore

pool = pool_of(16)
TEXT = "".join(Random(3).choices(ascii_lowercase, k=700))
Action = tuple[str, dict[str, Any]]


def envelope(*actions: Action, version: str = "1") -> dict[str, Any]:
    """vLLM's envelope of actions, each a type and a payload."""
    found = [
        {"action_id": str(i), "action_type": kind, "action_version": version, "payload": payload}
        for i, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": found}


def results(found: Any) -> list[str]:
    assert [one["action_id"] for one in found] == [str(i) for i in range(len(found))]
    return [one["result"] for one in found]


def hint(engine: RunningEngine, *actions: Action, version: str = "1") -> list[str]:
    """Return the results of actions that are sent by themselves."""
    reply = httpx.post(
        f"{engine.url}/v1/kv_hints",
        json=envelope(*actions, version=version),
        headers={"Authorization": f"Bearer {engine.token}"},
        timeout=60,
    ).json()
    assert reply["message_id"] == "m"
    return results(reply["results"])


def tiers(engine: RunningEngine, agent: str) -> list[str]:
    found: list[str] = httpx.get(f"{engine.url}/v1/agents/{agent}", timeout=60).json()["tiers"]
    return found


def ask(engine: RunningEngine, text: str, *actions: Action, **fields: Any) -> Any:
    """Return the field `kvpage` of the answer to a text in a chat with hints."""
    hints = {"kv_transfer_params": {"kv_hints": envelope(*actions)}} if actions else {}
    with engine.client(engine.token) as client:
        made: Any = client.chat.completions.create(
            model="tiny", max_tokens=2, messages=[{"role": "user", "content": text}], extra_body=hints, **fields
        )
    return made.kvpage


def fill(engine: RunningEngine, contexts: int) -> None:
    """Compute other prompts."""
    with httpx.Client(base_url=engine.url, timeout=60) as client:
        for i in range(contexts):
            text = "".join(Random(100 + i).choices(ascii_lowercase, k=700))
            body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
            assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_a_context_leaves_memory_and_returns(server: RunningServer, tmp_path: Path) -> None:
    erin = {"session_id": "erin"}
    with start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url) as engine:
        assert hint(engine, ("retain", erin), ("demote", erin), ("prefetch", erin)) == ["not_found"] * 3
        ask(engine, "I am erin", user="erin")
        assert hint(engine, ("retain", erin)) == ["done"]
        assert tiers(engine, "erin") == ["hot", "page"]
        assert hint(engine, ("pin", erin), ("demote", erin), ("unpin", erin), ("demote", erin)) == [
            "done",
            "refused",
            "done",
            "done",
        ]
        assert tiers(engine, "erin") == ["page"]
        assert hint(engine, ("prefetch", erin)) == ["done"]
        assert tiers(engine, "erin") == ["hot", "page"]
        assert hint(engine, ("demote", erin), ("unpin", erin), ("pin", erin)) == ["done", "not_found", "done"]
        assert tiers(engine, "erin") == ["hot", "page"]
        assert hint(engine, ("demote", erin), ("pin", {"session_id": "nobody"})) == ["refused", "not_found"]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2"])
def test_blocks_leave_memory_and_return(server: RunningServer, tmp_path: Path, kind: str) -> None:
    with start_engine(write_family(tmp_path / "tiny", kind), "--store", server.url, "--keep", "named") as engine:
        first, other = ask(engine, TEXT), ask(engine, TEXT[:300])
        block, beginning = ({"block_hashes": [one["block_hash"]]} for one in (first, other))
        assert hint(engine, ("demote", beginning)) == ["refused"]  # the longer context continues it
        assert hint(engine, ("demote", block), ("demote", block)) == ["done", "not_found"]
        assert hint(engine, ("prefetch", block)) == ["done"]
        again = ask(engine, TEXT)
        assert (again["tier"], again["tokens_reused"] >= 512) == ("prefix", True)
        assert hint(engine, ("demote", block)) == ["done"]
        assert ask(engine, TEXT)["tier"] == "page"


def test_pinned_blocks_stay_in_memory(tmp_path: Path) -> None:
    with start_engine(write_tiny(tmp_path / "tiny"), "--memory", "4mb") as engine:
        pinned, other = ask(engine, TEXT), ask(engine, TEXT[::-1])
        assert pinned["block_hash"] != other["block_hash"]
        block = {"block_hashes": [pinned["block_hash"]]}
        assert hint(engine, ("pin", block)) == ["done"]
        fill(engine, 30)
        assert ask(engine, TEXT[::-1])["tokens_reused"] <= len("user:")
        assert ask(engine, TEXT)["tokens_reused"] >= 512
        assert hint(engine, ("demote", block), ("unpin", block), ("unpin", block)) == ["refused", "done", "not_found"]
        fill(engine, 30)
        assert ask(engine, TEXT)["tokens_reused"] < 512


def test_pins_and_lifetimes_of_blocks_have_a_limit(tmp_path: Path) -> None:
    with start_engine(write_tiny(tmp_path / "tiny"), "--memory", "4mb") as engine:
        for i in range(30):
            block = {"block_hashes": [ask(engine, "".join(Random(i).choices(ascii_lowercase, k=700)))["block_hash"]]}
            if (found := hint(engine, ("pin", block))) != ["done"]:
                break
        assert found == ["refused"]
        assert hint(engine, ("retain", block | {"seconds": 60})) == ["refused"]
        assert ask(engine, "".join(Random(99).choices(ascii_lowercase, k=700)))["tokens_reused"] <= len("user:")


def test_a_retained_block_is_kept_with_all_before_it(tmp_path: Path) -> None:
    """The page server, whose memory ends, keeps it. The blocks are named in any order."""
    model = write_tiny(tmp_path / "tiny")
    with start_server("--maxmemory", "4mb") as server, server.client() as client:
        with start_engine(model, "--store", server.url) as engine:
            first = ask(engine, TEXT)["block_hash"]
            longer = ask(engine, TEXT * 2)["block_hash"]
            retained = {"block_hashes": [longer, first], "seconds": 600}
            assert hint(engine, ("retain", retained)) == ["done"]
        for i in range(400):
            client.execute_command("KVBLOCKSET", f"o{i}", 0, 1, 1, 1, 0, 1, 0, 3, 100_000, bytes(100_000))
        with start_engine(model, "--store", server.url) as engine:
            assert ask(engine, TEXT * 2)["tokens_reused"] >= 1280


def test_a_request_carries_hints_in_every_api(server: RunningServer, tmp_path: Path) -> None:
    """They are about its own context, if they name no other, whether it has an agent or not."""
    actions: list[Action] = [("retain", {"seconds": 600}), ("pin", {}), ("unpin", {"sesion_id": "alice"})]
    params: Any = {"kv_transfer_params": {"kv_hints": envelope(*actions)}}
    done = [{"action_id": str(i), "result": one} for i, one in enumerate(["done", "done", "unsupported"])]
    messages: Any = [{"role": "user", "content": TEXT}]
    with start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url) as engine, engine.client() as client:
        for agent in ({}, {"X-Agent-Id": "alice"}):
            more: Any = {"model": "tiny", "extra_body": params, "extra_headers": agent}
            chat: Any = client.chat.completions.create(messages=messages, max_tokens=2, **more)
            text: Any = client.completions.create(prompt=TEXT, max_tokens=2, **more)
            response: Any = client.responses.create(input=TEXT, max_output_tokens=2, **more)
            *_, last = client.chat.completions.create(messages=messages, max_tokens=2, stream=True, **more)
            streamed: Any = last
            with anthropic.Anthropic(base_url=engine.url, api_key="none", max_retries=0) as theirs:
                message: Any = theirs.messages.create(messages=messages, max_tokens=2, **more)
            for reply in (chat, text, response, streamed, message):
                assert reply.kvpage["kv_hints"] == done
                assert reply.kvpage["block_hash"]
        unstored: Any = client.responses.create(
            model="tiny", input=TEXT[::-1], max_output_tokens=2, store=False, extra_body=params
        )
        assert results(unstored.kvpage["kv_hints"]) == ["refused", "done", "unsupported"]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2"])
def test_hints_on_a_context_shorter_than_a_block(
    server: RunningServer, client: redis.Redis, tmp_path: Path, kind: str
) -> None:
    """A pin moves to the longer context that takes its place."""
    text = "I have no agent's name"
    with start_engine(write_family(tmp_path / "tiny", kind), "--store", server.url, "--keep", "named") as engine:
        actions: list[Action] = [("pin", {}), ("retain", {"seconds": 600}), ("demote", {})]
        made = ask(engine, text, *actions, temperature=0)
        assert made["block_hash"] is None
        assert results(made["kv_hints"]) == ["done", "done", "refused"]
        actions = [("unpin", {}), ("unpin", {}), ("demote", {}), ("prefetch", {}), ("retain", {}), ("demote", {})]
        made = ask(engine, text, *actions, temperature=0)
        assert results(made["kv_hints"]) == ["done", "not_found", "done", "done", "done", "done"]
        again = ask(engine, text, temperature=0)  # the record has the state at the end of the prompt, too
        assert again["tier"] == "page"
    assert client.keys("tails:*")


@pytest.mark.parametrize(("common", "length"), [(200, 200), (500, 600)])
def test_a_demoted_context_returns_to_the_last_token(
    server: RunningServer, tmp_path: Path, common: int, length: int
) -> None:
    """Also if memory has all but a few tokens of its last block, which a prompt would compute."""
    actions: list[Action] = [("demote", {}), ("prefetch", {})]
    with start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url) as engine:
        ask(engine, TEXT[:length], logit_bias={"5": 100})
        made = ask(engine, TEXT[:common] + "?" * (length - common), *actions, logit_bias={"6": 100})
        assert (made["block_hash"] is None) == (length < 256)
        assert results(made["kv_hints"]) == ["done", "done"]


def test_a_request_carries_hints_on_others(server: RunningServer, tmp_path: Path) -> None:
    with start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url) as engine:
        ask(engine, "I am alice", user="alice")
        block = ask(engine, TEXT)["block_hash"]
        others: list[Action] = [("demote", {"session_id": "alice"}), ("demote", {"block_hashes": [block]})]
        assert results(ask(engine, "Hello", *others)["kv_hints"]) == ["done", "done"]
        assert tiers(engine, "alice") == ["page"]
        assert ask(engine, "Hello")["kv_hints"] is None


def test_pins_have_shares_by_tenant(tenants: RunningEngine) -> None:
    names = [f"agent{i}" for i in range(4)]
    blocks = []
    for tenant in ("one", "two"):
        tenants.token = tenant
        for name in names:
            ask(tenants, f"I am {name}", user=name)
        pins = hint(tenants, *(("pin", {"session_id": name}) for name in names))
        assert pins == ["done", "done", "refused", "refused"]
        blocks.append(ask(tenants, TEXT)["block_hash"])
    assert blocks[0] != blocks[1]
    foreign = {"block_hashes": blocks[:1]}
    kinds = ("pin", "unpin", "retain", "prefetch", "demote")
    assert hint(tenants, *((kind, foreign) for kind in kinds)) == ["not_found"] * 5
    tenants.token = "none"


def test_other_actions_are_unsupported(engine: RunningEngine) -> None:
    assert hint(engine, ("split", {}), ("pin", {})) == ["unsupported"] * 2
    assert hint(engine, ("pin", {"block_hashes": ["a"]})) == ["not_found"]
    assert hint(engine, ("pin", {"session_id": "alice"}), version="2") == ["unsupported"]
    reply = httpx.post(f"{engine.url}/v1/kv_hints", json={"message_id": "m"}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "protocol_version")


@pytest.mark.parametrize(
    ("payload", "field", "said"),
    [
        ({"session_id": "a", "seconds": 0}, "seconds", "1 to 86400"),
        ({"session_id": "a", "seconds": True}, "seconds", "1 to 86400"),
        ({"session_id": ".a"}, "session_id", "must not start with a dot"),
        ({"session_id": 1}, "session_id", "a text"),
        ({"block_hashes": []}, "block_hashes", "1 to 4096"),
        ({"block_hashes": [1]}, "block_hashes", "1 to 4096"),
    ],
)
def test_an_invalid_hint_is_named(engine: RunningEngine, payload: dict[str, Any], field: str, said: str) -> None:
    reply = httpx.post(f"{engine.url}/v1/kv_hints", json=envelope(("retain", payload)), timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, f"actions[0].payload.{field}")
    assert said in reply.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(engine, "Hello", ("retain", payload))
    assert caught.value.param == f"kv_transfer_params.kv_hints.actions[0].payload.{field}"


def test_actions_have_a_time_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is not begun after its end."""
    begun: list[str] = []

    async def pin(contexts: Contexts, agent_id: str, seconds: int) -> str:
        begun.append(agent_id)
        await asyncio.sleep(0.0 if agent_id == "a" else PATIENCE)
        return "done"

    async def run() -> list[tuple[str, str]]:
        any_contexts: Any = None
        async with asyncio.timeout(PATIENCE / 2):
            return await hints.carry_out(any_contexts, [hints.Hint(name, "pin", name, None, 0) for name in "abc"])

    monkeypatch.setattr(hints, "SECONDS", 0.2)
    monkeypatch.setitem(hints._ACTIONS, "pin", (pin, None))
    assert asyncio.run(run()) == [("a", "done"), ("b", "refused"), ("c", "refused")]
    assert begun == ["a", "b"]


@pytest.mark.parametrize("begun", [False, True], ids=["queued", "begun"])
def test_a_cancelled_load_frees_its_blocks(pool: BlockPool, begun: bool) -> None:
    """And the engine goes on. A reply to a client that does not read is cancelled at its deadline."""
    store = AgentCacheStore(SPEC, pool)
    context = made(pool, "alice", some_tokens(1, 20))
    store.save(context)
    pool.free(context.block_ids, "alice")
    agents = SimpleNamespace(step=lambda _: time.sleep(0.01), wake=lambda: None)
    engine: Any = SimpleNamespace(agent_engine=agents, store=store, pool=pool, close=store.close)
    service: Any = SimpleNamespace(tokens=SimpleNamespace(count=1))
    tenant: Any = SimpleNamespace(name="")
    held, go = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        held.set()
        go.wait(PATIENCE)

    async def run() -> None:
        worker = EngineThread(lambda: engine, "tiny")
        worker.start()
        await worker.loaded()
        model: Any = SimpleNamespace(worker=worker, engine=engine)
        holding = asyncio.create_task(worker.call(hold))
        await asyncio.to_thread(held.wait, PATIENCE)
        loading: asyncio.Task[Any]
        if begun:
            loading = holding  # its call runs
        else:
            loading = asyncio.create_task(Contexts(service, model, tenant).load("alice"))
            assert await asyncio.to_thread(eventually, lambda: bool(worker._calls))
        loading.cancel()
        await asyncio.wait([loading])
        assert loading.cancelled()
        go.set()
        async with asyncio.timeout(PATIENCE):
            assert await worker.call(lambda _: 1) == 1
        assert worker.running
        await worker.stop()

    asyncio.run(run())
