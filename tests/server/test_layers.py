"""Structure of the packages: permitted imports between rooms, the contents of rooms, and depth of inheritance.

Every import counts, those for type checking too. There are no exceptions: violations are fixed.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
PACKAGES = ("kvpage_server", "engine")
MOST_ABOVE = 2  # classes of ours above a class

# Permitted imports between the server's packages. Arrows point down; `start` is at the top.
MAY_KNOW = {
    "page": "",
    "glob": "core",
    "system": "",
    "bounded": "",
    "address": "",
    "layouts": "page",
    "kv_events": "address core system page",
    "core": "page",
    "lossless": "core page",
    "resp": "core",
    "store": "core glob lossless page system",
    "configuration": "address bounded core glob store system",
    "tracing": "",
    "commands": "bounded configuration core glob lossless page resp store system",
    "gateway": "client commands core page resp store system",
    "net": "commands configuration core resp system",
    "service": "commands configuration core net page store system",
    "app": "bounded client commands configuration core gateway kv_events net service store system",
    "client": "address core lossless page tracing",
    "snapshot": "address bounded client lossless page system",
    "replay": "bounded page store system",
    "bench": "client look page system",
    "look": "replay address client observe page system",
    "observe": "bounded page system",
    "http": "",
    "monitor": "http observe system",
    "web": "http monitor observe page system",
    "doctor": "address client commands configuration core store system",
    "cli": "address bench client configuration doctor look replay snapshot system",
}
# Its `__init__` has the version.
ENGINE_MAY_KNOW = {
    "page",
    "lossless",
    "layouts",
    "client",
    "system",
    "bounded",
    "address",
    "http",
    "web",
    "tracing",
    "kv_events",
    "__init__",
}


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name; a package's own is called `package.__init__`."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def resolved(name: str) -> str | None:
    """The module of ours that a dotted name means, if it means one."""
    return next((found for found in (name, f"{name}.__init__") if found in modules()), None)


def source_of(module: str, node: ast.ImportFrom) -> str:
    """The dotted name after `from`, absolute."""
    if not node.level:
        return node.module or ""
    package = module.split(".")[: -node.level]  # a package's own module ends with `__init__`
    return ".".join([*package, node.module] if node.module else package)


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of ours that a module imports, anywhere in its text."""
    found: set[str | None] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {resolved(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = source_of(module, node)
            found |= {resolved(f"{base}.{alias.name}") or resolved(base) for alias in node.names}
    return frozenset(name for name in found if name is not None and name != module)


def all_imports() -> Iterator[tuple[str, str]]:
    return ((module, imported) for module in modules() for imported in imports(module))


def room(module: str) -> str:
    """The folder or file right below its package."""
    return module.split(".")[1]


# -- who knows whom ----------------------------------------------------------------------------------------------------


def test_every_room_of_the_server_knows_no_more_than_it_may() -> None:
    known: dict[str, set[str]] = defaultdict(set)
    for module, imported in all_imports():
        if module.startswith("kvpage_server.") and room(module) not in ("__init__", "__main__"):
            assert imported.startswith("kvpage_server."), f"{module} imports {imported}"
            known[room(module)] |= {room(imported)} - {room(module), "__init__"}
    too_much = {name: found for name, rooms in known.items() if (found := rooms - set(MAY_KNOW[name].split()))}
    assert not too_much


def test_the_engine_imports_only_client_modules_of_the_server() -> None:
    used = {
        (module, name) for module, name in all_imports() if module.startswith("engine.") > name.startswith("engine.")
    }
    policies = {(module, name) for module, name in used if name.startswith("kvpage_server.store.eviction.")}
    assert {module for module, _ in policies} == {"engine.memory.context_tree"}, "it evicts as the store does"
    known = {room(name) for _, name in used - policies}
    assert known - {"__init__"} <= ENGINE_MAY_KNOW, used  # that is the version


def test_the_engine_imports_its_own_modules_relatively() -> None:
    """So it can be installed under another name. The server's modules import absolutely."""
    absolute = [
        (module, node.lineno)
        for module in modules()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom)
        and (node.level > 0) != (module.startswith("engine.") and source_of(module, node).startswith("engine"))
    ]
    assert absolute == []


def test_the_core_imports_only_core_and_page() -> None:
    assert {room(name) for module, name in all_imports() if room(module) == "core"} <= {"core", "page"}


_CHANGES = {  # methods that change a part of the store, by the name of the part
    "catalogue": {"put", "pop", "fill", "split", "take_pages", "clear", "note_stray", "forget_stray", "list_all"},
    "index": {"open", "remove", "clear", "note_made", "note_on_disk"},
    "entries": {"pop", "update", "clear", "setdefault", "popitem"},
    "pages": {"put"},
}


def _changes_of_contents(tree: ast.AST) -> Iterator[str]:
    """The statements that set or remove an entry of the store, or change its index."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        for target in targets:
            if isinstance(target, ast.Subscript) and _part(target.value) == "entries":
                yield ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            methods = _CHANGES.get(_part(node.func.value), set())
            yield from [ast.unparse(node)] if node.func.attr in methods else []


def _part(node: ast.AST) -> str:
    """The name of a part of the store: a variable, or an attribute of the store; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id.lstrip("_")
    if isinstance(node, ast.Attribute):
        is_entries_of_others = node.attr == "entries" and _part(node.value) != "catalogue"
        return "" if is_entries_of_others else node.attr.lstrip("_")
    return ""


def test_values_are_stored_and_removed_by_contents_alone() -> None:
    store, within = ROOT / "kvpage_server" / "store", ("contents.py", "memory", "eviction")
    rooms = [store, *(ROOT / "kvpage_server" / name for name in ("commands", "net"))]
    modules = [path for room in rooms for path in room.rglob("*.py")]
    outside = [
        path for path in modules if not (path.is_relative_to(store) and path.relative_to(store).parts[0] in within)
    ]
    found = {
        str(path.relative_to(ROOT)): changes
        for path in outside
        if (changes := [*_changes_of_contents(ast.parse(path.read_text(encoding="utf-8")))])
    }
    assert found == {}
    assert [*_changes_of_contents(ast.parse((store / "contents.py").read_text(encoding="utf-8")))]


def test_nothing_below_the_commands_spells_a_reply() -> None:
    """RESP's values and errors belong to who answers. The core frames bytes; it makes no reply."""
    packages = {room(module) for module, name in all_imports() if name.startswith("kvpage_server.resp")}
    assert packages <= {"resp", "commands", "net", "gateway"}
    below = {*MAY_KNOW["commands"].split()} - {"core", "resp"}
    by_hand = {
        (module, node.lineno)
        for module in modules()
        if module.startswith("kvpage_server.") and room(module) in below
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes) and b"\r\n" in node.value
    }
    assert by_hand == set()


