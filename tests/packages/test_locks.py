"""conf/locks: every dependency of pyproject.toml in an allowed version, with hashes and without addresses."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from documents import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = ["dev", "docs", "engine", "web", "wheels"]
_OTHERS = {"vllm", "torch", "lmcache", "sglang", "atheris", "agents", "pydantic_ai", "claude_agent_sdk"}
ELSEWHERE = _OTHERS | {"pydantic_core", "opentelemetry", "matplotlib"}  # a part of pydantic; other extras


def required(extra: str) -> dict[str, Requirement]:
    """The requirements of the package with an extra, by name."""
    found = {}
    for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]):
        requirement = Requirement(text)
        if requirement.name == "kvpage":
            found |= {name: each for inner in requirement.extras for name, each in required(inner).items()}
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


def locked(extra: str) -> dict[str, set[str]]:
    """The versions of each package in a lock file; platforms may have different ones."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", text_of(extra), re.MULTILINE):
        versions.setdefault(name, set()).add(version)
    return versions


def text_of(extra: str) -> str:
    return (ROOT / "conf" / "locks" / f"{extra}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_dependency_is_locked_in_an_allowed_version(extra: str) -> None:
    versions = locked(extra)
    for name, requirement in required(extra).items():
        assert versions.get(name), f"{name} is missing in conf/locks/{extra}.txt: run `make lock`"
        assert all(requirement.specifier.contains(version) for version in versions[name]), name
    everything = locked("dev")
    assert {name: found for name, found in versions.items() if not found <= everything.get(name, found)} == {}


def test_the_requirements_of_a_build_are_locked() -> None:
    """`make` installs them before it builds without isolation."""
    versions = locked("build")
    wanted = [Requirement(text) for text in PYPROJECT["build-system"]["requires"]]
    assert versions.keys() == {canonicalize_name(requirement.name) for requirement in wanted}
    for requirement in wanted:
        assert versions[canonicalize_name(requirement.name)] == locked("dev")[canonicalize_name(requirement.name)]


@pytest.mark.parametrize(
    ("folder", "extra"),
    [
        *[(folder, "dev") for folder in ("tests", "benchmarks", "conf", "examples")],
        *[("kvpage_server", "web"), ("engine", "engine")],
    ],
)
def test_every_imported_package_is_declared(folder: str, extra: str) -> None:
    declared, providers = required(extra), packages_distributions()
    missing = {}
    for path in (ROOT / folder).rglob("*.py"):
        if "frameworks" in path.parts or "node_modules" in path.parts:
            continue
        for name in imported_by(path) - sys.stdlib_module_names - ELSEWHERE:
            owners = {canonicalize_name(owner) for owner in providers.get(name, ())} - {"kvpage"}
            if owners and not owners & declared.keys():
                missing[name] = str(path.relative_to(ROOT))
    assert missing == {}


def imported_by(path: Path) -> set[str]:
    """The first parts of the names of all modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


@pytest.mark.parametrize("extra", [*EXTRAS, "build"])
def test_every_version_has_hashes_and_no_address(extra: str) -> None:
    text = text_of(extra)
    entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text
