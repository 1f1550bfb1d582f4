"""A seed: its server's options, and the random generator of its steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.model.model import Words
from tests.simulation.programs.step import MS, TENANTS, Step

FEW, MANY = 8, 60  # strings that there are


class Seed:
    """The server of a number, and the random generator of its steps.

    `maxdisk` is bytes, far fewer than the server's own least, so that a run can fill them; 0 for no limit.
    """

    def __init__(self, number: int) -> None:
        self.rng = rng = random.Random(f"program {number}")
        self.number = number
        self.disk = rng.random() < 0.65
        self.tenants = rng.random() < 0.25
        self.engines = rng.choice([0, 0, 0, 1, 2])
        self.crowded = rng.random() < 0.25  # memory has less room than is asked for
        self.strings = [b"s%d" % i for i in range(MANY if self.crowded else rng.choice([FEW, FEW, MANY]))]
        self.options = self._options()
        self.maxdisk = rng.choice([0, 0, 0, 0, 60_000, 250_000]) if self.disk else 0
        self.costs = rng.choice([(0, 0), (0, 2_000), (0, 60_000), (0, 900_000)])  # of a look at the clock
        self.large = rng.choice([200, 450, 3_000, 20_000])  # bytes of a long value
        self.weights: list[float] = []  # of commands
        self.splits = 0.0  # of commands that arrive in pieces
        self.gaps = MS  # nanoseconds between two steps, at the most, mostly
        self.peer = 0  # the peer of the next command
        self.drawn = 0  # steps so far

    def _options(self) -> dict[str, str]:
        rng = self.rng
        options = {
            "store": "tiered" if self.disk else "memory",
            "appendfsync": rng.choice(["always", "always", "everysec", "everysec", "no"]),
            "maxmemory": str(rng.choice([30_000, 60_000] if self.crowded else [0, 0, 150_000, 400_000, 1_500_000])),
            "maxmemory-clients": rng.choice(["25%", "2mb"]),
            "page-checksums": rng.choice(["yes", "yes", "yes", "no"]),
            "scrub-rate": "20000",
            "write-behind-limit": str(rng.choice([1 << 20, 1 << 24])),
            "maxmemory-policy": rng.choice(
                ["allkeys-prefix", "allkeys-lru", "allkeys-s3fifo", "volatile-ttl", "noeviction"]
            ),
        }
        if rng.random() < 0.1:
            options["notify-keyspace-events"] = "KEA"
        if not self.disk:
            options.pop("appendfsync")
        return options

    @property
    def users(self) -> list[str]:
        """Return the users of a server with tenants."""
        return [f"u{peer} on nopass ~u{peer}:* ~kv:q{peer}:* &* +@all" for peer in TENANTS if self.tenants]

    # -- chance ----------------------------------------------------------------------------------------------------

    def beside(self, rng: random.Random, share: float, pick: Callable[[], list[Step]]) -> Callable[[], list[Step]]:
        """Return a function that draws steps with a generator of its own, and usually none: so other steps stay the
        same.
        """

        def draw() -> list[Step]:
            if rng.random() >= share:
                return []
            usual, self.rng = self.rng, rng
            steps = pick()
            self.rng = usual
            return steps

        return draw

    @property
    def is_tenant(self) -> bool:
        """Return whether the next command's peer has only keys of its own."""
        return self.tenants and self.peer in TENANTS

    @property
    def own_strings(self) -> list[bytes]:
        """Return strings for the next command's peer. Tenants mostly name their own."""
        own = self.is_tenant and self.rng.random() < 0.85
        some = self.strings[:FEW] if self.rng.random() < 0.6 else self.strings  # some are used more
        return [b"u%d:%b" % (self.peer, key) for key in some] if own else some

    def unlike(self, size: int) -> bytes:
        """A value of about so many bytes, unlike all others."""
        return b"%d:" % self.drawn + self.rng.randbytes(max(size - 8, 0))

    def exactly(self, size: int) -> bytes:
        """A value of so many bytes, unlike others if there is room to be so."""
        return (b"%d:" % self.drawn + self.rng.randbytes(size))[:size]

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, kind: str, peer: int = -1, words: Words = (), **extra: Any) -> Step:
        """Something happens, at a moment of chance."""
        self.drawn += 1
        rng = self.rng
        gap = rng.choice([0, 0, rng.randrange(self.gaps), rng.randrange(self.gaps)])
        if rng.random() < 0.003:
            gap = rng.randrange(5_000 * MS)
        return Step(self.drawn, gap, kind, peer, words, extra)

    def send(self, peer: int, words: Words) -> Step:
        """A peer says something, sometimes in pieces."""
        extra: dict[str, Any] = {}
        if self.rng.random() < self.splits:
            extra["pieces"] = self.rng.randrange(2, 6)
        return self.step("send", peer, words, **extra)

    def soon(self, step: Step, within: int) -> Step:
        """The same, within so many nanoseconds."""
        return replace(step, gap=self.rng.randrange(within))
