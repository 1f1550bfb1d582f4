"""The package in clean environments of every Python that is found, with dependencies from the registry.

`make test-packages` runs it. It compiles the core for each Python, and installs the engine for one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packages import build_sdist, output, run_document, start_installed_server

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
OURS = f"3.{sys.version_info.minor}"


def interpreter(version: str) -> str:
    """Return the path of a Python, or skip the test."""
    found = shutil.which(f"python{version}")
    if not found or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"python{version} is not installed")
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(autouse=True)
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_server_client_and_tools_are_installed(version: str, sdist: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    output(interpreter(version), "-m", "venv", environment)
    output(environment / "bin/pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sdist)
    (wheel,) = tmp_path.glob("*.whl")
    output(environment / "bin/pip", "install", "--quiet", wheel)
    assert "native" in output(environment / "bin/kvpage-server", "--version")
    missing = subprocess.run([environment / "bin/kvpage-engine", "--help"], capture_output=True, encoding="utf-8")
    assert missing.returncode == 1
    assert missing.stderr.endswith("is not installed: pip install '.[engine]' in a checkout of kvpage\n")
    with start_installed_server(environment, tmp_path) as port:
        run_document("docs/client.md", environment, port, tmp_path)
        assert "blocks" in output(environment / "bin/kvpage", "status", "--url", f"redis://127.0.0.1:{port}")


@pytest.mark.model
def test_the_extra_installs_the_engine(sdist: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    output(interpreter(OURS), "-m", "venv", environment)
    output(environment / "bin/pip", "install", "--quiet", f"{sdist}[engine]")
    assert "mlx-lm" in output(environment / "bin/kvpage-engine", "--version")
    with start_installed_server(environment, tmp_path) as port:
        run_document("docs/start.md", environment, port, tmp_path)
