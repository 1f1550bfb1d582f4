"""`kvpage connectors verify vllm`, without vLLM: comparison of two runs, arguments and exit codes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from kvpage_connectors import verify as verify_core
from kvpage_connectors import vllm_verify
from kvpage_connectors.verify import Run
from kvpage_connectors.vllm_verify import transfer_config, verify
from servers import RunningServer

from kvpage_server import cli

COMPUTED = Run("vLLM", 1025, 0, 3.0, [1, 2, 3], [-0.1, -0.2, -0.3], ["kvpage: the names of blocks begin with x"])
RESTORED = Run("vLLM", 1025, 1024, 0.06, [1, 2, 3], [-0.1, -0.2, -0.30001], ["kvpage: load missed 1 blocks"])


def runs(monkeypatch: pytest.MonkeyPatch, *found: Run | str) -> list[dict[str, Any]]:
    """Replace the processes of vLLM by their results. Return the jobs that they get."""
    jobs: list[dict[str, Any]] = []

    def start(module: str, job: dict[str, Any], environment: Any) -> tuple[dict[str, Any] | None, str]:
        run = found[len(jobs)]
        jobs.append(job)
        return (None, run) if isinstance(run, str) else (asdict(run), "")

    monkeypatch.setattr(verify_core, "in_process", start)
    return jobs


def test_an_equal_restored_answer_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = runs(monkeypatch, COMPUTED, RESTORED)
    assert verify("redis://store", "folder", tier=False, options={"dtype": "float32"}) == []
    assert jobs[0] == jobs[1]
    assert jobs[0]["options"] == {"model": "folder", "dtype": "float32"}
    assert capsys.readouterr().out.splitlines() == [
        "vLLM",
        "kvpage: the names of blocks begin with x",
        "kvpage: load missed 1 blocks",
        "prompt of 1025 tokens: 1024 restored by another process",
        "first token: 3.000 s computed, 0.060 s restored, ratio 0.020",
        "answers of 3 tokens are equal, log probabilities within 0.000010",
    ]


@pytest.mark.parametrize(
    ("restored", "failure"),
    [
        (Run("", 1025, 0, 3.0, [1, 2, 3], [-0.1, -0.2, -0.3]), "nothing was restored"),
        (Run("", 1025, 1024, 1.0, [1, 2, 4], [-0.1, -0.2, -0.3]), "the answers differ: [1, 2, 3] and [1, 2, 4]"),
        (Run("", 1025, 1024, 1.0, [1, 2, 3], [-0.1, -0.2, -1.3]), "the log probabilities differ by 1.000"),
        ("Traceback", "process 2 of vLLM failed:\nTraceback"),
    ],
)
def test_a_difference_is_a_failure(monkeypatch: pytest.MonkeyPatch, restored: Run | str, failure: str) -> None:
    runs(monkeypatch, COMPUTED, restored)
    assert verify("redis://store", "folder", tier=True, options={}) == [failure]


def test_a_new_prompt_must_not_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, RESTORED, RESTORED)
    assert verify("redis://store", "folder", tier=False, options={}) == ["a new prompt had 1024 restored tokens"]


def test_the_tier_is_below_the_offloading_of_vllm() -> None:
    config = transfer_config("redis://store", tier=True)
    (tier,) = config["kv_connector_extra_config"]["secondary_tiers"]
    assert (tier["type"], tier["url"]) == ("KvpageTier", "redis://store")
    assert config["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize(("failures", "code"), [([], 0), (["nothing was restored"], 1)])
def test_the_exit_code_is_the_result(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failures: list[str],
    code: int,
) -> None:
    monkeypatch.setattr(vllm_verify, "verify", lambda *args, **options: failures)
    assert run("--url", server.url) == code
    assert capsys.readouterr().err == "".join(f"kvpage: {failure}\n" for failure in failures)


def test_a_missing_engine_is_named(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert run("--url", server.url) == 1
    assert "vllm is not installed in the environment" in capsys.readouterr().err


def test_a_missing_model_is_named(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: True)
    assert run("--url", server.url, "--model", "") == 1
    assert "verify vllm needs --model" in capsys.readouterr().err


def test_wrong_options_and_a_missing_store_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--options", "[]") == 2
    assert run("--options", "{") == 2
    assert run("--url", "redis://127.0.0.1:1") == 2


def run(*options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["connectors", "verify", "vllm", "--model", "folder", *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code
