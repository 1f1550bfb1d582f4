"""Mistakes in the compiled core: a copy of the package, built with one, in which the simulation starts again."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

NATIVE = "kvpage_server.core.native."
PLANTED = "KVPAGE_PLANTED"  # in the environment of a process that runs in such a copy: the mistake's name


class CannotBuild(Exception):
    """The compiler has failed; the message is its output."""


def start_again_in_copy(root: Path, name: str, module: str, source: str) -> NoReturn:
    """Replace this process by one that runs in a copy of `root` with `source` as the module's Cython source.

    Raises CannotBuild.
    """
    copy = _built(root, name, module, source)
    os.environ[PLANTED] = name
    os.environ.pop("KVPAGE_CORE", None)
    os.chdir(copy)
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])


def _built(root: Path, name: str, module: str, source: str) -> Path:
    """A copy whose core is compiled from the changed source. One that was built from the same sources is used again.

    The compiled modules are copied, too: only the changed one and `built`, which has the digest of all sources, are
    compiled, which takes seconds.
    """
    folders = ("kvpage_server", "engine", "tests", "benchmarks")
    digest = hashlib.blake2b(source.encode(), digest_size=8)
    for path in sorted((root / "kvpage_server").rglob("*.p[xy]*")):
        digest.update(path.read_bytes())
    for path in sorted((root / "tests").rglob("*.py")):
        digest.update(path.read_bytes())
    copy = root / "build" / "planted" / f"{name}-{digest.hexdigest()}"
    if (copy / "done").exists():
        return copy
    for older in copy.parent.glob(f"{name}-*"):
        shutil.rmtree(older)
    copy.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.c")
    for folder in folders:
        shutil.copytree(root / folder, copy / folder, ignore=ignored)
    shutil.copy2(root / "setup.py", copy)
    copy.joinpath(*module.split(".")).with_suffix(".pyx").write_text(source, encoding="utf-8")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=copy, capture_output=True, encoding="utf-8")
    core = [sys.executable, "-c", "from kvpage_server import core; assert core.NAME == 'native', core.REASON"]
    checked = subprocess.run(core, cwd=copy, capture_output=True, encoding="utf-8")
    if done.returncode or checked.returncode:
        raise CannotBuild((done.stderr + checked.stderr)[-2000:])
    (copy / "done").touch()
    return copy
