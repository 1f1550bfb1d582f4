"""Programs that start from a process with all imports, which take longer than most tests.

Each is a fork of a process that has done nothing else. Run as ``python forked.py MODULE...``, that process imports the
modules, and reads requests in JSON from a socket, its standard input:

    {"module": "...", "arguments": [...]}   with three descriptors, its standard streams: the module's `main` begins;
                                            its process id is the reply
    {"poll": 123}                           the reply is its exit code, or null while it runs

It ends when the socket is closed, with all processes that it started.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn

LONGEST = 1 << 16  # bytes of a message
SERVER = ("kvpage_server.app",)
ENGINES = ("engine_process", "engine.cli", "engine.api.server", "persistent_models")  # the first imports MLX
SUPPORT = os.path.dirname(__file__)


def main() -> None:
    sys.path[:1] = [os.getcwd(), SUPPORT]  # as with `python -m`, and this folder
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise each fork visits, and so copies, all imported objects
    assert threading.active_count() == 1, "a fork has one thread of several"
    received = socket.socket(fileno=os.dup(0))
    running = set[int]()
    while True:
        line, streams, _, _ = socket.recv_fds(received, LONGEST, 3)
        if not line:
            break
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            result = os.waitstatus_to_exitcode(status) if pid else None
            running.discard(pid)
        elif not (result := os.fork()):
            received.close()
            _become(streams)
            sys.argv[1:] = asked["arguments"]
            _end_after(importlib.import_module(asked["module"]).main)
        else:
            running.add(result)
            for stream in streams:
                os.close(stream)
        received.send(json.dumps(result).encode())
    for pid in running:  # processes whose parent was killed before it could stop them
        os.kill(pid, signal.SIGKILL)


def _become(streams: Sequence[int]) -> None:
    """A service of its own, with these streams."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def _end_after(run: Callable[[], object]) -> NoReturn:
    """Call a program's `main` and end the process with its status, without freeing each imported object.

    To free them takes longer than to start and stop a server. Programs that are no forks do it.
    """
    try:
        status = run()
    except SystemExit as error:
        status = error.code
    if not isinstance(status, int | None):
        sys.exit(str(status))
    threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


class _Origin:
    """The process that has imported everything."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self._told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, *modules]
        with theirs:
            self._process = subprocess.Popen(command, env=environment, start_new_session=True, stdin=theirs)
        atexit.register(self._end)
        self._lock = threading.Lock()

    def _end(self) -> None:
        self._told.close()
        self._process.wait(10)

    def ask(self, streams: Sequence[int] = (), **what: object) -> Any:
        with self._lock:
            socket.send_fds(self._told, [json.dumps(what).encode()], list(streams))
            return json.loads(self._told.recv(LONGEST))


@cache
def _origin(modules: Sequence[str], folder: str, *environment: tuple[str, str]) -> _Origin:
    """Return the origin for programs in this folder with this environment."""
    return _Origin(modules, dict(environment))


@dataclass
class Forked:
    """A program, as `subprocess.Popen` has a process."""

    pid: int
    args: Sequence[str]
    _origin: _Origin
    returncode: int | None = field(default=None)
    stdin: IO[str] | None = None
    stdout: IO[str] | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._origin.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[Any] | Forked


def begin(command: Sequence[str], log: IO[bytes]) -> Process:
    """Start a service with its output in a log: `python -m MODULE` with further words."""
    if not _forks(command):
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    with open(os.devnull, "rb") as nothing:
        return _fork(command, (nothing.fileno(), log.fileno(), log.fileno()), os.environ)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m WORDS` to its end, with its output as text."""
    command = [sys.executable, "-m", *words]
    if not _forks(command):
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100)
    with open(os.devnull, "rb") as nothing, TemporaryFile() as output, TemporaryFile() as errors:
        code = _fork(command, (nothing.fileno(), output.fileno(), errors.fileno()), os.environ).wait(100)
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, output.read().decode(), errors.read().decode())


def converse(command: Sequence[str], errors: int = 2, **environment: str) -> Process:
    """Start a program that reads and writes lines. `errors` is a descriptor."""
    environment = {**os.environ, **environment}
    if not _forks(command):
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
        return subprocess.Popen(command, stderr=errors, env=environment | {"PYTHONPATH": SUPPORT}, **pipes)
    (asked, ask), (answer, answered) = os.pipe(), os.pipe()
    forked = _fork(command, (asked, answered, errors), environment)
    os.close(asked)
    os.close(answered)
    forked.stdin, forked.stdout = os.fdopen(ask, "w", encoding="utf-8"), os.fdopen(answer, encoding="utf-8")
    return forked


def _forks(command: Sequence[str]) -> bool:
    return sys.platform == "linux" and list(command[:2]) == [sys.executable, "-m"] and command[2] in SERVER + ENGINES


def _fork(command: Sequence[str], streams: Sequence[int], environment: Mapping[str, str]) -> Forked:
    modules = SERVER if command[2] in SERVER else ENGINES
    named = sorted((name, value) for name, value in environment.items() if name != "PYTEST_CURRENT_TEST")
    origin = _origin(modules, os.getcwd(), *named)
    return Forked(origin.ask(streams, module=command[2], arguments=command[3:]), command, origin)


if __name__ == "__main__":
    main()
