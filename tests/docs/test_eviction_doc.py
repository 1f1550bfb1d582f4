"""docs/eviction.md is true: its examples run on a server of their own, and on short traces under the names of the
recorded ones.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from documents import NO_REDIS_CLI, REDIS_CLI, blocks, check, commands, entry_point, run
from servers import start_server

DOCUMENT = "docs/eviction.md"
TYPED = [(shlex.split(typed), shown) for typed, shown in commands(DOCUMENT)]


@pytest.mark.skipif(not REDIS_CLI, reason=NO_REDIS_CLI)
def test_its_commands_are_answered_as_shown() -> None:
    with start_server() as server:
        asked = [(rest, shown) for (program, *rest), shown in TYPED if program == "redis-cli"]
        assert len(asked) >= 4
        for rest, shown in asked:
            assert rest[:2] == ["-p", "9221"]
            check(run([str(REDIS_CLI), "--no-raw", "-p", str(server.port), *rest[2:]]), shown)


def test_its_quotas_are_a_configuration(tmp_path: Path) -> None:
    for text in blocks(DOCUMENT, "conf"):
        file = tmp_path / "kvpage.conf"
        file.write_text(text, encoding="utf-8")
        assert run([*entry_point("kvpage-server"), "--check-config", str(file)]) == "the configuration is valid"


def test_its_replays_make_the_plots_they_name(tmp_path: Path) -> None:
    replays = [words for words, _ in TYPED if words[0] == "kvpage"]
    assert replays
    for program, *rest in replays:
        trace, plot = rest[1], rest[rest.index("--plot") + 1]
        requests = [{"timestamp": 1000 * at, "hash_ids": [0, 1 + at % 7, 100 + at]} for at in range(50)]
        (tmp_path / trace).write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
        subprocess.run([*entry_point(program), *rest], cwd=tmp_path, check=True, capture_output=True, timeout=60)
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
