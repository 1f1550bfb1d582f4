"""vLLM in a process of its own: prompts are lists of (first token, number of tokens)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import until

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("KVPAGE_VLLM")  # of the environment with vLLM
QUICK = bool(os.environ.get("QUICK"))  # a context is restored, and the store never fails
STARTS_WITHIN = 300  # seconds on a busy machine
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'connectors'}",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
Parts = list[tuple[int, int]]

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.alone,
    pytest.mark.timeout(3000),  # a busy machine takes minutes for a prompt
    pytest.mark.skipif(PYTHON is None, reason="`make test-connectors` runs it"),
]


class Vllm:
    """A process with vLLM."""

    def __init__(self, log: Path, **options: Any) -> None:
        assert PYTHON
        command = [PYTHON, str(ROOT / "tests/connectors/vllm_host.py"), json.dumps(options)]
        self.log = log
        self._output = log.open("wb")
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=self._output, stderr=self._output
        )
        self._results = 0
        self.counts: dict[str, float] = {}
        self._next()

    def _next(self) -> dict[str, Any]:
        def lines() -> list[str]:
            text = self.log.read_text(encoding="utf-8", errors="replace")
            return [
                line for line in text.splitlines(keepends=True) if line.startswith("RESULT ") and line.endswith("\n")
            ]

        def is_there() -> bool:
            assert self._process.poll() is None, self.log.read_text(encoding="utf-8", errors="replace")[-5000:]
            return len(lines()) > self._results

        until(is_there, "a result of vLLM", within=STARTS_WITHIN)
        self._results += 1
        found: dict[str, Any] = json.loads(lines()[self._results - 1].removeprefix("RESULT "))
        return found

    def begin(self, *prompts: Parts, answers: int = 16, rest: float = 0, saves: bool = True) -> None:
        assert self._process.stdin
        order = {"prompts": prompts, "answers": answers, "rest": rest, "saves": saves}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def run(self, *prompts: Parts, answers: int = 16, rest: float = 0, saves: bool = True) -> dict[str, Any]:
        """Run prompts. The result's `counts` are those of this run, its `cpu` has the processor seconds up to `rest`
        seconds after the answer.
        """
        self.begin(*prompts, answers=answers, rest=rest, saves=saves)
        return self.end()

    def end(self) -> dict[str, Any]:
        found = self._next()
        before, self.counts = self.counts, found["counts"]
        found["counts"] = {name: n - before.get(name, 0) for name, n in self.counts.items() if n != before.get(name, 0)}
        assert set(found["reasons"]) == {"length"}
        return found

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            assert self._process.wait(60) == 0
        finally:
            self._process.kill()
            self._output.close()


@contextmanager
def vllm(log: Path, **options: Any) -> Iterator[Vllm]:
    engine = Vllm(log, **options)
    try:
        yield engine
    finally:
        engine.close()


def print_ratio(computed: dict[str, Any], restored: dict[str, Any]) -> None:
    """Print the time to the first token, which is that of the first request of each process."""
    times = computed["first"][0], restored["first"][0]
    print(f"first token: computed {times[0]:.3f} s, restored {times[1]:.3f} s, ratio {times[1] / times[0]:.3f}")
