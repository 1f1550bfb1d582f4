"""conf/man: the manual pages of the three programs, which `make docs` writes from the declarations of their options."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, run

from kvpage_server import cli
from kvpage_server.configuration.config import Config

MAN = ROOT / "conf" / "man"
PROGRAMS = "kvpage", "kvpage-engine", "kvpage-server"


def test_the_pages_are_up_to_date(tmp_path: Path) -> None:
    run([sys.executable, "-m", "conf.manual", str(tmp_path)])
    assert {path.stem for path in tmp_path.iterdir()} == set(PROGRAMS)
    for name in PROGRAMS:
        new, old = ((place / f"{name}.1").read_text(encoding="utf-8") for place in (tmp_path, MAN))
        assert new == old, "run: make docs"


@pytest.mark.parametrize("name", PROGRAMS)
def test_man_shows_each_page_without_a_warning(name: str) -> None:
    man = shutil.which("man")
    if not man or not run([man, "--version"]).startswith("man 2"):
        pytest.skip("man-db is not installed (Debian: apt-get install man-db)")
    shown = subprocess.run([man, "--warnings", "-l", str(MAN / f"{name}.1")], capture_output=True, encoding="utf-8")
    assert (shown.returncode, shown.stderr) == (0, "")
    plain = re.sub(".\b", "", shown.stdout)
    for title in ("NAME", "SYNOPSIS", "OPTIONS", "ENVIRONMENT", "EXIT STATUS", "SEE ALSO"):
        assert re.search(rf"^{title}$", plain, re.MULTILINE), plain


def test_every_command_and_parameter_has_an_entry() -> None:
    text = (MAN / "kvpage.1").read_text(encoding="utf-8")
    listed = re.findall(r"^\.SS (.*)$", text, re.MULTILINE)
    assert listed == [*next(action.choices for action in cli.parser()._actions if action.choices)]
    server = (MAN / "kvpage-server.1").read_text(encoding="utf-8").replace("\\-", "-")
    assert set(Config.parameters()) <= set(re.findall(r"^\.B --([\w-]+) value$", server, re.MULTILINE))
