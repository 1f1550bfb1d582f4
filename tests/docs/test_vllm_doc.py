"""docs/vllm.md: its configurations are accepted, its rights suffice, and its figures of sizes are true."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import re
import shlex
from typing import Any

import pytest
from documents import ROOT, blocks
from kvpage_connectors.jobs import Blocks, Jobs
from kvpage_connectors.vllm_hints import hints_of
from servers import start_server

from kvpage_server.address import DEFAULT_URL
from kvpage_server.client.page import BlockPages, PageLayout
from kvpage_server.page import DType

DOCUMENT = "docs/vllm.md"
TEXT = (ROOT / DOCUMENT).read_text(encoding="utf-8")
EXAMPLES = [json.loads(block) for block in blocks(DOCUMENT, "json")]
CONFIGURATIONS = [one for one in EXAMPLES if "kv_connector" in one]


def test_the_connector_of_a_configuration_exists() -> None:
    found = [one for one in CONFIGURATIONS if "kv_connector_module_path" in one]
    assert found
    for one in found:
        assert hasattr(importlib.import_module(one["kv_connector_module_path"]), one["kv_connector"])
        assert one["kv_load_failure_policy"] == "recompute"


def test_the_classes_of_the_offloading_exist() -> None:
    extras = [
        one["kv_connector_extra_config"] for one in CONFIGURATIONS if one["kv_connector"] == "OffloadingConnector"
    ]
    tier, policy = extras
    (below,) = tier["secondary_tiers"]
    assert hasattr(importlib.import_module(below["module_path"]), below["type"])
    assert hasattr(importlib.import_module(policy["cache_policy_module_path"]), policy["eviction_policy"])


@pytest.mark.parametrize("name", re.findall(r"^\| `(\w+)` \| [\d`]", TEXT, re.MULTILINE))
def test_an_option_and_its_default_exist(name: str) -> None:
    (shown,) = re.findall(rf"^\| `{name}` \| `?([^|`]*)`? \|", TEXT, re.MULTILINE)
    if name == "url":
        assert shown.strip() == DEFAULT_URL
        return
    default: Any = inspect.signature(Jobs).parameters[name].default
    assert float(shown) == default


def source(module: str) -> str:
    return (ROOT / "connectors" / "kvpage_connectors" / f"{module}.py").read_text(encoding="utf-8")


def test_a_user_with_the_documented_rights_can_do_all_jobs() -> None:
    (line,) = re.findall(r"redis-cli -p 9221 (ACL SETUSER .*)", TEXT)
    name = b"vllm.lbhnc-vec.0.1"
    bodies = [bytearray(b"k" * 32), bytearray(b"v" * 32)]
    layout = PageLayout([(0, 0, plane, DType.UINT8, 4, 8) for plane in (0, 1)])
    stored = Blocks(1, 64, lambda part: BlockPages([(name, 0)][part], layout, bodies))
    with start_server() as server, server.client() as client:
        client.execute_command(*shlex.split(line))
        jobs = Jobs(f"redis://vllm:secret@127.0.0.1:{server.port}", logging.getLogger("kvpage.test"))
        assert jobs.save(stored).result(60) == [True], jobs.reasons.counts
        assert jobs.load(stored).result(60) == [True], jobs.reasons.counts
        for pin in (True, False):
            jobs.pin(lambda: [(name, 0)], 1, pin=pin)
        lookup = jobs.lookup(lambda: [(name, 0)], 1, 2)
        assert lookup.answer(60) == 1, jobs.reasons.counts
        jobs.close()
        assert jobs.reasons.counts == {}


def test_the_hints_are_understood() -> None:
    (params,) = [example for example in EXAMPLES if "kv_hints" in example]
    assert [hint.kind for hint in hints_of(params, None)] == ["pin", "retain"]


def test_sizes_are_computed_as_documented() -> None:
    def bytes_of_token(layers: int, heads: int, dim: int, itemsize: int) -> int:
        return 2 * layers * heads * dim * itemsize

    large, small = bytes_of_token(32, 8, 128, 2), bytes_of_token(30, 3, 64, 4)
    assert large == 128 * 1024
    assert (128 * large, 256 * large, 8192 * large) == (16 << 20, 32 << 20, 1 << 30)
    assert f"{small / 1024:.0f} KiB" in TEXT
    assert f"{128 * small / (1 << 20):.1f} MiB" in TEXT
    assert f"load/bytes={16 * 128 * small}" in TEXT


@pytest.mark.parametrize("reason", ["away", "deadline", "unsupported"])
def test_a_documented_reason_exists(reason: str) -> None:
    assert f"`{reason}`" in TEXT
    assert f'"{reason}"' in source("reasons")
