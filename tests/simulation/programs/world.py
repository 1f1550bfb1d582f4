"""Events of the world: the process, the disk, the clock and connections, engines and tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.simulation.programs import commands
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import MS, PEERS, Step

AGENTS = ["ann", "bob", "cy", "dee@acme"]
_FIRST = (7, 7, 3, 1, 9, 9, 2, 5)  # tokens that many prompts begin with


def kinds(seed: Seed) -> Sequence[tuple[Callable[[Seed], Step], float]]:
    """All that happens to all, and how often."""
    return [
        (_stall, 1), (_reset, 1), (_half, 1), (_kill, 0.4 if seed.disk else 0.05), (_stop, 0.2),
        (_fault, 1.0 if seed.disk else 0.0), (_rot, 0.5 if seed.disk else 0.0), (_clock, 0.3), (_dump, 0.1),
        (_settle, 1.0),
    ]  # fmt: skip


def _stall(seed: Seed) -> Step:
    return seed.step("stall", seed.rng.randrange(PEERS), nanoseconds=seed.rng.randrange(2_000 * MS))


def _reset(seed: Seed) -> Step:
    return seed.step("reset", seed.rng.randrange(PEERS))


def _half(seed: Seed) -> Step:
    peer = seed.rng.randrange(PEERS)
    return seed.step("half", peer, commands.any_of(seed, peer), share=seed.rng.random())


def _kill(seed: Seed) -> Step:
    return seed.step("kill")


def _stop(seed: Seed) -> Step:
    return seed.step("stop")


def _fault(seed: Seed) -> Step:
    name = seed.rng.choice(["full", "refuses", "unreadable", "", ""])
    longest = seed.rng.choice([4_000, 4_000, 30_000]) * MS if name else 4_000 * MS
    slow = 0 if name else 80 * MS
    return seed.step("fault", name=name, slow=slow, nanoseconds=seed.rng.randrange(100 * MS, longest))


def _clock(seed: Seed) -> Step:
    return seed.step("clock", milliseconds=seed.rng.choice([-5_000, -1, 1, 700, 60_000]))


def _settle(seed: Seed) -> Step:
    return seed.step("settle")


def engine(seed: Seed) -> Step:
    rng = seed.rng
    agent, other = rng.choice(AGENTS), rng.choice(AGENTS[:3])
    tokens = rng.choice([_FIRST, _FIRST, ()]) + tuple(rng.randrange(1 << 16) for _ in range(rng.randrange(1, 6)))
    what, *args = rng.choice([
        ("turn", agent, tokens), ("turn", agent, tokens), ("turn", agent, tokens), ("recall", agent),
        ("fork", AGENTS[0], other), ("delete", agent), ("die",),
    ])  # fmt: skip
    return seed.step("engine", rng.randrange(seed.engines), what=what, args=args)


def _rot(seed: Seed) -> Step:
    database = seed.rng.choice([b"pieces", b"pieces", b"records"])
    return seed.step("rot", database=database, bits=seed.rng.randrange(1, 4))


def _dump(seed: Seed) -> Step:
    return seed.step("dump", restore=seed.rng.random() < 0.7, replace=seed.rng.random() < 0.5)
