"""The default store, memory and disk with `everysec`, beside one in memory alone, where memory is enough for both."""

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
    """What was written is on disk before anything is read: reads are measured, and not the writes before them."""
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
