"""`kvpage-server` on the command line: its arguments, configuration, log, and error messages."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

import forked
import pytest
import redis
from servers import START_WITHIN, STOP_WITHIN, RunningServer, free_port, start_server
from small_disks import small_disk
from waiting import until
from wire import Wire, encode_command

from kvpage_server import __version__, core
from kvpage_server.configuration.config import ConfigError, from_arguments
from kvpage_server.store.disk.database import NECESSARY_FILES, Disk
from kvpage_server.store.eviction.policies import POLICIES

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf" / "kvpage.conf"
NO_MAPS = "kvpage-server has no maps of slots: use servers side by side, or `store cluster` (docs/scaling.md)"
NO_SUCH = f"kvpage-server {__version__} has none of this name: remove it, `kvpage-server --help` lists all"
VERSION = f"kvpage-server {__version__}, page core: {core.NAME}\n"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run("kvpage_server.app", *words)


def refused(*words: str) -> str:
    """Return the error message of a refused start: one line, no traceback."""
    result = run(*words)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("kvpage-server: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("kvpage-server: ").rstrip("\n")


class TestWords:
    def test_version(self) -> None:
        for word in ("--version", "-v"):
            assert run(word).stdout == VERSION

    def test_help_names_every_parameter(self) -> None:
        received = run("--help").stdout
        assert "kvpage-server [FILE]" in received
        for name in ("port", "bind", "maxmemory", "requirepass", "tls-port", "page-checksums", "loglevel"):
            assert re.search(rf"^ +--{name} ", received, re.MULTILINE), name

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is of Linux")
    @pytest.mark.parametrize("word", ["--version", "--help", "--check-config"])
    def test_a_full_or_closed_output_is_an_error_in_one_line(self, word: str) -> None:
        command = [sys.executable, "-m", "kvpage_server.app", word]
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, encoding="utf-8", timeout=100)
        assert (done.returncode, done.stderr) == (1, "kvpage-server: No space left on device\n")
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, encoding="utf-8", timeout=100)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, "")

    @pytest.mark.parametrize("words", [(), ("--check-config",)])
    def test_a_new_store_needs_more_space_than_a_file(self, tmp_path: Path, words: tuple[str, ...]) -> None:
        with small_disk(tmp_path / "disk", 1) as disk:
            (disk / "filler").write_bytes(bytes((1 << 20) - 65536))
            shown = refused(*words, "--port", "0", "--dir", str(disk))
        assert shown == f"dir: no file can be created in {disk}: No space left on device"

    def test_a_store_on_a_full_disk_starts(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", 1) as disk:
            Disk(disk).close()
            with suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
            options = "--store", "tiered", "--maxdisk", "16mb"
            with start_server(*options, directory=disk) as server, server.client() as client:
                assert client.get("absent") is None

    def test_the_last_value_of_a_repeated_option_counts(self) -> None:
        """The same is so in redis-server. The lists of users and quotas grow."""
        config = from_arguments(["--dir", "A", "--user", "a", "on", "--dir", "B", "--user", "b", "on"])
        assert (config.dir, len(config.user)) == ("B", 2)

    def test_it_is_installed_as_a_command(self) -> None:
        command = Path(sysconfig.get_path("scripts"), "kvpage-server")
        result = subprocess.run([command, "--version"], capture_output=True, encoding="utf-8", timeout=100)
        assert result.stdout == VERSION

    def test_it_starts_without_dependencies_of_the_gateway(self) -> None:
        program = "import kvpage_server.app, sys; print({'redis', 'kvpage_server.client'} & set(sys.modules))"
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=100)
        assert result.stdout == "set()\n", "it takes as long to load as all the rest"

    def test_check_config_reports_whether_it_would_start(self, tmp_path: Path) -> None:
        assert run("--check-config").returncode == 0
        assert run("--check-config", str(CONF)).stdout == "the configuration is valid\n"
        assert run("--check-config", str(CONF), "--port", "9222").returncode == 0
        assert refused("--check-config", "--port", "x").startswith("port must be")
        assert refused("--check-config", str(CONF), "--nosuch", "1") == f"unknown parameter 'nosuch'; {NO_SUCH}"

    @pytest.mark.parametrize("words", [(), ("--check-config",)])
    def test_a_file_of_the_store_that_cannot_be_opened(self, tmp_path: Path, words: tuple[str, ...]) -> None:
        for name in NECESSARY_FILES:
            place = tmp_path / name
            place.mkdir()
            shown = refused(*words, "--port", "0", "--dir", str(tmp_path))
            assert shown == f"dir: {place} is a directory"
            place.rmdir()
        if os.geteuid() != 0:  # root may write to every file
            place.touch(0o400)
            shown = refused(*words, "--port", "0", "--dir", str(tmp_path))
            assert shown == f"dir: {place} cannot be written: Permission denied"

    def test_check_config_reads_certificates_without_a_tls_port(self) -> None:
        for words, reason in (
            (["--tls-cert-file", "/no.crt", "--tls-key-file", "/no.key"], "/no.crt: No such file or directory"),
            (["--tls-cert-file", "/no.crt"], "TLS needs both tls-cert-file and tls-key-file"),
            (["--tls-ca-cert-file", "/no.crt"], "tls-ca-cert-file /no.crt: "),
        ):
            assert reason in refused("--check-config", *words)


class TestBadConfiguration:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("nosuch yes", f"unknown parameter 'nosuch'; {NO_SUCH}"),
            *(
                (f"{name} x", f"unknown parameter '{name}'; {NO_MAPS}")
                for name in ("cluster-config", "cluster-node", "Cluster-Node")
            ),
            ("port abc", "port must be a whole number between 0 and 65535, got 'abc'"),
            ("port 65536", "port must be a whole number between 0 and 65535, got '65536'"),
            ("port -1", "port must be a whole number between 0 and 65535, got '-1'"),
            ("port", "port takes one value, got 0"),
            ("port 1 2", "port takes one value, got 2"),
            ("maxmemory-clients 5", "maxmemory-clients must be 0, a share, or at least 65536 bytes, got 5"),
            ("databases 16", "databases must be a whole number between 1 and 1, got '16'"),
            ("appendonly yes", "appendonly must be one of no, got 'yes'"),
            ("page-checksums maybe", "page-checksums must be yes or no, got 'maybe'"),
            ('dir "/tmp', "unbalanced quotes"),
            ("\0 \0", "NUL bytes instead of a parameter's name"),
        ],
    )
    def test_a_bad_line_is_named_with_its_number(self, tmp_path: Path, line: str, message: str) -> None:
        file = tmp_path / "kvpage.conf"
        file.write_text(f"# a comment\n\nmaxmemory 1gb\n{line}\nport 9221\n", encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            from_arguments([str(file)])
        assert str(caught.value) == f"{file}, line 4: {message}"

    @pytest.mark.parametrize("value", ["4x", "gb", "-1", "1.5gb", ""])
    def test_a_bad_size_is_refused_with_the_format_of_sizes(self, value: str) -> None:
        with pytest.raises(ConfigError) as caught:
            from_arguments(["--maxmemory", value])
        assert str(caught.value) == f"maxmemory must be a number of bytes such as 0, 512mb or 4gb, got '{value}'"

    @pytest.mark.parametrize(
        "name", ["proto-max-bulk-len", "client-query-buffer-limit", "write-behind-limit", "scrub-rate", "maxmemory"]
    )
    def test_an_error_names_0_only_where_0_is_allowed(self, name: str) -> None:
        with pytest.raises(ConfigError) as caught:
            from_arguments([f"--{name}", "?"])
        if "such as 0," in str(caught.value):
            from_arguments([f"--{name}", "0"])
        else:
            with pytest.raises(ConfigError, match="at least 1048576 bytes, got 0"):
                from_arguments([f"--{name}", "0"])

    def test_a_configuration_file_behind_options_gets_advice(self, tmp_path: Path) -> None:
        file = tmp_path / "kvpage.conf"
        file.touch()
        with pytest.raises(
            ConfigError, match=r"got 2; a configuration file such as .*kvpage.conf is the first argument"
        ):
            from_arguments(["--port", "9221", str(file)])

    def test_a_bad_policy_lists_the_known_ones(self) -> None:
        with pytest.raises(ConfigError) as caught:
            from_arguments(["--maxmemory-policy", "random"])
        assert str(caught.value) == f"maxmemory-policy must be one of {', '.join(POLICIES)}, got 'random'"

    def test_it_is_refused_with_a_reason(self, tmp_path: Path) -> None:
        file = tmp_path / "kvpage.conf"
        file.write_text("port 9221\nnosuch yes\n", encoding="utf-8")
        assert refused(str(file)) == f"{file}, line 2: unknown parameter 'nosuch'; {NO_SUCH}"

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        assert refused(str(tmp_path / "none.conf")) == f"{tmp_path}/none.conf: No such file or directory"
        assert refused(str(tmp_path)) == f"{tmp_path}: Is a directory"

    def test_a_directory_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        assert refused("--dir", str(tmp_path / "none")) == f"dir: {tmp_path}/none: No such file or directory"
        assert refused("--aclfile", "none.acl") == f"aclfile: {Path('none.acl').absolute()}: No such file or directory"

    def test_a_value_without_a_name(self) -> None:
        assert refused("--port", "9221", "--", "x").startswith("unknown parameter ''")
        assert refused(str(CONF), "9221") == "expected --name, got '9221'"
        for word in ("--check-config", "--help", "--version"):
            assert refused(str(CONF), word) == f"{word} is no parameter: it must be the first argument"


class TestConfiguration:
    def test_the_shipped_file_is_valid_and_used(self) -> None:
        assert "\nport 9221\n" in CONF.read_text(encoding="utf-8")
        with start_server(file=CONF) as server, server.client(decode_responses=True) as client:
            assert client.config_get("maxmemory") == {"maxmemory": str(4 * 1024**3)}

    def test_the_command_line_wins_over_the_file(self, tmp_path: Path) -> None:
        file, port = tmp_path / "kvpage.conf", free_port()
        file.write_text("maxmemory 64mb\nloglevel warning\nmaxmemory-policy noeviction\n", encoding="utf-8")
        with (
            start_server("--maxmemory", "32mb", port=port, file=file) as server,
            server.client(decode_responses=True) as client,
        ):
            assert client.config_get("maxmemory*")["maxmemory"] == str(32 * 1024**2)
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("loglevel") == {"loglevel": "warning"}
            assert client.config_get("port") == {"port": str(port)}

    @pytest.mark.parametrize(
        ("text", "size"), [("1kb", 1024), ("1k", 1000), ("2mb", 2 * 1024**2), ("2M", 2_000_000), ("3GB", 3 * 1024**3)]
    )
    def test_sizes_have_units(self, text: str, size: int) -> None:
        assert from_arguments(["--maxmemory", text]).maxmemory == size

    def test_port_0_selects_and_prints_a_free_port(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "kvpage_server.app", "--port", "0", "--dir", str(tmp_path)]
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            port = self.port_told_in(log)
            with RunningServer(process, port, log).client() as client:
                assert client.info("server")["tcp_port"] == port
        finally:
            process.terminate()
            assert process.wait(STOP_WITHIN) == 0

    def port_told_in(self, log: Path) -> int:
        deadline = time.monotonic() + START_WITHIN
        while time.monotonic() < deadline:
            found = re.search(r"ready on 127\.0\.0\.1:(\d+)", log.read_text(encoding="utf-8"))
            if found:
                return int(found[1])
            time.sleep(0.05)
        raise AssertionError(f"it never said that it is ready:\n{log.read_text(encoding='utf-8')}")


def failing_once(what: str) -> tuple[str, str]:
    """The program of a server of which a method fails the first time it is called."""
    return "-c", (
        "from kvpage_server import app\n"
        f"call = app.{what}\n"
        "def fail(*_, **__):\n"
        f"    app.{what} = call\n"
        "    raise OSError(5, 'broken')\n"
        f"app.{what} = fail\n"
        "app.main()\n"
    )


class TestAFailure:
    def test_acknowledged_values_are_saved_despite_a_failing_stop(self, tmp_path: Path) -> None:
        options = ("--store", "tiered", "--appendfsync", "no")
        with (
            pytest.raises(AssertionError, match="exit code 1"),
            start_server(*options, directory=tmp_path, program=failing_once("Listener.stop")) as server,
            server.client() as client,
        ):
            client.set("key", "value")
        with start_server(*options, directory=tmp_path) as server, server.client() as client:
            assert client.get("key") == b"value"

    def test_a_stop_completes_a_batch_that_has_begun(self, tmp_path: Path) -> None:
        """Its pages are stored in steps, and all of them or none."""
        count = 4000
        named = [("r", layer, 0, 0, 0) for layer in range(count)]
        for _ in range(4):
            with start_server("--store", "tiered", directory=tmp_path) as server, Wire(server.port) as wire:
                for version in range(10):
                    pages = chain.from_iterable((*name, 8, 1, 8, 0, f"{version:08}") for name in named)
                    wire.send(encode_command([str(word).encode() for word in ("KVPAGEMSET", count, *pages)]))
                assert wire.reply() == b"+OK\r\n"
                server.stop()
            with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
                found = client.execute_command("KVPAGEMGET", count, *chain.from_iterable(named))
                assert len(set(found)) == 1
                assert found[0] is not None

    def test_periodic_tasks_continue(self, tmp_path: Path) -> None:
        log = tmp_path / "kvpage.log"
        with (
            start_server("--logfile", str(log), program=failing_once("Keyspace.sweep")) as server,
            server.client() as client,
        ):
            client.set("key", "value", px=1)
            until(lambda: client.dbsize() == 0, "an expired key to be swept")
        assert "broken" in log.read_text(encoding="utf-8")


class TestLog:
    def test_the_banner_has_the_important_facts(self) -> None:
        with start_server("--maxmemory", "64mb") as server:
            server.stop()
            log = server.log
        assert f"kvpage-server {__version__}, pid {server.pid}" in log
        assert f"core    {core.NAME}" in log
        assert f"ready on 127.0.0.1:{server.port}" in log
        assert "store" in log
        assert "memory, limit 64.00M, allkeys-prefix" in log
        assert "bye" in log

    def test_a_maxmemory_without_its_unit_is_a_warning(self) -> None:
        with start_server("--loglevel", "warning", "--maxmemory", "5") as server:
            assert "maxmemory is less than 1mb: 5 bytes (is a unit missing, such as gb?)" in server.log

    def test_json_lines(self) -> None:
        with start_server("--log-format", "json") as server, server.client() as client:
            client.ping()
            lines = [json.loads(line) for line in server.log.splitlines()]
        assert all({"time", "level", "message"} <= set(line) for line in lines)
        ready = next(line for line in lines if "ready on" in line["message"])
        assert f"127.0.0.1:{server.port}" in ready["addresses"]
        assert ready["pid"] == server.pid

    def test_a_quiet_log(self) -> None:
        with start_server("--loglevel", "warning", "--maxclients", "100") as server:
            assert [line for line in server.log.splitlines() if "core    python, slower" not in line] == []

    def test_logfile_and_pidfile(self, tmp_path: Path) -> None:
        log, pid = tmp_path / "kvpage.log", tmp_path / "kvpage.pid"
        with start_server("--logfile", str(log), "--pidfile", str(pid)) as server:
            assert pid.read_text(encoding="utf-8") == f"{server.pid}\n"
            assert server.log == ""
            assert "ready on" in log.read_text(encoding="utf-8")
        assert not pid.exists()
        assert "bye" in log.read_text(encoding="utf-8")

    @pytest.mark.parametrize("checks", [True, False])
    @pytest.mark.parametrize("name", ["logfile", "pidfile", "unixsocket"])
    def test_a_file_that_cannot_be_written_is_named(self, tmp_path: Path, name: str, checks: bool) -> None:
        """Both by --check-config and by a start, before the server is ready."""
        first = ["--check-config"] if checks else ["--port", str(free_port()), "--store", "memory"]
        file, plain = tmp_path / "none" / "file", tmp_path / "plain"
        plain.touch()
        assert refused(*first, f"--{name}", str(file)) == f"{name}: {file.parent} does not exist"
        assert refused(*first, f"--{name}", str(plain / "x")) == f"{name}: {plain} is not a directory"
        wrong = "exists and is not a socket" if name == "unixsocket" else "is a directory"
        there = plain if name == "unixsocket" else tmp_path
        assert refused(*first, f"--{name}", str(there)) == f"{name}: {there} {wrong}"
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        wrong = "exists and is not a socket" if name == "unixsocket" else "is not a regular file"
        assert refused(*first, f"--{name}", str(pipe)) == f"{name}: {pipe} {wrong}"

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is of Linux")
    @pytest.mark.parametrize("checks", [True, False])
    def test_a_file_that_not_even_root_can_create_is_named(self, checks: bool) -> None:
        first = ["--check-config"] if checks else ["--port", str(free_port()), "--store", "memory"]
        expected = "no file can be created in /proc: No such file or directory"
        assert refused("--check-config", "--store", "tiered", "--dir", "/proc") == f"dir: {expected}"
        for name in ("logfile", "pidfile", "unixsocket"):
            assert refused(*first, f"--{name}", "/proc/x") == f"{name}: {expected}"

    @pytest.mark.parametrize("checks", [True, False])
    def test_no_file_of_others_is_written_over(self, tmp_path: Path, checks: bool) -> None:
        first = ["--check-config"] if checks else []
        conf, other, users = tmp_path / "kvpage.conf", tmp_path / "notes", tmp_path / "users"
        conf.write_text(f"port {free_port()}\ndir {tmp_path}\n", encoding="utf-8")
        other.write_text("notes", encoding="utf-8")
        users.write_text("", encoding="utf-8")
        with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
            client.set("key", "value")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        expected = {
            ("--pidfile", "kvpage.lmdb"): f"pidfile: {tmp_path}/kvpage.lmdb is a file of the store",
            ("--logfile", "kvpage.lock"): f"logfile: {tmp_path}/kvpage.lock is a file of the store",
            ("--pidfile", "kvpage.conf"): f"pidfile: {conf} is also the configuration file",
            ("--logfile", "./kvpage.conf"): f"logfile: {conf} is also the configuration file",
            ("--logfile", "x", "--pidfile", "x"): f"pidfile: {tmp_path}/x is also logfile",
            ("--aclfile", "users", "--pidfile", "users"): f"pidfile: {users} is also aclfile",
            ("--pidfile", "notes"): "pidfile: notes exists and contains no process id",
        }
        for options, message in expected.items():
            assert refused(*first, str(conf), *options) == message
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        other.write_text(" 4711\n", encoding="utf-8")
        assert run("--check-config", str(conf), "--pidfile", "notes").returncode == 0

    @pytest.mark.parametrize("name", ["kvpage.lmdb", "kvpage.lock"])
    def test_a_pipe_in_the_place_of_the_store_is_refused(self, tmp_path: Path, name: str) -> None:
        os.mkfifo(tmp_path / name)
        message = refused("--port", "0", "--store", "tiered", "--dir", str(tmp_path))
        assert message == f"dir: {tmp_path / name} is not a regular file"

    def test_a_link_to_a_store_that_is_not_there_stays(self, tmp_path: Path) -> None:
        store, elsewhere = tmp_path / "kvpage.lmdb", tmp_path / "disk" / "store.lmdb"
        store.symlink_to(elsewhere)
        message = f"dir: {store} is a link to {elsewhere}, which does not exist: is its disk mounted?"
        for first in (["--check-config"], ["--port", "0"]):
            assert refused(*first, "--store", "tiered", "--dir", str(tmp_path)) == message
        assert store.is_symlink()

    def test_a_link_that_leads_nowhere_is_refused(self, tmp_path: Path) -> None:
        nowhere, loop, new = tmp_path / "nowhere", tmp_path / "loop", tmp_path / "new"
        nowhere.symlink_to(tmp_path / "unmounted" / "file")
        loop.symlink_to(loop)
        new.symlink_to(tmp_path / "file")
        lost = "which does not exist: is its disk mounted?"
        for first in (["--check-config"], ["--port", str(free_port()), "--store", "memory"]):
            for name in ("logfile", "pidfile"):
                assert refused(*first, f"--{name}", str(nowhere)) == f"{name}: {tmp_path}/unmounted does not exist"
                assert refused(*first, f"--{name}", str(loop)) == f"{name}: {loop} is a link to {loop}, {lost}"
            assert (
                refused(*first, "--unixsocket", str(new)) == f"unixsocket: {new} is a link to {tmp_path}/file, {lost}"
            )
        with start_server("--logfile", str(new)) as server:
            assert server.client().ping()
        assert "ready on" in (tmp_path / "file").read_text(encoding="utf-8")

    def test_a_file_that_is_refused_at_the_start_cannot_be_set(self, tmp_path: Path) -> None:
        log, link = tmp_path / "log of its own", tmp_path / "link to itself"
        link.symlink_to(link)
        with start_server("--logfile", str(log)) as server, server.client() as client:
            for value, reason in (
                (str(log), f"logfile: {log} is also tls-cert-file"),
                ("a\0b", "null byte"),
                (str(link), "TLS needs both tls-cert-file and tls-key-file"),
            ):
                with pytest.raises(redis.ResponseError, match=re.escape(reason)):
                    client.config_set("tls-cert-file", value)
            assert client.config_get("tls-cert-file") == {"tls-cert-file": ""}
        conf = tmp_path / "kvpage.conf"
        conf.write_text('pidfile "a\\x00b"\n', encoding="utf-8")
        assert refused("--check-config", str(conf)).endswith("pidfile must be a path, which has no null byte")

    def test_check_config_finds_a_port_that_is_used_twice(self) -> None:
        for names in (["--port", "--metrics-port"], ["--metrics-port", "--port"]):
            words = [word for name in names for word in (name, "9399")]
            assert refused("--check-config", *words) == "metrics-port: 9399 is another port of this server, too"
        port = str(free_port())
        start = ["--store", "memory", "--port", port]
        for words in (["--metrics-port", port], ["--kv-events", f"tcp://127.0.0.1:{port}"]):
            expected = f"{words[0][2:]}: {port} is another port of this server, too"
            assert refused(*start, *words).endswith(expected)
        for checked in ([], ["--check-config"]):
            for bind in ("127.0.0.1 localhost", "0.0.0.0 127.0.0.1"):
                expected = f"bind: two of the addresses {bind} are the same, or one contains the other"
                assert refused(*checked, *start, "--bind", bind).endswith(expected)
        elsewhere = ["--bind", "127.0.0.1", "--metrics-bind", "127.0.0.2"]
        assert run("--check-config", "--port", "9399", "--metrics-port", "9399", *elsewhere).returncode == 0

    def test_check_config_finds_a_full_file_system(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "small", megabytes=1) as disk:
            (disk / "d").mkdir()
            with suppress(OSError), (disk / "others").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            full = "No space left on device"
            assert (
                refused("--check-config", "--dir", str(disk / "d"))
                == f"dir: no file can be created in {disk}/d: {full}"
            )
            pidfile = ["--pidfile", str(disk / "pid"), "--store", "memory"]
            for check in (["--check-config"], []):
                assert refused(*check, *pidfile) == f"pidfile: no file can be created in {disk}: {full}"
            assert not (disk / "pid").exists()

    def test_check_config_tries_the_addresses_of_kv_events(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine", encoding="utf-8")
        listening, absent = "tcp://127.0.0.1:9398", tmp_path / "absent" / "s"
        for words, why in (
            (["tcp://192.0.2.1:5557"], "kv-events: tcp://192.0.2.1:5557: this machine has no such address"),
            (["tcp://127.0.0.1:9399"], "kv-events: 9399 is another port of this server, too"),
            ([listening, "tcp://*:9398"], "kv-events-replay: 9398 is another port of this server, too"),
            ([listening, listening], f"kv-events-replay: {listening} is also kv-events"),
            ([f"ipc://{absent}"], f"kv-events: {absent.parent} does not exist"),
            ([f"ipc://{tmp_path}/file"], f"kv-events: {tmp_path}/file exists and is not a socket"),
            ([f"ipc://{tmp_path}/unix"], f"unixsocket: {tmp_path}/unix is also kv-events"),
        ):
            options = [
                word for pair in zip(("--kv-events", "--kv-events-replay"), words, strict=False) for word in pair
            ]
            unix = ["--unixsocket", str(tmp_path / "unix")]
            assert refused("--check-config", "--port", "9399", *unix, *options) == why
        free = ["--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "tcp://127.0.0.1:*"]
        assert run("--check-config", *free).returncode == 0
        with socket.create_server(("127.0.0.1", 0)) as running:
            port = running.getsockname()[1]
            assert run("--check-config", "--kv-events", f"tcp://127.0.0.1:{port}").returncode == 0

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is of Linux")
    def test_a_pidfile_on_a_full_disk_is_named(self) -> None:
        message = "pidfile: /dev/full cannot be written: No space left on device"
        words = ["--port", str(free_port()), "--store", "memory", "--maxclients", "100", "--pidfile", "/dev/full"]
        assert refused(*words).endswith(message)

    def test_a_byte_order_mark_is_ignored(self, tmp_path: Path) -> None:
        conf = tmp_path / "kvpage.conf"
        conf.write_text("\ufeffport 9300\n", encoding="utf-8")
        assert run("--check-config", str(conf)).returncode == 0

    def test_check_config_leaves_directories_empty(self, tmp_path: Path) -> None:
        for name in ("logfile", "pidfile", "unixsocket"):
            assert run("--check-config", f"--{name}", str(tmp_path / "file")).returncode == 0
        assert list(tmp_path.iterdir()) == []

    def test_check_config_finds_an_address_of_another_machine(self) -> None:
        expected = "bind: cannot listen on 192.0.2.1: Cannot assign requested address"
        assert refused("--check-config", "--bind", "192.0.2.1") == expected
        assert refused("--check-config", "--bind", "127.0.0.1 192.0.2.1").startswith(
            "bind: cannot listen on 192.0.2.1:"
        )
        with start_server() as server:
            assert run("--check-config", "--port", str(server.port)).returncode == 0

    def test_the_least_size_is_named(self) -> None:
        expected = "write-behind-limit must be a number of bytes from 1048576 on, such as 512mb or 4gb, got 'much'"
        assert refused("--check-config", "--write-behind-limit", "much") == expected

    def test_check_config_finds_a_limit_that_is_too_low(self) -> None:
        assert refused("--check-config", "--maxdisk", "1mb").startswith("maxdisk must be auto, 0 or at least 16.00M")
