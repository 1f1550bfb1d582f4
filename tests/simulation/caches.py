"""Clients that cache what they read, in every mode of CLIENT TRACKING, and what is asked of it that is wrong.

They are drawn beside a program's other steps, by a chance of their own, in a fourth of the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.administration import MS
from tests.simulation.model import Words
from tests.simulation.model_tracking import CHANNEL
from tests.simulation.peers import PEERS
from tests.simulation.scenes import LISTENERS

if TYPE_CHECKING:
    from tests.simulation.programs import Step

_SHARE = 0.03  # of steps that one of these follows
_ON, _OFF = (b"CLIENT", b"TRACKING", b"ON"), (b"CLIENT", b"TRACKING", b"OFF")
_PREFIXES = [b"", b"s", b"s1", b"u3:", b"u4:", b"kv:", b"kv:q", b"kv:q1:", b"kv:q3:", b"kv:r0:0:", b"none"]
_NOBODY = b"999999999"  # the id of no connection


def name_of(peer: int) -> bytes:
    """What stands for the id of a peer's connection, which nobody knows before it is there."""
    return b"@%d" % peer


class Caches:
    """A part of `Program`."""

    rng: random.Random
    peer: int
    tenants: bool
    options: dict[str, str]
    _is_tenant: bool
    _strings: list[bytes]
    _any_key: Any
    _block_get: Any
    _block_set: Any
    _page_get: Any
    _page_other: Any
    _page_set: Any
    _batch_get: Any
    _send: Any
    _soon: Any
    _step: Any
    _string_read: Any
    _string_write: Any
    _time: Any

    def caches(self, seed: int) -> Callable[[], list[Step]]:
        """What draws some of it, and mostly nothing, after each step."""
        rng = random.Random(f"caches {seed}")
        share = _SHARE if rng.random() < 0.25 else 0.0
        kinds = [self._cached, self._cached, self._cached, self._told_elsewhere, self._told_elsewhere, self._asked]

        def draw() -> list[Step]:
            if rng.random() >= share:
                return []
            usual, self.rng, self.peer = self.rng, rng, rng.randrange(PEERS)
            steps = rng.choice(kinds)()
            self.rng = usual
            return steps

        return draw

    # -- commands --------------------------------------------------------------------------------------------------

    def _say(self, peer: int, words: Words) -> Step:
        """Something that may name another's connection."""
        step: Step = self._step("name", peer, words)
        return self._soon(step, MS)

    def _prefixed(self) -> Words:
        """BCAST, of everything or of what begins so. Some of these overlap, and may not."""
        some = self.rng.sample(_PREFIXES, self.rng.choice([0, 1, 1, 2, 3]))
        return b"BCAST", *(word for prefix in some for word in (b"PREFIX", prefix))

    def _mode(self) -> Words:
        """Options that go together, mostly."""
        rng = self.rng
        looped = rng.choice([(), (b"NOLOOP",)])
        return *_ON, *rng.choice([(), (b"OPTIN",), (b"OPTOUT",), self._prefixed(), self._prefixed()]), *looped

    def _asked(self) -> list[Step]:
        """One command about tracking, of one who may not track; many of these are wrong."""
        rng, other = self.rng, name_of(self.rng.randrange(PEERS))
        wrong: list[Words] = [
            (*_ON, b"PREFIX", b"s"), (*_ON, b"BCAST", b"OPTIN"), (*_ON, b"OPTIN", b"OPTOUT"), (*_ON, b"BCAST"), _ON,
            (*_ON, b"BCAST", b"PREFIX", b"s", b"PREFIX", b"s1"), (*_ON, b"REDIRECT", _NOBODY), (*_ON, b"NONSENSE"),
            (*_ON, b"REDIRECT", other, b"REDIRECT", other), (*_ON, b"OPTIN"), (*_ON, b"OPTOUT"), (*_ON, b"PREFIX"),
            (*_OFF, b"NONSENSE"), (b"CLIENT", b"TRACKING", b"PERHAPS"), (b"CLIENT", b"CACHING", b"PERHAPS"),
        ]  # fmt: skip
        caching = b"CLIENT", b"CACHING", rng.choice([b"YES", b"NO"])
        words = rng.choice([rng.choice(wrong), rng.choice(wrong), caching, self._mode(), _OFF])
        shown = b"CLIENT", rng.choice([b"TRACKINGINFO", b"TRACKINGINFO", b"GETREDIR"])
        return [self._say(self.peer, words), self._say(self.peer, shown)]

    # -- caches ----------------------------------------------------------------------------------------------------

    def _some_read(self) -> Words:
        kinds = [self._string_read] * 4 + [self._page_get, self._batch_get, self._block_get, self._page_other]
        words: Words = self.rng.choice(kinds)()
        return words

    def _some_write(self) -> Words:
        kinds = [self._string_write] * 4 + [self._time, self._page_set, self._block_set, self._page_other]
        words: Words = self.rng.choice(kinds)()
        return words

    def _lived(self, reader: int) -> list[Step]:
        """It reads, and what it has read is changed, by it or by others; each thing at a moment of its own, or none."""
        rng, steps = self.rng, []
        within = rng.choice([1, MS, 20 * MS])
        for _ in range(rng.randrange(3, 12)):
            self.peer = reader
            if rng.random() < 0.4:
                steps.append(self._say(reader, (b"CLIENT", b"CACHING", rng.choice([b"YES", b"NO"]))))
            if rng.random() < 0.15:
                inside = [self._some_read(), rng.choice([self._some_read(), self._some_write()])]
                steps += [self._send(reader, words) for words in ((b"MULTI",), *inside, (b"EXEC",))]
            read = [self._send(reader, self._some_read()) for _ in range(rng.randrange(1, 3))]
            self.peer = reader if rng.random() < 0.3 else rng.randrange(PEERS)
            steps += [*read, *(self._send(self.peer, self._some_write()) for _ in range(rng.randrange(1, 4)))]
        return [self._soon(step, within) for step in steps]

    def _cached(self) -> list[Step]:
        """One tracks for a while, and is told on its own connection. Sometimes all that it caches goes at once."""
        rng, reader = self.rng, self.peer
        steps = [self._say(reader, (b"HELLO", rng.choice([b"3", b"3", b"3", b"2"]))), self._say(reader, _OFF)]
        for _ in range(rng.randrange(1, 3)):
            steps += [self._say(reader, self._mode()), *self._lived(reader)]
            if rng.random() < 0.1:
                steps.append(self._send(0, (b"FLUSHALL",)))
            steps.append(self._say(reader, (b"CLIENT", b"TRACKINGINFO")))
        steps.append(replace(self._step("settle"), gap=MS))
        return [*steps, *([self._say(reader, _OFF)] if rng.random() < 0.6 else [])]

    def _told_elsewhere(self) -> list[Step]:
        """Another connection is told: in RESP3, or on a channel. It may go while it is told, and come back as another.

        Tenants may only be told on connections of their own.
        """
        rng, reader = self.rng, self.peer
        there = rng.choice(LISTENERS)
        in_resp2 = rng.random() < 0.5
        hello = (b"HELLO", b"2" if in_resp2 else b"3")
        steps = [self._say(reader, (b"HELLO", rng.choice([b"2", b"3"]))), self._say(reader, _OFF)]
        steps += [self._say(there, hello)]
        if in_resp2:
            steps.append(self._say(there, (b"SUBSCRIBE", CHANNEL)))
        other = PEERS if "notify-keyspace-events" in self.options and rng.random() < 0.3 else there
        elsewhere = rng.choice([other, other, other, reader])
        steps.append(self._say(reader, (*self._mode(), b"REDIRECT", name_of(elsewhere))))
        steps += self._lived(reader)
        end = rng.random()
        if end < 0.4:
            steps += [self._soon(self._step("reset", there), MS), *self._lived(reader)]
        elif end < 0.6 and in_resp2:
            steps += [self._say(there, (b"UNSUBSCRIBE", CHANNEL)), *self._lived(reader)]
        shown = b"CLIENT", rng.choice([b"TRACKINGINFO", b"GETREDIR"])
        steps += [self._say(reader, shown), replace(self._step("settle"), gap=MS), self._say(reader, shown)]
        if in_resp2 and end >= 0.4:
            steps.append(self._say(there, (b"UNSUBSCRIBE", CHANNEL)))
        return [*steps, *([self._say(reader, _OFF)] if rng.random() < 0.6 else [])]
