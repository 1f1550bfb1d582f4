"""What programs do besides reading and writing: users and their rights, limits, tracking, engines, dumps, rot."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.simulation.model import Words

if TYPE_CHECKING:
    from tests.simulation.programs import Step

MS = 1_000_000  # nanoseconds
TENANTS = (3, 4)  # peers that are somebody else than the default user, where there are tenants
AGENTS = ["ann", "bob", "cy", "dee@acme"]
_FIRST = (7, 7, 3, 1, 9, 9, 2, 5)  # tokens that many prompts begin with


class Administration:
    """A part of `Program`."""

    rng: random.Random
    tenants: bool
    engines: int
    _step: Any

    def _rights(self) -> Words:
        rng, user = self.rng, b"u%d" % self.rng.choice(TENANTS)
        if not self.tenants:
            return (b"ACL", b"WHOAMI")
        first = [b"~%b:*" % user, b"~kv:q%b:*" % user[1:]]
        rules = [
            [b"-get"],
            [b"+get"],
            [b"-kvpagemget"],
            [b"+kvpagemget"],
            [b"~s*"],
            [b"~kv:q1:*"],
            [b"resetkeys", *first],
        ]
        return b"ACL", b"SETUSER", user, *rng.choice(rules)

    def _limits(self) -> Words:
        rng = self.rng
        quotas = [b"", b"", b"kv:q1:* 20000", b"s* 30000 kv:r* 9000", b"kv:q3:* 6000 kv:* 300000"]
        name, values = rng.choice([
            (b"maxmemory-policy", [b"allkeys-lru", b"allkeys-prefix", b"noeviction"]),
            (b"maxmemory", [b"40000", b"200000", b"600000", b"3000000"]),
            (b"quota", quotas),
            (b"page-checksums", [b"yes", b"no"]),
            (b"tracking-table-max-keys", [b"3", b"0"]),
            (b"maxmemory-clients", [b"200kb", b"2mb", b"25%"]),
            (b"slowlog-log-slower-than", [b"0", b"10000"]),
        ])  # fmt: skip
        return b"CONFIG", b"SET", name, rng.choice(values)

    def _tracking(self) -> Words:
        return self.rng.choice([
            (b"HELLO", b"3"), (b"CLIENT", b"TRACKING", b"ON"), (b"CLIENT", b"TRACKING", b"ON"),
            (b"CLIENT", b"TRACKING", b"OFF"),
        ])  # fmt: skip

    # -- the world -------------------------------------------------------------------------------------------------

    def _engine(self) -> Step:
        rng = self.rng
        agent, other = rng.choice(AGENTS), rng.choice(AGENTS[:3])
        said = rng.choice([_FIRST, _FIRST, ()]) + tuple(rng.randrange(1 << 16) for _ in range(rng.randrange(1, 6)))
        what, *args = rng.choice([
            ("turn", agent, said), ("turn", agent, said), ("turn", agent, said), ("recall", agent),
            ("fork", AGENTS[0], other), ("delete", agent), ("die",),
        ])  # fmt: skip
        step: Step = self._step("engine", rng.randrange(self.engines), what=what, args=args)
        return step

    def _rot(self) -> Step:
        database = self.rng.choice([b"pieces", b"pieces", b"records"])
        step: Step = self._step("rot", database=database, bits=self.rng.randrange(1, 4))
        return step

    def _dump(self) -> Step:
        step: Step = self._step("dump", restore=self.rng.random() < 0.7, replace=self.rng.random() < 0.5)
        return step
