"""Two things that rarely meet, at the same moment: a fetch and a new time to live, a full disk and what was removed.

They are drawn beside a program's other steps, by a chance of their own, in a fourth of the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.administration import MS
from tests.simulation.peers import PEERS

if TYPE_CHECKING:
    from tests.simulation.programs import Step

_SHARE = 0.012  # of steps that one of these follows
_CROWDED = 40_000  # bytes of memory that some strings have
_CROWD = [b"crowd%d" % i for i in range(24)]
_SIZE = 3_000  # bytes of each, so that most are on disk alone
_PAGES = [b"%d" % page for page in range(100, 124)]
_SHAPE = b"1", b"2", b"1", b"0", b"1", b"0", b"3"  # layers, heads, rows, ttl, planes, kv_type, dtype; all but head_dim
_NO_TENANTS = 3  # peers that may ask for everything


class Meetings:
    """A part of `Program`."""

    rng: random.Random
    peer: int
    disk: bool
    maxdisk: int
    options: dict[str, str]
    strings: list[bytes]
    _any_key: Any
    _block_set: Any
    _exactly: Any
    _page_set: Any
    _send: Any
    _soon: Any
    _step: Any

    def meetings(self, seed: int) -> Callable[[], list[Step]]:
        """What draws one of them, and mostly none, after each step."""
        rng = random.Random(f"meetings {seed}")
        share = _SHARE if rng.random() < 0.25 else 0.0
        kinds = [self._grown_between_scans, self._another_quota]
        kinds += [self._fetched_and_dated] * self.disk
        kinds += [self._dated_while_written, self._removed_on_a_full_disk] * (2 * self.disk)
        kinds += [self._pinned_and_crowded_out, self._replaced_at_once] * (3 if self.maxdisk else 0)

        def draw() -> list[Step]:
            if rng.random() >= share:
                return []
            usual, self.rng = self.rng, rng
            steps = rng.choice(kinds)()
            self.rng = usual
            return steps

        return draw

    def _fetched_and_dated(self) -> list[Step]:
        """What is on disk alone is asked for, slowly, while somebody else says for how long it shall live."""
        rng = self.rng
        lasts, usual = rng.randrange(300 * MS, 2_000 * MS), self.options["maxmemory"].encode()
        steps: list[Step] = [self._send(0, (b"CONFIG", b"SET", b"maxmemory", b"%d" % _CROWDED))]
        steps += [self._send(rng.randrange(_NO_TENANTS), (b"SET", key, self._exactly(_SIZE))) for key in _CROWD]
        steps += [self._step("settle"), self._step("fault", name="", slow=150 * MS, nanoseconds=lasts)]
        for key in rng.sample(_CROWD[: len(_CROWD) // 2], 6):
            one, other = rng.sample(range(_NO_TENANTS), 2)
            time = b"PEXPIRE", key, b"%d" % rng.randrange(1_000, 90_000)
            dated = rng.choice([time, time, (b"PERSIST", key), (b"SET", key, self._exactly(30), b"KEEPTTL")])
            both = [self._send(one, (rng.choice([b"GET", b"STRLEN"]), key)), self._send(other, dated)]
            steps += [self._soon(step, 5 * MS) for step in both]
        steps.append(replace(self._step("settle"), gap=lasts))
        return [*steps, self._send(0, (b"DEL", *_CROWD)), self._send(0, (b"CONFIG", b"SET", b"maxmemory", usual))]

    def _removed_on_a_full_disk(self) -> list[Step]:
        """Keys are removed and written again while the disk is full and slow: what is gone makes room."""
        rng, (*gone, other) = self.rng, self.rng.sample(self.strings, 6)
        lasts, apart = rng.randrange(1_000 * MS, 5_000 * MS), rng.choice([30 * MS, 100 * MS, 400 * MS])
        steps = [self._send(0, (b"SET", key, self._exactly(600))) for key in (*gone, other)]
        steps += [self._step("settle"), self._step("fault", name="full", slow=250 * MS, nanoseconds=lasts)]
        steps.append(self._soon(self._send(rng.randrange(PEERS), (b"SET", other, self._exactly(900))), MS))
        steps.append(self._soon(self._send(rng.randrange(PEERS), (b"DEL", *gone)), MS))
        begin = replace(self._send(0, (b"PING",)), gap=rng.choice([MS, 200 * MS, 900 * MS, 1_200 * MS]))
        steps.append(begin)  # when it is removed, at once or after everysec's second
        for key in gone:
            steps.append(self._soon(self._send(rng.randrange(PEERS), (b"SET", key, self._exactly(20))), apart))
        return [*steps, replace(self._step("settle"), gap=lasts), self._step(rng.choice(["stop", "kill"]))]

    def _dated_while_written(self) -> list[Step]:
        """A transaction changes the time to live of what is just being committed, and then: death."""
        rng, self.peer = self.rng, self.rng.randrange(_NO_TENANTS)
        other, steps = self.strings[0], [self._step("fault", name="", slow=400 * MS, nanoseconds=5_000 * MS)]
        for key in _CROWD[:8]:
            stored = [(b"SET", key, self._exactly(_SIZE)), (b"SET", key, self._exactly(_SIZE), b"PX", b"90000")]
            steps.append(self._soon(self._send(self.peer, rng.choice(stored)), 200 * MS))
            time = rng.choice([(b"PEXPIRE", key, b"%d" % rng.randrange(20_000, 90_000)), (b"PERSIST", key)])
            changed = [(b"MULTI",), (b"SET", other, self._exactly(20)), time, (b"EXEC",)]
            steps += [self._soon(self._send(self.peer, words), 200 * MS) for words in changed]
        return [*steps, replace(self._step("kill"), gap=rng.randrange(600 * MS))]

    def _pinned_and_crowded_out(self) -> list[Step]:
        """A page has the key that a string had, and its block is pinned, when more comes than the disk has room for."""
        rng, self.peer = self.rng, self.rng.randrange(_NO_TENANTS)
        name, *page, body = self._page_set()
        key, req, number = b"kv:" + b":".join(page[:5]), page[0], page[3]
        steps = [self._send(self.peer, (b"SET", key, self._exactly(_SIZE))), self._step("settle")]
        steps += [self._send(self.peer, (name, *page, body)), self._send(self.peer, (b"KVPAGEPIN", req, number))]
        size = 2 * self.maxdisk // len(_CROWD)
        for key in _CROWD:
            steps.append(
                self._soon(self._send(rng.randrange(_NO_TENANTS), (b"SET", key, self._exactly(size))), 20 * MS)
            )
        ask, free = (b"KVPAGEGET", *page[:5]), (b"KVPAGEUNPIN", req, number)
        return [*steps, self._send(self.peer, ask), self._send(self.peer, free), self._send(0, (b"DEL", *_CROWD))]

    def _replaced_at_once(self) -> list[Step]:
        """One transaction replaces most of what a small disk has; or sets a time to live to a page of each block."""
        rng, self.peer = self.rng, self.rng.randrange(_NO_TENANTS)
        req, size = b"q%d" % self.peer, 2 * self.maxdisk // (3 * len(_CROWD))
        stored = [(b"SET", key, self._exactly(size)) for key in _CROWD]
        changed = [(b"SET", key, self._exactly(size)) for key in _CROWD]
        if rng.random() < 0.5:
            shape = *_SHAPE, b"%d" % (size // 2)
            stored = [(b"KVBLOCKSET", req, page, *shape, self._exactly(size // 2 * 2)) for page in _PAGES]
            changed = [(b"EXPIRE", b"kv:%b:0:1:%b:0" % (req, page), b"100") for page in _PAGES]
        steps = [self._soon(self._send(self.peer, words), 5 * MS) for words in stored]
        steps += [self._step("settle"), self._send(self.peer, (b"MULTI",))]
        steps += [self._send(self.peer, words) for words in changed]
        steps += [self._send(self.peer, (b"EXEC",)), self._step("settle")]
        steps.append(replace(self._send(self.peer, (b"SET", _CROWD[0], self._exactly(30))), gap=2_000 * MS))
        return [*steps, self._send(self.peer, (b"KVPAGEDEL", req, *_PAGES)), self._send(0, (b"DEL", *_CROWD))]

    def _grown_between_scans(self) -> list[Step]:
        """A request gets blocks, and loses some, between two scans of it."""
        rng, self.peer = self.rng, self.rng.randrange(_NO_TENANTS)
        index, steps = b"kv:q%d:index" % self.peer, []
        for _ in range(rng.randrange(2, 5)):
            scan = self._step("scan", rng.randrange(_NO_TENANTS), (b"SSCAN", index), count=100, pace=MS)
            gone = b"KVPAGEDEL", b"q%d" % self.peer, b"%d" % rng.randrange(8)
            between = rng.choice([self._page_set(), self._block_set(), gone])
            steps += [replace(scan, gap=2 * MS), self._soon(self._send(self.peer, between), MS)]
        return steps

    def _another_quota(self) -> list[Step]:
        """What is pinned or leased comes to belong to another quota, or to none."""
        rng, self.peer = self.rng, self.rng.choice([1, 3])
        name, req, page, *words = self._block_set()
        protect = rng.choice([(b"KVPAGEPIN", req, page), (b"KVPAGELEASE", req, b"60000", page)])
        quotas = rng.sample([b"", b"kv:q1:* 20000", b"kv:q3:* 60000 kv:* 300000", b"kv:* 500000"], 2)
        steps = [self._send(self.peer, (name, req, page, *words)), replace(self._send(self.peer, protect), gap=MS)]
        for quota in quotas:
            steps.append(replace(self._send(0, (b"CONFIG", b"SET", b"quota", quota)), gap=MS))
            steps.append(replace(self._step("settle"), gap=MS))
        return [*steps, self._send(self.peer, (b"KVPAGEUNPIN", req, page))]
