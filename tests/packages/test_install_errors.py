"""An installation that cannot succeed ends with one line that says what to do."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from documents import ROOT
from packages import SOURCES
from small_disks import small_disk

OFFLINE = {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}


def failed(*command: str | Path, at: Path, **environment: str) -> str:
    """Return the last line of a command that fails."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    done = subprocess.run(
        [*map(str, command)], cwd=at, env=inherited | environment, capture_output=True, encoding="utf-8", timeout=500
    )
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts of the installation, with locks of one package."""
    shutil.copytree(ROOT / "conf", tmp_path / "checkout" / "conf")
    wheel = tmp_path / "big-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("big.bin", bytes(60 << 20), zipfile.ZIP_DEFLATED)
        archive.writestr("big-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: big\nVersion: 1.0\n")
        archive.writestr("big-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("big-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    locks = tmp_path / "checkout" / "conf" / "locks"
    (locks / "web.txt").write_text(f"big==1.0 --hash=sha256:{digest}\n", encoding="utf-8")
    (locks / "build.txt").write_text("", encoding="utf-8")
    return tmp_path / "checkout"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip, which nothing is installed into."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    return place


def test_an_old_python_is_named_with_the_needed_one(checkout: Path, tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.4\n[ "$1" = --version ]\n', encoding="utf-8")
    old.chmod(0o755)
    line = failed("/bin/sh", "conf/venv.sh", tmp_path / "venv", at=checkout, PYTHON=str(old), PATH=str(tmp_path))
    assert line == "kvpage needs Python 3.11 or newer; Python 3.10.4 was found. Name another: make PYTHON=python3.12"


def test_another_platform_is_refused_before_a_build() -> None:
    program = "import runpy, setuptools.command.build_ext, sys; sys.platform = 'win32'; runpy.run_path('setup.py')"
    line = failed(sys.executable, "-c", program, at=ROOT)
    assert line == "kvpage runs on Linux and macOS. On Windows, install it in WSL: wsl --install"


def test_no_network_is_one_line(checkout: Path, environment: Path) -> None:
    nowhere = OFFLINE | {"PIP_INDEX_URL": "http://127.0.0.1:1/simple"}
    line = failed("conf/install.sh", environment, "web", at=checkout, **nowhere)
    assert line.startswith("kvpage is not installed: no package registry can be reached: check the network")


def test_an_incomplete_environment_is_no_network_error(checkout: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    line = failed("conf/install.sh", tmp_path / "venv", "web", at=checkout)
    assert line.endswith(f"{tmp_path}/venv is incomplete, an earlier make was interrupted: make clean, then make again")


def test_a_version_that_the_registry_lacks_is_no_network_error(
    checkout: Path, environment: Path, tmp_path: Path
) -> None:
    (checkout / "conf" / "locks" / "web.txt").write_text(f"big==2.0 --hash=sha256:{'0' * 64}\n", encoding="utf-8")
    local = OFFLINE | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    line = failed("conf/install.sh", environment, "web", at=checkout, **local)
    assert line.startswith("kvpage is not installed: the package registry lacks a version for Python 3.")


def test_a_full_disk_is_one_line(checkout: Path, environment: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 50) as place:
        shutil.copytree(environment, place / "venv", symlinks=True)
        local = OFFLINE | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
        line = failed("conf/install.sh", place / "venv", "web", at=checkout, **local)
    assert line.startswith(f"kvpage is not installed: the disk of {place}/venv is full: free 1 GB")


@pytest.mark.soak
def test_without_a_compiler_the_server_runs_in_python(checkout: Path, tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=skipped, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, checkout)
    (checkout / "conf" / "locks" / "web.txt").write_text("", encoding="utf-8")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    uninstall = [tmp_path / "venv/bin/pip", "uninstall", "--quiet", "--yes", "setuptools"]  # an old one, of Python 3.11
    subprocess.run(uninstall, check=True, capture_output=True)
    (packages,) = (tmp_path / "venv").glob("lib/python3.*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    done = subprocess.run(
        ["conf/install.sh", tmp_path / "venv", "web"],
        cwd=checkout,
        env=os.environ | OFFLINE | {"PIP_NO_INDEX": "1", "CC": "false", "PYTHONPATH": str(checkout)},
        capture_output=True,
        encoding="utf-8",
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    first, line = done.stderr.splitlines()
    assert first.startswith("Installing kvpage")
    assert line.startswith("The page core is not compiled, so its Python twin runs, which is slower. To change that: ")
    assert line.endswith("make core")
