"""conf/locks: every dependency of pyproject.toml in an allowed version, with hashes and without addresses."""

from __future__ import annotations

import re
import tomllib

import pytest
from documents import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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


@pytest.mark.parametrize("extra", ["dev", "engine", "web"])
def test_every_dependency_is_locked_in_an_allowed_version(extra: str) -> None:
    versions = locked(extra)
    for name, requirement in required(extra).items():
        assert versions.get(name), f"{name} is missing in conf/locks/{extra}.txt: run `make lock`"
        assert all(requirement.specifier.contains(version) for version in versions[name]), name
    assert {name: found for name, found in versions.items() if not found <= locked("dev")[name]} == {}


@pytest.mark.parametrize("extra", ["dev", "engine", "web"])
def test_every_version_has_hashes_and_no_address(extra: str) -> None:
    text = text_of(extra)
    entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text
