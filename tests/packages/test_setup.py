"""Two `make` in one folder, at the same moment: one sets up the environment, the other waits for it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT
from waiting import until

WAITING = "another make sets up this folder, waiting for it"
EXCLUSIVE = str(ROOT / "conf" / "exclusive.sh")


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_two_makes_at_once_set_up_one_environment(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "conf" / "locks" / "docs.txt").write_text("", encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "PYTHON"))}
    environment = inherited | {"PYTHON": sys.executable}
    makes, logs = [], [tmp_path / name for name in ("first", "second")]
    with (tmp_path / ".venv.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for log in logs:
            with log.open("wb") as file:
                command = ["make", ".venv/docs.stamp"]
                makes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=file))
        until(lambda: all(WAITING in log.read_text(encoding="utf-8") for log in logs), "two makes that wait")
    codes = [make.wait(300) for make in makes]
    assert codes == [0, 0], [log.read_text(encoding="utf-8") for log in logs]
    assert subprocess.run([tmp_path / ".venv/bin/pip", "--version"], capture_output=True).returncode == 0


@pytest.mark.parametrize(("newer", "done"), [("target", ""), ("source", "made\n")])
def test_a_target_that_was_made_meanwhile_is_kept(newer: str, done: str, tmp_path: Path) -> None:
    for name in ("source", "target"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 10 if name == newer else 5))
    command = [EXCLUSIVE, "target", "source", "echo made"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8").stdout == done


@pytest.mark.parametrize("program", ["flock", "python3"])
def test_a_killed_setup_blocks_no_other(program: str, tmp_path: Path) -> None:
    """Python takes the lock where there is no flock."""
    if not (found := shutil.which(program)):
        pytest.skip(f"{program} is not installed")
    path = tmp_path / "programs"
    path.mkdir()
    (path / program).symlink_to(sys.executable if program == "python3" else found)
    (path / "sh").symlink_to("/bin/sh")

    def start(command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [EXCLUSIVE, "", "", command],
            cwd=tmp_path,
            env={"PATH": str(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    with start("echo started; read line") as first:
        assert first.stdout
        assert b"started\n" in first.stdout
        with start("echo second") as second:
            assert second.stdout
            assert WAITING.encode() in second.stdout.readline()
            first.kill()
            assert second.communicate(timeout=60)[0].endswith(b"\nsecond\n")
