"""Calls that open a text name its encoding, since the locale's encoding differs between machines.

`make lint` runs ruff's PLW1514, which knows `open` and those paths whose type it can infer. This test knows all calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
FOLDERS = ("kvpage_server", "engine", "benchmarks", "examples", "tests")
MODE_AT = {"open": 0, "fdopen": 1, "makefile": 0, "TemporaryFile": 0, "NamedTemporaryFile": 0}  # its position
WITH_A_FILE_FIRST = ("", "io", "gzip", "lzma", "bz2")  # whose `open` gets the mode second
BINARY_BY_DEFAULT = ("gzip.open", "lzma.open", "bz2.open", "TemporaryFile", "NamedTemporaryFile")
MODES = frozenset("rwaxbt+")


def without_encoding(source: str) -> Iterator[int]:
    """The lines of calls that open a text in the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _takes_the_locales(node):
            yield node.lineno


def _takes_the_locales(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
    if "encoding" in given or None in given:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) < 1 + (name == "write_text")
    if any(_is_true(given.get(word)) for word in ("text", "universal_newlines")):
        return True
    if name not in MODE_AT:
        return False
    owner = ast.unparse(call.func).rpartition(".")[0]
    if (owner, name) == ("os", "open"):
        return False
    at = MODE_AT[name] + (name == "open" and owner in WITH_A_FILE_FIRST)
    mode = given.get("mode", call.args[at] if len(call.args) > at else None)
    if not isinstance(mode, ast.Constant):
        return mode is None and (owner, name) in (("", "open"), ("io", "open"), ("os", "fdopen"))
    if not isinstance(mode.value, str) or not set(mode.value) <= MODES:
        return False
    return "b" not in mode.value and (f"{owner}.{name}" not in BINARY_BY_DEFAULT or "t" in mode.value)


def _is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def test_every_text_is_opened_with_an_encoding() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    found = [f"{file}:{line}" for file in files for line in without_encoding(file.read_text(encoding="utf-8"))]
    assert len(files) > 500
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "open(path, 'w')",
        "path.open('a')",
        "path.read_text()",
        "path.write_text(text)",
        "os.fdopen(3)",
        "gzip.open(path, 'rt')",
        "TemporaryFile('w+')",
        "sock.makefile('rw')",
        "subprocess.run(words, text=True)",
    ],
)
def test_a_call_without_an_encoding_is_recognised(source: str) -> None:
    assert list(without_encoding(source)) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'rb')",
        "open(path, encoding='ascii')",
        "path.open('wb')",
        "path.read_text('utf-8')",
        "gzip.open(path)",
        "index.open(request, 1)",
        "os.open(path, flags)",
        "TemporaryFile()",
        "subprocess.run(words, encoding='utf-8')",
    ],
)
def test_a_call_that_needs_none_is_let_through(source: str) -> None:
    assert list(without_encoding(source)) == []
