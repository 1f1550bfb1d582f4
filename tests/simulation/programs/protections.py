"""Leases and pins in a row, and then eviction or a look: each change of a protection meets the next.

They are drawn in addition to a program's other steps, from a random generator of their own, in a fourth of the seeds.
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


def beside(seed: Seed) -> Callable[[], list[Step]]:
    """Return a function that draws one such row of steps, and mostly none, after each step."""
    rng = random.Random(f"protections {seed.number}")
    share = _SHARE if rng.random() < 0.25 else 0.0
    return seed.beside(rng, share, lambda: _protected(seed))


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
