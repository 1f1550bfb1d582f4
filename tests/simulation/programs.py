"""What is done in a run: steps, all drawn from the seed before anything happens, so that some can be left out.

Each seed has weights of its own (swarm testing): some runs are about nothing but strings, others kill the server every
second; so rare things meet more often than if all runs were alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.administration import MS, TENANTS, Administration
from tests.simulation.caches import Caches
from tests.simulation.meetings import Meetings
from tests.simulation.model import Words
from tests.simulation.oddities import Oddities
from tests.simulation.peers import PEERS
from tests.simulation.scenes import CHANNELS, Scenes
from tests.simulation.sessions import Sessions

FEW, MANY = 8, 60  # strings that there are
REQUESTS = [b"r%d" % i for i in range(3)]  # everybody writes their pages, one by one
PLANES = [(0, 1, 8), (1, 4, 6)]  # type, dtype, columns: of blocks
LAYERS, HEADS, ROWS = 2, 2, 4


@dataclass(frozen=True)
class Step:
    """One thing that happens, `gap` nanoseconds after the one before. `peer` is -1 where it is the world's."""

    number: int
    gap: int
    kind: str
    peer: int = -1
    words: Words = ()
    extra: dict[str, Any] = field(default_factory=dict)


class Program(Administration, Scenes, Oddities, Meetings, Sessions, Caches):
    """`steps(count)` are the first of a seed's; `options` is how its server is started.

    `maxdisk` is bytes, far fewer than the server's own least, so that a run can fill them; 0 for no limit.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"program {seed}")
        self.seed = seed
        self.disk = rng.random() < 0.65
        self.tenants = rng.random() < 0.25
        self.engines = rng.choice([0, 0, 0, 1, 2])
        self.crowded = rng.random() < 0.25  # memory has less room than is asked for
        self.strings = [b"s%d" % i for i in range(MANY if self.crowded else rng.choice([FEW, FEW, MANY]))]
        self.options = self._options()
        self.maxdisk = rng.choice([0, 0, 0, 0, 60_000, 250_000]) if self.disk else 0
        self.costs = rng.choice([(0, 0), (0, 2_000), (0, 60_000), (0, 900_000)])  # of a look at the clock
        self.large = rng.choice([200, 450, 3_000, 20_000])  # bytes of a long value
        self._number = 0
        commands: list[tuple[Callable[[], Words], float]] = [
            (self._string_write, 4), (self._string_read, 4), (self._counter, 1), (self._keys, 1),
            (self._time, 2), (self._page_set, 3), (self._page_get, 3), (self._batch_set, 2), (self._batch_get, 3),
            (self._block_set, 2), (self._block_get, 3), (self._page_other, 2), (self._protect, 1), (self._all, 0.3),
            (self._server, 0.3), (self._flush, 0.05), (self._channel, 0.5), (self._limits, 0.2), (self._tracking, 0.3),
            (self._rights, 0.2),
        ]  # fmt: skip
        self._commands = [one for one, _ in commands]
        self._weights = [weight * rng.choice([0, 0.3, 1, 1, 4]) for _, weight in commands]
        self._weights[0] += 0.1
        worlds: list[tuple[Callable[[], Step], float]] = [
            (self._stall, 1), (self._reset, 1), (self._half, 1), (self._kill, 0.4 if self.disk else 0.05),
            (self._stop, 0.2), (self._fault, 1.0 if self.disk else 0.0), (self._rot, 0.5 if self.disk else 0.0),
            (self._clock, 0.3), (self._dump, 0.1), (self._settle, 1.0),
        ]  # fmt: skip
        self._worlds = [one for one, _ in worlds]
        self._world_weights = [weight * rng.choice([0, 0.3, 1, 3]) for _, weight in worlds[:-1]] + [0.3]
        self._share = rng.choice([0.0, 0.004, 0.02, 0.06])  # of steps that are the world's
        self._scenes, weights = zip(*self.scenes, strict=True)
        self._scene_weights = [weight * rng.choice([0, 1, 1, 4]) for weight in weights]
        self._scene_weights[0] += 0.01
        self._scenes_share = rng.choice([0.0, 0.003, 0.01, 0.03])
        self._transactions = rng.choice([0, 0.02, 0.08])
        self._splits = rng.choice([0.0, 0.05, 0.5])
        self._engines_share = rng.choice([0.03, 0.15]) if self.engines else 0.0
        self._gaps = rng.choice([20_000, 200_000, 2 * MS, 30 * MS])
        self._odd = self.oddities(seed)
        self._meet = self.meetings(seed)
        self._talk = self.sessions(seed)
        self._cache = self.caches(seed)

    def _options(self) -> dict[str, str]:
        rng = self.rng
        options = {
            "store": "tiered" if self.disk else "memory",
            "appendfsync": rng.choice(["always", "always", "everysec", "everysec", "no"]),
            "maxmemory": str(rng.choice([30_000, 60_000] if self.crowded else [0, 0, 150_000, 400_000, 1_500_000])),
            "maxmemory-clients": rng.choice(["25%", "2mb"]),
            "page-checksums": rng.choice(["yes", "yes", "yes", "no"]),
            "scrub-rate": "20000",
            "write-behind-limit": str(rng.choice([1 << 20, 1 << 24])),
            "maxmemory-policy": rng.choice(
                ["allkeys-prefix", "allkeys-lru", "allkeys-s3fifo", "volatile-ttl", "noeviction"]
            ),
        }
        if rng.random() < 0.1:
            options["notify-keyspace-events"] = "KEA"
        if not self.disk:
            options.pop("appendfsync")
        return options

    # -- steps -----------------------------------------------------------------------------------------------------

    def steps(self, count: int) -> list[Step]:
        """So many, and some that end transactions."""
        steps: list[Step] = []
        while len(steps) < count:
            if self.rng.random() < self._share:
                steps.append(self.rng.choices(self._worlds, self._world_weights)[0]())
            elif self.rng.random() < self._scenes_share:
                steps += self.rng.choices(self._scenes, self._scene_weights)[0]()
            elif self.rng.random() < self._engines_share:
                steps.append(self._engine())
            elif self.rng.random() < self._transactions:
                steps += self._transaction()
            else:
                peer = self.rng.randrange(PEERS)
                steps.append(self._send(peer, self._command(peer)))
            steps += self._odd()
            steps += self._meet()
            steps += self._talk()
            steps += self._cache()
        return steps

    def _step(self, kind: str, peer: int = -1, words: Words = (), **extra: Any) -> Step:
        self._number += 1
        rng = self.rng
        gap = rng.choice([0, 0, rng.randrange(self._gaps), rng.randrange(self._gaps)])
        if rng.random() < 0.003:
            gap = rng.randrange(5_000 * MS)
        return Step(self._number, gap, kind, peer, words, extra)

    def _send(self, peer: int, words: Words) -> Step:
        extra: dict[str, Any] = {}
        if self.rng.random() < self._splits:
            extra["pieces"] = self.rng.randrange(2, 6)
        return self._step("send", peer, words, **extra)

    def _command(self, peer: int) -> Words:
        """What a peer says. Batches and blocks go to a request of its own: so nobody has to guess whose came last."""
        self.peer = peer
        command = self.rng.choices(self._commands, self._weights)[0]
        if self._is_tenant and command in (self._server, self._flush, self._limits, self._tracking, self._rights):
            command = self._string_read
        return command()

    @property
    def users(self) -> list[str]:
        """Those of a server with tenants."""
        return [f"u{peer} on nopass ~u{peer}:* ~kv:q{peer}:* &* +@all" for peer in TENANTS if self.tenants]

    @property
    def _is_tenant(self) -> bool:
        return self.tenants and self.peer in TENANTS

    @property
    def _strings(self) -> list[bytes]:
        own = self._is_tenant and self.rng.random() < 0.85
        some = self.strings[:FEW] if self.rng.random() < 0.6 else self.strings  # some are used more
        return [b"u%d:%b" % (self.peer, key) for key in some] if own else some

    def _transaction(self) -> list[Step]:
        rng, peer = self.rng, self.rng.randrange(PEERS)
        steps = []
        if rng.random() < 0.5:
            self.peer = peer
            steps.append(self._send(peer, (b"WATCH", *rng.sample(self._strings, 2))))
        steps.append(self._send(peer, (b"MULTI",)))
        for _ in range(rng.randrange(1, 6)):
            steps.append(self._send(peer, self._command(peer)))
            if rng.random() < 0.3:
                other = (peer + 1) % PEERS
                steps.append(self._send(other, self._command(other)))
        end = self._send(peer, (rng.choice([b"EXEC"] * 5 + [b"DISCARD"]),))
        more = random.Random(
            f"rights {self.seed} {self._number}"
        )  # other than `rng`: most seeds are the runs they were
        if not self.tenants or peer not in TENANTS or more.random() < 0.6:
            return [*steps, end]
        user = b"u%d" % peer  # whose rights go between what it queues and what is run of it
        grant = b"ACL", b"SETUSER", user, b"resetkeys", b"~%b:*" % user, b"~kv:q%b:*" % user[1:]
        return [*steps, self._send(0, grant[:4]), end, self._send(0, grant)]

    # -- commands --------------------------------------------------------------------------------------------------

    def _bytes(self, size: int) -> bytes:
        return b"%d:" % self._number + self.rng.randbytes(max(size - 8, 0))

    def _value(self) -> bytes:
        rng = self.rng
        return rng.choice([b"%d" % rng.randrange(-5, 1000), self._bytes(40), self._bytes(self.large)])

    def _string_write(self) -> Words:
        rng, strings, value = self.rng, self._strings, self._value()
        key = rng.choice(strings)
        options: list[bytes] = []
        if rng.random() < 0.3:
            options += [rng.choice([b"NX", b"XX"])]
        if rng.random() < 0.2:
            options += [b"GET"]
        if rng.random() < 0.4:
            options += rng.choice(
                [[b"PX", b"%d" % rng.randrange(1, 4000)], [b"EX", b"%d" % rng.randrange(1, 60)], [b"KEEPTTL"]]
            )
        return rng.choice([
            (b"SET", key, value, *options), (b"SET", key, value, *options), (b"SET", key, value),
            (b"SETEX", key, b"%d" % rng.randrange(1, 5), value), (b"PSETEX", key, b"%d" % rng.randrange(1, 900), value),
            (b"SETNX", key, value), (b"GETSET", key, value), (b"GETDEL", key),
            (b"MSET", *(w for k in rng.sample(strings, 3) for w in (k, self._value()))),
            (b"MSETNX", *(w for k in rng.sample(strings, 2) for w in (k, self._value()))),
            (b"GETEX", key, *rng.choice([(), (b"PX", b"500"), (b"PERSIST",)])),
        ])  # fmt: skip

    def _string_read(self) -> Words:
        rng, strings = self.rng, self._strings
        key = rng.choice(strings)
        return rng.choice([
            (b"GET", key), (b"GET", key), (b"MGET", *rng.choices(strings, k=4)), (b"STRLEN", key),
            (b"GETRANGE", key, b"%d" % rng.randrange(-50, 50), b"%d" % rng.randrange(-50, 5000)),
        ])  # fmt: skip

    def _counter(self) -> Words:
        rng, key = self.rng, self.rng.choice([*self._strings[:2], b"n"])
        return rng.choice(
            [(b"INCR", key), (b"DECR", key), (b"INCRBY", key, b"%d" % rng.randrange(-9, 99)), (b"DECRBY", key, b"3")]
        )

    def _any_key(self) -> bytes:
        if self.rng.random() < 0.5:
            return self.rng.choice(self._strings)
        return b"kv:" + b":".join(self._page(self._any_request()))

    def _keys(self) -> Words:
        rng = self.rng
        name = rng.choice([b"DEL", b"UNLINK", b"EXISTS", b"TOUCH"])
        keys = [self._any_key() for _ in range(rng.randrange(1, 4))]
        return rng.choice([(name, *keys), (b"TYPE", keys[0]), (b"GET", keys[0])])

    def _time(self) -> Words:
        rng, key = self.rng, self._any_key()
        condition = rng.choice([(), (), (b"NX",), (b"XX",), (b"GT",), (b"LT",)])
        return rng.choice([
            (b"EXPIRE", key, b"%d" % rng.randrange(-1, 90), *condition), (b"PERSIST", key),
            (b"PEXPIRE", key, b"%d" % rng.randrange(1, 3000), *condition),
            (b"TTL", key), (b"PTTL", key), (b"PEXPIRETIME", key), (b"EXPIRETIME", key),
        ])  # fmt: skip

    def _any_request(self) -> bytes:
        if self._is_tenant and self.rng.random() < 0.85:
            return b"q%d" % self.peer
        return self.rng.choice([*REQUESTS, *(b"q%d" % i for i in range(PEERS))])

    def _page(self, req: bytes) -> Words:
        rng = self.rng
        return (
            req,
            b"%d" % rng.randrange(LAYERS),
            b"%d" % rng.randrange(HEADS),
            b"%d" % rng.randrange(4),
            b"%d" % rng.randrange(2),
        )

    def _described(self, page: Words) -> Words:
        rng = self.rng
        kv_type = int(page[4])
        _, dtype, columns = PLANES[kv_type]
        size = ROWS * columns * 2
        if rng.random() < 0.2:
            dtype, columns = 8, rng.choice([1, 40, self.large])
            size = ROWS * columns
        ttl = rng.choice([0, 0, 0, 1, 30])
        return *page, b"%d" % dtype, b"%d" % ROWS, b"%d" % columns, b"%d" % ttl, self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        return (b"%d:" % self._number + self.rng.randbytes(size))[:size]

    def _page_set(self) -> Words:
        return b"KVPAGESET", *self._described(self._page(self.rng.choice([*REQUESTS, b"q%d" % self.peer])))

    def _page_get(self) -> Words:
        return self.rng.choice([b"KVPAGEGET", b"KVPAGEGET", b"KVPAGEEXISTS", b"KVPAGESTAT"]), *self._page(
            self._any_request()
        )

    def _batch(self, least: int = 1) -> list[tuple[bytes, int, int, int, int]]:
        """Whole blocks, and parts of some."""
        rng = self.rng
        pages = rng.sample(range(8), rng.choice([1, 2, 4]))
        names = [
            (0, layer, head, page, kind)
            for page in pages
            for layer in range(LAYERS)
            for kind in (0, 1)
            for head in range(HEADS)
        ]
        if rng.random() < 0.4:
            names = rng.sample(names, max(least, len(names) * 2 // 3))
        return [(b"", *name[1:]) for name in names]

    def _batch_set(self) -> Words:
        req = b"q%d" % self.peer
        pages = [self._described((req, *(b"%d" % part for part in name[1:]))) for name in self._batch()]
        return b"KVPAGEMSET", b"%d" % len(pages), *(word for page in pages for word in page)

    def _batch_get(self) -> Words:
        req = self._any_request()
        names = [(req, *(b"%d" % part for part in name[1:])) for name in self._batch()]
        command = self.rng.choice([b"KVPAGEMGET", b"KVPAGEMGET", b"KVPAGEMEXISTS"])
        return command, b"%d" % len(names), *(word for name in names for word in name)

    def _block_set(self) -> Words:
        rng = self.rng
        ttl, page = rng.choice([0, 0, 2, 60]), rng.randrange(8)
        planes = rng.choice([PLANES, PLANES, PLANES[:1]])
        size = sum(LAYERS * HEADS * ROWS * columns * 2 for _, _, columns in planes)
        spelt = [b"%d" % number for plane in planes for number in plane]
        head = [b"%d" % n for n in (page, LAYERS, HEADS, ROWS, ttl, len(planes))]
        return b"KVBLOCKSET", b"q%d" % self.peer, *head, *spelt, self._exactly(size)

    def _block_get(self) -> Words:
        rng = self.rng
        names = [(self._any_request(), b"%d" % rng.randrange(8)) for _ in range(rng.randrange(1, 5))]
        many = b"KVBLOCKMGET", b"%d" % len(names), *(word for name in names for word in name)
        return rng.choice([(b"KVBLOCKGET", *names[0]), (b"KVBLOCKEXISTS", *names[0]), many, many])

    def _page_other(self) -> Words:
        rng, req = self.rng, self._any_request()
        pages = [b"%d" % page for page in rng.sample(range(8), rng.randrange(3))]
        return rng.choice([
            (b"KVPAGEINDEX", req), (b"KVPAGEVERIFY", req, *pages), (b"KVPAGEDEL", req, *(pages or [b"1"])),
            (b"SCARD", b"kv:%b:index" % req), (b"SMEMBERS", b"kv:%b:index" % req), (b"KVPAGEWHY", req),
        ])  # fmt: skip

    def _protect(self) -> Words:
        rng, req = self.rng, self._any_request()
        pages = [b"%d" % page for page in rng.sample(range(8), rng.randrange(1, 3))]
        blocks = [word for page in pages for word in (req, page)]
        return rng.choice([
            (b"KVPAGEPIN", req, *pages), (b"KVPAGEUNPIN", req, *pages), (b"KVPAGEUNPIN", req),
            (b"KVPAGELEASE", req, b"%d" % rng.randrange(1, 20_000), *pages),
            (b"KVPAGEPREFIX", rng.choice([b"8", b"8", b"5"]), rng.choice([b"0", b"700"]), b"%d" % len(pages), *blocks),
        ])  # fmt: skip

    def _all(self) -> Words:
        return self.rng.choice([(b"DBSIZE",), (b"KEYS", b"*"), (b"DBSIZE",)])

    def _flush(self) -> Words:
        return (b"FLUSHALL",)

    def _server(self) -> Words:
        rng = self.rng
        return rng.choice([
            (b"INFO",), (b"SAVE",), (b"PING",), (b"ECHO", b"hello"), (b"CLIENT", b"LIST"), (b"MEMORY", b"STATS"),
            (b"CLIENT", b"PAUSE", b"%d" % rng.randrange(1, 400), rng.choice([b"ALL", b"WRITE"])),
            (b"CLIENT", b"UNPAUSE"),
        ])  # fmt: skip

    def _channel(self) -> Words:
        return b"PUBLISH", self.rng.choice(CHANNELS), b"%d" % self._number

    # -- the world -------------------------------------------------------------------------------------------------

    def _stall(self) -> Step:
        return self._step("stall", self.rng.randrange(PEERS), nanoseconds=self.rng.randrange(2_000 * MS))

    def _reset(self) -> Step:
        return self._step("reset", self.rng.randrange(PEERS))

    def _half(self) -> Step:
        peer = self.rng.randrange(PEERS)
        return self._step("half", peer, self._command(peer), share=self.rng.random())

    def _kill(self) -> Step:
        return self._step("kill")

    def _stop(self) -> Step:
        return self._step("stop")

    def _fault(self) -> Step:
        name = self.rng.choice(["full", "refuses", "unreadable", "", ""])
        longest = self.rng.choice([4_000, 4_000, 30_000]) * MS if name else 4_000 * MS
        slow = 0 if name else 80 * MS
        return self._step("fault", name=name, slow=slow, nanoseconds=self.rng.randrange(100 * MS, longest))

    def _clock(self) -> Step:
        return self._step("clock", milliseconds=self.rng.choice([-5_000, -1, 1, 700, 60_000]))

    def _settle(self) -> Step:
        return self._step("settle")
