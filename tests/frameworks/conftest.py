"""SmolLM2 with a chat template for tools, served to agent frameworks, and a record of requests and replies.

The tests run in two environments: that of `make test-frameworks`, and that of `make test`, without most frameworks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorder import Recorder, recording

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "models" / "smollm2"
PYTHON = os.environ.get("KVPAGE_PYTHON", sys.executable)  # of the environment with the engine
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an engine with SmolLM2, whose own chat template has no tools."""
    model = tmp_path_factory.mktemp("models") / "smollm2"
    model.mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (model / file).symlink_to(SMOLLM2 / file)
    (model / "chat_template.jinja").symlink_to(Path(__file__).with_name("tools.jinja"))
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


@pytest.fixture
def recorder(engine: str) -> Iterator[Recorder]:
    """A proxy of the engine. The SDK's types must accept every answer that passed through it."""
    with recording(engine) as recorder:
        yield recorder
    assert recorder.wrong == []


@pytest.fixture
def url(recorder: Recorder) -> str:
    """The base URL for a framework."""
    return f"http://127.0.0.1:{recorder.server_port}/v1"
