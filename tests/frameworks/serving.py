"""Engines for agent frameworks: processes in the environment with the engine, which may be another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("KVPAGE_PYTHON", sys.executable)  # of the environment with the engine
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Serve a model, and yield its URL."""
    command = [PYTHON, "-m", "engine.cli", "serve", "--model", str(model), "--port", "0", "--max-tokens", "48"]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, encoding="utf-8")
    assert process.stdout
    try:
        served = process.stdout.readline()
        assert " is served on " in served, "the engine does not start"
        yield served.split()[-1]
    finally:
        process.terminate()
        assert process.wait(60) == 0
