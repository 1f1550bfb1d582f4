"""KVPAGEMGET of twice as many pages as exist, compared with one of the existing ones: the cost of a miss."""

from __future__ import annotations

from itertools import chain

from benchmarks.findings import Finding
from benchmarks.pages import ordinary
from benchmarks.pages.ordinary import Way
from benchmarks.pages.rounds import Contestant, Plan, Target, Trials
from benchmarks.pages.work import KIB, pages
from benchmarks.servers import start_kvpage
from kvpage_server.page import PageKey

HALF, ALL = "half of them absent", "all of them present"
TARGETS = {"read": {ALL: Target(cpu=1.1)}}
SIZES = {4: 900, 16: 256, 64: 256}  # KiB, and how many are present


def findings(plan: Plan) -> list[Finding]:
    """Every other page that is asked for is absent."""
    trials = Trials(HALF)
    for _ in range(plan.sets):
        with start_kvpage() as server, server.connect() as sock:
            for size in (16,) if plan.quick else SIZES:
                work = pages(SIZES[size], size * KIB, "layers fastest")
                present = ordinary.kvpage_pages(sock, work)
                for write in present.writes:
                    write()
                pairs = [[word for key in batch.keys for word in (key, absent(key))] for batch in work.batches]
                reads = map(ordinary.kvpagemget, pairs)
                expected = [list(chain.from_iterable((body, None) for body in batch.bodies)) for batch in work.batches]
                contestants = {
                    HALF: Contestant(server, ordinary.way(sock, [], reads, expected)),
                    ALL: Contestant(server, Way([], present.reads, present.check)),
                }
                trials.run(f"{work.name}, as many more absent", contestants, work.nbytes, plan, TARGETS, ops=["read"])
                server.admin.flushall()
    return list(trials.findings())


def absent(key: PageKey) -> PageKey:
    """A page that nobody has stored."""
    return PageKey(key.req_id, key.layer, key.head, key.page + 1000, key.kv_type)
