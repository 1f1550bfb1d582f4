"""Clients of a Valkey Cluster of three masters: GB/s and the client's own CPU seconds a GB, for long values.

PageClient writes and reads blocks, the others strings of the same length; all of them end in the caller's memory. The
clients take turns, round after round. CPU time is that of this process and all its threads: on a machine where the
servers share the cores with the client, it says more than GB/s do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import glide
import glide_sync
import numpy as np
import redis

from benchmarks import valkey_cluster
from benchmarks.findings import Finding
from benchmarks.servers import Server, start_kvpage, unpin
from benchmarks.valkey_cluster import Cluster
from kvpage_server.bench import GB, SMOLLM2_256, BatchMemory, spell
from kvpage_server.client import BlockName, PageClient
from kvpage_server.page import BlockShape, DType, KVType, Plane

PLANES = tuple(Plane(kv_type, DType.BFLOAT16, 128) for kv_type in (KVType.K, KVType.V))
WORKS = {BlockShape(16, 8, 16, PLANES): 256, BlockShape(32, 8, 16, PLANES): 48, SMOLLM2_256: 17}  # 1, 2 and 5.6 MiB
ROUNDS = 7
OURS, ALONE, THROUGH = "PageClient", "PageClient, one master", "PageClient, through a gateway"
SERVER, SIDE_BY_SIDE = "PageClient, one kvpage-server", "PageClient, two kvpage-servers side by side"
INTRO = (
    "client / PageClient of three masters, or of one kvpage-server for two of them; with a client each, all clients "
    "together / one client of one kvpage-server; medians of the rounds, ratios are medians of the ratios of each round"
)
_TIMEOUT = 60_000  # milliseconds of a request
_SERVER = ("--maxmemory", "4gb")


@dataclass(frozen=True)
class Client:
    """The functions with which a client writes a batch, and reads it into its memory."""

    write: Callable[[], Any]
    read: Callable[[], Any]


@dataclass(frozen=True)
class Pass:
    """Measurements of one transfer of a batch."""

    gb_per_s: float
    cpu_s_per_gb: float


def _page_client(stack: ExitStack, url: str, work: Work, **options: Any) -> Client:
    client = stack.enter_context(PageClient(url, deadline=60, **options))

    def read() -> None:
        assert all(client.mget_blocks_into(work.names, work.shape, work.into))

    return Client(lambda: client.mset_blocks(work.names, work.shape, work.bodies), read)


def _redis_py(stack: ExitStack, cluster: Cluster, work: Work) -> Client:
    client: Any = redis.RedisCluster("127.0.0.1", cluster.nodes[0].port)
    stack.callback(client.close)

    def write() -> None:
        pipe = client.pipeline()
        for key, body in zip(work.keys, work.bodies, strict=True):
            pipe.set(key, memoryview(body))
        pipe.execute()

    def read() -> None:
        pipe = client.pipeline()
        for key in work.keys:
            pipe.get(key)
        work.copy(pipe.execute())

    return Client(write, read)


def _glide_sync(stack: ExitStack, cluster: Cluster, work: Work) -> tuple[Client, Client]:
    """Return two clients: one sends a command for each value, the other a batch."""
    addresses = [glide_sync.NodeAddress("127.0.0.1", node.port) for node in cluster.nodes]
    client = glide_sync.GlideClusterClient.create(
        glide_sync.GlideClusterClientConfiguration(addresses, request_timeout=_TIMEOUT)
    )
    stack.callback(client.close)

    def write() -> None:
        for key, body in zip(work.keys, work.bodies, strict=True):
            client.set(key, memoryview(body))

    def read() -> None:
        for key, into in zip(work.keys, work.into, strict=True):
            client.get(key, buffer=memoryview(into))

    def write_batch() -> None:
        batch = glide_sync.ClusterBatch(is_atomic=False)
        for key, body in zip(work.keys, work.bodies, strict=True):
            batch.set(key, memoryview(body))
        client.exec(batch, raise_on_error=True)

    def read_batch() -> None:
        batch = glide_sync.ClusterBatch(is_atomic=False)
        for key in work.keys:
            batch.get(key)
        work.copy(client.exec(batch, raise_on_error=True) or [])

    return Client(write, read), Client(write_batch, read_batch)


def _glide(stack: ExitStack, cluster: Cluster, work: Work) -> Client:
    """Return a client that writes and reads all values concurrently."""
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)
    addresses = [glide.NodeAddress("127.0.0.1", node.port) for node in cluster.nodes]
    client = loop.run_until_complete(
        glide.GlideClusterClient.create(glide.GlideClusterClientConfiguration(addresses, request_timeout=_TIMEOUT))
    )
    stack.callback(lambda: loop.run_until_complete(client.close()))

    async def write() -> None:
        await asyncio.gather(*(client.set(k, bytes(body)) for k, body in zip(work.keys, work.bodies, strict=True)))

    async def read() -> None:
        work.copy(await asyncio.gather(*(client.get(key) for key in work.keys)))

    return Client(lambda: loop.run_until_complete(write()), lambda: loop.run_until_complete(read()))


class Work:
    """Blocks of one shape, and the memory into which they are read."""

    def __init__(self, shape: BlockShape, count: int, req_id: bytes = b"cluster") -> None:
        self.shape = shape
        self.name = self.name_of(shape, count)
        self.batch = BatchMemory(count, shape.nbytes, seed=24)
        self.names: list[BlockName] = [(b"%b-%d" % (req_id, i), 0) for i in range(count)]
        self.keys = [b"value-%d" % i for i in range(count)]
        self.bodies, self.into = list(self.batch.written), list(self.batch.read)

    @staticmethod
    def name_of(shape: BlockShape, count: int) -> str:
        """Return the name of the work in the tables."""
        return f"{count} of {spell(shape.nbytes)}"

    def copy(self, values: list[Any]) -> None:
        """Copy the values that a client has returned into the memory for reads."""
        for into, value in zip(self.into, values, strict=True):
            into[:] = np.frombuffer(value, np.uint8)


def _pass(move: Callable[[], Any], nbytes: int) -> Pass:
    started, used = time.perf_counter(), time.process_time()
    move()
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    return Pass(nbytes / GB / seconds, cpu / (nbytes / GB))


def _round_trips(cluster: Cluster, work: Work) -> Iterator[Finding]:
    """Yield the number of round trips of one call for all blocks."""
    with PageClient(cluster.url, deadline=60) as client:
        client.mset_blocks(work.names, work.shape, work.bodies)
        assert client._several
        for name, ask in (
            ("prefix lookup", lambda: client.prefix(work.names, pages_per_block=work.shape.pages)),
            ("read", lambda: client.mget_blocks_into(work.names, work.shape, work.into)),
        ):
            before = client._several.peers.round_trips
            ask()
            trips, nodes = client._several.peers.round_trips - before, len(cluster.masters)
            yield Finding(f"{name} {work.name}", OURS, "round trips", f"{trips} / {nodes}", trips / nodes, at_most=1.0)


def _measured(
    three: Cluster, one: Cluster, gateway: Server, servers: Sequence[Server], shape: BlockShape, count: int, rounds: int
) -> Iterator[Finding]:
    work = Work(shape, count)
    yield from _round_trips(three, work)
    passes: dict[tuple[str, str], list[Pass]] = {}
    with ExitStack() as stack:
        one_by_one, batch = _glide_sync(stack, three, work)
        clients = {
            OURS: _page_client(stack, three.url, work),
            ALONE: _page_client(stack, one.url, work),
            THROUGH: _page_client(stack, gateway.url, work),
            SERVER: _page_client(stack, servers[0].url, work),
            SIDE_BY_SIDE: _page_client(stack, ",".join(server.url for server in servers[1:]), work),
            "PageClient, not verifying": _page_client(stack, three.url, work, verify=False),
            "redis-py, a pipeline": _redis_py(stack, three, work),
            "glide-sync, one by one": one_by_one,
            "glide-sync, a batch": batch,
            "glide, all at once": _glide(stack, three, work),
        }
        for turn in range(-1, rounds):  # turn -1 is a warm-up
            for name, client in clients.items():
                for op, move in (("write", client.write), ("read", client.read)):
                    if op == "read":
                        work.batch.spoil()
                    found = _pass(move, work.batch.written.nbytes)
                    if op == "read":
                        work.batch.check()
                    if turn >= 0:
                        passes.setdefault((op, name), []).append(found)
                for node in (*three.nodes, *one.nodes):
                    node.ask("FLUSHALL")
                for server in servers:
                    server.admin.flushall()
    for (op, name), of_it in passes.items():
        ours = passes[op, SERVER if name == SIDE_BY_SIDE else OURS]
        for what, measure in (("GB/s", "gb_per_s"), ("client CPU s/GB", "cpu_s_per_gb")):
            by_client: list[list[float]] = [[getattr(one, measure) for one in some] for some in (of_it, ours)]
            ratio = median(a / b for a, b in zip(*by_client, strict=True))
            mine, theirs = map(median, by_client)
            at_least = at_most = None
            if name == ALONE and what == "GB/s":
                at_most = 1 / 0.9
            elif name == ALONE:
                at_least = 1 / 1.1
            elif what == "GB/s":
                at_least = {THROUGH: 0.45}.get(name)
            measured = f"{mine:.2f} / {theirs:.2f}"
            yield Finding(f"{op} {work.name}", name, what, measured, ratio, at_least=at_least, at_most=at_most)


def measured(quick: bool) -> tuple[list[Finding], str]:
    """Return the findings, and the version of Valkey."""
    glide_sync.Logger.set_logger_config(glide_sync.LogLevel.OFF)
    findings: list[Finding] = []
    with (
        valkey_cluster.run(*_SERVER, replicas=False) as three,
        valkey_cluster.run(*_SERVER, masters=1, replicas=False) as one,
        start_kvpage("--store", "cluster", "--cluster-nodes", three.addresses) as gateway,
        start_kvpage() as alone,
        start_kvpage() as first,
        start_kvpage() as second,
    ):
        servers = (alone, first, second)
        for server in (gateway, *servers):
            unpin(server.process.pid)
        for shape, count in WORKS.items():
            blocks, rounds = (max(count // 8, 1), 1) if quick else (count, ROUNDS)
            findings += _measured(three, one, gateway, servers, shape, blocks, rounds)
        return findings, three.nodes[0].info_of("INFO", "server")["valkey_version"]
