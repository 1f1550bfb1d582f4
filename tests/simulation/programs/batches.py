"""Batches of pages that become visible in several steps, while others read, replace and delete some of these pages.

They are drawn in addition to a program's other steps, by a chance of their own, in a fourth of the seeds. In such a
seed the server stores only a few pages in a step, with either page core: `acting/smaller.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.simulation.model.model import Words
from tests.simulation.programs import commands
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import MS, NO_TENANTS, PEERS, Step

_SHARE = 0.012  # of steps that one of these follows
_PAGES_AT_ONCE = [5, 8, 11]  # so a batch of 32 pages has at most seven parts
_DTYPE = 5  # which word of a page that is stored
_CROWDED = 40_000  # bytes of memory that the strings below exceed
_CROWD = [b"crowd%d" % i for i in range(24)]
_SIZE = 3_000  # bytes of each
_Name = tuple[int, int, int, int]  # layer, head, page, kv_type


def at_once(number: int) -> int:
    """Return how many pages the server of a seed stores in a step: 0 for as many as usual."""
    rng = random.Random(f"batches {number}")
    return rng.choice(_PAGES_AT_ONCE) if rng.random() < 0.25 else 0


def beside(seed: Seed) -> Callable[[], list[Step]]:
    """Return a function that draws one such batch, and mostly none, after each step."""
    share = _SHARE if at_once(seed.number) else 0.0
    return seed.beside(random.Random(f"steps of batches {seed.number}"), share, lambda: _in_parts(seed))


def _in_parts(seed: Seed) -> list[Step]:
    """Store a batch in parts, over blocks that may lie on disk, or have it refused; others act meanwhile, or a kill."""
    rng, seed.peer = seed.rng, seed.rng.randrange(PEERS)
    req = b"q%d" % seed.peer
    names = [
        (layer, head, page, kind)
        for page in rng.sample(range(8), rng.choice([2, 3, 4]))
        for layer in range(commands.LAYERS)
        for kind in (0, 1)
        for head in range(commands.HEADS)
    ]
    if rng.random() < 0.4:
        rng.shuffle(names)  # so a block is in several parts
    pages = [list(commands.described(seed, _words(req, name))) for name in names]
    if rng.random() < 0.25:
        pages[rng.randrange(len(pages) // 2, len(pages))][_DTYPE] = b"99"
    batch = b"KVPAGEMSET", b"%d" % len(pages), *(word for page in pages for word in page)
    on_disk = seed.disk and rng.random() < 0.6
    steps = _on_disk(seed, req, names) if on_disk else []
    apart = rng.choice([1, 20_000, 200_000, 30 * MS if on_disk else 1])  # nanoseconds
    steps.append(replace(seed.send(seed.peer, batch), gap=MS))
    others = [peer for peer in range(PEERS) if peer != seed.peer]
    for _ in range(rng.randrange(6, 20)):
        steps.append(seed.soon(_meanwhile(seed, rng.choice(others), req, names), apart))
    if rng.random() < 0.35:
        steps.append(seed.soon(seed.step("kill"), rng.choice([apart, 50 * MS])))
    if on_disk:
        usual = seed.options["maxmemory"].encode()
        steps += [seed.send(0, (b"DEL", *_CROWD)), seed.send(0, (b"CONFIG", b"SET", b"maxmemory", usual))]
    return steps


def _words(req: bytes, name: _Name) -> Words:
    return req, *(b"%d" % part for part in name)


def _on_disk(seed: Seed, req: bytes, names: Sequence[_Name]) -> list[Step]:
    """Store some blocks of a batch before it, whole or page by page, have them leave memory, and slow down the disk."""
    rng, steps = seed.rng, list[Step]()
    for page in dict.fromkeys(name[2] for name in names):
        words = list(commands.block_set(seed))
        words[2] = b"%d" % page
        if rng.random() < 0.4:
            some = [name for name in names if name[2] == page]
            stored = [word for name in some for word in commands.described(seed, _words(req, name))]
            words = [b"KVPAGEMSET", b"%d" % len(some), *stored]
        if rng.random() < 0.8:
            steps.append(seed.soon(seed.send(seed.peer, tuple(words)), MS))
    steps.append(seed.send(0, (b"CONFIG", b"SET", b"maxmemory", b"%d" % _CROWDED)))
    steps += [seed.soon(seed.send(rng.randrange(NO_TENANTS), (b"SET", key, seed.exactly(_SIZE))), MS) for key in _CROWD]
    slow = seed.step("fault", name="", slow=rng.choice([5, 40, 150]) * MS, nanoseconds=rng.randrange(100, 1_500) * MS)
    return [*steps, seed.step("settle"), slow]


def _meanwhile(seed: Seed, peer: int, req: bytes, names: Sequence[_Name]) -> Step:
    """Read the first and the last page of a batch, or its blocks; or change some of it, which is rarer."""
    rng, any_one = seed.rng, seed.rng.choice(names)
    first, last = _words(req, names[0]), _words(req, names[-1])
    one, index, block = _words(req, any_one), b"kv:%b:index" % req, b"%d" % any_one[2]
    if rng.random() < 0.1:
        return seed.step("scan", peer, (b"SSCAN", index), count=rng.choice([3, 100]), pace=rng.choice([1, MS]))
    if rng.random() < 0.05:
        return seed.step(
            "scan", rng.randrange(NO_TENANTS), (b"SCAN",), count=rng.choice([10, 100]), pace=rng.choice([1, MS])
        )
    keys = [b"kv:" + b":".join(words) for words in (first, one, last)]
    if rng.random() < 0.15:
        change = rng.choice([
            (b"KVPAGEDEL", req, block), (b"DEL", *keys), (b"EXPIRE", keys[2], b"30"), (b"SET", keys[1], b"a string"),
            (b"KVPAGESET", *commands.described(seed, last)), (b"KVPAGESET", *commands.described(seed, first)),
        ])  # fmt: skip
        return seed.send(peer, change)
    look = rng.choice([
        (b"KVPAGEMGET", b"3", *first, *one, *last), (b"KVPAGEMEXISTS", b"3", *first, *one, *last), (b"MGET", *keys),
        (b"MGET", *keys), (b"GET", keys[0]), (b"GET", keys[2]), (b"KVPAGEGET", *last), (b"KVPAGEGET", *one),
        (b"KVPAGEINDEX", req), (b"KVBLOCKGET", req, block), (b"KVBLOCKGET", req, block), (b"SMEMBERS", index),
        (b"EXISTS", *keys), (b"SCARD", index),
    ])  # fmt: skip
    return seed.send(peer, look)
