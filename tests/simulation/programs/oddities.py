"""Rare commands: scans, strings under keys of pages, blobs, times of the clock, and invalid commands.

They are drawn in addition to a program's other steps, from a random generator of their own: seeds without them have the
same runs as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.model.model import Words
from tests.simulation.model.values import Value
from tests.simulation.programs import commands
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import PEERS, Step
from tests.simulation.world.clock import EPOCH

_BEGIN = EPOCH // 10**6  # unix milliseconds at which every world begins
_LATEST = 60_000  # milliseconds after it that are named
_TEXT = 600  # bytes, at most, of a string under a page's key


def beside(seed: Seed) -> Callable[[], list[Step]]:
    """Return a function that draws one of them, and usually none, after each step."""
    rng = random.Random(f"odd {seed.number}")
    share = rng.choice([0.0, 0.0, 0.02, 0.1])
    kinds: list[Callable[[Seed], Words | Step]] = [_text, _blob, _moment, _wrong, _question, _scan, _mixed]
    weights = [rng.choice([0.3, 1, 4]) for _ in kinds]

    def pick() -> list[Step]:
        seed.peer = rng.randrange(PEERS)
        drawn = rng.choices(kinds, weights)[0](seed)
        return [drawn if isinstance(drawn, Step) else seed.send(seed.peer, drawn)]

    return seed.beside(rng, share, pick)


def _own_page(seed: Seed) -> Words:
    return commands.any_page(seed, b"q%d" % seed.peer if seed.is_tenant or seed.rng.random() < 0.7 else b"r0")


def _any_page(seed: Seed) -> Words:
    return commands.any_page(seed, commands.any_request(seed))


def _text(seed: Seed) -> Words:
    """A string under the key of a page: it takes the page's place, and its block has it no more."""
    rng, key = seed.rng, b"kv:" + b":".join(_own_page(seed))
    text = seed.exactly(rng.choice([3, 40, _TEXT]))
    return rng.choice([
        (b"SET", key, text), (b"SET", key, text, rng.choice([b"NX", b"XX"])), (b"SETNX", key, text),
        (b"PSETEX", key, b"%d" % rng.randrange(1, 900), text), (b"GETSET", key, text), (b"GETDEL", key),
        (b"MSET", key, text, rng.choice(seed.own_strings), commands.any_value(seed)),
        (b"MGET", key, rng.choice(seed.own_strings)),
    ])  # fmt: skip


def _blob(seed: Seed) -> Words:
    """A page as SET is given it."""
    *words, body = commands.described(seed, _own_page(seed))
    req, layer, head, page, kind, dtype, rows, columns, ttl = words
    described = tuple(map(int, (layer, head, page, kind, dtype, rows, columns, ttl)))
    value = Value(body, page=described, checksum=seed.rng.random() < 0.7)  # type: ignore[arg-type]
    key = b"kv:" + b":".join((req, layer, head, page, kind))
    options = seed.rng.choice([(), (), (b"PX", b"%d" % seed.rng.randrange(1, 4000)), (b"KEEPTTL",), (b"NX", b"GET")])
    return b"SET", key, value.header + body, *options


def _moment(seed: Seed) -> Words:
    """Return an expiry as a time of the clock, which may be past."""
    rng, key = seed.rng, commands.any_key(seed)
    at = _BEGIN + rng.randrange(_LATEST)
    unit, when = rng.choice([(b"PX", b"%d" % at), (b"EX", b"%d" % (at // 1000))])
    condition = rng.choice([(), (), (b"NX",), (b"GT",)])
    return rng.choice([
        ((b"PEXPIREAT" if unit == b"PX" else b"EXPIREAT"), key, when, *condition),
        (b"GETEX", rng.choice(seed.own_strings), unit + b"AT", when),
        (b"SET", rng.choice(seed.own_strings), commands.any_value(seed), unit + b"AT", when),
    ])  # fmt: skip


def _wrong(seed: Seed) -> Words:
    """Return a command whose only effect is an error."""
    rng, key, page = seed.rng, seed.rng.choice(seed.own_strings), _own_page(seed)
    described = commands.described(seed, page)
    block, batch = commands.block_set(seed), commands.batch_set(seed)
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


def _question(seed: Seed) -> Words:
    rng, page = seed.rng, _any_page(seed)
    index = b"kv:%b:index" % page[0]
    return rng.choice([
        (b"KVPAGEWHY", *page), (b"KVPAGEWHY", *page), (b"SISMEMBER", index, b"kv:" + b":".join(page)),
        (b"RANDOMKEY",), (b"EXISTS", index), (b"TYPE", index),
        (b"SUBSTR", rng.choice(seed.own_strings), b"%d" % rng.randrange(-9, 9), b"300"),
    ])  # fmt: skip


def _mixed(seed: Seed) -> Words:
    """A batch of several requests. A tenant that stores one may not store all of it."""
    rng = seed.rng
    pages = [
        _own_page(seed),
        *(commands.any_page(seed, commands.any_request(seed)) for _ in range(rng.randrange(1, 6))),
    ]
    if not seed.is_tenant or rng.random() < 0.7:
        command = rng.choice([b"KVPAGEMGET", b"KVPAGEMEXISTS"])
        return command, b"%d" % len(pages), *(word for page in pages for word in page)
    stored = [commands.described(seed, page) for page in (pages[0], commands.any_page(seed, b"r1"))]
    return b"KVPAGEMSET", b"%d" % len(stored), *(word for page in stored for word in page)


def _scan(seed: Seed) -> Step:
    """All keys, or those of a request's index, some at a time."""
    peer = seed.rng.randrange(3)  # no tenant: users without access to every key get all keys in one reply
    words = seed.rng.choice([(b"SCAN",), (b"SCAN",), (b"SSCAN", b"kv:%b:index" % commands.any_request(seed))])
    step: Step = seed.step(
        "scan", peer, words, count=seed.rng.choice([1, 3, 10, 100]), pace=seed.rng.randrange(3_000_000)
    )
    return step