@pytest.mark.parametrize("package", sorted({name.rpartition(".")[0] for name in modules()}))
def test_there_is_no_circle(package: str) -> None:
    """Modules and folders within a folder have an import order; so all modules have one."""
    graph: dict[str, set[str]] = defaultdict(set)
    edges: dict[tuple[str, str], tuple[str, str]] = {}
    beginning = package + "."
    for module, imported in all_imports():
        if module.startswith(beginning) and imported.startswith(beginning):
            here, there = (name.removeprefix(beginning).split(".")[0] for name in (module, imported))
            if here != there:
                graph[here].add(there)
                edges[here, there] = module, imported
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        pytest.fail("; ".join("{} imports {}".format(*edges[b, a]) for a, b in pairwise(circle)))


# -- classes -----------------------------------------------------------------------------------------------------------


Class = tuple[str, ast.ClassDef]  # the module, and the syntax tree


@cache
def classes() -> tuple[Class, ...]:
    return tuple(
        (module, node) for module in modules() for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)
    )


@cache
def class_by_name() -> dict[str, Class]:
    return {f"{module.split('.')[0]}.{node.name}": (module, node) for module, node in classes()}


def bases(module: str, node: ast.ClassDef) -> Iterator[Class]:
    """The classes of ours right above one. A name means one class in a package, as another test sees to."""
    for base in node.bases:
        name = ast.unparse(base).split("[")[0].rpartition(".")[2]
        for package in (module.split(".")[0], "kvpage_server"):
            found = class_by_name().get(f"{package}.{name}")
            if found is not None and found[1] is not node:
                yield found
                break


def above(module: str, node: ast.ClassDef) -> list[Class]:
    ways = ([base, *above(*base)] for base in bases(module, node))
    return max(ways, key=len, default=[])


def everything_above(module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    for base in bases(module, node):
        yield base[1]
        yield from everything_above(*base)


def methods(node: ast.ClassDef) -> set[str]:
    return {member.name for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_no_class_stands_on_a_tower() -> None:
    towers = {node.name: len(way) for module, node in classes() if len(way := above(module, node)) > MOST_ABOVE}
    assert towers == {}


def test_private_methods_are_not_overridden() -> None:
    overridden = {
        f"{module}.{node.name}": private
        for module, node in classes()
        for base in everything_above(module, node)
        if (private := {name for name in methods(node) & methods(base) if re.match(r"_[^_]", name)})
    }
    assert overridden == {}


def test_a_class_name_means_one_thing_in_a_package() -> None:
    names = Counter((module.split(".")[0], node.name) for module, node in classes())
    assert {name: count for name, count in names.items() if count > 1} == {}


# -- the map -----------------------------------------------------------------------------------------------------------


def test_the_architecture_page_lists_every_package() -> None:
    page = (
        (ROOT / "docs" / "architecture.md")
        .read_text(encoding="utf-8")
        .partition("## Packages")[2]
        .partition("\n## ")[0]
    )
    listed = re.findall(r"^\| `([\w/.]+)` \|", page, re.MULTILINE)
    paths = [*modules().values(), *ROOT.glob("connectors/*/__init__.py")]
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in paths}
    files = {str(path.relative_to(ROOT)) for path in modules().values() if path.parent.parent == ROOT}
    there = folders | {name for name in files if not Path(name).name.startswith("__")}
    assert sorted(listed) == sorted(there)


def test_every_package_has_a_docstring() -> None:
    silent = [name for name in modules() if name.endswith(".__init__") and not ast.get_docstring(tree(name))]
    assert silent == []
