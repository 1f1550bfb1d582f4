"""docs/persistent.md: its program runs and prints the documented values, and its lists are complete."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
import redis
from documents import ROOT, blocks, check, commands, entry_point
from servers import RunningServer

from engine.persistent import errors
from engine.persistent.compile import OPS
from engine.persistent.graph import DTYPES
from engine.persistent.parser import ATTRIBUTES

NAME = "docs/persistent.md"
DOCUMENT = (ROOT / NAME).read_text(encoding="utf-8")
PROGRAM = "\n".join(blocks(NAME, "python"))


def test_the_program_prints_the_documented_output(
    server: RunningServer, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(PROGRAM.replace("redis://127.0.0.1:9221", server.url), "persistent.md", "exec"), {})
    expected = re.findall(r"^ *print\(.*?\)  # (.*)$|^    # (.*)$", PROGRAM, re.MULTILINE)
    assert printed.getvalue().splitlines() == [after or below for after, below in expected]
    assert client.dbsize() == 0


def test_the_command_prints_the_documented_output(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    ((typed, shown),) = commands(NAME)
    program, *words = shlex.split(typed)
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"x": mx.ones((2, 3))})
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [*entry_point(program), *words, "--url", server.url]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    check("\n".join(line.rstrip() for line in done.stdout.splitlines()), shown)


def test_everything_is_listed() -> None:
    for name in OPS:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", DOCUMENT), name
    for attribute in ATTRIBUTES:
        assert f"`@{attribute}" in DOCUMENT
    for dtype in ("f16", "bf16", "f32", "f64", "i8", "i64", "u8", "u64", "bool"):
        assert dtype in DTYPES
        assert f"`{dtype}`" in DOCUMENT
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.GraphError)]
    for kind in kinds:
        assert kind is errors.GraphError or f"`{kind.__name__}`" in DOCUMENT
