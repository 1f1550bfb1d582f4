"""The default store, memory and disk with `everysec`, compared with one in memory, if memory suffices for both."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.findings import Finding
from benchmarks.pages import ordinary
from benchmarks.pages.rounds import Contestant, Plan, Target, Trials
from benchmarks.pages.work import KIB, pages
from benchmarks.servers import start_kvpage

TIERED, MEMORY = "tiered", "memory"
TARGETS = {"write": {MEMORY: Target(speed=0.75)}, "read": {MEMORY: Target(speed=0.9)}}
SIZES = {4: 900, 16: 256, 64: 256, 256: 256}  # KiB, and how many at once


def findings(plan: Plan) -> list[Finding]:
    """All writes are on disk before the first read, so that reads are measured without them."""
    trials = Trials(TIERED)
    for _ in range(plan.sets):
        with ExitStack() as stack:
            tiered, memory = map(stack.enter_context, (start_kvpage("--store", "tiered"), start_kvpage()))
            sockets = [stack.enter_context(server.connect()) for server in (tiered, memory)]
            for size in (16,) if plan.quick else SIZES:
                work = pages(SIZES[size], size * KIB, "an engine's order")
                contestants = {
                    store: Contestant(server, ordinary.kvpage_pages(sock, work))
                    for store, server, sock in zip((TIERED, MEMORY), (tiered, memory), sockets, strict=True)
                }
                name = f"{work.name}, memory and disk"
                trials.run(name, contestants, work.nbytes, plan, TARGETS, ops=["write"])
                tiered.admin.execute_command("SAVE")
                trials.run(name, contestants, work.nbytes, plan, TARGETS, ops=["read"])
                for server in (tiered, memory):
                    server.admin.flushall()
    return list(trials.findings())
