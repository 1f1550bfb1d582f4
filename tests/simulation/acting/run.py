"""A run: a seed's steps, in its world, before its judge."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation.acting.deeds import Deeds
from tests.simulation.acting.dumps import Dumper
from tests.simulation.acting.engines import Engine
from tests.simulation.acting.peers import Asked, BlockedError, Peer, Watchers, encode
from tests.simulation.acting.process import SOCKET, Process
from tests.simulation.acting.smaller import make_smaller
from tests.simulation.judging.audit import Audit
from tests.simulation.judging.judge import Judge, Violation
from tests.simulation.judging.patience import Patience
from tests.simulation.model.model import Words
from tests.simulation.model.replies import ANYTHING
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import MS, PEERS, TENANTS, Step
from tests.simulation.world import place
from tests.simulation.world.clock import Clock
from tests.simulation.world.disk import copy_of
from tests.simulation.world.machine import Idle, Machine

_ALIVE = 5 * MS
_RETRY = 20 * MS


@dataclass
class Outcome:
    """Result of a run."""

    seed: int
    commands: int
    digest: str  # of all sent and received bytes, with times
    fault: str = ""


class Run:
    """One run of some steps of a program."""

    def __init__(self, clock: Clock, seed: Seed, steps: Sequence[Step], directory: Path) -> None:
        self.seed = seed
        self.steps = list(steps)
        self.machine = Machine(clock, str(seed.number))
        costs = random.Random(f"costs {seed.number}")
        low, high = seed.costs
        clock.cost = (lambda: low + int(costs.random() * (high - low))) if high else (lambda: 0)
        notifies = "notify-keyspace-events" in seed.options
        self.peers = [Peer(number, self._told, self._lost) for number in range(PEERS + notifies)]
        self.judge = Judge(self.machine, self.peers)
        self.machine.turns.broke = self.judge.note_broken
        self.judge.model.limited = seed.options["maxmemory"] != "0" or seed.maxdisk > 0
        self.judge.model.notifies = notifies
        self.judge.checksums = seed.options["page-checksums"] == "yes"
        self.directory = directory
        self.digest = hashlib.blake2b(digest_size=12)
        self._watchers = Watchers()
        self._lives = 0
        self._at = 0
        self._over = False
        self._begun = -1
        self._after: Callable[[], None] = self.begin_work
        self.audit = Audit(self)
        self._deeds = Deeds(self)
        self._patience = Patience(self)
        self.dumpers: list[Dumper] = []
        self._doom: int | None = None  # nanoseconds between the next notified change and the kill
        self.judge.tenants = [b"u%d" % peer for peer in TENANTS if seed.tenants]
        self.now = directory / "now"  # where the process lives that serves now
        self.machine.attend = self._watchers.watch
        self.engines = [self._new_engine(number) for number in range(seed.engines)]

    def _new_engine(self, number: int) -> Engine:
        files = self.directory / "engine" if number == 1 else None
        return Engine(number, self.now / SOCKET, self.judge.note_broken, self._add_output, files)

    # -- processes -------------------------------------------------------------------------------------------------

    def play(self) -> Outcome:
        """From the first step to the last. Raises nothing: an error is in the outcome."""
        fault = ""
        try:
            self.machine.after_round = self._look
            self._patience.look()
            here = self._new_directory()
            here.mkdir()
            while not self._over:
                self.machine.disk.faults.unreadable = False  # or it would say so, and not begin
                self.now.unlink(missing_ok=True)
                self.process = Process(self.machine, here, self.seed, self.judge.ran)
                self.judge.begin(self.process)
                self.machine.later(_ALIVE, lambda process=self.process: self._connect(process))
                self.process.live()
                self._disconnect()
                if self._over:
                    break
                there = self._new_directory()
                copy_of(here, there)
                here = there
                self.audit.died(in_order=not self._killed and not self.process.lost)
        except Violation as violation:
            fault = str(violation)
        except Idle:
            fault = "nothing happens any more, and nobody is at the end"
        if self.judge.violation is not None:
            fault = str(self.judge.violation)
        return Outcome(self.seed.number, self.judge.commands, self.digest.hexdigest(), fault)

    def _new_directory(self) -> Path:
        self._lives += 1
        return self.directory / f"life-{self._lives}"

    def _connect(self, process: Process) -> None:
        if process is not self.process or process.over:
            return
        if not (process.directory / SOCKET).exists():  # its start takes long, because each look at the clock costs time
            self.machine.later(_ALIVE, lambda: self._connect(process))
            return
        self._killed = False
        for peer in self.peers:
            self._enter(peer)
        after, self._after = self._after, self.begin_work
        after()

    def begin_work(self) -> None:
        """The server has its former state: other programs find it, too."""
        self.now.symlink_to(self.process.directory)
        self.go_on()

    def _enter(self, peer: Peer) -> None:
        peer.connect(str(self.process.directory / SOCKET))
        self._watchers.attend(peer)
        self.send(peer, 0, (b"CLIENT", b"SETNAME", peer.name))
        if self.seed.tenants and peer.number in TENANTS:
            self.send(peer, 0, (b"AUTH", b"u%d" % peer.number, b"any"))
        if peer.number == PEERS:
            self.send(peer, 0, (b"PSUBSCRIBE", b"*"))  # who does nothing but listen

    def _disconnect(self) -> None:
        for peer in self.peers:
            peer.drop()

    def finish(self) -> None:
        """All is done: the server ends."""
        self._over = True
        self.process.end()

    # -- output --------------------------------------------------------------------------------------------------------

    def send(self, peer: Peer, step: int, words: Words, pieces: int = 1) -> Asked:
        """Have a peer say something, in so many pieces."""
        data, asked = encode(words), Asked(step, words)
        peer.unrun.append(asked)
        self._push(peer, data, pieces, step)
        asked.sent = peer.busy_until
        return asked

    def _push(self, peer: Peer, data: bytes, pieces: int, step: int) -> None:
        if pieces == 1:
            peer.sending += 1
            self._arrive(peer, data, peer.lives, 0)
            return
        rng = random.Random(f"{self.seed.number} {step}")
        cuts = sorted(rng.randrange(len(data)) for _ in range(pieces - 1))
        delay = 0
        life = peer.lives
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            peer.sending += 1
            self._arrive(peer, data[start:stop], life, delay)
            delay += rng.randrange(1, 3 * MS)

    def _arrive(self, peer: Peer, piece: bytes, life: int, delay: int) -> None:
        """Deliver a piece after the pieces that were sent before it."""
        now = self.machine.clock.now
        when = max(now + delay, peer.busy_until)
        peer.busy_until = when
        self.machine.later(when - now, lambda: self._arrived(peer, piece, life))

    def _arrived(self, peer: Peer, piece: bytes, life: int) -> None:
        if life == peer.lives:
            peer.blocked.append(piece)
            if len(peer.blocked) == 1:
                self._deliver(peer, life)

    def _deliver(self, peer: Peer, life: int) -> None:
        """Move arrived bytes into the server's socket, as far as it has space."""
        while life == peer.lives and peer.blocked:
            try:
                peer.push(peer.blocked[0], life)
            except BlockedError as blocked:
                peer.sending += 1
                peer.blocked[0] = blocked.rest
                self.machine.later(_RETRY, lambda: self._deliver(peer, life))
                return
            if peer.blocked:
                peer.blocked.pop(0)

    def _look(self) -> None:
        if self.judge.violation is not None:
            raise self.judge.violation
        if self.process.ready and not self.process.over:
            self.judge.note_evictions()
            self._watchers.look()

    def _told(self, peer: Peer, reply: Any) -> None:
        machines_own = peer.unanswered and _says_anything(peer.unanswered[0].expected)  # such as INFO's process id
        self.digest.update(b"%d %d " % (self.machine.clock.now, peer.number))
        if not machines_own:
            self.digest.update(reply if type(reply) is bytes else repr(reply).encode())
        known = self.judge.acknowledged
        self.judge.received(peer, reply)
        if self._doom is not None and self.judge.acknowledged > known:
            self.machine.later(self._doom, self._deeds.killer())
            self._doom = None

    def _add_output(self, text: str) -> None:
        self.digest.update(b"%d %b" % (self.machine.clock.now, text.encode()))

    def _lost(self, peer: Peer, by_server: bool) -> None:
        if not peer.stalled:
            self._watchers.ignore(peer)
        if by_server:
            self.judge.endings.lost(peer)
        self.judge.lost(peer)

    # -- steps -----------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Do the next step when it is time."""
        if self._at == len(self.steps):
            self.audit.settle(self.audit.final)
            return
        step = self.steps[self._at]
        self._at += 1
        self.machine.later(step.gap, lambda: self._do(step))

    def _do(self, step: Step) -> None:
        if not self._deeds.do(step):
            self.go_on()


def run(clock: Clock, seed: Seed, steps: Sequence[Step]) -> Outcome:
    """Play steps of a program in a temporary directory."""
    make_smaller(seed.number)
    with tempfile.TemporaryDirectory(prefix="kvpage-world-", dir=place.parent()) as directory:
        return Run(clock, seed, steps, Path(directory)).play()


def _says_anything(expected: Any) -> bool:
    """Whether a reply is not known before, or a part of it is not."""
    return expected is ANYTHING or (isinstance(expected, list) and any(map(_says_anything, expected)))
