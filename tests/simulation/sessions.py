"""What is said about connections and about the server: who ends whom, who is silent, who looks on, who asks what.

They are drawn beside a program's other steps, by a chance of their own: seeds that draw none are the runs they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.administration import MS, TENANTS
from tests.simulation.caches import name_of
from tests.simulation.model import Words
from tests.simulation.peers import PEERS

if TYPE_CHECKING:
    from tests.simulation.programs import Step

_MAY_ALL = 3  # peers that are never tenants
_SAID = """
    CLIENT ID, CLIENT INFO, CLIENT GETNAME, CLIENT HELP, SELECT 0, SELECT 1, READONLY, READWRITE, WAIT 0 0, ROLE, TIME,
    LASTSAVE, BGSAVE, MODULE LIST, MODULE HELP, UNWATCH, COMMAND, COMMAND COUNT, COMMAND LIST, COMMAND HELP,
    COMMAND DOCS set, COMMAND INFO get, CLUSTER INFO, CLUSTER MYID, CLUSTER NODES, CLUSTER SHARDS, CLUSTER SLOTS,
    CLUSTER HELP, CONFIG HELP, CONFIG REWRITE, ACL WHOAMI, ACL USERS, ACL LIST, ACL CAT, ACL LOG, ACL GENPASS,
    ACL LOAD, ACL SAVE, ACL HELP, PUBSUB CHANNELS, PUBSUB NUMPAT, PUBSUB HELP, OBJECT HELP, MEMORY DOCTOR, MEMORY HELP,
    SLOWLOG GET, SLOWLOG LEN, SLOWLOG RESET, SLOWLOG HELP, LATENCY LATEST, LATENCY DOCTOR, LATENCY HISTOGRAM,
    LATENCY HISTORY command, LATENCY RESET, LATENCY HELP
    """
_WITHOUT_ARGUMENTS = [tuple(line.encode().split()) for line in _SAID.split(",")]


class Sessions:
    """A part of `Program`."""

    rng: random.Random
    peer: int
    tenants: bool
    strings: list[bytes]
    _any_key: Any
    _command: Any
    _send: Any
    _soon: Any
    _step: Any
    _write: Any

    def sessions(self, seed: int) -> Callable[[], list[Step]]:
        """What draws one of them, and mostly none, after each step."""
        rng = random.Random(f"sessions {seed}")
        share = rng.choice([0.0, 0.0, 0.01, 0.05])
        kinds = [
            self._inquiry, self._inquiry, self._inquiry, self._untouched, self._silent, self._skipped, self._quits,
            self._killed, self._monitored, self._shut_down,
        ]  # fmt: skip
        kinds += [self._user_removed] * self.tenants

        def draw() -> list[Step]:
            if rng.random() >= share:
                return []
            usual, self.rng, self.peer = self.rng, rng, rng.randrange(_MAY_ALL)
            steps = rng.choice(kinds)()
            self.rng = usual
            return steps

        return draw

    def _inquiry(self) -> list[Step]:
        """A question about the server, about a connection, or about a key."""
        rng, key, name = self.rng, self._any_key(), b"n%d" % self.rng.randrange(9)
        user = b"u%d" % rng.choice(TENANTS) if self.tenants else b"default"
        asked: Words = rng.choice([
            (b"CLIENT", b"SETNAME", name), (b"CLIENT", b"SETINFO", b"LIB-NAME", name), (b"CLIENT", b"UNBLOCK", b"1"),
            (b"COMMAND", b"GETKEYS", b"MSET", key, b"1", name, b"2"), (b"COMMAND", b"GETKEYS", b"DEL", key, name),
            (b"COMMAND", b"GETKEYSANDFLAGS", b"GET", key), (b"CLUSTER", b"KEYSLOT", key), (b"ACL", b"GETUSER", user),
            (b"CONFIG", b"GET", rng.choice([b"maxmemory", b"maxmemory-policy", b"page-checksums", b"*"])),
            (b"ACL", b"DRYRUN", user, b"GET", key), (b"PUBSUB", b"NUMSUB", b"news"), (b"OBJECT", b"ENCODING", key),
            (b"OBJECT", b"IDLETIME", key), (b"OBJECT", b"REFCOUNT", key), (b"OBJECT", b"FREQ", key),
            (b"MEMORY", b"USAGE", key), (b"CLIENT", b"NO-EVICT", rng.choice([b"ON", b"OFF"])),
            (b"FLUSHDB",) if rng.random() < 0.2 else (b"PING",), *_WITHOUT_ARGUMENTS,
        ])  # fmt: skip
        return [self._send(self.peer, asked)]

    def _untouched(self) -> list[Step]:
        """Somebody whose reads do not count as a use: what lies on disk is shown to it, and does not come to memory."""
        reads = [self._soon(self._send(self.peer, self._read()), 3 * MS) for _ in range(self.rng.randrange(1, 12))]
        off = [self._send(self.peer, (b"CLIENT", b"NO-TOUCH", b"OFF"))] * (self.rng.random() < 0.5)
        return [self._send(self.peer, (b"CLIENT", b"NO-TOUCH", b"ON")), *reads, *off]

    def _read(self) -> Words:
        some = self.rng.sample(self.strings, 3)
        read: Words = self.rng.choice([(b"GET", some[0]), (b"MGET", *some), self._command(self.peer)])
        return read

    def _silent(self) -> list[Step]:
        """Somebody wants no replies for a while, and has things done."""
        steps = [self._send(self.peer, (b"CLIENT", b"REPLY", b"OFF"))]
        steps += [self._soon(self._write(self.peer), MS) for _ in range(self.rng.randrange(1, 6))]
        if self.rng.random() < 0.3:
            steps.append(self._send(self.peer, self._command(self.peer)))
        return [*steps, self._send(self.peer, (b"CLIENT", b"REPLY", b"ON"))]

    def _skipped(self) -> list[Step]:
        """Somebody wants no reply to the next command."""
        skip = self._send(self.peer, (b"CLIENT", b"REPLY", b"SKIP"))
        return [skip, self._soon(self._send(self.peer, self._command(self.peer)), MS)]

    def _quits(self) -> list[Step]:
        """Somebody goes, when all has been answered, and says something after that."""
        last = [self._soon(self._write(self.peer), 50_000) for _ in range(self.rng.randrange(3))]
        after = [replace(self._send(self.peer, self._command(self.peer)), gap=0)] * (self.rng.random() < 0.5)
        return [*last, replace(self._send(self.peer, (b"QUIT",)), gap=0), *after]

    def _killed(self) -> list[Step]:
        """Somebody ends connections, while they ask for something."""
        rng, me, target = self.rng, self.peer, self.rng.randrange(PEERS)
        busy = [self._soon(self._write(target), 100_000), self._send(target, self._command(target))]
        kill = self._step("name", me, (b"CLIENT", b"KILL", b"ID", name_of(target)))
        if rng.random() < 0.4:
            which = rng.choice([(b"TYPE", b"normal"), (b"TYPE", b"pubsub"), (b"USER", b"default")])
            kill = self._send(me, (b"CLIENT", b"KILL", *which, b"SKIPME", rng.choice([b"yes", b"no"])))
        return [*busy, replace(kill, gap=rng.choice([0, 50_000, MS]))]

    def _monitored(self) -> list[Step]:
        """Somebody looks on."""
        rng, me = self.rng, self.peer
        steps = [self._send(me, (b"MONITOR",))]
        for _ in range(rng.randrange(3, 20)):
            other = rng.randrange(PEERS)
            steps.append(self._soon(self._send(other, self._command(other)), MS))
        ends = [(b"RESET",), (b"RESET",), (b"QUIT",), (b"PING",)]
        return [*steps, self._send(me, rng.choice(ends))]

    def _shut_down(self) -> list[Step]:
        """Somebody has the server end, by a command."""
        rng, me = self.rng, self.peer
        if rng.random() < 0.5:
            return [self._send(me, (b"SHUTDOWN", b"ABORT"))]
        words = rng.choice([(b"SHUTDOWN",), (b"SHUTDOWN", b"SAVE"), (b"SHUTDOWN", b"NOSAVE"), (b"SHUTDOWN", b"FORCE")])
        before = [self._soon(self._write(rng.randrange(_MAY_ALL)), 100_000) for _ in range(rng.randrange(4))]
        return [*before, self._step("shutdown", me, words)]

    def _user_removed(self) -> list[Step]:
        """A user is removed, with all connections that it has, and made anew."""
        user = b"u%d" % self.rng.choice(TENANTS)
        made = b"on", b"nopass", b"~%b:*" % user, b"~kv:q%b:*" % user[1:], b"&*", b"+@all"
        steps = [self._send(0, (b"ACL", b"DELUSER", user)), self._send(0, (b"ACL", b"SETUSER", user, *made))]
        return [self._soon(step, 200_000) for step in steps]
