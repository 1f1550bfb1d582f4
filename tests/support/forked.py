"""kvpage-servers that begin where others have imported everything, which takes longer than most tests.

Each is a fork of a process that has done nothing else. Run as ``python forked.py``, that process takes lines of JSON:

    {"log": "...", "arguments": [...]}   a server begins; its process id is told
    {"poll": 123}                        its exit code is told, or null while it runs

When the lines end, so does it, with all its servers.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any


def main() -> None:
    sys.path[0] = os.getcwd()  # as for `python -m`
    from kvpage_server import app

    running = set[int]()
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            said = os.waitstatus_to_exitcode(status) if pid else None
            running.discard(pid)
        elif not (said := os.fork()):
            _become(asked["log"])
            sys.argv[1:] = asked["arguments"]
            return app.main()
        else:
            running.add(said)
        print(json.dumps(said), flush=True)
    for pid in running:  # of who was killed before it could stop them
        os.kill(pid, signal.SIGKILL)
    return None


def _become(log: str) -> None:
    """A service of its own, that says what it says in a file."""
    os.setsid()
    for path, numbers in ((os.devnull, [0]), (log, [1, 2])):
        opened = os.open(path, os.O_RDWR)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)


class _Origin:
    """The process that has imported everything."""

    def __init__(self, environment: dict[str, str]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        atexit.register(self._end)
        self._lock = threading.Lock()

    def _end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)

    def ask(self, **what: object) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        with self._lock:
            stdin.write(json.dumps(what) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())


@cache
def _origin(folder: str, *environment: tuple[str, str]) -> _Origin:
    """For those who start a server in this folder, with this environment."""
    return _Origin(dict(environment))


@dataclass
class Forked:
    """A server, as `subprocess.Popen` has a process."""

    pid: int
    args: list[str]
    _origin: _Origin
    returncode: int | None = field(default=None)

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


def fork_server(command: list[str], log: str) -> Forked:
    """What `python -m kvpage_server.app` with further words is."""
    named = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    origin = _origin(os.getcwd(), *sorted(named.items()))
    return Forked(origin.ask(arguments=command[3:], log=log), command, origin)


if __name__ == "__main__":
    main()
