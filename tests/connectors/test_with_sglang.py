"""SGLang's factory of backends, its file backend and its switches for faults: the real SGLang on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from servers import start_server

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("KVPAGE_SGLANG")  # of the environment with SGLang

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(PYTHON is None, reason="`make test-connectors` runs it"),
]


def run_host(name: str, *arguments: str) -> Any:
    """Run a host in the environment of SGLang. Return the result that it prints."""
    assert PYTHON
    done = subprocess.run(
        [PYTHON, str(ROOT / "tests/connectors" / name), *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'connectors'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=1000,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_the_example_of_a_linker_restores_pages() -> None:
    """Offload 50 pages and two states, and load them at other places of another linker's pools."""
    with start_server("--maxmemory", "1gb") as server:
        result = run_host("sglang_linker_host.py", server.url)
    assert result == {
        "before": [],
        "offloaded": [True, True],
        "lengths": [20, 50],
        "loaded": True,
        "equal": [True] * 4,
        "missing": False,
        "cancelled": [True, -1],
    }


def test_the_backend_by_sglangs_own_factory(tmp_path: Path) -> None:
    """Restore pages, also through flat tensors; agree with SGLang's file backend on random pages of hybrid models; and
    return no wrong byte while SGLang's switches delay and fail calls.
    """
    with start_server("--maxmemory", "1gb") as server:
        result = run_host("sglang_host.py", server.url, str(tmp_path))
    print(result)
    assert result["version"] == "0.5.23"
    assert (result["restored"], result["flat"]) == (128, 8)
    assert result["different"] == []
    faults = result["faults"]
    assert faults["wrong"] == 0
    assert faults["loaded"] > 0
    assert faults["missed"] > 0
