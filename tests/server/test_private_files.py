"""Files of server, dump and engine are readable only by their own user, under every umask, and if they existed before.

They contain pages, strings and names of all tenants.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from keyspaces import block, set_block
from servers import START_WITHIN, STOP_WITHIN, RunningServer, answers, free_port, start_server
from waiting import until

from kvpage_server.configuration import log
from kvpage_server.configuration.config import Config
from kvpage_server.page import DType
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.lmdb_file import DiskError
from kvpage_server.system.durable import private_directory, replacing, restrict_permissions

BODY = os.urandom(50_000)
SHAPE = block([(0, DType.FLOAT16, 64), (1, DType.FLOAT16, 64)], layers=2, heads=2, page_size=16)
OF_THE_STORE = {"kvpage.lmdb", "kvpage.lmdb.clean", "kvpage.lmdb.reserve", "kvpage.lock"}


def rights(directory: Path) -> dict[str, int]:
    """Return the permissions of all files in a directory, by relative path."""
    return {str(path.relative_to(directory)): stat.S_IMODE(path.lstat().st_mode) for path in directory.rglob("*")}


@contextmanager
def careless(*options: str) -> Iterator[RunningServer]:
    """A server of somebody whose umask is 000."""
    port = free_port()
    command = [sys.executable, "-m", "kvpage_server.app", *options, "--port", str(port)]
    process = subprocess.Popen(command, umask=0, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + START_WITHIN
        while not answers(port):
            assert process.poll() is None, process.returncode
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield RunningServer(process, port, Path(os.devnull))
    finally:
        process.terminate()
        assert process.wait(STOP_WITHIN) == 0


def run_careless(*command: str, typed: str = "") -> None:
    """A command of theirs that has to succeed."""
    words = [sys.executable, "-m", *command]
    done = subprocess.run(words, umask=0, capture_output=True, timeout=100, input=typed.encode())
    assert done.returncode == 0, done.stderr


def test_a_server_writes_nothing_that_others_may_see(tmp_path: Path) -> None:
    """Database, locks, log, pid, users, configuration and socket, while it runs and after it ended."""
    (tmp_path / "kvpage.conf").write_text(
        "store tiered\nlogfile log\npidfile pid\nunixsocket socket\naclfile users.acl\n", encoding="utf-8"
    )
    (tmp_path / "users.acl").write_text("user default on nopass ~* &* +@all\n", encoding="utf-8")
    for name, mode in (("kvpage.conf", 0o644), ("users.acl", 0o666)):
        (tmp_path / name).chmod(mode)
    with (
        careless(str(tmp_path / "kvpage.conf"), "--dir", str(tmp_path)) as server,
        server.client() as client,
    ):
        client.set("string", BODY)
        set_block(client, "chat", 0, SHAPE)
        client.save()
        client.acl_setuser("tenant", enabled=True, passwords=["+secret"])
        assert client.execute_command("ACL", "SAVE")
        assert client.config_rewrite()
        (tmp_path / "log").rename(tmp_path / "log.1")
        server.process.send_signal(signal.SIGHUP)
        until((tmp_path / "log").exists, "a new log")
        there = rights(tmp_path)
        assert there.keys() == OF_THE_STORE | {"log", "log.1", "pid", "socket", "users.acl", "kvpage.conf"}
        assert there.pop("socket") == 0o700
        assert there.pop("kvpage.conf") == 0o640  # whatever group it was given to is the operator's choice
        assert there.pop("users.acl") == 0o660
        assert set(there.values()) == {0o600}, there
    there = rights(tmp_path)
    assert there.keys() == OF_THE_STORE | {"log", "log.1", "users.acl", "kvpage.conf"}
    assert all(mode & 0o007 == 0 for mode in there.values()), there


def test_formerly_readable_files_become_private(tmp_path: Path) -> None:
    """A store of a version that left it to the umask."""
    with start_server("--store", "tiered", directory=tmp_path, name="output") as server, server.client() as client:
        client.set("string", BODY)
    (tmp_path / "kvpage.pid").touch()
    for path in tmp_path.iterdir():
        path.chmod(0o666)
    (tmp_path / "output").unlink()
    with start_server("--store", "tiered", "--pidfile", "kvpage.pid", directory=tmp_path, name="output") as server:
        with server.client() as client:
            assert client.get("string") == BODY
        there = rights(tmp_path)
        assert OF_THE_STORE | {"kvpage.pid"} == there.keys() - {"output"}
        assert {mode for name, mode in there.items() if name != "output"} == {0o600}


def test_a_dump_and_the_directories_that_it_makes_are_private(tmp_path: Path) -> None:
    target = tmp_path / "backups" / "monday"
    with start_server() as server, server.client() as client:
        client.set("string", BODY)
        set_block(client, "chat", 0, SHAPE)
        run_careless("kvpage_server.cli", "dump", str(target), "--url", server.url)
        (target / "dump.json").chmod(0o644)
        client.set("another", BODY)
        run_careless("kvpage_server.cli", "dump", str(target), "--update", "--url", server.url)
    there = rights(tmp_path)
    assert {name: mode for name, mode in there.items() if (tmp_path / name).is_dir()} == dict.fromkeys(
        ("backups", "backups/monday"), 0o700
    )
    written = {name: mode for name, mode in there.items() if (tmp_path / name).is_file()}
    assert len(written) > 2
    assert set(written.values()) == {0o600}, written


def test_an_engines_files_are_private(tmp_path: Path) -> None:
    """Contexts in files, and the transcript, also one that others could read before."""
    pytest.importorskip("mlx.core")
    from api_engines import write_tiny

    model = write_tiny(tmp_path / "model")
    made = tmp_path / "made"
    made.mkdir()
    transcript = made / "chat.json"
    transcript.write_text("[]", encoding="utf-8")
    transcript.chmod(0o644)
    options = ["--model", str(model), "--max-tokens", "4", "--agent", "alice"]
    options += ["--cold", str(made / "agents" / "contexts"), "--transcript", str(transcript)]
    run_careless("engine.cli", "chat", *options, typed="Hello\n")
    there = rights(made)
    assert there.keys() == {"agents", "agents/contexts", "agents/contexts/alice.safetensors", "chat.json"}
    assert {there["agents"], there["agents/contexts"]} == {0o700}
    assert {mode for name, mode in there.items() if (made / name).is_file()} == {0o600}
    assert len(json.loads(transcript.read_text(encoding="utf-8"))) == 2


def test_a_removed_lock_file_admits_no_second_server(tmp_path: Path) -> None:
    with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
        client.set("string", BODY)
        (tmp_path / "kvpage.lock").unlink()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="is in use by another kvpage-server"):
                start_server("--store", "tiered", directory=tmp_path, name="second").__enter__()
        assert client.get("string") == BODY
        assert client.save()
    with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
        assert client.get("string") == BODY


def test_a_store_that_was_closed_can_be_had_again(tmp_path: Path) -> None:
    """Whether it was opened, or found to be no store at all."""
    (tmp_path / "kvpage.lmdb").write_bytes(bytes(5000))
    for _ in range(2):
        with pytest.raises(DiskError, match="is not a store"):
            Disk(tmp_path)
    (tmp_path / "kvpage.lmdb").unlink()
    for _ in range(2):
        Disk(tmp_path).close()


class TestWriting:
    def test_directories_that_are_there_stay_as_they_are(self, tmp_path: Path) -> None:
        given = tmp_path / "given"
        given.mkdir(0o755)
        private_directory(given)
        private_directory(given / "a" / "b")
        assert rights(tmp_path) == {"given": 0o755, "given/a": 0o700, "given/a/b": 0o700}
        (given / "file").touch()
        with pytest.raises(OSError, match="file"):
            private_directory(given / "file")
        with pytest.raises(OSError, match="file"):
            private_directory(given / "file" / "below")

    def test_a_device_or_pipe_is_not_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "pipe"
        os.mkfifo(path)
        with pytest.raises(OSError, match=r"it is not a regular file: .*pipe"), replacing(path) as file:
            file.write(b"new")
        assert path.is_fifo()
        assert [*tmp_path.iterdir()] == [path]

    @pytest.mark.parametrize(("before", "keep_group", "after"), [(0o644, False, 0o600), (0o666, True, 0o660)])
    def test_a_file_that_is_replaced(self, tmp_path: Path, before: int, keep_group: bool, after: int) -> None:
        path = tmp_path / "file"
        path.touch()
        path.chmod(before)
        with replacing(path, keep_group=keep_group) as file:
            file.write(b"new")
        assert (path.read_bytes(), rights(tmp_path)) == (b"new", {"file": after})

    def test_special_files_are_not_touched(self) -> None:
        before = os.stat(os.devnull).st_mode
        with open(os.devnull, encoding="utf-8") as nowhere:
            restrict_permissions(nowhere.fileno())
        assert os.stat(os.devnull).st_mode == before

    def test_a_log_file_that_others_may_read_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        path = tmp_path / "log"
        path.touch()
        path.chmod(0o666)
        monkeypatch.setattr(os, "chmod", refused)
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        log.reopen(Config(logfile=str(path)))
        logging.getLogger().handlers[0].close()
        assert f"others may read {path}, which cannot be changed: Operation not permitted\n" in path.read_text(
            encoding="utf-8"
        )


def test_an_error_of_a_replacement_names_the_file(tmp_path: Path) -> None:
    program = (
        "import pathlib, resource, sys; from kvpage_server.system.durable import replacing\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))\n"
        "try:\n"
        "    with replacing(pathlib.Path(sys.argv[1])) as file:\n"
        "        file.write(bytes(100))\n"
        "except OSError as error:\n"
        "    print(error.filename)\n"
    )
    path = tmp_path / "dump.json"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, encoding="utf-8", timeout=100)
    assert (done.stdout, done.stderr) == (f"{path}\n", "")
    assert [*tmp_path.iterdir()] == []
