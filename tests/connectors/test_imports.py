"""Imports of the connectors: of the server only client, URLs and page contract, and no engine in the common core."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvpage_connectors
import pytest

ROOT = Path(kvpage_connectors.__file__).parent
SERVER = {"kvpage_server.client", "kvpage_server.page", "kvpage_server.address"}
MAY_ALSO = {
    "vllm_policy.py": {"kvpage_server.store.eviction"},
    "mlx_lm_command.py": {"kvpage_server.system.program"},  # a command as those of the server, at Ctrl-C
    # its contexts are those of the engine, and so are the texts of its log
    "mlx_lm.py": {"engine", "engine.memory", "engine.tiers", "kvpage_server.system.text"},
}
MODULES = sorted(ROOT.glob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: an engine may import the module by its path: import absolutely"
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_connector_imports_only_client_and_page_of_the_server(path: Path) -> None:
    ours = {name for name in imports(path) if name.startswith(("kvpage_server", "engine"))}
    allowed = SERVER | MAY_ALSO.get(path.name, set())
    assert {name for name in ours if name not in allowed and name.rpartition(".")[0] not in allowed} == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_connector_has_fewer_than_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400


def test_the_core_works_without_an_engine() -> None:
    """Import the core in a new process, and look for modules of engines."""
    program = (
        "import sys, kvpage_connectors.names, kvpage_connectors.jobs, kvpage_connectors.verify; print(*sys.modules)"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r}; "
    loaded = subprocess.run([sys.executable, "-c", path + program], check=True, capture_output=True, encoding="utf-8")
    assert {name.partition(".")[0] for name in loaded.stdout.split()}.isdisjoint({"vllm", "torch", "sglang", "engine"})
