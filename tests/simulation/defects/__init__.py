"""Mistakes that somebody could make, one at a time, in the server's source as it is imported or compiled.

Each is a line or some of `mistakes.py`: a module, what stands there, and what would be wrong. Where the source does
not say that any more, the mistake cannot be made and says so: it is to be written anew, or to go.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
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
    """`right` stands once in the module's source, and `wrong` takes its place."""

    name: str
    module: str
    right: str
    wrong: str
    about: str
    shown_by: tuple[str, ...] = ()  # of the command line: what it takes to see it

    @property
    def is_compiled(self) -> bool:
        """Whether it is a mistake in the compiled core."""
        return self.module.startswith(NATIVE)


class DoesNotApply(Exception):
    """The source does not say that."""


def apply(mistake: Mistake) -> str:
    """The source with the mistake in it. Raises DoesNotApply."""
    path = ROOT.joinpath(*mistake.module.split(".")).with_suffix(".pyx" if mistake.is_compiled else ".py")
    if not path.is_file():
        raise DoesNotApply(f"{mistake.name}: there is no {mistake.module}")
    source = path.read_text(encoding="utf-8")
    if source.count(mistake.right) != 1:
        raise DoesNotApply(
            f"{mistake.name}: {mistake.module} says {mistake.right!r} {source.count(mistake.right)} times"
        )
    return source.replace(mistake.right, mistake.wrong)


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
