"""Hints of an orchestrator on contexts, in vLLM's envelope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from api_engines import RunningEngine, start_engine, write_tiny
from servers import RunningServer


def hint(engine: RunningEngine, *actions: tuple[str, dict[str, Any]], version: str = "1") -> list[str]:
    """Return the results of actions, each a type and a payload."""
    envelope = {
        "protocol_version": "1",
        "message_id": "m",
        "actions": [
            {"action_id": str(i), "action_type": kind, "action_version": version, "payload": payload}
            for i, (kind, payload) in enumerate(actions)
        ],
    }
    reply = httpx.post(
        f"{engine.url}/v1/kv_hints", json=envelope, headers={"Authorization": f"Bearer {engine.token}"}, timeout=60
    ).json()
    assert reply["message_id"] == "m"
    assert [one["action_id"] for one in reply["results"]] == [str(i) for i in range(len(actions))]
    return [one["result"] for one in reply["results"]]


def tiers(engine: RunningEngine, agent: str) -> list[str]:
    found: list[str] = httpx.get(f"{engine.url}/v1/agents/{agent}", timeout=60).json()["tiers"]
    return found


def ask(engine: RunningEngine, agent: str) -> None:
    with engine.client(engine.token) as client:
        client.chat.completions.create(
            model="tiny", max_tokens=2, user=agent, messages=[{"role": "user", "content": f"I am {agent}"}]
        )


def test_a_context_leaves_memory_and_returns(server: RunningServer, tmp_path: Path) -> None:
    alice = {"session_id": "alice"}
    with start_engine(write_tiny(tmp_path / "tiny"), "--store", server.url) as engine:
        assert hint(engine, ("retain", alice), ("demote", alice), ("prefetch", alice)) == ["not_found"] * 3
        ask(engine, "alice")
        assert hint(engine, ("retain", alice)) == ["done"]
        assert tiers(engine, "alice") == ["hot", "page"]
        assert hint(engine, ("pin", alice), ("demote", alice), ("unpin", alice), ("demote", alice)) == [
            "done",
            "refused",
            "done",
            "done",
        ]
        assert tiers(engine, "alice") == ["page"]
        assert hint(engine, ("prefetch", alice)) == ["done"]
        assert tiers(engine, "alice") == ["hot", "page"]


def test_pins_have_shares_by_tenant(tenants: RunningEngine) -> None:
    names = [f"agent{i}" for i in range(4)]
    for tenant in ("one", "two"):
        tenants.token = tenant
        for name in names:
            ask(tenants, name)
        pins = hint(tenants, *(("pin", {"session_id": name}) for name in names))
        assert pins == ["done", "done", "refused", "refused"]
    tenants.token = "none"


def test_other_actions_are_unsupported(engine: RunningEngine) -> None:
    assert hint(engine, ("split", {}), ("pin", {}), ("pin", {"block_hashes": ["a"]})) == ["unsupported"] * 3
    assert hint(engine, ("pin", {"session_id": "alice"}), version="2") == ["unsupported"]
    reply = httpx.post(f"{engine.url}/v1/kv_hints", json={"message_id": "m"}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "protocol_version")
