"""The connectors with the real vLLM, in the environment of `make test-connectors`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("KVPAGE_VLLM")

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(PYTHON is None, reason="`make test-connectors` runs it")]


def run_python(*arguments: str, timeout: float = 120) -> str:
    """Run a program in the environment of vLLM. Return its standard output. Raises AssertionError with all output."""
    assert PYTHON
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'connectors'}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [PYTHON, *arguments], cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
