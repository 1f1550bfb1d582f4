"""Batches of single pages compared with Valkey: sizes from 1 to 256 KiB and mixed ones, three orders of keys, two
clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from benchmarks.findings import Finding
from benchmarks.pages import ordinary, through_page_client
from benchmarks.pages.rounds import Contestant, Plan, Target, Trials
from benchmarks.pages.work import KIB, ORDERS, Work, mixed_pages, pages
from benchmarks.servers import start_kvpage, start_redis, start_valkey

OURS, VALKEY, REDIS = "kvpage-server", "Valkey", "redis-server"
ENGINES, *OTHERS = ORDERS
SMALL = {"write": {VALKEY: Target(cpu=0.95, speed=1.1)}, "read": {VALKEY: Target(cpu=0.75, speed=1.3)}}
LARGE = {"write": {VALKEY: Target(cpu=1.15, speed=0.95)}, "read": {VALKEY: Target(cpu=1.1, speed=0.95)}}

SIZES = {1: 900, 4: 900, 16: 256, 32: 256, 64: 256, 256: 256}  # KiB, and how many at once
MIXED = 256


def works(plan: Plan) -> Iterator[tuple[str, Callable[[], Work], dict[str, dict[str, Target]]]]:
    """Yield the order of keys, the work, and its targets."""
    if plan.quick:
        for size, order in ((1, OTHERS[0]), (16, OTHERS[1]), (64, ENGINES)):
            yield order, partial(pages, SIZES[size], size * KIB, order), _targets(size)
        return
    for order in ORDERS:
        for size, count in SIZES.items():
            yield order, partial(pages, count, size * KIB, order), _targets(size)
        yield order, partial(mixed_pages, MIXED, order), LARGE


def _targets(size: int) -> dict[str, dict[str, Target]]:
    return SMALL if size <= 4 else LARGE


def findings(plan: Plan) -> list[Finding]:
    """redis-server is measured as well with keys in an engine's order."""
    trials = Trials(OURS)
    for _ in range(plan.sets):
        with ExitStack() as stack:
            ours, valkey, redis = map(stack.enter_context, (start_kvpage(), start_valkey(), start_redis()))
            our_sock, their_sock, redis_sock = (
                stack.enter_context(server.connect()) for server in (ours, valkey, redis)
            )
            our_client, their_client = (
                stack.enter_context(through_page_client.connect(server.url)) for server in (ours, valkey)
            )
            for order, make, targets in works(plan):
                work = make()
                contestants = {
                    OURS: Contestant(ours, ordinary.kvpage_pages(our_sock, work)),
                    VALKEY: Contestant(valkey, ordinary.values(their_sock, work)),
                }
                if order == ENGINES:
                    contestants[REDIS] = Contestant(redis, ordinary.values(redis_sock, work))
                trials.run(work.name, contestants, work.nbytes, plan, targets)
                contestants = {
                    OURS: Contestant(ours, through_page_client.pages(our_client, work)),
                    VALKEY: Contestant(valkey, through_page_client.pages(their_client, work)),
                }
                trials.run(f"{work.name}, PageClient", contestants, work.nbytes, plan, targets)
                for server in (ours, valkey, redis):
                    server.admin.flushall()
    return list(trials.findings())
