"""The sdist and the wheel of this checkout, built in a copy and without the network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from documents import ROOT

SOURCES = ("connectors", "engine", "kvpage_server", "setup.py", "pyproject.toml", "README.md", "LICENSE")
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build_sdist(into: Path) -> Path:
    """Return the path of an sdist, in the folder `into`."""
    copy = into / "checkout"
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(ROOT / name, copy)
    return into / _build("build_sdist", copy, into)


def build_wheel(sdist: Path, into: Path) -> Path:
    """Return the path of a wheel of an sdist, in the folder `into`."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    return into / _build("build_wheel", next(into.iterdir()), into)


def _build(kind: str, tree: Path, into: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, kind, into], cwd=tree, capture_output=True, encoding="utf-8", timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()[-1]
