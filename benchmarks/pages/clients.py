"""An engine's costs: the page clients compared with redis-py, and with a bare loop of `recv_into`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.findings import Finding
from benchmarks.pages import receiving, redis_py
from benchmarks.pages.rounds import Plan
from benchmarks.servers import start_kvpage


def findings(plan: Plan) -> Iterator[Finding]:
    """Measure one server."""
    rounds = plan.sets * plan.rounds
    print("page clients ...", flush=True)
    with start_kvpage() as server:
        yield from redis_py.findings(server, rounds)
        yield from receiving.findings(server, rounds)
