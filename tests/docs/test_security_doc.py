"""docs/security.md: its commands, in order, against a server with its configuration."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import NO_REDIS_CLI, REDIS_CLI, blocks, check, commands, run
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
