"""CONTRIBUTING.md's recipes, followed exactly in a copy of the tree: their code works, and its tests pass.

A recipe names the place of each block: the end of a file, the text before or in place of which it is inserted, or a new
file. The lines of an inserted block are indented as the lines around it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## Recipe: (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
STEP = re.compile(r"((?:(?!```).)*?)^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([^`]+)`")
COPIED = ["kvpage_server", "engine", "benchmarks", "docs", "conf", "tests"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that a recipe changes and runs."""
    tree = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def follow(tree: Path, before: str, block: str) -> Path:
    """Put a block where the words before it say; the file."""
    place = re.sub(r"\s+", " ", before.strip().split("\n\n")[-1])
    if found := re.search(r"(?:At the end of|Write|Its test is) `([^`]+)`", place):
        file = tree / found[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{file.read_text(encoding='utf-8')}\n\n{block}" if file.exists() else block, encoding="utf-8")
        return file
    found = re.search(r"In `([^`]+)`, (before|instead of) `([^`]+)`:$", place)
    assert found, f"it is not said where this goes: {place}"
    file, how, text = tree / found[1], found[2], found[3]
    whole = file.read_text(encoding="utf-8")
    assert whole.count(text) == 1, f"{text} is in {found[1]} {whole.count(text)} times"
    indent = re.search(rf"^( *){re.escape(text)}", whole, re.MULTILINE)
    assert indent, f"{text} begins no line of {found[1]}"
    lines = [indent[1] + line for line in block.splitlines()]
    file.write_text(
        whole.replace(indent[0], "\n".join(lines if how == "instead of" else [*lines, indent[0]])), encoding="utf-8"
    )
    return file


def run(tree: Path, typed: str) -> None:
    """A command of a recipe, with the environment that the tests run in."""
    program, *words = shlex.split(typed)
    if program == "make":  # the installation exists already
        words += ["-o", ".venv/dev.stamp", f"BIN={Path(sys.executable).parent}"]
    else:
        assert program == ".venv/bin/python"
        program = sys.executable
    done = subprocess.run([program, *words], cwd=tree, capture_output=True, encoding="utf-8", timeout=280)
    assert done.returncode == 0, f"{typed}\n{done.stdout}{done.stderr}"


@pytest.mark.timeout(900)
def test_each_recipe_works_as_it_is_written(tree: Path) -> None:
    """One after the other: the second goes on from the first."""
    assert list(RECIPES) == ["a command", "a configuration parameter", "a kind of cache"]
    written = set()
    for recipe in RECIPES.values():
        for before, kind, block in STEP.findall(recipe):
            if kind in ("python", "text"):  # a whole statement, or a part of one
                written.add(follow(tree, before, block))
                continue
            assert kind == "console"
            for line in block.splitlines():
                run(tree, line.removeprefix("$ "))
    assert "| `LONGER key other` |" in (tree / "docs/commands.md").read_text(encoding="utf-8")
    assert "| `longer-by` | `0` | bytes by which LONGER" in (tree / "docs/configuration.md").read_text(encoding="utf-8")
    ruff = str(Path(sys.executable).with_name("ruff"))
    for words in (["check"], ["format", "--check"]):
        looked = subprocess.run([ruff, *words, *map(str, written)], cwd=tree, capture_output=True, encoding="utf-8")
        assert looked.returncode == 0, looked.stdout
    worst = "from benchmarks.worst import scenes; assert any(scene.command == 'longer' for scene in scenes(10))"
    run(tree, shlex.join([".venv/bin/python", "-c", worst]))


def test_named_files_exist() -> None:
    made = set(re.findall(r"(?:Write|Its test is) `([^`]+)`", TEXT))
    for name in set(NAMED.findall(TEXT)) - made:
        if re.fullmatch(r"(kvpage_server|engine|benchmarks|docs|tests)(/[\w.]+)*/?", name):
            assert (ROOT / name).exists() or not (ROOT / "tests" / "support").exists(), name
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)", TEXT)) <= targets
