"""All programs report the core in use; a half-built or outdated core is never used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from sysconfig import get_config_var

import pytest
from servers import start_server

from kvpage_server import core

pytestmark = pytest.mark.timeout(1200)  # it compiles
ROOT = Path(__file__).parents[3]
BUILT = "built.*.so"
needs_native = pytest.mark.skipif(core.NAME != "native", reason=f"the compiled core does not run: {core.REASON}")
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")


def run(*words: str, where: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of Python's that finds the package in the folder `where`."""
    environment = {name: value for name, value in os.environ.items() if name != "KVPAGE_CORE"} | variables
    return subprocess.run(
        [sys.executable, *words], cwd=where, env=environment, capture_output=True, encoding="utf-8", timeout=500
    )


def core_of(where: Path = ROOT, **variables: str) -> str:
    """The core that runs, and why it is no other."""
    done = run("-c", "from kvpage_server import core; print(core.NAME, core.REASON)", where=where, **variables)
    return done.stdout.strip() or done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the package and its compiled core, with everything that a build needs."""
    shutil.copytree(ROOT / "kvpage_server", tmp_path / "kvpage_server", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "engine").mkdir()
    return tmp_path


def native(copy: Path, pattern: str) -> list[Path]:
    """Files of the compiled core."""
    return sorted((copy / "kvpage_server" / "core" / "native").glob(pattern))


class TestWhatRuns:
    def test_the_server_reports_the_core_everywhere(self) -> None:
        with start_server() as server, server.client() as client:
            assert client.info("server")["page_core"] == core.NAME
            assert f"core    {core.NAME}" in server.log

    def test_the_python_core_can_be_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert core_of(KVPAGE_CORE="python") == "python"
        monkeypatch.setenv("KVPAGE_CORE", "python")
        with start_server("--log-format", "json") as server, server.client() as client:
            assert client.info("server")["page_core"] == "python"
            assert '"page_core": "python"' in server.log
            assert not [line for line in server.log.splitlines() if '"warning"' in line and "core" in line]

    @pytest.mark.parametrize("program", ["kvpage_server", "kvpage_server.app"])
    def test_nothing_else_can_be_asked_for(self, program: str) -> None:
        refused = run("-m", program, KVPAGE_CORE="fast")
        assert refused.returncode == 1
        assert refused.stderr == "KVPAGE_CORE is 'fast': set it to python, or leave it unset for the compiled core\n"

    @needs_native
    def test_a_core_compiled_from_other_sources_does_not_run(self, copy: Path) -> None:
        assert core_of(copy) == "native"
        source = native(copy, "*.pxd")[0]
        was = source.read_text(encoding="utf-8")
        source.write_text(was + "\n# another line\n", encoding="utf-8")
        assert core_of(copy) == "python it was compiled from other sources than are there now"
        source.write_text(was, encoding="utf-8")
        assert core_of(copy) == "native"
        for source in [*native(copy, "*.p[xy][xd]"), *native(copy, "*.h")]:  # as installed from a wheel
            source.unlink()
        assert core_of(copy) == "native"

    @needs_native
    def test_a_core_without_its_dependencies_does_not_run(self, copy: Path) -> None:
        twin = copy / "kvpage_server" / "core" / "python" / "bodies.py"
        twin.write_text(twin.read_text(encoding="utf-8").replace("SCRATCH_BYTES", "OTHER_BYTES"), encoding="utf-8")
        assert core_of(copy) == "python it was compiled from other sources than are there now"

    @needs_native
    def test_a_part_of_the_core_does_not_run(self, copy: Path) -> None:
        for number, module in enumerate(native(copy, "*.so")):
            content = module.read_bytes()
            module.unlink()
            if number % 2:
                module.write_bytes(b"")
            assert core_of(copy).startswith("python it was not compiled for this Python: ")
            module.write_bytes(content)
        assert core_of(copy) == "native"

    @needs_native
    def test_a_server_without_the_core_reports_it_and_serves(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        native(copy, BUILT)[0].unlink()
        monkeypatch.delenv("KVPAGE_CORE", raising=False)
        monkeypatch.chdir(copy)
        with start_server("--loglevel", "warning") as server, server.client() as client:
            assert client.info("server")["page_core"] == "python"
            assert len([line for line in server.log.splitlines() if " core " in line]) == 1
            assert "core    python, slower than the compiled one: it was not compiled for this Python: " in server.log


@needs_compiler
class TestTheBuild:
    @pytest.fixture
    def small(self, copy: Path) -> Path:
        """A core of two small modules, of which none is compiled."""
        for file in (*native(copy, "*.so"), *native(copy, "*.p[xy][xd]")):
            if file.name != "built.pyx":
                file.unlink()
        folder = copy / "kvpage_server" / "core" / "native"
        (folder / "aa.pyx").write_text("VALUE = 1\n", encoding="utf-8")
        (folder / "zz.pyx").write_text("VALUE = 1\n", encoding="utf-8")
        (folder / "__init__.py").write_text("from kvpage_server.core.native import aa, zz\n", encoding="utf-8")
        (folder.parent / "__init__.py").write_text(
            "from kvpage_server.core.choice import NAME, REASON\n", encoding="utf-8"
        )
        return copy

    def build(self, where: Path, **variables: str) -> str:
        done = run("setup.py", "-q", "build_ext", "--inplace", where=where, **variables)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def test_a_build_is_silent_and_recompiles_only_changes(self, small: Path) -> None:
        assert self.build(small) == ""
        assert core_of(small) == "native"
        assert len(native(small, "*.so")) == 3
        assert native(small, "*.c") == []
        native(small, "zz.pyx")[0].write_text("VALUE = 2\n", encoding="utf-8")
        assert "other sources" in core_of(small)
        self.build(small)
        assert core_of(small) == "native"
        assert run("-c", "from kvpage_server.core.native.zz import VALUE; print(VALUE)", where=small).stdout == "2\n"

    @pytest.mark.parametrize("broken", ["aa.pyx", "zz.pyx"])
    def test_all_is_built_or_nothing(self, small: Path, broken: str) -> None:
        """Including modules that were compiled before."""
        for source in native(small, "*.pyx"):
            source.with_suffix(get_config_var("EXT_SUFFIX")).touch()
        native(small, broken)[0].write_text(
            'cdef extern from "there-is-no-such-header.h":\n    int x\nVALUE = x\n', encoding="utf-8"
        )
        assert "there-is-no-such-header.h" in self.build(small)
        assert native(small, "*.so") == []
        assert core_of(small).startswith("python ")

    def test_without_a_compiler_it_ends_well(self, small: Path) -> None:
        self.build(small, CC="/bin/false")
        assert native(small, "*.so") == []
        assert core_of(small).startswith("python it was not compiled for this Python: ")
