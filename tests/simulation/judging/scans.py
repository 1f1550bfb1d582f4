"""SCAN and SSCAN, from the first cursor to the last: keys that existed all the time are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.acting.peers import Asked
from tests.simulation.programs.step import Step

if TYPE_CHECKING:
    from tests.simulation.acting.run import Run

_LONGEST = 3000  # calls: a scan ends for any number of new keys


class Scan:
    """One of them. It is given up when its client does something else that it can't go on after."""

    def __init__(self, run: Run, step: Step) -> None:
        self._run = run
        self._step = step
        self._peer = run.peers[step.peer]
        self._life = self._peer.lives
        self._start = step.words[1].removesuffix(b"index") if len(step.words) > 1 else b""
        self._calls = 0
        self._since = -1  # changes that there were when it began
        self._there: set[bytes] = set()  # when it began
        self._unsure: set[bytes] = set()
        self._found: set[bytes] = set()

    def ask(self, cursor: bytes = b"0") -> None:
        """The next call, if the client is still there."""
        peer, count = self._peer, b"%d" % self._step.extra["count"]
        if peer.lives == self._life and peer.sock is not None and not peer.half:
            words = (*self._step.words, cursor, b"COUNT", count)
            self._run.send(peer, self._step.number, words).heard = self._heard

    def _heard(self, asked: Asked, reply: Any) -> None:
        if not isinstance(reply, list):
            return  # it is in a transaction, or was refused
        store, judge = self._run.judge.model.store, self._run.judge
        cursor, keys = reply
        if self._since < 0:
            self._since = asked.at
            self._there = {*filter(self._is_listed, store.keys)}.difference(key for key, _, _ in store.log[asked.at :])
        self._unsure |= asked.unsure | store.doubtful() | store.fog
        self._found.update(keys)
        self._calls += 1
        if self._calls > _LONGEST:
            judge.fail(f"step {self._step.number}: a scan does not end")
        if int(cursor):
            self._run.machine.later(self._step.extra["pace"], lambda: self.ask(cursor))
        else:
            self._check()

    def _is_listed(self, key: bytes) -> bool:
        value = self._run.judge.model.store.keys.get(key)
        return key.startswith(self._start) and value is not None and (value.page is not None or not self._start)

    def _turned(self, key: bytes) -> bool:
        """Return whether a key was a page's and a string's alternately: it has changed its place."""
        log = self._run.judge.model.store.log[self._since :]
        return len({cell.page is None for name, *cells in log if name == key for cell in cells if cell}) > 1

    def _check(self) -> None:
        judge, store = self._run.judge, self._run.judge.model.store
        judge.note_evictions()
        store.now = self._run.machine.clock.unix_ms
        store.expire()
        changed = {key for key, _, _ in store.log[self._since :]}
        gone = {
            key
            for key, old, new in store.log[self._since :]
            if new is None
            or (self._start and not new.page)
            # A write that waits for the disk happens later than in the model: its key may have expired before.
            or (old is not None and 0 < old.expires <= store.now)
        }
        missing = self._there - gone - self._unsure - self._found
        if missing := {key for key in missing if not self._turned(key)}:
            judge.fail(f"step {self._step.number}: a scan has not found {sorted(missing)[:5]!r}")
        if extra := self._found - self._there - changed - self._unsure - set(store.lately_expired()):
            judge.fail(f"step {self._step.number}: a scan has found {sorted(extra)[:5]!r}, which were not there")
