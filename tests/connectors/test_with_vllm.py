"""Policy, benchmark and `kvpage connectors verify vllm` with the real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from documents import blocks
from servers import start_server
from vllm_process import ENVIRONMENT, PYTHON, ROOT, needs_vllm

pytestmark = needs_vllm


def run_python(*arguments: str, text: str = "") -> str:
    """Run a program in the environment of vLLM. Return its standard output. Raises AssertionError with all output."""
    assert PYTHON
    done = subprocess.run(
        [PYTHON, *arguments], input=text, cwd=ROOT, env=ENVIRONMENT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_stub_has_the_interfaces_of_vllm() -> None:
    assert "differs" not in run_python("tests/connectors/vllm_interfaces.py")


def test_the_tier_works_below_the_manager_of_vllm() -> None:
    """Check backpressure, partial loads and uses without a model."""
    with start_server() as server:
        assert run_python("tests/connectors/vllm_manager.py", server.url).count(" is right\n") == 3


def test_the_configurations_of_the_page_are_those_of_vllm() -> None:
    """Let vLLM read each configuration of docs/vllm.md, and find its classes."""
    program = """
import json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
for one in json.load(sys.stdin):
    print(KVConnectorFactory.get_connector_class(KVTransferConfig(**one)).__name__)
    for tier in one["kv_connector_extra_config"].get("secondary_tiers", []):
        print(SecondaryTierFactory.get_tier_class(tier).__name__)
"""
    configurations = [one for one in map(json.loads, blocks("docs/vllm.md", "json")) if "kv_connector" in one]
    assert run_python("-c", program, text=json.dumps(configurations)).split()[-4:] == [
        "KvpageConnector",
        "OffloadingConnector",
        "KvpageTier",
        "OffloadingConnector",
    ]


def test_the_policy_passes_its_tests_with_the_classes_of_vllm() -> None:
    path = "tests/connectors/test_vllm_policy.py"
    output = run_python("-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), path)
    assert "28 passed" in output


def test_the_benchmark_of_policies_runs(tmp_path: Path) -> None:
    """Run a trace in which a prompt returns after many others, with vLLM's own manager of the tier."""
    trace = tmp_path / "trace.jsonl"
    prompts = [[1, 2, 3], [1, 2, 4], *([10 * i, 10 * i + 1, 10 * i + 2] for i in range(1, 20)), [1, 2, 5]]
    lines = [f'{{"timestamp": {5000 * i}, "hash_ids": {prompt}}}\n' for i, prompt in enumerate(prompts)]
    trace.write_text("".join(lines), encoding="utf-8")
    output = run_python("-m", "benchmarks", "vllm_policies", "--trace", str(trace), "--capacity", "20", "100")
    rows = [line.split("\t") for line in output.splitlines() if "\t" in line]
    asked = sum(map(len, prompts))
    some, most = f"{2 / asked:.2%}", f"{4 / asked:.2%}"
    assert rows[-4:] == [
        ["capacity", "20", "100"],
        ["lru", some, most],
        ["arc", most, most],
        ["PrefixPolicy", most, most],
    ]


def test_verify_saves_and_restores_a_context() -> None:
    options = '{"dtype": "float32", "max_model_len": 2048, "gpu_memory_utilization": 0.5}'
    with start_server() as server:
        words = ["connectors", "verify", "vllm", "--url", server.url, "--model", "models/smollm2", "--options", options]
        output = run_python("-m", "kvpage_server.cli", *words)
    print(output)
    assert "prompt of 1025 tokens: 1024 restored by another process\n" in output
    assert "kvpage: the names of blocks begin with vllm.lbhnc-" in output
