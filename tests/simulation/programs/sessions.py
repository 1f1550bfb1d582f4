"""Commands about connections and the server: kills, silence, monitors, queries.

They are drawn in addition to a program's other steps, from a random generator of their own: seeds without them have the
same runs as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.model.model import Words
from tests.simulation.programs import commands
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import MS, NO_TENANTS, PEERS, TENANTS, Step, name_of

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


def beside(seed: Seed) -> Callable[[], list[Step]]:
    """Return a function that draws one of them, and usually none, after each step."""
    rng = random.Random(f"sessions {seed.number}")
    share = rng.choice([0.0, 0.0, 0.01, 0.05])
    kinds = [
        _inquiry, _inquiry, _inquiry, _untouched, _silent, _skipped, _quits,
        _killed, _monitored, _shut_down,
    ]  # fmt: skip
    kinds += [_user_removed] * seed.tenants

    def pick() -> list[Step]:
        seed.peer = rng.randrange(NO_TENANTS)
        return rng.choice(kinds)(seed)

    return seed.beside(rng, share, pick)


def _inquiry(seed: Seed) -> list[Step]:
    """A question about the server, about a connection, or about a key."""
    rng, key, name = seed.rng, commands.any_key(seed), b"n%d" % seed.rng.randrange(9)
    user = b"u%d" % rng.choice(TENANTS) if seed.tenants else b"default"
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
    return [seed.send(seed.peer, asked)]


def _untouched(seed: Seed) -> list[Step]:
    """Reads that do not count as a use: values on disk are shown to the client, and are not loaded into memory."""
    reads = [seed.soon(seed.send(seed.peer, _read(seed)), 3 * MS) for _ in range(seed.rng.randrange(1, 12))]
    off = [seed.send(seed.peer, (b"CLIENT", b"NO-TOUCH", b"OFF"))] * (seed.rng.random() < 0.5)
    return [seed.send(seed.peer, (b"CLIENT", b"NO-TOUCH", b"ON")), *reads, *off]


def _read(seed: Seed) -> Words:
    some = seed.rng.sample(seed.strings, 3)
    return seed.rng.choice([(b"GET", some[0]), (b"MGET", *some), commands.any_of(seed, seed.peer)])


def _silent(seed: Seed) -> list[Step]:
    """Somebody wants no replies for a while, and has things done."""
    steps = [seed.send(seed.peer, (b"CLIENT", b"REPLY", b"OFF"))]
    steps += [seed.soon(commands.write(seed, seed.peer), MS) for _ in range(seed.rng.randrange(1, 6))]
    if seed.rng.random() < 0.3:
        steps.append(seed.send(seed.peer, commands.any_of(seed, seed.peer)))
    return [*steps, seed.send(seed.peer, (b"CLIENT", b"REPLY", b"ON"))]


def _skipped(seed: Seed) -> list[Step]:
    """Somebody wants no reply to the next command."""
    skip = seed.send(seed.peer, (b"CLIENT", b"REPLY", b"SKIP"))
    return [skip, seed.soon(seed.send(seed.peer, commands.any_of(seed, seed.peer)), MS)]


def _quits(seed: Seed) -> list[Step]:
    """A client quits after all replies, and sends commands after that."""
    last = [seed.soon(commands.write(seed, seed.peer), 50_000) for _ in range(seed.rng.randrange(3))]
    after = [replace(seed.send(seed.peer, commands.any_of(seed, seed.peer)), gap=0)] * (seed.rng.random() < 0.5)
    return [*last, replace(seed.send(seed.peer, (b"QUIT",)), gap=0), *after]


def _killed(seed: Seed) -> list[Step]:
    """Somebody ends connections, while they ask for something."""
    rng, me, target = seed.rng, seed.peer, seed.rng.randrange(PEERS)
    busy = [seed.soon(commands.write(seed, target), 100_000), seed.send(target, commands.any_of(seed, target))]
    kill = seed.step("name", me, (b"CLIENT", b"KILL", b"ID", name_of(target)))
    if rng.random() < 0.4:
        which = rng.choice([(b"TYPE", b"normal"), (b"TYPE", b"pubsub"), (b"USER", b"default")])
        kill = seed.send(me, (b"CLIENT", b"KILL", *which, b"SKIPME", rng.choice([b"yes", b"no"])))
    return [*busy, replace(kill, gap=rng.choice([0, 50_000, MS]))]


def _monitored(seed: Seed) -> list[Step]:
    """Somebody looks on."""
    rng, me = seed.rng, seed.peer
    steps = [seed.send(me, (b"MONITOR",))]
    for _ in range(rng.randrange(3, 20)):
        other = rng.randrange(PEERS)
        steps.append(seed.soon(seed.send(other, commands.any_of(seed, other)), MS))
    ends = [(b"RESET",), (b"RESET",), (b"QUIT",), (b"PING",)]
    return [*steps, seed.send(me, rng.choice(ends))]


def _shut_down(seed: Seed) -> list[Step]:
    """Somebody has the server end, by a command."""
    rng, me = seed.rng, seed.peer
    if rng.random() < 0.5:
        return [seed.send(me, (b"SHUTDOWN", b"ABORT"))]
    words = rng.choice([(b"SHUTDOWN",), (b"SHUTDOWN", b"SAVE"), (b"SHUTDOWN", b"NOSAVE"), (b"SHUTDOWN", b"FORCE")])
    before = [seed.soon(commands.write(seed, rng.randrange(NO_TENANTS)), 100_000) for _ in range(rng.randrange(4))]
    return [*before, seed.step("shutdown", me, words)]


def _user_removed(seed: Seed) -> list[Step]:
    """A user is removed, with all connections that it has, and made anew."""
    user = b"u%d" % seed.rng.choice(TENANTS)
    made = b"on", b"nopass", b"~%b:*" % user, b"~kv:q%b:*" % user[1:], b"&*", b"+@all"
    steps = [seed.send(0, (b"ACL", b"DELUSER", user)), seed.send(0, (b"ACL", b"SETUSER", user, *made))]
    return [seed.soon(step, 200_000) for step in steps]
