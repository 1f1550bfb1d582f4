"""Adapters of mlx-lm: they change the answers, and never share a context with the model alone or with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from api_engines import start_engine, write_tiny
from engine_models import letter_tokenizer, tiny_llama, write_adapter
from servers import RunningServer

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from engine import cli
from engine.model import UnknownModelError, adapt
from engine.spec import ModelCacheSpec

MESSAGES = [{"role": "user", "content": "hello " * 60}]


def spec(adapter: Path | None) -> tuple[ModelCacheSpec, Any]:
    model = tiny_llama()
    if adapter:
        adapt(model, adapter)
    return ModelCacheSpec.probe(model, letter_tokenizer()), np.array(model(mx.array([[1, 2, 3]])))


def test_each_adapter_and_scale_is_a_model_of_its_own(tmp_path: Path) -> None:
    adapters = [
        None,
        write_adapter(tmp_path / "one", 1),
        write_adapter(tmp_path / "two", 2),
        write_adapter(tmp_path / "scaled", 1, scale=10.0),
        write_adapter(tmp_path / "dora", 1, kind="dora"),
    ]
    found = [spec(adapter) for adapter in adapters]
    assert len({one.fingerprint for one, _ in found}) == len(adapters)
    assert not any(np.array_equal(found[0][1], logits) for _, logits in found[1:])
    assert spec(write_adapter(tmp_path / "copy", 1))[0].fingerprint == found[1][0].fingerprint


def test_an_adapter_of_other_layers_is_refused(tmp_path: Path) -> None:
    wider = write_adapter(tmp_path / "wider", 1, hidden_size=128)
    with pytest.raises(UnknownModelError, match=r"does not fit the model: .* does not match model parameter shape"):
        adapt(tiny_llama(), wider)
    partial = write_adapter(tmp_path / "partial", 1)
    (name, weight), *_ = mx.load(str(partial / "adapters.safetensors")).items()
    mx.save_safetensors(str(partial / "adapters.safetensors"), {name: weight})
    with pytest.raises(UnknownModelError, match=r"does not fit the model: it has no model\.layers"):
        adapt(tiny_llama(), partial)
    other = write_adapter(tmp_path / "peft", 1)
    (other / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    with pytest.raises(UnknownModelError, match=r"does not fit the model: .*num_layers"):
        adapt(tiny_llama(), other)
    with pytest.raises(UnknownModelError, match=r"has no adapter of mlx-lm: there is no adapter_config\.json"):
        adapt(tiny_llama(), tmp_path)


def test_a_wrong_adapter_ends_the_start_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, wider = write_tiny(tmp_path / "tiny"), write_adapter(tmp_path / "wider", 1, hidden_size=128)
    assert cli.main(["generate", "--model", str(model), "--adapter", str(wider), "hello"]) == 1
    assert f"kvpage-engine: the adapter in {wider} does not fit the model" in capsys.readouterr().err


def test_contexts_of_the_model_alone_are_not_reused(tmp_path: Path, server: RunningServer) -> None:
    model = write_tiny(tmp_path / "tiny")
    pirate = write_adapter(tmp_path / "pirate", 1)
    reused = {}
    for turn, options in (
        ("alone", []),
        ("adapted", ["--adapter", str(pirate)]),
        ("again", ["--adapter", str(pirate)]),
    ):
        with start_engine(model, *options, "--store", server.url, "--keep", "all") as engine, engine.client() as client:
            (served,) = client.models.list().data
            assert served.id == ("tiny" if turn == "alone" else "tiny+pirate")
            answer = client.chat.completions.create(model=served.id, messages=MESSAGES, max_tokens=4, user="anne")  # type: ignore[arg-type]
            reused[turn] = answer.usage.prompt_tokens_details.cached_tokens
    assert (reused["alone"], reused["adapted"]) == (0, 0)
    assert reused["again"] > 256
