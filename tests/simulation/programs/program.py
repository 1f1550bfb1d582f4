"""A run's steps, all drawn from the seed before the run, so that some can be left out.

Each seed has weights of its own (swarm testing): some runs are about nothing but strings, others kill the server every
second; so rare things meet more often than if all runs were alike.
"""

from __future__ import annotations

import random

from tests.simulation.programs import (
    batches,
    caches,
    coded,
    commands,
    meetings,
    oddities,
    protections,
    scenes,
    sessions,
    world,
)
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import MS, PEERS, TENANTS, Step


class Program:
    """`steps(count)` are the first of a seed's; `seed` says how its server is started."""

    def __init__(self, number: int) -> None:
        self.seed = seed = Seed(number)
        if seed.disk:
            seed.options["page-code"] = coded.page_code(number)
        rng = seed.rng
        seed.weights = [weight * rng.choice([0, 0.3, 1, 1, 4]) for _, weight in commands.KINDS]
        seed.weights[0] += 0.1
        self._worlds, weights = zip(*world.kinds(seed), strict=True)
        self._world_weights = [weight * rng.choice([0, 0.3, 1, 3]) for weight in weights[:-1]] + [0.3]
        self._share = rng.choice([0.0, 0.004, 0.02, 0.06])  # of steps that are the world's
        self._scenes, weights = zip(*scenes.KINDS, strict=True)
        self._scene_weights = [weight * rng.choice([0, 1, 1, 4]) for weight in weights]
        self._scene_weights[0] += 0.01
        self._scenes_share = rng.choice([0.0, 0.003, 0.01, 0.03])
        self._transactions = rng.choice([0, 0.02, 0.08])
        seed.splits = rng.choice([0.0, 0.05, 0.5])
        self._engines_share = rng.choice([0.03, 0.15]) if seed.engines else 0.0
        seed.gaps = rng.choice([20_000, 200_000, 2 * MS, 30 * MS])
        parts = (oddities, meetings, sessions, caches, protections, batches, coded)
        self._beside = [part.beside(seed) for part in parts]

    def steps(self, count: int) -> list[Step]:
        """So many, and some that end transactions."""
        seed, steps = self.seed, list[Step]()
        while len(steps) < count:
            if seed.rng.random() < self._share:
                steps.append(seed.rng.choices(self._worlds, self._world_weights)[0](seed))
            elif seed.rng.random() < self._scenes_share:
                steps += seed.rng.choices(self._scenes, self._scene_weights)[0](seed)
            elif seed.rng.random() < self._engines_share:
                steps.append(world.engine(seed))
            elif seed.rng.random() < self._transactions:
                steps += _transaction(seed)
            else:
                peer = seed.rng.randrange(PEERS)
                steps.append(seed.send(peer, commands.any_of(seed, peer)))
            for draw in self._beside:
                steps += draw()
        return steps


def _transaction(seed: Seed) -> list[Step]:
    """Somebody queues some commands, and has them run or not, while another says something, too."""
    rng, peer = seed.rng, seed.rng.randrange(PEERS)
    steps = []
    if rng.random() < 0.5:
        seed.peer = peer
        steps.append(seed.send(peer, (b"WATCH", *rng.sample(seed.own_strings, 2))))
    steps.append(seed.send(peer, (b"MULTI",)))
    for _ in range(rng.randrange(1, 6)):
        steps.append(seed.send(peer, commands.any_of(seed, peer)))
        if rng.random() < 0.3:
            other = (peer + 1) % PEERS
            steps.append(seed.send(other, commands.any_of(seed, other)))
    end = seed.send(peer, (rng.choice([b"EXEC"] * 5 + [b"DISCARD"]),))
    more = random.Random(f"rights {seed.number} {seed.drawn}")  # other than `rng`: most seeds are the runs they were
    if not seed.tenants or peer not in TENANTS or more.random() < 0.6:
        return [*steps, end]
    user = b"u%d" % peer  # whose rights end between queueing and EXEC
    grant = b"ACL", b"SETUSER", user, b"resetkeys", b"~%b:*" % user, b"~kv:q%b:*" % user[1:]
    return [*steps, seed.send(0, grant[:4]), end, seed.send(0, grant)]
