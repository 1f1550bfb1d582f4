"""SmolLM2 with a chat template for tools, served to agent frameworks, and a record of requests and replies.

The tests run in two environments: that of `make test-frameworks`, and that of `make test`, without most frameworks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from recorder import Recorder, recording
from serving import ROOT, serving

SMOLLM2 = ROOT / "models" / "smollm2"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an engine with SmolLM2, whose own chat template has no tools."""
    model = tmp_path_factory.mktemp("models") / "smollm2"
    model.mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (model / file).symlink_to(SMOLLM2 / file)
    (model / "chat_template.jinja").symlink_to(Path(__file__).with_name("tools.jinja"))
    with serving(model) as url:
        yield url


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
