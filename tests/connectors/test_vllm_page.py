"""docs/vllm.md: its configurations are those of the connectors, and its user has the rights that they need."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from typing import Any

import redis
from kvpage_connectors.vllm_hints import hints_of
from servers import RunningServer
from stub_engine import TOKENS, counts, engine_on, prompt
from stub_manager import manager_on
from vllm.v1.kv_offload.base import ReqContext
from vllm_process import ROOT

PAGE = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
EXAMPLES: list[dict[str, Any]] = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
CONFIGURATIONS = [example for example in EXAMPLES if "kv_connector" in example]


def test_every_named_class_exists() -> None:
    named = [(one["kv_connector"], one.get("kv_connector_module_path")) for one in CONFIGURATIONS]
    for one in CONFIGURATIONS:
        extra = one["kv_connector_extra_config"]
        named += [(tier["type"], tier["module_path"]) for tier in extra.get("secondary_tiers", [])]
        named.append((extra.get("eviction_policy"), extra.get("cache_policy_module_path")))
    ours = {(name, module) for name, module in named if module}
    assert {name for name, _ in ours} == {"KvpageConnector", "KvpageTier", "PrefixPolicy"}
    for name, module in ours:
        assert hasattr(importlib.import_module(module), name)


def test_the_hints_are_understood() -> None:
    (params,) = [example for example in EXAMPLES if "kvpage_hints" in example]
    assert [hint.kind for hint in hints_of(ReqContext("r", params))] == ["kvpage.pin", "kvpage.retain"]


def test_the_user_has_the_rights_of_the_connectors(server: RunningServer, client: redis.Redis) -> None:
    (line,) = [line for line in PAGE.splitlines() if "ACL SETUSER" in line]
    words = shlex.split(line)
    client.execute_command(*words[words.index("ACL") :])
    user = {"username": "vllm", "password": "secret"}
    with engine_on(server.url, **user) as engine:
        assert engine.run(prompt("a", 2 * TOKENS + 1)) == 0
        assert engine.run(prompt("b", 2 * TOKENS + 1)) == 2 * TOKENS
        assert {name.rpartition("/")[2] for name in counts(engine)} == {"ok", "bytes"}
    with manager_on(server.url, **user) as manager:
        manager.tier.touch([], ReqContext("r", {"kvpage_hints": [{"type": "kvpage.pin"}]}))
        manager.store("a", "r")
        manager.tier.on_request_finished(ReqContext("r"))
        assert manager.lookup("a") == "a", "after the pin, by the same thread"
        assert manager.tier.reasons.counts == {}
    client.acl_deluser("vllm")
