"""`kvpage dump` and `kvpage restore`, while everybody goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvpage_server.client import PageClientError
from kvpage_server.snapshot.dump import Selection, dump
from kvpage_server.snapshot.inspect import inspect
from kvpage_server.snapshot.restore import restore
from kvpage_server.snapshot.store import RunningStore
from tests.simulation.process import SOCKET
from tests.simulation.programs import Step
from tests.simulation.world import threads

if TYPE_CHECKING:
    from tests.simulation.run import Run


class Dumper:
    """A process that dumps what the server holds, and may restore it."""

    def __init__(self, run: Run, step: Step) -> None:
        self._run = run
        self._step = step
        self._path = run.directory / f"dump-{step.number}"
        self.over = False

    def start(self) -> None:
        """Begin."""
        with threads.turns.of(self._path.name):
            threading.Thread(target=self._work, name=self._path.name).start()

    def _work(self) -> None:
        try:
            self._dump()
        finally:
            self.over = True

    def _dump(self) -> None:
        try:
            with RunningStore(f"unix://{self._run.now / SOCKET}") as store:
                dumped = dump(store, self._path, Selection(), file_bytes=30_000)
                if self._step.extra["restore"]:
                    restore(store, self._path, replace=self._step.extra["replace"])
        except (PageClientError, OSError):
            return  # the server died, or refused
        if dumped.corrupt and not self._run.judge.rotted:
            self._run.judge.note_broken(f"a dump found corrupt: {dumped.corrupt[:3]}")
        found = inspect(self._path, (), verify=True)
        if found.corrupt:
            self._run.judge.note_broken(f"a dump is corrupt: {found.corrupt[:3]}")
