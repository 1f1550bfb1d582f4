"""Mistakes that a developer could make, planted one at a time into the server's source when it is imported or compiled.

`mistakes.py` lists them: each is a module, a function and a mutation of its tokens. If the function does not contain
these tokens any more, `apply` raises DoesNotApply, and the mistake must be written anew or deleted.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.simulation.defects.compiled import NATIVE, PLANTED, CannotBuild, start_again_in_copy

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Mistake:
    """A mutation of one function: the tokens of `right`, which its source contains once, are replaced by `wrong`.

    Tokens are compared, so comments, line breaks and indentation may change. `wrong` is inserted without a change.
    """

    name: str
    module: str
    function: str  # "Class.method" or "function"; "": the whole module, as in Cython sources
    right: str
    wrong: str
    about: str
    shown_by: tuple[str, ...] = ()  # options of the command line that are necessary to detect the mistake

    @property
    def is_compiled(self) -> bool:
        """Whether it is a mistake in the compiled core."""
        return self.module.startswith(NATIVE)


class DoesNotApply(Exception):
    """The source has no such function, or the function does not contain the tokens once."""


def apply(mistake: Mistake) -> str:
    """Return the module's source with the mistake. Raises DoesNotApply."""
    path = ROOT.joinpath(*mistake.module.split(".")).with_suffix(".pyx" if mistake.is_compiled else ".py")
    if not path.is_file():
        raise DoesNotApply(f"{mistake.name}: there is no {mistake.module}")
    source = path.read_text(encoding="utf-8")
    first, last = 0, len(source)
    if mistake.function:
        first, last = _extent(source, mistake)
    right = [token for token, _ in _tokens(mistake.right)]
    tokens = _tokens(source[first:last])
    texts = [token for token, _ in tokens]
    found = [at for at in range(len(texts) - len(right) + 1) if texts[at : at + len(right)] == right]
    if len(found) != 1:
        place = f"{mistake.module}.{mistake.function}".rstrip(".")
        raise DoesNotApply(f"{mistake.name}: {place} contains {mistake.right!r} {len(found)} times")
    start = first + tokens[found[0]][1]
    end = first + tokens[found[0] + len(right) - 1][1] + len(right[-1])
    wrong = mistake.wrong.strip() if mistake.wrong.strip() else "pass"
    return source[:start] + wrong + source[end:]


_TOKEN = re.compile(r"""#[^\n]*|[a-z]*(?:\"(?:[^"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')|\w+|[^\s\w]""")


def _tokens(source: str) -> list[tuple[str, int]]:
    """Return the tokens of Python or Cython source without comments, each with its offset in characters."""
    return [(match[0], match.start()) for match in _TOKEN.finditer(source) if match[0][0] != "#"]


def _extent(source: str, mistake: Mistake) -> tuple[int, int]:
    """Return the offsets of the function's first and last character. Raises DoesNotApply."""
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.stmt | None = None
    for name in mistake.function.split("."):
        node = next((stmt for stmt in body if getattr(stmt, "name", None) == name), None)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            raise DoesNotApply(f"{mistake.name}: {mistake.module} has no {mistake.function}")
        body = node.body
    assert node is not None
    assert node.end_lineno is not None
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: node.lineno - 1])), sum(map(len, lines[: node.end_lineno]))


class _Loader(SourceFileLoader):
    def __init__(self, module: str, path: str, source: str) -> None:
        super().__init__(module, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compiled from the changed source; nothing is kept on disk."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module that the mistake is made in."""
        if name != self._module:
            return None
        found = PathFinder.find_spec(name, path)
        assert found is not None
        assert found.origin is not None
        return importlib.util.spec_from_file_location(
            name, found.origin, loader=_Loader(name, found.origin, self._source)
        )


def plant(name: str) -> None:
    """Have the server make a mistake, before it is imported. Raises DoesNotApply."""
    from tests.simulation.defects.mistakes import MISTAKES

    mistake = next((one for one in MISTAKES if one.name == name), None)
    if mistake is None:
        raise DoesNotApply(f"no mistake is named {name}; there are {', '.join(one.name for one in MISTAKES)}")
    if not mistake.is_compiled:
        sys.meta_path.insert(0, _Finder(mistake.module, apply(mistake)))
        return
    if os.environ.get(PLANTED) == name:
        return  # this is the copy that has it
    try:
        start_again_in_copy(ROOT, name, mistake.module, apply(mistake))
    except CannotBuild as error:
        raise DoesNotApply(f"{name}: the core cannot be compiled with it: {error}") from error
