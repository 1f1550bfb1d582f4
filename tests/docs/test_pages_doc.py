"""docs/monitoring/pages.md is true: its servers start, and its curl lines have the documented replies."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from api_engines import start_engine, write_tiny
from browsing import start_seen_server
from documents import ROOT, check, commands, entry_point, run

CURL = shutil.which("curl")
DOCUMENT = "docs/monitoring/pages.md"


@pytest.mark.skipif(not CURL, reason="curl is not installed")
def test_every_command_does_as_shown(tmp_path: Path) -> None:
    with (
        start_seen_server("--web-token", "9jV2xQm4TzK7sWc1") as seen,
        start_engine(write_tiny(tmp_path / "tiny"), "--store", seen.server.url) as engine,
    ):
        where = {"localhost:9223": seen.url, "localhost:8000": engine.url}
        for typed, shown in commands(DOCUMENT):
            program, *words = shlex.split(typed)
            if program != "curl":
                known = run([*entry_point(program), *(words[:1] if words[0] == "serve" else []), "--help"])
                assert all(word in known for word in words if word.startswith("--")), typed
                continue
            host = next(host for host in where if host in typed)
            check(run([program, *(word.replace(host, where[host]) for word in words)]), shown)


def test_its_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (ROOT / DOCUMENT).read_text(encoding="utf-8"))
    assert len(pictures) == 4
    for picture in pictures:
        assert (ROOT / DOCUMENT).parent.joinpath(picture).resolve().is_file(), picture
