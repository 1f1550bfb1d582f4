"""The processes of the demonstration: a page server, and engines that share only that server."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from engine.demo.turn import Messages, Turn, ask, save

START_SECONDS = 30.0  # for the store
STOP_SECONDS = 10.0
# OpenBLAS's threads wait for one another: on a busy machine, several would measure the other load.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
MODEL = "smollm2"  # what it is called by its clients
TETHERED = str(Path(__file__).with_name("tethered.py"))


class ProcessError(RuntimeError):
    """A process of the demonstration failed; the message has the last line of its stderr."""


@dataclass(frozen=True, slots=True)
class Process:
    """A Python module that runs in a process of its own."""

    name: str
    popen: subprocess.Popen[str]
    log: IO[str]  # what it writes to stderr

    @property
    def ended(self) -> bool:
        return self.popen.poll() is not None

    def failure(self) -> ProcessError:
        """The error to raise when it fails."""
        self.log.seek(0)
        lines = self.log.read().strip().splitlines() or ["it said nothing"]
        return ProcessError(f"{self.name}: {lines[-1]}")


@contextmanager
def _running(name: str, *command: str) -> Iterator[Process]:
    """Run Python with these arguments, and stop it at the end of the block.

    The process has its own session, so that Ctrl-C reaches only this one, which then stops it. If this process is
    killed, the other's stdin ends, and it exits by itself.
    """
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            env=ONE_THREAD | os.environ,
            start_new_session=True,
        ) as popen,
    ):
        try:
            yield Process(name, popen, log)
        finally:
            popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                popen.wait(STOP_SECONDS)
            popen.kill()


@dataclass(frozen=True, slots=True)
class Store:
    """A page server in a process of its own."""

    url: str
    page: str  # for a browser


@contextmanager
def running_store() -> Iterator[Store]:
    """Run an empty page server on free ports. Raises ProcessError if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, http = (sock.getsockname()[1] for sock in (free, other))
    options = ["--bind", "127.0.0.1", "--port", str(port), "--store", "memory", "--metrics-port", str(http)]
    token = secrets.token_urlsafe(24)
    with (
        TemporaryDirectory() as directory,
        _running("the store", "-P", TETHERED, "kvpage_server.app", _with(token, directory), *options) as process,
    ):
        deadline = time.monotonic() + START_SECONDS
        while not listens(port):
            if process.ended or time.monotonic() > deadline:
                raise process.failure()
            time.sleep(0.05)
        yield Store(f"redis://127.0.0.1:{port}", f"http://127.0.0.1:{http}/?token={token}")


def _with(token: str, directory: str) -> str:
    """A configuration file in a private directory: every user of the machine can read a process's arguments."""
    file = Path(directory, "store.conf")
    file.write_text(f"web-token {token}\ndir {directory}\n", encoding="utf-8")
    return str(file)


def listens(port: int) -> bool:
    """Whether somebody takes connections on `port`."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@dataclass(frozen=True)
class EngineProcess:
    """An engine in a process of its own."""

    process: Process
    model: str  # as it is served

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    @cached_property
    def url(self) -> str:
        """Its URL; waits until it serves. Raises ProcessError if it could not load the model, or has ended."""
        stdout = self.process.popen.stdout
        assert stdout
        _, served, url = stdout.readline().partition(" is served on ")
        if not served:
            raise self.process.failure()
        return url.strip()

    def answer(self, messages: Messages) -> Turn:
        """Its answer to a conversation. Raises ProcessError."""
        url = self.url
        with self._failing():
            return ask(url, self.model, messages)

    def save(self) -> None:
        """Wait until its contexts are in the store, so that another engine can continue."""
        url = self.url
        with self._failing():
            save(url)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            said = ProcessError(f"{self.process.name}: {error}")
            raise (self.process.failure() if self.process.ended else said) from error


@contextmanager
def running_engine(name: str, model: str, store: str | None = None) -> Iterator[EngineProcess]:
    """Run an engine that keeps its contexts in `store`, or only in its memory."""
    options = ["--model", model, "--port", "0", "--name", MODEL, *(["--store", store] if store else [])]
    with _running(name, "-P", TETHERED, "engine.cli", "serve", *options) as process:
        yield EngineProcess(process, MODEL)
