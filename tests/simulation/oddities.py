"""What is asked rarely: scans, texts where pages lie, blobs, moments of the clock, and commands that are wrong.

They are drawn beside a program's other steps, by a chance of their own: seeds that draw none are the runs they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.model import Words
from tests.simulation.peers import PEERS
from tests.simulation.values import Value
from tests.simulation.world.clock import EPOCH

if TYPE_CHECKING:
    from tests.simulation.programs import Step

_BEGIN = EPOCH // 10**6  # unix milliseconds at which every world begins
_LATEST = 60_000  # milliseconds after it that are named
_TEXT = 600  # bytes, at the most, of what lies where a page could


class Oddities:
    """A part of `Program`."""

    rng: random.Random
    peer: int
    _is_tenant: bool
    _strings: list[bytes]
    _any_key: Any
    _any_request: Any
    _batch_set: Any
    _block_set: Any
    _described: Any
    _exactly: Any
    _page: Any
    _send: Any
    _step: Any
    _value: Any

    def oddities(self, seed: int) -> Callable[[], list[Step]]:
        """What draws one of them, and mostly none, after each step."""
        rng = random.Random(f"odd {seed}")
        share = rng.choice([0.0, 0.0, 0.02, 0.1])
        kinds = [self._text, self._blob, self._moment, self._wrong, self._question, self._scan, self._mixed]
        weights = [rng.choice([0.3, 1, 4]) for _ in kinds]

        def draw() -> list[Step]:
            if rng.random() >= share:
                return []
            usual, self.rng, self.peer = self.rng, rng, rng.randrange(PEERS)
            drawn = rng.choices(kinds, weights)[0]()
            step: Step = self._send(self.peer, drawn) if isinstance(drawn, tuple) else drawn
            self.rng = usual
            return [step]

        return draw

    def _own_page(self) -> Words:
        page: Words = self._page(b"q%d" % self.peer if self._is_tenant or self.rng.random() < 0.7 else b"r0")
        return page

    def _text(self) -> Words:
        """A string under the key of a page: it takes the page's place, and its block has it no more."""
        rng, key = self.rng, b"kv:" + b":".join(self._own_page())
        text = self._exactly(rng.choice([3, 40, _TEXT]))
        return rng.choice([
            (b"SET", key, text), (b"SET", key, text, rng.choice([b"NX", b"XX"])), (b"SETNX", key, text),
            (b"PSETEX", key, b"%d" % rng.randrange(1, 900), text), (b"GETSET", key, text), (b"GETDEL", key),
            (b"MSET", key, text, rng.choice(self._strings), self._value()), (b"MGET", key, rng.choice(self._strings)),
        ])  # fmt: skip

    def _blob(self) -> Words:
        """A page as SET is given it."""
        *words, body = self._described(self._own_page())
        req, layer, head, page, kind, dtype, rows, columns, ttl = words
        described = tuple(map(int, (layer, head, page, kind, dtype, rows, columns, ttl)))
        value = Value(body, page=described, checksum=self.rng.random() < 0.7)  # type: ignore[arg-type]
        key = b"kv:" + b":".join((req, layer, head, page, kind))
        options = self.rng.choice(
            [(), (), (b"PX", b"%d" % self.rng.randrange(1, 4000)), (b"KEEPTTL",), (b"NX", b"GET")]
        )
        return b"SET", key, value.header + body, *options

    def _moment(self) -> Words:
        """A time of the clock at which something goes, which may be past."""
        rng, key = self.rng, self._any_key()
        at = _BEGIN + rng.randrange(_LATEST)
        unit, when = rng.choice([(b"PX", b"%d" % at), (b"EX", b"%d" % (at // 1000))])
        condition = rng.choice([(), (), (b"NX",), (b"GT",)])
        return rng.choice([
            ((b"PEXPIREAT" if unit == b"PX" else b"EXPIREAT"), key, when, *condition),
            (b"GETEX", rng.choice(self._strings), unit + b"AT", when),
            (b"SET", rng.choice(self._strings), self._value(), unit + b"AT", when),
        ])  # fmt: skip

    def _wrong(self) -> Words:
        """A command of which nothing may come but an error."""
        rng, key, page = self.rng, self.rng.choice(self._strings), self._own_page()
        described = self._described(page)
        block, batch = self._block_set(), self._batch_set()
        spoilt = [*batch]
        at = 2 + 10 * rng.randrange((len(batch) - 2) // 10)
        place, word = rng.choice([(1, b"70000"), (5, b"99"), (6, b"0"), (8, b"-1"), (3, b"x"), (4, b"6")])
        spoilt[at + place] = word
        few = rng.choice([(b"SET", key), (b"GET",), (b"MSET",), (b"EXPIRE", key), (b"INCR", key, b"1")])
        return rng.choice([
            few, (b"NOSUCH", key), (b"KVPAGESET", *described[:-1]), (*block[:-1], block[-1] + b"x"),
            (b"KVPAGEMSET", b"%d" % (int(batch[1]) + 1), *batch[2:]), tuple(spoilt), tuple(spoilt), tuple(spoilt),
            (b"SET", key, b"v", b"PX", b"0"), (b"SET", key, b"v", b"NX", b"XX"), (b"EXPIRE", key, b"soon"),
            (b"INCRBY", key, b"much"), (b"SETEX", key, b"-1", b"v"), (b"MSET", key, b"v", key),
            (b"KVPAGEGET", *page, b"1"),
        ])  # fmt: skip

    def _question(self) -> Words:
        rng, page = self.rng, self._page(self._any_request())
        index = b"kv:%b:index" % page[0]
        return rng.choice([
            (b"KVPAGEWHY", *page), (b"KVPAGEWHY", *page), (b"SISMEMBER", index, b"kv:" + b":".join(page)),
            (b"RANDOMKEY",), (b"EXISTS", index), (b"TYPE", index),
            (b"SUBSTR", rng.choice(self._strings), b"%d" % rng.randrange(-9, 9), b"300"),
        ])  # fmt: skip

    def _mixed(self) -> Words:
        """A batch of several requests. A tenant that stores one may not store all of it."""
        rng = self.rng
        pages = [self._own_page(), *(self._page(self._any_request()) for _ in range(rng.randrange(1, 6)))]
        if not self._is_tenant or rng.random() < 0.7:
            command = rng.choice([b"KVPAGEMGET", b"KVPAGEMEXISTS"])
            return command, b"%d" % len(pages), *(word for page in pages for word in page)
        stored = [self._described(page) for page in (pages[0], self._page(b"r1"))]
        return b"KVPAGEMSET", b"%d" % len(stored), *(word for page in stored for word in page)

    def _scan(self) -> Step:
        """All keys, or those of a request's index, some at a time."""
        peer = self.rng.randrange(3)  # no tenant: who may not read all of them is told of the others' all at once
        words = self.rng.choice([(b"SCAN",), (b"SCAN",), (b"SSCAN", b"kv:%b:index" % self._any_request())])
        step: Step = self._step(
            "scan", peer, words, count=self.rng.choice([1, 3, 10, 100]), pace=self.rng.randrange(3_000_000)
        )
        return step
