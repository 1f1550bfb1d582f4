"""`kvpage connectors verify lmcache`, with a stub of LMCache, on a real server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis
from kvpage_connectors import lmcache_verify
from servers import RunningServer

from kvpage_server import cli

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(HERE / "stub"), str(HERE.parents[1] / "connectors"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def run(*options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["connectors", "verify", "lmcache", *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_another_process_loads_equal_bytes(
    server: RunningServer, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--url", server.url) == 0
    versions, result = capsys.readouterr().out.splitlines()
    assert versions.startswith("LMCache 0.5.6")
    assert result.endswith("by another process, bytes equal")
    assert client.dbsize() == 0


def test_lost_objects_are_a_failure(
    server: RunningServer,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = lmcache_verify._start

    def lose(job: dict[str, str]) -> object:
        if job["step"] == "load":
            client.flushall()
        return start(job)

    monkeypatch.setattr(lmcache_verify, "_start", lose)
    assert run("--url", server.url) == 1
    assert "0 of 64 objects were found" in capsys.readouterr().err
