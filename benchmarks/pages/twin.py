"""The core's reference implementation compared with an older checkout, for pages that are not small."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.findings import Finding
from benchmarks.pages import ordinary
from benchmarks.pages.rounds import Contestant, Plan, Target, Trials
from benchmarks.pages.work import KIB, ORDERS, pages
from benchmarks.servers import start_kvpage

TWIN, OLDER = "the Python twin", "the older checkout"
SLOWER = 1.3  # times, at most
TARGETS = {op: {OLDER: Target(cpu=SLOWER, speed=1 / SLOWER)} for op in ("write", "read")}


def findings(plan: Plan) -> list[Finding]:
    """None, and a line that says why, without an older checkout."""
    if plan.against is None:
        print("no Python twin beside an older checkout: --against TREE names one")
        return []
    trials = Trials(TWIN)
    for _ in range(plan.sets):
        with ExitStack() as stack:
            twin, older = map(stack.enter_context, (start_kvpage(core="python"), start_kvpage(tree=plan.against)))
            sockets = [stack.enter_context(server.connect()) for server in (twin, older)]
            for size in (64,) if plan.quick else (64, 256):
                for order in list(ORDERS)[: 1 if plan.quick else 2]:
                    work = pages(256, size * KIB, order)
                    contestants = {
                        name: Contestant(server, ordinary.kvpage_pages(sock, work))
                        for name, server, sock in zip((TWIN, OLDER), (twin, older), sockets, strict=True)
                    }
                    trials.run(f"{work.name}, {TWIN}", contestants, work.nbytes, plan, TARGETS)
                    for server in (twin, older):
                        server.admin.flushall()
    return list(trials.findings())
