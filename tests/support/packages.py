"""Packages of this checkout: an sdist and a wheel, built in a copy and without the network, and installed programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archives import unpack
from documents import ROOT, blocks, check_program
from servers import free_port
from waiting import until

SOURCES = ("conf/man", "connectors", "engine", "kvpage_server", "setup.py", "pyproject.toml", "README.md", "LICENSE")
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
    unpack(sdist, into)
    return into / _build("build_wheel", next(into.iterdir()), into)


def _build(kind: str, tree: Path, into: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, kind, into], cwd=tree, capture_output=True, encoding="utf-8", timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()[-1]


def output(*command: str | Path) -> str:
    """Return the output of a successful command."""
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def start_installed_server(environment: Path, directory: Path) -> Iterator[int]:
    """Run the kvpage-server of a virtual environment, with its data in `directory`. Yield its port."""
    port, log_file = free_port(), directory / "log"
    command = [environment / "bin/kvpage-server", "--port", str(port), "--dir", directory]
    with log_file.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until(lambda: b"ready" in log_file.read_bytes(), "the server")
            yield port
        finally:
            process.terminate()


def run_document(document: str, environment: Path, port: int, directory: Path) -> None:
    """Run the Python program of a document in a virtual environment and in `directory`, with the server on `port`."""
    (directory / "models").symlink_to(ROOT / "models")
    check_program(
        "\n".join(blocks(document, "python")).replace("9221", str(port)), environment / "bin/python", directory
    )
