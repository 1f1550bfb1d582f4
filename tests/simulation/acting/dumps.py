"""`kvpage dump` and `kvpage restore`, while everybody goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import xxhash

from kvpage_server.client import PageClientError
from kvpage_server.snapshot.command import inspect
from kvpage_server.snapshot.dump import Selection, dump
from kvpage_server.snapshot.format import BadFile, PageTensor, files_of, read_all, read_summary
from kvpage_server.snapshot.restore import restore
from kvpage_server.snapshot.store import RunningStore
from tests.simulation.acting.process import SOCKET
from tests.simulation.model.values import Value
from tests.simulation.programs.step import Step
from tests.simulation.world import threads

if TYPE_CHECKING:
    from tests.simulation.acting.run import Run

_LEAP = 120_000  # milliseconds; a clock is set by half as many


class Dumper:
    """A process that dumps the server's keys, and may restore them. Permanent keys must be in the dump."""

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
                begun = self._known()
                dumped = dump(store, self._path, Selection(), file_bytes=30_000)
                stayed = self._stayed(*begun)
                if self._step.extra["restore"]:
                    restore(store, self._path, replace=self._step.extra["replace"])
        except (PageClientError, OSError):
            return  # the server died, or refused
        if dumped.corrupt.texts and not self._run.judge.rotted:
            self._run.judge.note_broken(f"a dump found corrupt: {dumped.corrupt.texts[:3]}")
        found = inspect(self._path, (), verify=True)
        if found.corrupt.texts:
            self._run.judge.note_broken(f"a dump is corrupt: {found.corrupt.texts[:3]}")
        dumped_ones = self._dumped()
        for key, value in stayed.items():
            if dumped_ones.get(key) != xxhash.xxh3_64_intdigest(value.data):
                what = "has another value of" if key in dumped_ones else "has missed"
                self._run.judge.note_broken(f"a dump {what} {key!r}, which was there all the while")
                return

    def _known(self) -> tuple[dict[bytes, Value], int]:
        """Return the certain values, and the number of changes."""
        store = self._run.judge.model.store
        unsure = store.doubtful() | store.fog
        return {key: value for key, value in store.keys.items() if key not in unsure}, len(store.log)

    def _stayed(self, before: dict[bytes, Value], changes: int) -> dict[bytes, Value]:
        """Return those values that have existed since, and could be read."""
        judge, (now, _) = self._run.judge, self._known()
        if judge.model.may_miss:
            return {}
        changed = {key for key, _, _ in judge.model.store.log[changes:]} | judge.let_go
        at = self._run.machine.clock.unix_ms + _LEAP  # who sets the clock forward and back lets it expire
        return {
            key: value
            for key, value in before.items()
            if now.get(key) is value and key not in changed and not 0 < value.expires <= at
        }

    def _dumped(self) -> dict[bytes, int]:
        """Return the keys in the dump, with the checksums of their values."""
        found: dict[bytes, int] = {}
        for _, contents in read_all(files_of(self._path, read_summary(self._path)), None):
            assert not isinstance(contents, BadFile)
            for entry, _, _ in contents.spans:
                keys = map(bytes, entry.keys()) if isinstance(entry, PageTensor) else [entry.key]
                found.update(zip(keys, entry.checksums, strict=True))
        return found
