"""Structure of the engine: layers that import only lower ones, and constructors with few arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "engine").rglob("*.py"))
MAX_ARGUMENTS = 6  # of a constructor; records, which are dataclasses, have as many as they have fields

# From the bottom up: a room imports those above it in this list. A module directly in `engine` or `engine.persistent`
# is an entry by itself.
ROOMS = [
    "engine.platform",
    "engine.pool",
    "engine.event_loop",
    "engine.tensor_file",
    "engine.caches",
    "engine.generation",
    "engine.model",
    "engine.chains",
    "engine.spec",
    "engine.memory",
    "engine.scheduling",
    "engine.batch_engine",
    "engine.tiers.server",
    "engine.tiers",
    "engine.agent_engine",
    "engine.startup",
    "engine.api.openai",
    "engine.api.anthropic",
    "engine.api",
    "engine.demo",
    "engine.persistent.errors",
    "engine.persistent.graph",
    "engine.persistent.parser",
    "engine.persistent.builder",
    "engine.persistent.state",
    "engine.persistent.variables",
    "engine.persistent.compile",
    "engine.persistent.storage",
    "engine.persistent.simulator",
    "engine.persistent.run",
    "engine.persistent",
    "engine.commands",
    "engine.cli",
    "engine",
]
PACKAGES_OF_ROOMS = ("engine", "engine.persistent")  # whose modules are rooms by themselves


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path): path for path in PATHS}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """The modules that a module imports, for type checking too, and within functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name_of(path).split(".") if path.name == "__init__.py" else name_of(path).split(".")[:-1]
            base = [*package[: len(package) + 1 - node.level]] if node.level else []
            source = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield full if full in NAMES else source


def room_of(name: str) -> str:
    if NAMES[name].name == "__init__.py":
        return name
    package = name.rpartition(".")[0]
    return name if package in PACKAGES_OF_ROOMS else package


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in PATHS:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                yield name_of(path), node


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (member for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_module_is_in_a_listed_package() -> None:
    assert {room_of(name) for name in NAMES} == set(ROOMS)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_only_rooms_below_its_own(name: str) -> None:
    order = {room: i for i, room in enumerate(ROOMS)}
    room = room_of(name)
    for imported in imports(NAMES[name]):
        if imported in NAMES and room_of(imported) != room:
            assert order[room_of(imported)] < order[room], f"{name} imports {imported}"


def test_every_folder_states_its_contents() -> None:
    for folder in {path.parent for path in PATHS}:
        docstring = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
        assert len(docstring.split()) >= 8, folder


def test_a_constructor_takes_few_arguments() -> None:
    for name, node in classes():
        for made in methods(node):
            if made.name == "__init__":
                taken = [*made.args.posonlyargs, *made.args.args[1:], *made.args.kwonlyargs]
                assert len(taken) <= MAX_ARGUMENTS, f"{name}.{node.name}: {[arg.arg for arg in taken]}"


def test_the_list_of_rooms_names_each_once() -> None:
    assert all(a != b for a, b in pairwise(sorted(ROOMS)))
