"""docs/security.md: its commands, in order, against a server with its configuration."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import start_seen_server
from documents import NO_REDIS_CLI, REDIS_CLI, ROOT, blocks, check, commands, run
from servers import RunningServer, start_server

DOCUMENT = "docs/security.md"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RunningServer]:
    """A server with the document's configuration."""
    (configuration,) = blocks(DOCUMENT, "conf")
    file = tmp_path / "kvpage.conf"
    file.write_text(configuration, encoding="utf-8")
    with start_server(file=file) as server:
        yield server


@pytest.mark.skipif(not REDIS_CLI, reason=NO_REDIS_CLI)
def test_its_commands_answer_as_shown(guarded: RunningServer) -> None:
    assert REDIS_CLI
    for typed, shown in commands(DOCUMENT):
        program, _, _, *words = shlex.split(typed)
        assert program == "redis-cli"
        check(run([REDIS_CLI, "--no-raw", "-p", str(guarded.port), *words]), shown)


def test_its_metrics_user_sees_every_figure(tmp_path: Path) -> None:
    (configuration,) = blocks(DOCUMENT, "conf")
    file = tmp_path / "kvpage.conf"
    file.write_text(configuration, encoding="utf-8")
    elsewhere = {"X-Forwarded-For": "192.0.2.1"}
    with start_seen_server("--store", "tiered", file=file) as seen:
        users = ("metrics", "third-password"), ("default", "correct-horse")
        found = [{name for name, *_ in seen.metrics(headers=elsewhere, auth=user)} for user in users]
    assert found[0] == found[1]
    assert {"kvpage_blocks", "kvpage_disk_full", "kvpage_disk_limit_bytes"} <= found[0]


def test_every_document_gives_the_metrics_user_the_same_rights() -> None:
    files = ("docs/security.md", "docs/watch.md", "conf/kvpage.conf")
    lines = [line for file in files for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    rights = [line.split(" %R~* ")[1] for line in lines if "user metrics on" in line]
    assert len(rights) == len(files)
    assert len(set(rights)) == 1, rights
