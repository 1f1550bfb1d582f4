"""Leases and pins in a row, and then eviction or a look: each change of a protection meets the next. And prefixes with
states, which are leased as far as there is room, while others change them.

They are drawn in addition to a program's other steps, from random generators of their own, each in a fourth of the
seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.programs import commands
from tests.simulation.programs.scenes import TTL
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import MS, PEERS, Step

_SHARE = 0.012  # of steps that one of these follows
_CROWD = 40  # writes of others, which evict
_LEASES = [300, 2_000, 9_000]  # milliseconds


def has_lengths(number: int) -> bool:
    """Return whether a seed has prefixes with states."""
    return random.Random(f"lengths {number}").random() < 0.25


def beside(seed: Seed) -> Callable[[], list[Step]]:
    """Return a function that draws such rows of steps, and mostly none, after each step."""
    rng = random.Random(f"protections {seed.number}")
    share = _SHARE if rng.random() < 0.25 else 0.0
    of_blocks = seed.beside(rng, share, lambda: _protected(seed))
    share = _SHARE if has_lengths(seed.number) else 0.0
    of_prefixes = seed.beside(random.Random(f"steps of lengths {seed.number}"), share, lambda: _lengths(seed))
    return lambda: [*of_blocks(), *of_prefixes()]


def _protected(seed: Seed) -> list[Step]:
    """A block is leased, leased for longer or shorter, pinned and unpinned, in any order; others write, or look."""
    rng, seed.peer = seed.rng, seed.rng.randrange(PEERS)
    name, req, page, *words = commands.block_set(seed)
    words[TTL] = b"0"  # or the end of its protection is not known to the moment
    steps = [seed.send(seed.peer, (name, req, page, *words))]
    for _ in range(rng.randrange(2, 6)):
        change = rng.choice([
            (b"KVPAGELEASE", req, b"%d" % rng.choice(_LEASES), page),
            (b"KVPAGEPREFIX", b"8", b"%d" % rng.choice(_LEASES), b"1", req, page),
            (b"KVPAGEPIN", req, page), (b"KVPAGEUNPIN", req, page), (b"KVPAGEUNPIN", req),
        ])  # fmt: skip
        steps.append(replace(seed.send(seed.peer, change), gap=rng.choice([MS, MS, 250 * MS, 2_500 * MS])))
    if rng.random() < 0.3:
        look = rng.choice([(b"KVPAGESTAT", req, b"0", b"0", page, b"0"), (b"KVPAGEINDEX", req)])
        steps.append(seed.soon(seed.send(seed.peer, look), MS))
    others = [peer for peer in range(PEERS) if peer != seed.peer]
    steps += [seed.soon(commands.write(seed, rng.choice(others)), MS) for _ in range(rng.randrange(10, _CROWD))]
    return [*steps, seed.send(seed.peer, (b"KVBLOCKGET", req, page)), seed.send(seed.peer, (b"KVPAGEUNPIN", req, page))]


def _lengths(seed: Seed) -> list[Step]:
    """Blocks and states are stored, a part of them is pinned, and the longest prefix with a state is leased, while
    others change blocks and states, and then fill memory.
    """
    rng, seed.peer = seed.rng, seed.rng.randrange(PEERS)
    req, count = b"q%d" % seed.peer, rng.randrange(2, 6)
    steps = []
    for page in (*range(count), 6, 7):  # the last two are states
        name, _, _, *words = commands.block_set(seed)
        words[TTL] = b"0"
        steps.append(seed.soon(seed.send(seed.peer, (name, req, b"%d" % page, *words)), MS))
    if rng.random() < 0.5:
        pinned = rng.sample([b"%d" % page for page in range(8)], rng.randrange(1, 4))
        steps.append(seed.send(rng.randrange(PEERS), (b"KVPAGEPIN", commands.any_request(seed), *pinned)))
    names = [word for page in range(count) for word in (req, b"%d" % page)]
    states = [b"6", b"7", rng.choice([b"6", b"7", b"5"])]
    needs = [word for page in states for word in (req, page, b"%d" % rng.randint(1, count))]
    lease = b"%d" % rng.choice([*_LEASES, 0])
    prefix = (b"KVPAGEPREFIX", b"8", lease, b"%d" % count, *names, b"LENGTHS", b"3", *needs)
    others = [peer for peer in range(PEERS) if peer != seed.peer]
    for _ in range(rng.randrange(1, 4)):
        steps.append(seed.send(seed.peer, prefix))
        if rng.random() < 0.7:
            page = b"%d" % rng.choice([*range(count), 6, 7])
            key = b"kv:%b:%d:%d:%b:%d" % (req, rng.randrange(2), rng.randrange(2), page, rng.randrange(2))
            change = rng.choice([(b"DEL", key), (b"KVPAGEDEL", req, page), (b"PEXPIRE", key, b"1")])
            steps.append(replace(seed.send(rng.choice(others), change), gap=rng.choice([0, 0, 1000, MS])))
    steps += [seed.soon(commands.write(seed, rng.choice(others)), MS) for _ in range(rng.randrange(5, _CROWD))]
    return [*steps, seed.send(seed.peer, (b"KVPAGEUNPIN", req))]
