"""Completion of the three programs, in real shells."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from kvpage_server import cli

ENGINE = [sys.executable, "-m", "engine.cli", "completion"]
PRINTS = {
    "bash": "{script}\nCOMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); {function}\n"
    'echo "${{COMPREPLY[@]}}"',
    "fish": "{script}\ncomplete --do-complete '{words}'",
    "zsh": "compdef() {{ :; }}\n_describe() {{ print -r -- ${{(P)2}}; }}\n{script}\n"
    "words=({words}) CURRENT=$#words; {function}",
}


def scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["completion", shell])
    assert end.value.code == 0
    return capsys.readouterr().out


def completed(shell: str, script: str, typed: str) -> str:
    program = typed.split()[0]
    function = "_" + program.replace("-", "_")
    text = PRINTS[shell].format(script=script, words=typed, function=function)
    done = subprocess.run([shell, "-c", text], capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_commands_and_options_are_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    script = scripts(shell, capsys)
    assert "verify" in completed(shell, script, "kvpage ver")
    assert "--watch" in completed(shell, script, "kvpage status --w")
    assert "--maxmemory" in completed(shell, script, "kvpage-server --maxmem")


def test_the_engine_completes_its_commands() -> None:
    script = subprocess.run([*ENGINE, "bash"], check=True, capture_output=True, encoding="utf-8", timeout=100).stdout
    assert "fetch-model" in completed("bash", script, "kvpage-engine fet")
    assert "--transcript" in completed("bash", script, "kvpage-engine chat --t")
