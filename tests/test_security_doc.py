"""docs/security.md: its commands, in order, against a server with its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import RunningServer, start_server
from test_readme import REDIS_CLI, blocks, check, commands, run

DOCUMENT = "docs/security.md"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RunningServer]:
    """A server with the document's configuration."""
    (configuration,) = blocks(DOCUMENT, "conf")
    file = tmp_path / "kvpage.conf"
    file.write_text(configuration)
    with start_server(file=file) as server:
        yield server


@pytest.mark.skipif(not REDIS_CLI, reason="redis-cli is not installed (Debian: redis-tools)")
def test_its_commands_answer_as_shown(guarded: RunningServer) -> None:
    assert REDIS_CLI
    for (program, _, _, *words), shown in commands(DOCUMENT):
        assert program == "redis-cli"
        check(run([REDIS_CLI, "--no-raw", "-p", str(guarded.port), *words]), shown)
