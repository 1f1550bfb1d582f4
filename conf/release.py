"""A release: `make release VERSION=1.2.3`. With DRY_RUN=1, a rehearsal, which leaves the checkout as it is.

In a copy of the last commit, the version and the changelog are changed, and committed. Wheels and the sdist are built
from it twice, in different folders, and have to be equal to the byte. dist/ gets them, their checksums, and an SBOM in
CycloneDX, which lists all dependencies. At last, the checkout gets the commit and the tag `v1.2.3`.
It publishes nothing.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory

VERSION_FILE = "kvpage_server/__init__.py"
CHANGELOG = "docs/changelog.md"
UNRELEASED = "## [Unreleased]\n"
NONE_YET = "No version has been released yet. "


class ReleaseError(Exception):
    """Error: the release cannot be made. The message says what to do."""


def with_version(source: str, version: str) -> str:
    """Return the text of VERSION_FILE with another version. Raises ReleaseError unless it is newer."""
    found = re.search(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    assert found
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"VERSION must be three numbers, as 1.2.3, got {version!r}")
    if _numbers(version) < _numbers(found[1]):
        raise ReleaseError(f"VERSION {version} is older than {found[1]}, the version of this checkout")
    return source.replace(found[0], f'__version__ = "{version}"')


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def with_release(changelog: str, version: str, date: str) -> str:
    """Return the changelog with its unreleased changes under a version.

    Raises ReleaseError if there are none, or if the changelog has the version.
    """
    if f"## [{version}]" in changelog:
        raise ReleaseError(f"{CHANGELOG} has {version} already: name the next version")
    before, _, changes = changelog.replace(NONE_YET, "").partition(UNRELEASED)
    if not re.search(r"^- ", changes.partition("\n## ")[0], re.MULTILINE):
        raise ReleaseError(f"{CHANGELOG} has no unreleased changes: describe them below {UNRELEASED.strip()!r}")
    return f"{before}{UNRELEASED}\n## [{version}] - {date}\n{changes}"


def normalise(sdist: Path, epoch: int) -> None:
    """Write an sdist again, with files in order, and without the times and owners of this build."""
    with tarfile.open(sdist) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = {member.name: archive.extractfile(member) if member.isfile() else None for member in members}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as written:
            for member in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                written.addfile(member, contents[member.name])
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))


def build(checkout: Path, epoch: int) -> dict[str, str]:
    """Build wheels and sdist in `dist` of a checkout. Return the SHA-256 of each file by its name."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    _run("conf/wheels.sh", sys.executable, "dist", at=checkout, environment=environment)
    for sdist in (checkout / "dist").glob("*.tar.gz"):
        normalise(sdist, epoch)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((checkout / "dist").iterdir())}


def bill_of_materials(checkout: Path, version: str) -> Path:
    """Write a CycloneDX document with the locked dependencies of server and engine. Return its path."""
    path = checkout / "dist" / f"kvpage-{version}.cdx.json"
    options = ["--pyproject", "pyproject.toml", "--mc-type", "application", "--output-reproducible", "-o", str(path)]
    _run(sys.executable, "-m", "cyclonedx_py", "requirements", *options, "conf/locks/engine.txt", at=checkout)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["metadata"]["component"]["version"] = version  # pyproject.toml does not have it
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path


def prepare(checkout: Path, version: str) -> int:
    """Change and commit the version, the changelog and the manual pages. Return the time of the commit."""
    for name, change in ((VERSION_FILE, with_version), (CHANGELOG, with_release)):
        path = checkout / name
        date = [time.strftime("%Y-%m-%d", time.gmtime())] if change is with_release else []
        path.write_text(change(path.read_text(encoding="utf-8"), version, *date), encoding="utf-8")
    places = os.pathsep.join([str(checkout), str(checkout / "connectors")])
    _run(sys.executable, "-m", "conf.manual", "conf/man", at=checkout, environment=os.environ | {"PYTHONPATH": places})
    _run("git", "commit", "--quiet", "--all", "--message", f"Release {version}", at=checkout)
    return int(_run("git", "log", "-1", "--format=%ct", at=checkout))


def release(version: str, into: Path, *, root: Path, dry_run: bool) -> None:
    """Make a release of the last commit of `root`, with its files in `into`. Raises ReleaseError."""
    if not dry_run and _run("git", "status", "--porcelain", at=root):
        raise ReleaseError("the checkout has changes that are not committed: commit or stash them")
    if _run("git", "tag", "--list", f"v{version}", at=root):
        raise ReleaseError(f"the tag v{version} exists: name the next version")
    with TemporaryDirectory() as work:
        first, second = Path(work, "first"), Path(work, "the second")
        _run("git", "clone", "--quiet", str(root), str(first), at=root)
        for name in ("user.name", "user.email"):
            _run("git", "config", name, _run("git", "config", name, at=root), at=first)
        epoch = prepare(first, version)
        _run("git", "clone", "--quiet", str(first), str(second), at=root)
        found = []
        for number, checkout in enumerate((first, second), start=1):
            print(f"release: build {number} of 2", flush=True)
            found.append(build(checkout, epoch))
        if found[0] != found[1]:
            differing = sorted(name for name, _ in found[0].items() ^ found[1].items())
            raise ReleaseError(f"two builds differ: {', '.join(dict.fromkeys(differing))}")
        listed = bill_of_materials(first, version)
        sums = found[0] | {listed.name: hashlib.sha256(listed.read_bytes()).hexdigest()}
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
        (first / "dist" / "SHA256SUMS").write_text(lines, encoding="utf-8")
        into.mkdir(parents=True, exist_ok=True)
        for path in (first / "dist").iterdir():
            shutil.copy(path, into)
        if not dry_run:
            _run("git", "pull", "--quiet", "--ff-only", str(first), "HEAD", at=root)
            _run("git", "tag", f"v{version}", at=root)
    print(lines, end="")
    print(f"release: {into} has {len(sums)} files and SHA256SUMS; both builds were equal")
    if not dry_run:
        print(f"release: next, git push --follow-tags origin HEAD v{version}")


def _run(*command: str, at: Path, environment: dict[str, str] | None = None) -> str:
    """Return the output of a command. Its errors are printed. Raises ReleaseError if it fails."""
    done = subprocess.run(command, cwd=at, env=environment, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[:3])} failed, see above{done.stdout and ': ' + done.stdout}")
    return done.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make release", description="Make the files of a release.")
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument("--into", type=Path, default=Path("dist"), metavar="DIRECTORY")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(arguments)
    try:
        release(args.version, args.into, root=Path(__file__).parents[1], dry_run=args.dry_run)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
