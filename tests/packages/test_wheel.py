"""A wheel, built from the sdist and installed outside of the checkout: its packages, programs, types and examples.

It is built without a C compiler and uses the dependencies of the tests, so nothing is fetched. `make test-packages`
compiles wheels, and installs them into clean environments.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packages import build_sdist, build_wheel, output, run_document, start_installed_server

import kvpage_server


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the core in Python, which a build without a compiler gives."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CC", "false")
        return build_wheel(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and the dependencies of the tests' environment."""
    directory = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    pip = [sys.executable, "-m", "pip", "--python", directory, "install", "--quiet", "--no-index", "--no-deps"]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which has a kvpage, too
    subprocess.run([*pip, wheel], check=True, env=outside)
    (packages,) = directory.glob("lib/python3.*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return directory


@pytest.fixture(autouse=True)
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory, and environment variables, that know nothing of the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH")


def test_the_wheel_installs_three_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = kvpage_server.__version__
    assert {name.partition("/")[0] for name in names} == {
        *("kvpage", "kvpage_connectors", "kvpage_server"),
        *(f"kvpage-{version}.dist-info", f"kvpage-{version}.data"),
    }
    pages = [name.partition(".data/data/share/man/man1/")[2] for name in names if name.endswith(".1")]
    assert sorted(pages) == ["kvpage-engine.1", "kvpage-server.1", "kvpage.1"]
    data = {"handbook.txt", "grammar.lark", "main.html", "shell.html", "py.typed"}
    assert data <= {name.rpartition("/")[2] for name in names}
    assert not [name for name in names if name.endswith((".pyx", ".pxd", ".c"))]


def test_the_sdist_has_the_source_of_the_core_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert "kvpage_server/core/native/built.pyx" in names
    assert not [name for name in names if name.startswith(("tests", "models"))]


def test_import_kvpage_gives_only_public_names(environment: Path) -> None:
    program = "import kvpage; print(kvpage.__file__, *sorted(set(vars(kvpage)) - set(kvpage.__all__)))"
    file, *others = output(environment / "bin/python", "-c", program).split()
    assert Path(file).is_relative_to(environment)
    assert [name for name in others if not name.startswith("__")] == []


def test_programs_run_beside_a_package_named_engine(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("engine").mkdir()
    Path("engine/__init__.py").write_text("raise ImportError('another engine')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    for program in ("kvpage", "kvpage-server", "kvpage-engine"):
        assert program in output(environment / "bin" / program, "--help")
    assert "mlx-lm" in output(environment / "bin/kvpage-engine", "--help"), "found by its entry point"


def test_mypy_finds_the_types_in_another_project(environment: Path) -> None:
    Path("project.py").write_text(
        "import kvpage\n"
        "from kvpage.engine.pool import BlockPool\n"
        "from kvpage.layouts import to_mlx\n"
        "with kvpage.PageClient('redis://127.0.0.1:9221') as client:\n"
        "    reveal_type(client.mset_blocks)\n"
        "    client.lease('chat-9', 10)\n"
        "reveal_type(BlockPool(64))\n"
        "reveal_type(kvpage.decode_page(b''))\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", environment / "bin/python"]
    found = subprocess.run([*command, "project.py"], capture_output=True, encoding="utf-8", timeout=500)
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, found.stdout
    assert 'incompatible type "str"; expected "bytes"' in errors[0]
    assert "kvpage.engine.pool.BlockPool" in found.stdout
    shown = found.stdout.replace("builtins.", "")  # an older mypy names the module
    assert "tuple[kvpage_server.page.PageHeader, memoryview" in shown
    assert 'Any"' not in found.stdout


@pytest.fixture
def installed_server(environment: Path, tmp_path: Path) -> Iterator[int]:
    """The port of the installed kvpage-server."""
    with start_installed_server(environment, tmp_path) as port:
        yield port


@pytest.mark.parametrize("document", ["docs/start.md", "docs/client.md"])
@pytest.mark.model
def test_documented_programs_run(document: str, environment: Path, installed_server: int, tmp_path: Path) -> None:
    run_document(document, environment, installed_server, tmp_path)


def test_the_server_is_looked_into(environment: Path, installed_server: int) -> None:
    assert "blocks" in output(environment / "bin/kvpage", "status", "--url", f"redis://127.0.0.1:{installed_server}")


def test_kvpage_engine_reports_mlx_as_missing(environment: Path) -> None:
    """The command in the error is one for a checkout: the name is not published."""
    program = "import sys; sys.modules['mlx'] = None; from kvpage.engine.cli import main; sys.exit(main(['serve']))"
    done = subprocess.run([environment / "bin/python", "-c", program], capture_output=True, encoding="utf-8")
    assert done.returncode == 1
    assert done.stderr.endswith("mlx is not installed: pip install '.[engine]' in a checkout of kvpage\n")
