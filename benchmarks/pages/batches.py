"""Commands for many pages or blocks, compared with Valkey: batches of single pages, blocks, absent pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain

from benchmarks.findings import Finding
from benchmarks.pages import clients
from benchmarks.pages.clients import Way
from benchmarks.pages.rounds import Contestant, Plan, Target, Trials
from benchmarks.pages.work import KIB, ORDERS, Work, blocks, mixed_pages, pages
from benchmarks.servers import start_kvpage, start_redis, start_valkey
from kvpage_server.bench import LLAMA3_16, SMOLLM2_256
from kvpage_server.page import PageKey

# -- Batches of single pages: sizes from 1 to 256 KiB and mixed ones, three orders of keys, two clients ----------------

OURS, VALKEY, REDIS = "kvpage-server", "Valkey", "redis-server"
ENGINES, *OTHERS = ORDERS
SMALL = {"write": {VALKEY: Target(cpu=0.95, speed=1.1)}, "read": {VALKEY: Target(cpu=0.75, speed=1.3)}}
LARGE = {"write": {VALKEY: Target(cpu=1.15, speed=0.95)}, "read": {VALKEY: Target(cpu=1.1, speed=0.95)}}

SIZES = {1: 900, 4: 900, 16: 256, 32: 256, 64: 256, 256: 256}  # KiB of a page, and pages of a batch
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


def batch_findings(plan: Plan) -> list[Finding]:
    """Return the findings of batches. redis-server is measured only with keys in an engine's order."""
    trials = Trials(OURS)
    for _ in range(plan.sets):
        with ExitStack() as stack:
            ours, valkey, redis = map(stack.enter_context, (start_kvpage(), start_valkey(), start_redis()))
            our_sock, their_sock, redis_sock = (
                stack.enter_context(server.connect()) for server in (ours, valkey, redis)
            )
            our_client, their_client = (
                stack.enter_context(clients.connect_page_client(server.url)) for server in (ours, valkey)
            )
            for order, make, targets in works(plan):
                work = make()
                contestants = {
                    OURS: Contestant(ours, clients.kvpage_pages(our_sock, work)),
                    VALKEY: Contestant(valkey, clients.values(their_sock, work)),
                }
                if order == ENGINES:
                    contestants[REDIS] = Contestant(redis, clients.values(redis_sock, work))
                trials.run(work.name, contestants, work.nbytes, plan, targets)
                contestants = {
                    OURS: Contestant(ours, clients.page_client_pages(our_client, work)),
                    VALKEY: Contestant(valkey, clients.page_client_pages(their_client, work)),
                }
                trials.run(f"{work.name}, PageClient", contestants, work.nbytes, plan, targets)
                for server in (ours, valkey, redis):
                    server.admin.flushall()
    return list(trials.findings())


# -- Blocks of 2 and of 5.6 MiB compared with a value of Valkey's each, and with their single pages --------------------

WHOLE = {op: {VALKEY: Target(cpu=1.0, speed=1.0)} for op in ("write", "read")}
PIECES = "there 4096 pages of 4 KiB"


def block_findings(plan: Plan) -> list[Finding]:
    """Return the findings of blocks. Valkey always has the ordinary client, because PageClient stores a block there
    as pages.
    """
    trials = Trials(OURS)
    for _ in range(plan.sets):
        with ExitStack() as stack:
            ours, valkey = map(stack.enter_context, (start_kvpage(), start_valkey()))
            our_sock, their_sock = (stack.enter_context(server.connect()) for server in (ours, valkey))
            client = stack.enter_context(clients.connect_page_client(ours.url))
            for shape in (LLAMA3_16,) if plan.quick else (LLAMA3_16, SMOLLM2_256):
                work = blocks(8, shape)
                plain = Contestant(ours, clients.kvpage_blocks(our_sock, work))
                through_client = Contestant(ours, clients.page_client_blocks(client, work))
                theirs = Contestant(valkey, clients.block_values(their_sock, work))
                for name, mine in ((work.name, plain), (f"{work.name}, PageClient", through_client)):
                    trials.run(name, {OURS: mine, VALKEY: theirs}, work.nbytes, plan, WHOLE)
                if shape is LLAMA3_16:
                    pieces = Contestant(valkey, clients.block_page_values(their_sock, work))
                    trials.run(f"{work.name}, {PIECES}", {OURS: plain, VALKEY: pieces}, work.nbytes, plan, {})
                for server in (ours, valkey):
                    server.admin.flushall()
    return list(trials.findings())


# -- KVPAGEMGET of twice as many pages as exist, compared with one of the existing ones: the cost of a miss ------------

HALF, ALL = "half of them absent", "all of them present"
ABSENT_TARGETS = {"read": {ALL: Target(cpu=1.1)}}
ABSENT_SIZES = {4: 900, 16: 256, 64: 256}  # KiB of a page, and present pages of a batch


def absent_findings(plan: Plan) -> list[Finding]:
    """Return the findings of reads in which every second page is absent."""
    trials = Trials(HALF)
    for _ in range(plan.sets):
        with start_kvpage() as server, server.connect() as sock:
            for size in (16,) if plan.quick else ABSENT_SIZES:
                work = pages(ABSENT_SIZES[size], size * KIB, "layers fastest")
                present = clients.kvpage_pages(sock, work)
                for write in present.writes:
                    write()
                pairs = [[word for key in batch.keys for word in (key, absent(key))] for batch in work.batches]
                reads = map(clients.kvpagemget, pairs)
                expected = [list(chain.from_iterable((body, None) for body in batch.bodies)) for batch in work.batches]
                contestants = {
                    HALF: Contestant(server, clients.way(sock, [], reads, expected)),
                    ALL: Contestant(server, Way([], present.reads, present.check)),
                }
                trials.run(
                    f"{work.name}, as many more absent", contestants, work.nbytes, plan, ABSENT_TARGETS, ops=["read"]
                )
                server.admin.flushall()
    return list(trials.findings())


def absent(key: PageKey) -> PageKey:
    """Return the key of an absent page."""
    return PageKey(key.req_id, key.layer, key.head, key.page + 1000, key.kv_type)
