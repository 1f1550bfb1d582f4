"""`make release`: version, changelog, two equal builds, checksums and SBOM; and refused releases."""

from __future__ import annotations

import hashlib
import json
import runpy
import subprocess
import sys
import tarfile
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
