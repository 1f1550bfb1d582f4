"""Mistakes that somebody could make, one at a time, in the server's source as it is imported.

Each is a line or some of `mistakes.py`: a module, what stands there, and what would be wrong. Where the source does
not say that any more, the mistake cannot be made and says so: it is to be written anew, or to go.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """`right` stands once in the module's source, and `wrong` takes its place."""

    name: str
    module: str
    right: str
    wrong: str
    about: str
    seeds: str = "1..200"  # among which it is found
    core: str = ""  # "python" where it is made in the plain core


class DoesNotApply(Exception):
    """The source does not say that."""


def changed(mistake: Mistake, source: str) -> str:
    """The source with the mistake in it."""
    if source.count(mistake.right) != 1:
        raise DoesNotApply(
            f"{mistake.name}: {mistake.module} says {mistake.right!r} {source.count(mistake.right)} times"
        )
    return source.replace(mistake.right, mistake.wrong)


class _Loader(SourceFileLoader):
    def __init__(self, mistake: Mistake, path: str) -> None:
        super().__init__(mistake.module, path)
        self._mistake = mistake

    def get_code(self, fullname: str) -> CodeType:
        """Compiled from the changed source; nothing is kept on disk."""
        source = changed(self._mistake, self.get_source(fullname) or "")
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mistake: Mistake) -> None:
        self._mistake = mistake

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module that the mistake is made in."""
        if name != self._mistake.module:
            return None
        found = PathFinder.find_spec(name, path)
        if found is None or found.origin is None:
            raise DoesNotApply(f"{self._mistake.name}: there is no {name}")
        return importlib.util.spec_from_file_location(name, found.origin, loader=_Loader(self._mistake, found.origin))


def plant(name: str) -> None:
    """Have the server make a mistake, before it is imported."""
    from tests.simulation.defects.mistakes import MISTAKES

    mistake = next(one for one in MISTAKES if one.name == name)
    sys.meta_path.insert(0, _Finder(mistake))
