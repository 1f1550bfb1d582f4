"""Blocks of 2 and of 5.6 MiB compared with a value of Valkey's each, and with their single pages."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.findings import Finding
from benchmarks.pages import ordinary, through_page_client
from benchmarks.pages.batches import OURS, VALKEY
from benchmarks.pages.rounds import Contestant, Plan, Target, Trials
from benchmarks.pages.work import blocks
from benchmarks.servers import start_kvpage, start_valkey
from kvpage_server.bench import LLAMA3_16, SMOLLM2_256

WHOLE = {op: {VALKEY: Target(cpu=1.0, speed=1.0)} for op in ("write", "read")}
PIECES = "there 4096 pages of 4 KiB"


def findings(plan: Plan) -> list[Finding]:
    """Valkey is always asked by the ordinary client: to PageClient a block there is so many pages."""
    trials = Trials(OURS)
    for _ in range(plan.sets):
        with ExitStack() as stack:
            ours, valkey = map(stack.enter_context, (start_kvpage(), start_valkey()))
            our_sock, their_sock = (stack.enter_context(server.connect()) for server in (ours, valkey))
            client = stack.enter_context(through_page_client.connect(ours.url))
            for shape in (LLAMA3_16,) if plan.quick else (LLAMA3_16, SMOLLM2_256):
                work = blocks(8, shape)
                plain = Contestant(ours, ordinary.kvpage_blocks(our_sock, work))
                through_client = Contestant(ours, through_page_client.blocks(client, work))
                theirs = Contestant(valkey, ordinary.block_values(their_sock, work))
                for name, mine in ((work.name, plain), (f"{work.name}, PageClient", through_client)):
                    trials.run(name, {OURS: mine, VALKEY: theirs}, work.nbytes, plan, WHOLE)
                if shape is LLAMA3_16:
                    pieces = Contestant(valkey, ordinary.block_page_values(their_sock, work))
                    trials.run(f"{work.name}, {PIECES}", {OURS: plain, VALKEY: pieces}, work.nbytes, plan, {})
                for server in (ours, valkey):
                    server.admin.flushall()
    return list(trials.findings())
