"""An engine with the tiny model and the default options, and `api`, OpenAI's client of it (`client` is Redis's)."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from api_engines import RunningEngine, link_smollm2, start_engine, write_tiny


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    model = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    with start_engine(model) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """SmolLM2 with a chat template that has tools. It keeps contexts of other tests: SHARED in tests/conftest.py."""
    with start_engine(link_smollm2(tmp_path_factory.mktemp("models") / "smollm2")) as engine:
        yield engine


@pytest.fixture(scope="module")
def api(engine: RunningEngine) -> Iterator[openai.OpenAI]:
    with engine.client() as client:
        yield client


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine of two tenants with the tokens "one" and "two"."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("a one\nb two\n", encoding="utf-8")
    model = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    with start_engine(model, "--token-file", str(tokens)) as engine:
        yield engine
