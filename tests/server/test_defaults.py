"""A server without a configuration file: its memory limit, and the place of its store."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from servers import CLIENT_OPTIONS
from test_app import CONF

from kvpage_server.configuration.config import choose_defaults, from_arguments
from kvpage_server.system.process import usable_memory

MIB = 1 << 20
READY = re.compile(r"ready on 127\.0\.0\.1:(\d+)")


class Home:
    """Somebody's home, and a directory in it where they stand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.here = path / "here"
        self.here.mkdir()
        self.data = path / ("Library/Application Support" if sys.platform == "darwin" else ".local/share") / "kvpage"

    @contextmanager
    def server(self, *options: str, file: str = "", **environment: str) -> Iterator[tuple[redis.Redis, list[str]]]:
        """Yield a client of the server, and the server's start messages."""
        with self._run(*filter(None, [file]), "--port", "0", *options, **environment) as process:
            received = []
            assert process.stderr
            for line in process.stderr:
                received.append(line)
                if found := READY.search(line):
                    break
            else:
                raise AssertionError("".join(received))
            with redis.Redis(**{**CLIENT_OPTIONS, "port": int(found[1])}, decode_responses=True) as client:
                yield client, received
            process.terminate()
            process.communicate(timeout=100)
            assert process.returncode == 0

    def refused(self, *options: str, **environment: str) -> str:
        with self._run(*options, **environment) as process:
            _, received = process.communicate(timeout=100)
        assert process.returncode == 1
        return received

    @contextmanager
    def _run(self, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        usual = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        command = [sys.executable, "-m", "kvpage_server.app", *options]
        env = {**usual, "HOME": str(self.path), "PYTHONPATH": str(CONF.parents[1]), **environment}
        with subprocess.Popen(
            command, cwd=self.here, env=env, stderr=subprocess.PIPE, encoding="utf-8", umask=0
        ) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


class TestDirectory:
    def test_the_store_is_in_the_data_directory_of_the_platform(self, home: Home) -> None:
        with home.server() as (client, received):
            assert client.config_get("dir") == {"dir": str(home.data)}
            assert f"disk    {home.data}/kvpage.lmdb" in "".join(received)
            client.set("x", "kept")
        assert list(home.here.iterdir()) == []
        for made in (home.data, home.data.parent, home.data.parent.parent):
            assert stat.S_IMODE(made.stat().st_mode) == 0o700
        with home.server() as (client, received):
            assert client.get("x") == "kept"
            assert "NOT used" not in "".join(received)

    @pytest.mark.skipif(sys.platform == "darwin", reason="XDG is Linux's")
    def test_xdg_data_home_is_used(self, home: Home) -> None:
        with home.server(XDG_DATA_HOME=str(home.path / "elsewhere")) as (client, _):
            assert client.config_get("dir") == {"dir": str(home.path / "elsewhere" / "kvpage")}

    def test_an_older_store_is_not_lost_and_its_command_is_printed(self, home: Home) -> None:
        with home.server("--dir", ".") as (client, _):
            client.set("x", "of before")
        assert (home.here / "kvpage.lmdb").exists()
        with home.server("--loglevel", "notice") as (client, received):
            assert client.get("x") is None
            (warning,) = (line for line in received if "NOT used" in line)
        assert f"{home.here}/kvpage.lmdb is NOT used; this store lies in {home.data}. " in warning
        command = warning.rpartition("To use the other: ")[2].split()
        assert command[0] == "kvpage-server"
        with home.server(*command[1:]) as (client, received):
            assert client.get("x") == "of before"
            assert "NOT used" not in "".join(received)

    def test_names_on_the_command_line_are_relative_to_the_directory(self, home: Home) -> None:
        (home.here / "users.acl").write_text(
            "user default on nopass ~* &* +@all\nuser alice on >pw ~* +@all\n", encoding="utf-8"
        )
        with home.server("--aclfile", "users.acl", "--pidfile", "pid") as (client, _):
            assert client.acl_users() == ["alice", "default"]
            assert {path.name for path in home.here.iterdir()} == {"users.acl", "pid"}
        assert not (home.data / "pid").exists()

    def test_a_directory_that_is_given_wins(self, home: Home) -> None:
        with home.server("--dir", str(home.here)) as (client, _):
            assert client.config_get("dir") == {"dir": str(home.here)}
        assert (home.here / "kvpage.lmdb").exists()
        assert not home.data.exists()

    def test_with_a_file_nothing_changes(self, home: Home) -> None:
        (home.here / "kvpage.conf").write_text("loglevel notice\n", encoding="utf-8")
        with home.server(file="kvpage.conf") as (client, received):
            assert client.config_get("maxmemory") == {"maxmemory": "0"}
            assert client.config_get("dir") == {"dir": str(home.here)}
        limit = "(maxdisk auto: half of the free space and the store together, or what the store needs)"
        assert limit in "".join(received)
        assert (home.here / "kvpage.lmdb").exists()
        assert not home.data.exists()

    def test_a_store_in_memory_and_a_check_make_nothing(self, home: Home) -> None:
        with home.server("--store", "memory") as (client, _):
            assert client.set("x", "y")
        subprocess.run(
            [sys.executable, "-m", "kvpage_server.app", "--check-config"],
            env={**os.environ, "HOME": str(home.path), "XDG_DATA_HOME": str(home.path / "data")},
            check=True,
            capture_output=True,
        )
        assert [path.name for path in home.path.iterdir()] == ["here"]

    def test_without_a_home_directory_the_error_has_a_remedy(self, home: Home) -> None:
        (home.path / "file").touch()
        received = home.refused(HOME=str(home.path / "file"), XDG_DATA_HOME=str(home.path / "file" / "data"))
        assert received.count("\n") == 1
        assert "Name another directory with --dir, or do without a disk: --store memory" in received


class TestMemory:
    def test_a_quarter_of_the_machines_memory_is_used_and_printed(self, home: Home) -> None:
        expected = usable_memory() // 4 // MIB * MIB
        with home.server("--store", "memory") as (client, received):
            assert client.config_get("maxmemory") == {"maxmemory": str(expected)}
            assert client.info("memory")["maxmemory"] == expected
        (line,) = (line for line in received if "store   memory" in line)
        assert re.search(r"limit [\d.]+[GM] of the [\d.]+[GM] there are \(maxmemory\), allkeys-prefix", line)

    @pytest.mark.parametrize("given", ["0", "64mb"])
    def test_given_values_are_used(self, home: Home, given: str) -> None:
        with home.server("--store", "memory", "--maxmemory", given) as (client, received):
            assert client.config_get("maxmemory") == {"maxmemory": str(64 * MIB if given == "64mb" else 0)}
        assert "there are" not in "".join(received)

    @pytest.mark.parametrize(
        ("own", "limits", "expected"),
        [
            ("0::/\n", {}, None),
            ("0::/\n", {"memory.max": "max\n"}, None),
            ("0::/\n", {"memory.max": f"{512 * MIB}\n"}, 512),
            ("0::/a/b\n", {"memory.max": "max", "a/memory.max": f"{256 * MIB}", "a/b/memory.max": "max"}, 256),
            ("0::/a/b\n", {"a/b/memory.max": f"{512 * MIB}", "a/memory.high": f"{300 * MIB}"}, 300),
            ("0::/host/path\n", {"memory.max": f"{128 * MIB}"}, 128),  # a container sees its own groups alone
            ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": f"{200 * MIB}"}, 200),
            ("4:memory:/host\n", {"memory/memory.limit_in_bytes": f"{100 * MIB}"}, 100),
            ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
            ("3:cpuset:/a\n", {"a/memory.max": f"{1 * MIB}", "memory/a/memory.limit_in_bytes": "1"}, None),
            (None, {"memory.max": f"{1 * MIB}"}, None),  # macOS
        ],
    )
    def test_limits_of_control_groups_count(
        self, tmp_path: Path, own: str | None, limits: Mapping[str, str], expected: int | None
    ) -> None:
        if own is not None:
            (tmp_path / "cgroup").write_text(own, encoding="utf-8")
        for name, value in limits.items():
            (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "groups" / name).write_text(value, encoding="utf-8")
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found = usable_memory(tmp_path / "cgroup", tmp_path / "groups")
        assert found == (machine if expected is None else expected * MIB)

    def test_a_cgroup_file_without_a_value_sets_no_limit(self, tmp_path: Path) -> None:
        (tmp_path / "kvpage.conf").write_text("port 0\n", encoding="utf-8")
        config = from_arguments([str(tmp_path / "kvpage.conf")])
        choose_defaults(config)
        assert (config.maxmemory, config.dir, config.chosen) == (0, ".", set())
