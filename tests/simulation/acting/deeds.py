"""Effects of a program's steps: on a client, the server's process, the disk and the clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.acting.dumps import Dumper
from tests.simulation.acting.peers import Peer, encode
from tests.simulation.acting.process import Process
from tests.simulation.judging.audit import PATIENCE, doubt_lifetimes, doubt_overdue
from tests.simulation.judging.scans import Scan
from tests.simulation.programs.step import MS, PEERS, Step, name_of
from tests.simulation.world.machine import ServerDied

if TYPE_CHECKING:
    from tests.simulation.acting.run import Run

_LONGEST_LIFE = 30 * MS  # of a server that is killed after a notification
_SOON = 1_000 * MS
_LOOK = 5 * MS


class Deeds:
    """Steps of one run. A method for each kind of step; it returns True if it starts the next one itself."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def do(self, step: Step) -> bool:
        """Do it; whether the run goes on by itself."""
        deed: Callable[[Step], bool | None] = getattr(self, f"do_{step.kind}")
        return deed(step) is True

    def _opened(self, step: Step) -> Peer:
        peer = self._run.peers[step.peer]
        if peer.half:
            peer.drop()
        if peer.sock is None:
            self._run._enter(peer)
        return peer

    def do_send(self, step: Step) -> None:
        self._run.send(self._opened(step), step.number, step.words, step.extra.get("pieces", 1))

    def do_scan(self, step: Step) -> None:
        self._opened(step)
        Scan(self._run, step).ask()

    def do_half(self, step: Step) -> None:
        peer = self._opened(step)
        data = encode(step.words)
        peer.half = True
        self._run._push(peer, data[: int(len(data) * step.extra["share"])], 1, step.number)

    def do_reset(self, step: Step) -> None:
        self._run.peers[step.peer].drop()

    def do_stall(self, step: Step) -> None:
        peer = self._opened(step)
        if peer.stalled:
            return
        peer.stalled = peer.has_stalled = True
        self._run._watchers.ignore(peer)
        life = peer.lives

        def wake() -> None:
            if peer.lives == life and peer.sock is not None:
                peer.stalled, peer.moved = False, self._run.machine.clock.now
                self._run._watchers.attend(peer)

        self._run.machine.later(step.extra["nanoseconds"], wake)

    def do_kill(self, step: Step) -> bool:
        kill = self.killer()
        if "told" not in step.extra:
            kill()
        self._run._doom = step.extra["told"]
        self._run.machine.later(_LONGEST_LIFE, kill)
        return True

    def killer(self) -> Callable[[], None]:
        """Return a function that kills the current process, if it still runs."""
        process = self._run.process

        def kill() -> None:
            if process is self._run.process and not process.over:
                self._run._killed, self._run._doom, self._run._after = True, None, self._run.audit.begin
                raise ServerDied

        return kill

    def do_due(self, step: Step) -> bool:
        """Send a command in the millisecond in which its key expires, if that is soon."""
        value, clock = self._run.judge.model.store.keys.get(step.words[1]), self._run.machine.clock
        left = value.expires * MS - clock.wall if value is not None else 0

        def send() -> None:
            self.do_send(step)
            self._run.go_on()

        self._run.machine.later(left if 0 < left < _SOON else 0, send)
        return True

    def do_stop(self, step: Step) -> bool:
        self._run._after = self._run.audit.begin
        self._run.machine.later(PATIENCE, lambda process=self._run.process: self._check_over(process))
        self._run.process.end()
        return True

    def _check_over(self, process: Process) -> None:
        if not process.over:
            self._run.judge.fail(f"the server was asked to end a minute ago, and does: {process.tasks}")

    def do_name(self, step: Step) -> None:
        """Say something in which `@1` stands for the id of a peer's connection, or for 0 if it has none."""
        peer, everybody = self._opened(step), self._run.peers
        ids = {name_of(one.number): b"%d" % (one.talk.client.id if one.talk.client else 0) for one in everybody}
        self._run.send(peer, step.number, tuple([ids.get(word, word) for word in step.words]))

    def do_shutdown(self, step: Step) -> bool:
        """A new client sends SHUTDOWN. The server may refuse it if the disk fails."""
        peer, process, end = self._run.peers[step.peer], self._run.process, self._run.process.server.stop
        peer.drop()
        asked = self._run.send(self._opened(step), step.number, step.words)
        self._run._after = self._run.audit.begin

        def stop() -> None:
            process.ending = True
            self._run.machine.later(PATIENCE, lambda: self._check_over(process))
            end()

        process.server.stop = stop

        def wait() -> None:
            if process is not self._run.process or process.ending or process.over:
                return
            if asked in peer.unrun or asked in peer.unanswered:
                self._run.machine.later(_LOOK, wait)
            else:
                self._run.go_on()

        wait()
        return True

    def do_fault(self, step: Step) -> None:
        faults, names, lasts = self._run.machine.disk.faults, step.extra["name"].split(), step.extra["nanoseconds"]
        if slow := step.extra.get("slow", 0):
            faults.slow = slow
            self._run._patience.excuse(lasts)
        if names:
            faults.room = 0
            self._run.audit.disk_failed()
        vars(faults).update(dict.fromkeys(names, True))

        def mend() -> None:
            if slow:
                faults.slow = 0
            vars(faults).update(dict.fromkeys(names, False))

        self._run.machine.later(lasts, mend)

    def do_rot(self, step: Step) -> None:
        database, bits = step.extra["database"], step.extra["bits"]
        if self._run.machine.disk.rot(random.Random(f"rot {self._run.seed.number} {step.number}"), database, bits):
            self._run.judge.rotted.add(database)

    def do_engine(self, step: Step) -> None:
        engine = self._run.engines[step.peer]
        if step.extra["what"] == "die":
            engine.die(random.Random(f"file {self._run.seed.number} {step.number}"))
        else:
            engine.order(step.extra["what"], *step.extra["args"])

    def do_dump(self, step: Step) -> None:
        self._run.dumpers.append(Dumper(self._run, step))
        self._run.dumpers[-1].start()

    def do_clock(self, step: Step) -> None:
        if step.extra["milliseconds"] < 0:
            doubt_overdue(self._run)
        else:
            doubt_lifetimes(self._run, step.extra["milliseconds"])
        self._run.machine.clock.set_wall(step.extra["milliseconds"] * MS)

    def do_settle(self, step: Step) -> bool:
        for peer in self._run.peers[PEERS:]:
            if peer.sock is None:
                self._run._enter(peer)
        self._run.audit.settle(self._run.go_on)
        return True
