"""Tests of documents: their examples, extracted to be run.

A fenced block is `console` (commands after ``$ ``, their output below, ``...`` standing for any), `python`, a file
(`conf`, `ini`, `dockerfile`), or `text`, which claims nothing. The Python blocks of a document are one program. A line
in it that prints and ends in a comment prints that.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REDIS_CLI = shutil.which("redis-cli")
HANGS = 500  # seconds; a busy machine may take many
NO_REDIS_CLI = "redis-cli is not installed (Debian: redis-tools)"


def blocks(document: str, kind: str) -> list[str]:
    """The contents of a document's blocks of one kind."""
    return [body for found, body in FENCE.findall((ROOT / document).read_text(encoding="utf-8")) if found == kind]


def commands(document: str) -> Iterator[tuple[str, str]]:
    """Yield the commands in a document's console blocks, and the output below each."""
    for block in blocks(document, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            typed, _, shown = part.partition("\n")
            yield typed, shown.rstrip("\n")


def run(command: list[str]) -> str:
    """Return the output of a successful command."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.rstrip("\n")


def check(output: str, shown: str) -> None:
    assert re.fullmatch(re.escape(shown).replace(re.escape("..."), "(?s:.*)"), output), output


def check_program(program: str, python: str | Path = sys.executable, cwd: Path = ROOT) -> None:
    """Check that a document's program runs, and prints the values in its comments. `python` is an interpreter."""
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert promised
    done = subprocess.run([python, "-c", program], cwd=cwd, capture_output=True, encoding="utf-8", timeout=HANGS)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [line for line in promised if line not in printed] == []


def entry_point(name: str) -> list[str]:
    """A command of the project, as it is installed."""
    return [str(Path(sys.executable).with_name(name))]
