"""Some steps in a row that ordinary ones rarely make: what is hard for a store happens in the same moment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.administration import MS
from tests.simulation.model import Words
from tests.simulation.peers import PEERS

if TYPE_CHECKING:
    from tests.simulation.programs import Step

LISTENERS = (1, 2)  # peers that listen to channels; the others may always say everything
CHANNELS = (b"news", b"art")
_LONG = [b"long%d" % i for i in range(4)]
_LONG_FAULT = 25_000 * MS  # longer than anybody may be kept waiting
_TTL = 3  # which of KVBLOCKSET's words after the page
_LONG_SIZE = 60_000  # bytes: some of these are more than a client may leave unread


class Scenes:
    """A part of `Program`: each method makes the steps of a scene."""

    rng: random.Random
    seed: int
    peer: int
    engines: int
    strings: list[bytes]
    _number: int
    _step: Any
    _send: Any
    _string_write: Any
    _batch_set: Any
    _block_set: Any
    _page_set: Any
    _exactly: Any

    @property
    def scenes(self) -> Sequence[tuple[Any, float]]:
        """All of them, and how often each is played."""
        return [
            (self._death, 3), (self._failing_disk, 2), (self._slow_reader, 1), (self._last_moment, 2),
            (self._pause_cut_short, 1), (self._listeners, 1), (self._leased_and_crowded, 1),
        ]  # fmt: skip

    def _soon(self, step: Step, within: int) -> Step:
        return replace(step, gap=self.rng.randrange(within))

    def _write(self, peer: int) -> Step:
        """Something is stored, or some of it."""
        self.peer = peer
        words: Words = self.rng.choice([self._string_write, self._batch_set, self._block_set, self._page_set])()
        step: Step = self._send(peer, words)
        return step

    def _restart(self) -> Step:
        step: Step = self._step(self.rng.choice(["stop", "stop", "kill"]))
        return step

    def _death(self) -> list[Step]:
        """Several write at the same time, and the server dies just when one of them has been told that it is done."""
        rng = self.rng
        writes = [self._soon(self._write(peer), 100_000) for peer in rng.choices(range(PEERS), k=rng.randrange(2, 7))]
        return [*writes, self._soon(self._step("kill", told=rng.choice([0, 0, 20_000, 200_000])), 20_000)]

    def _failing_disk(self) -> list[Step]:
        """The disk takes nothing, and slowly, or gives nothing either. The same keys are written again meanwhile.

        Then comes a restart, sometimes after so long that nobody may have waited for it.
        """
        rng, keys = self.rng, self.rng.sample(self.strings, 2)
        lasts, slow = rng.randrange(200 * MS, 2_000 * MS), rng.choice([0, 80 * MS, 400 * MS])
        name = rng.choice(["full", "refuses"])
        more = random.Random(lasts)  # other than `rng`, of which what comes later is drawn
        if more.random() < 0.4:
            lasts, slow = _LONG_FAULT, 0
        if more.random() < 0.4:
            name += " unreadable"
        steps: list[Step] = [self._step("fault", name=name, slow=slow, nanoseconds=lasts)]
        within = rng.choice([10 * MS, 150 * MS])
        for _ in range(rng.randrange(5, 15)):
            write = self._send(rng.randrange(PEERS), (b"SET", rng.choice(keys), self._exactly(20)))
            steps.append(self._soon(write, within))
        return [*steps, replace(self._step("settle"), gap=lasts), self._restart()]

    def _slow_reader(self) -> list[Step]:
        """Somebody asks for much, and reads it later."""
        rng, (peer, other) = self.rng, self.rng.sample(range(3), 2)
        steps = [self._soon(self._send(other, (b"SET", key, self._exactly(_LONG_SIZE))), MS) for key in _LONG]
        steps.append(replace(self._step("stall", peer, nanoseconds=rng.randrange(100 * MS, 1_000 * MS)), gap=MS))
        steps += [self._soon(self._send(peer, (b"MGET", *_LONG)), 2 * MS) for _ in range(rng.randrange(5, 14))]
        return [*steps, *(self._send(peer, (b"STRLEN", key)) for key in _LONG), self._send(other, (b"DEL", *_LONG))]

    def _last_moment(self) -> list[Step]:
        """Keys expire, and somebody asks for each at its very last millisecond."""
        rng, steps = self.rng, []
        for key in rng.sample(self.strings, 2):
            size, left = rng.choice([10, 600]), b"%d" % rng.randrange(5, 300)
            steps.append(self._send(rng.randrange(PEERS), (b"SET", key, self._exactly(size), b"PX", left)))
            name = rng.choice([b"GET", b"GET", b"EXISTS", b"STRLEN", b"GETDEL", b"PTTL"])
            steps.append(replace(self._step("due", rng.randrange(PEERS), (name, key)), gap=MS))
        return steps

    def _pause_cut_short(self) -> list[Step]:
        """Those who write wait for the end of a long pause, and then somebody ends it."""
        rng = self.rng
        pause = self._send(0, (b"CLIENT", b"PAUSE", b"%d" % rng.choice([900, 40_000]), b"WRITE"))
        writes = [self._soon(self._write(peer), 2 * MS) for peer in rng.choices(range(1, PEERS), k=rng.randrange(1, 5))]
        return [pause, *writes, replace(self._send(0, (b"CLIENT", b"UNPAUSE")), gap=10 * MS)]

    def _listeners(self) -> list[Step]:
        """Some listen while others talk, sometimes one of them in RESP3."""
        rng, peer, channel = self.rng, self.rng.choice(LISTENERS), self.rng.choice(CHANNELS)
        by_pattern = rng.random() < 0.3
        steps = [self._send(peer, (b"PSUBSCRIBE", b"*") if by_pattern else (b"SUBSCRIBE", channel))]
        for number in range(rng.randrange(1, 8)):
            said = (b"PUBLISH", rng.choice(CHANNELS), b"%d" % number)
            steps.append(self._send(rng.choice([0, 3]), rng.choice([said, said, (b"GET", rng.choice(self.strings))])))
        end = (b"PUNSUBSCRIBE", b"*") if by_pattern else (b"UNSUBSCRIBE", channel)
        steps.append(self._send(peer, rng.choice([end, end, (b"RESET",), (b"PING", b"there")])))
        more = random.Random(f"listeners {self.seed} {self._number}")  # other than `rng`: most seeds are what they were
        if more.random() >= 0.4:
            return steps
        other = LISTENERS[peer == LISTENERS[0]]
        first = [self._send(other, words) for words in ((b"HELLO", b"3"), (b"SUBSCRIBE", channel))]
        return [*first, *steps, self._send(other, (b"UNSUBSCRIBE", channel))]

    def _leased_and_crowded(self) -> list[Step]:
        """What is leased lies there while others fill memory."""
        rng, peer = self.rng, self.rng.randrange(PEERS)
        self.peer = peer
        name, req, page, *words = self._block_set()
        words[_TTL] = b"0"  # or nobody knows to the moment for how long it is protected
        steps = [self._send(peer, (name, req, page, *words))]
        pin = (b"KVPAGEPIN", req, page)
        leased = rng.choice([
            (b"KVPAGELEASE", req, b"9000", page), pin,
            pin if page < b"4" else (b"KVPAGEPREFIX", b"8", b"9000", b"1", req, page),
        ])  # fmt: skip
        steps.append(replace(self._send(peer, leased), gap=MS))
        others = [other for other in range(PEERS) if other != peer]
        return steps + [self._soon(self._write(rng.choice(others)), MS) for _ in range(rng.randrange(20, 60))]
