"""`kvpage connectors verify lmcache` and `sglang`, with stubs of these engines, on a real server."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import redis
from kvpage_connectors import verify
from servers import RunningServer

from kvpage_server import cli

HERE = Path(__file__).parent
ENGINES = {"lmcache": ("LMCache 0.5.6", "64 objects of 256 KiB"), "sglang": ("SGLang 0.5.23", "128 pages of 256 KiB")}


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(HERE / "stub"), str(HERE.parents[1] / "connectors"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def run(engine: str, server: RunningServer, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["connectors", "verify", engine, "--url", server.url, *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("engine_name", ENGINES)
def test_another_process_loads_equal_bytes(
    engine_name: str, server: RunningServer, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    version, objects = ENGINES[engine_name]
    assert run(engine_name, server) == 0
    out, err = capsys.readouterr()
    versions, result = out.splitlines()
    assert err.splitlines() == [f"process 1 of 2: store {objects}", f"process 2 of 2: load {objects}"]
    assert versions.startswith(version)
    assert result.startswith(f"{objects}: stored in ")
    assert result.endswith("by another process, bytes equal")


@pytest.mark.parametrize("engine_name", ENGINES)
def test_the_documented_rights_are_enough(
    engine_name: str, server: RunningServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (HERE.parents[1] / "docs" / f"{engine_name}.md").read_text(encoding="utf-8")
    (rights,) = re.findall(rf"ACL SETUSER {engine_name} (.*~kv:.*)$", page, re.MULTILINE)
    client.execute_command("ACL", "SETUSER", engine_name, *shlex.split(rights))
    monkeypatch.setenv("KVPAGE_PASSWORD", "secret")
    assert run(engine_name, server, "--user", engine_name) == 0
    client.acl_deluser(engine_name)


def test_lmcaches_objects_are_deleted(server: RunningServer, client: redis.Redis) -> None:
    assert run("lmcache", server) == 0
    assert client.dbsize() == 0


@pytest.mark.parametrize(
    ("engine_name", "failure"),
    [("lmcache", "0 of 64 objects were found"), ("sglang", "0 of 128 pages were found")],
)
def test_lost_objects_are_a_failure(
    engine_name: str,
    failure: str,
    server: RunningServer,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_process = verify.in_process

    def lose(module: str, job: dict[str, Any]) -> object:
        if job["step"] == "load":
            client.flushall()
        return in_process(module, job)

    monkeypatch.setattr(verify, "in_process", lose)
    assert run(engine_name, server) == 1
    error = capsys.readouterr().err
    assert failure in error
    assert "cannot be leased" in error


def test_a_process_that_fails_is_reported(
    server: RunningServer,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE / "stub"))
    monkeypatch.setattr("kvpage_connectors.sglang_verify.MODULE", "kvpage_connectors.no_such_module")
    assert run("sglang", server) == 1
    assert "the process that should store failed" in capsys.readouterr().err
