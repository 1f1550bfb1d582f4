"""`kvpage connectors verify mlx-lm`: two processes of the real mlx-lm, on a real server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import redis
from api_engines import write_family, write_tiny
from kvpage_connectors import mlx_lm_verify, verify
from servers import RunningServer

from kvpage_server import cli

STEPS = ["process 1 of 2: mlx-lm computes a new prompt", "process 2 of 2: mlx-lm restores the prompt"]


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parents[2] / "connectors"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def run(*options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["connectors", "verify", "mlx-lm", *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_another_process_restores_the_context(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    tiny = write_tiny(tmp_path / "tiny", max_position_embeddings=8192)
    model = tiny if kind == "llama" else write_family(tmp_path / kind, kind)
    assert run("--url", server.url, "--model", str(model)) == 0, capsys.readouterr()
    out, err = capsys.readouterr()
    versions, restored, first, answers = out.splitlines()
    assert err.splitlines() == STEPS
    assert versions.startswith("mlx-lm 0.32")
    assert restored == "prompt of 1025 tokens: 1024 restored by another process"
    assert first.startswith("first token: ")
    assert answers.startswith("answers of 16 tokens are equal")


def test_a_lost_context_is_a_failure(
    server: RunningServer,
    client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_process = verify.in_process

    def lose(*arguments: Any) -> object:
        client.flushall()
        return in_process(*arguments)

    monkeypatch.setattr(verify, "in_process", lose)
    assert run("--url", server.url, "--model", str(write_tiny(tmp_path / "tiny", max_position_embeddings=8192))) == 1
    assert capsys.readouterr().err.splitlines() == [*STEPS, "kvpage: nothing was restored"]


def test_an_untried_version_is_refused(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_lm_verify, "version", lambda package: "0.33.0")
    assert mlx_lm_verify.verify(server.url, "tiny") == ["mlx-lm 0.33.0 was not tried, only 0.32"]


def test_a_missing_model_is_named_without_a_traceback(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in (tmp_path, tmp_path / "none"):
        assert run("--url", server.url, "--model", str(model)) == 1
        step, failed, *_, why = capsys.readouterr().err.splitlines()
        assert step == STEPS[0]
        assert failed == "kvpage: process 1 of mlx-lm failed:"
        assert why.startswith(f"--model {model} cannot be loaded: ")
