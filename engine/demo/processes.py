"""The processes of the demonstration: a page server, and engines that share nothing else. All are gone at the end."""

from __future__ import annotations

import os
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
# OpenBLAS's threads wait for one another at every multiplication: on a busy machine they would measure what else runs.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
MODEL = "smollm2"  # what it is called by its clients
TETHERED = str(Path(__file__).with_name("tethered.py"))


class ProcessError(RuntimeError):
    """A process of the demonstration failed; the message has its last words."""


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
        """What to raise when it does not do its work."""
        self.log.seek(0)
        lines = self.log.read().strip().splitlines() or ["it said nothing"]
        return ProcessError(f"{self.name}: {lines[-1]}")


@contextmanager
def _running(name: str, *command: str) -> Iterator[Process]:
    """Python with these arguments, stopped when the block is left, however that happens.

    It has a session of its own, so that Ctrl-C reaches this process alone, and this one stops it. Should this process
    be killed without a chance to, its input ends, and it goes by itself.
    """
    with (
        TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
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


@contextmanager
def running_store() -> Iterator[str]:
    """A page server, empty, on a free port; its URL. Raises ProcessError when it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--port", str(port), "--store", "memory"]
    with (
        TemporaryDirectory() as directory,
        _running("the store", "-P", TETHERED, "kvpage_server.app", *options, "--dir", directory) as process,
    ):
        deadline = time.monotonic() + START_SECONDS
        while not listens(port):
            if process.ended or time.monotonic() > deadline:
                raise process.failure()
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"


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
        """Where it answers; waits until it does. Raises ProcessError when it could not load the model, or is gone."""
        stdout = self.process.popen.stdout
        assert stdout
        _, served, url = stdout.readline().partition(" is served on ")
        if not served:
            raise self.process.failure()
        return url.strip()

    def answer(self, messages: Messages) -> Turn:
        """What it says to a conversation. Raises ProcessError likewise."""
        url = self.url
        with self._failing():
            return ask(url, self.model, messages)

    def save(self) -> None:
        """Return when what it remembers is in the store, so that another can go on: it writes behind its answers."""
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
    """An engine that keeps its contexts in `store`, or in its own memory alone."""
    options = ["--model", model, "--port", "0", "--name", MODEL, *(["--store", store] if store else [])]
    with _running(name, "-P", TETHERED, "engine.cli", "serve", *options) as process:
        yield EngineProcess(process, MODEL)
