"""`make release`: version, changelog, two equal builds, checksums and SBOM; and refused releases."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT
from packages import build_sdist, output

import kvpage_server

RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / "conf" / "release.py"))
ReleaseError: type[Exception] = RELEASE["ReleaseError"]
CHANGELOG = (
    "No version has been released yet. Before\n\n## [Unreleased]\n\n### Added\n\n- A page.\n\n## [0.1.0] - 2026-01-02\n"
)


def test_the_changes_get_the_version_and_the_date() -> None:
    released = RELEASE["with_release"](CHANGELOG, "1.2.3", "2026-11-28")
    assert released == CHANGELOG.replace("No version has been released yet. ", "").replace(
        "## [Unreleased]\n", "## [Unreleased]\n\n## [1.2.3] - 2026-11-28\n"
    )
    own = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert "## [99.0.0] - 2026-11-28\n\n### " in RELEASE["with_release"](own, "99.0.0", "2026-11-28")


@pytest.mark.parametrize(
    ("version", "changelog", "why"),
    [
        ("1.2", CHANGELOG, "three numbers, as 1.2.3, got '1.2'"),
        ("v1.2.3", CHANGELOG, "three numbers"),
        ("0.0.1", CHANGELOG, f"older than {kvpage_server.__version__}"),
        ("9.9.9", CHANGELOG.replace("0.1.0", "9.9.9"), "has 9.9.9 already"),
        ("9.9.9", CHANGELOG.replace("- A page.", ""), "no unreleased changes"),
    ],
)
def test_a_release_is_refused_with_the_reason(version: str, changelog: str, why: str) -> None:
    source = (ROOT / "kvpage_server" / "__init__.py").read_text(encoding="utf-8")
    with pytest.raises(ReleaseError, match=why):
        RELEASE["with_release"](changelog, version, RELEASE["with_version"](source, version) and "2026-11-28")


def test_an_sdist_is_the_same_after_another_build(tmp_path: Path) -> None:
    digests = set()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        sdist = build_sdist(tmp_path / name)
        (sdist.parent / "checkout" / "setup.py").touch()
        RELEASE["normalise"](sdist, 1_700_000_000)
        digests.add(hashlib.sha256(sdist.read_bytes()).hexdigest())
    assert len(digests) == 1
    with tarfile.open(sdist) as archive:
        assert {member.mtime for member in archive} == {1_700_000_000}
        assert {member.mode for member in archive} <= {0o755, 0o644}


def test_an_sdist_is_made_beside_wheels_of_docker(tmp_path: Path) -> None:
    """Programs that make empty files stand for docker, cibuildwheel and build."""
    programs = {
        "docker": "exit 0",
        "python": """for into; do :; done
case $2 in
    build) touch "$7/kvpage-1.tar.gz" ;;
    cibuildwheel) touch "$into/kvpage-1.whl" ;;
esac""",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(
        ["conf/wheels.sh", tmp_path / "python", tmp_path / "made"], cwd=ROOT, env=os.environ | path, check=True
    )
    assert {made.name for made in (tmp_path / "made").iterdir()} == {"kvpage-1.tar.gz", "kvpage-1.whl"}
    passed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]["linux"]
    assert {*passed["environment-pass"]} == {"SOURCE_DATE_EPOCH", "PYTHONHASHSEED"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone of the last commit, with the files of this folder."""
    clone = tmp_path / "checkout"
    output("git", "clone", "--quiet", str(ROOT), str(clone))
    for name, value in (("user.name", "A Tester"), ("user.email", "tester@example.org")):
        output("git", "-C", str(clone), "config", name, value)
    return clone


def test_a_checkout_with_changes_is_not_released(checkout: Path) -> None:
    (checkout / "README.md").write_text("changed", encoding="utf-8")
    command = [sys.executable, str(checkout / "conf" / "release.py"), "99.0.0"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "commit or stash them" in done.stderr


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_rehearsal_makes_all_files_and_changes_nothing(checkout: Path, tmp_path: Path) -> None:
    before = output("git", "-C", str(checkout), "log", "-1", "--format=%H")
    output(sys.executable, "-m", "pip", "install", "-q", "--require-hashes", "-r", str(ROOT / "conf/locks/wheels.txt"))
    made = tmp_path / "made"
    shown = output(sys.executable, checkout / "conf" / "release.py", "99.0.0", "--dry-run", "--into", made)
    assert "both builds were equal" in shown
    assert output("git", "-C", str(checkout), "log", "-1", "--format=%H") == before
    assert output("git", "-C", str(checkout), "status", "--porcelain") == ""
    names = {path.name for path in made.iterdir()}
    assert {"SHA256SUMS", "kvpage-99.0.0.tar.gz", "kvpage-99.0.0.cdx.json"} <= names
    assert [name for name in names if name.startswith("kvpage-99.0.0-cp3") and name.endswith(".whl")]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=made, check=True)
    listed = json.loads((made / "kvpage-99.0.0.cdx.json").read_text(encoding="utf-8"))
    assert (listed["bomFormat"], listed["metadata"]["component"]["version"]) == ("CycloneDX", "99.0.0")
    assert {"redis", "lmdb", "mlx-lm"} <= {component["name"] for component in listed["components"]}
