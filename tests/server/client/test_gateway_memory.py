"""Memory of a gateway: unread values are counted and bounded, and a stop leaves no coroutine behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from servers import FRESH, start_server
from stored_pages import Here
from waiting import until
from wire import Wire, encode_command

from benchmarks import valkey_cluster
from benchmarks.valkey_cluster import Cluster
from kvpage_server.gateway.upstream import Value, _PendingBlocks
from kvpage_server.resp import ReplyError

MIB = 1024**2
LIMIT = 64 * MIB
READERS = 20
KEYS = [b"value:%d" % (i % 16) for i in range(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with valkey_cluster.run("--cluster-node-timeout", "60000", replicas=False) as cluster:
        yield cluster


@contextmanager
def silent(cluster: Cluster) -> Iterator[None]:
    """The nodes do not answer."""
    try:
        for node in cluster.masters:
            node.signal(signal.SIGSTOP)
        yield
    finally:
        for node in cluster.masters:
            node.signal(signal.SIGCONT)


def unread(stack: ExitStack, port: int, command: bytes) -> Wire:
    """A client that sends a command and reads nothing."""
    wire = stack.enter_context(Wire(port))
    wire._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.send(command)
    return wire


def test_values_that_are_not_read_are_counted_and_bounded(cluster: Cluster) -> None:
    options = ("--store", "cluster", "--cluster-nodes", cluster.addresses, "--maxmemory-clients", str(LIMIT))
    with start_server(*options, program=FRESH) as gateway, gateway.client() as client, ExitStack() as stack:
        for key in KEYS[:16]:
            client.set(key, bytes(MIB))
        client.mget(KEYS[:16])
        before = gateway.rss()
        readers = [unread(stack, gateway.port, encode_command([b"MGET", *KEYS])) for _ in range(READERS)]
        until(
            lambda: (
                len(client.client_list()) <= READERS or int(client.info("memory")["mem_clients_normal"]) > LIMIT // 2
            )
        )
        until(lambda: int(client.info("memory")["mem_clients_normal"]) <= LIMIT)
        assert gateway.rss() - before < 3 * LIMIT
        for reader in readers:
            reader.close()
        until(lambda: int(client.info("memory")["mem_clients_normal"]) == 0)


def test_many_readers_exceed_the_limit_for_no_moment(cluster: Cluster) -> None:
    options = ("--store", "cluster", "--cluster-nodes", cluster.addresses, "--maxmemory-clients", str(LIMIT))
    with start_server(*options, program=FRESH) as gateway, gateway.client() as client, ExitStack() as stack:
        for number in range(16):
            client.execute_command("KVBLOCKSET", "r", number, 1, 1, MIB, 0, 1, 0, 8, 1, bytes(MIB))
        names = [word for number in range(200) for word in (b"r", b"%d" % (number % 16))]
        before, most = gateway.rss(), 0
        for _ in range(200):
            unread(stack, gateway.port, encode_command([b"KVBLOCKMGET", b"200", *names]))
            most = max(most, gateway.rss())
        end = time.monotonic() + 3
        while time.monotonic() < end:
            most = max(most, gateway.rss())
        assert most - before < 6 * LIMIT  # of 200 replies of 200 MiB each


def test_a_reader_gets_all_values_in_order(cluster: Cluster) -> None:
    page = b"kv:r:0:0:0:0"
    with (
        start_server("--store", "cluster", "--cluster-nodes", cluster.addresses) as gateway,
        gateway.client() as client,
    ):
        client.execute_command("KVPAGESET", "r", 0, 0, 0, 0, 1, 2, 1, 0, b"body")
        expected = {b"text:%d" % i: b"%d" % i * (i + 1) for i in range(600)}
        for key, value in expected.items():
            client.set(key, value)
        keys = [*expected, b"absent", page, *expected]
        values = client.mget(keys)
        assert values.pop(len(expected) + 1)[64:] == b"body"
        assert values == [*expected.values(), None, *expected.values()]


def test_commands_of_a_client_count_while_the_cluster_is_silent(cluster: Cluster) -> None:
    with (
        start_server("--store", "cluster", "--cluster-nodes", cluster.addresses) as gateway,
        gateway.client() as client,
    ):
        client.set("key", "value")
        with silent(cluster), Wire(gateway.port) as wire:
            wire.send(encode_command([b"SET", b"key", bytes(8 * MIB)]))
            until(lambda: int(client.info("memory")["mem_clients_normal"]) > 8 * MIB)
        until(lambda: int(client.info("memory")["mem_clients_normal"]) == 0)


def test_nothing_is_left_when_a_gateway_stops_meanwhile(cluster: Cluster) -> None:
    program = ("-X", "dev", *FRESH)
    with start_server("--store", "cluster", "--cluster-nodes", cluster.addresses, program=program) as gateway:
        with gateway.client() as client, ExitStack() as stack:
            client.set(KEYS[0], bytes(MIB))
            before = client.info("stats")["total_net_input_bytes"]
            with silent(cluster):
                command = encode_command([b"MGET", *KEYS])
                for _ in range(80):
                    unread(stack, gateway.port, command)
                sent = 80 * len(command)
                until(lambda: client.info("stats")["total_net_input_bytes"] >= before + sent)
                assert gateway.stop() == 0
        warnings = [line for line in gateway.log.splitlines() if "never awaited" in line or "ignored in" in line]
        assert not warnings, gateway.log


def test_a_failed_request_expects_no_more_bytes() -> None:
    """Otherwise other replies wait until the client has read the values before it."""

    async def fail() -> list[Value | None]:
        raise ReplyError("CLUSTERDOWN")

    async def expected() -> tuple[int, int, int]:
        changes = list[int]()
        pending = _PendingBlocks(Here().client, changes.append)
        task = asyncio.get_running_loop().create_task(fail())
        pending.begin(task, 1, MIB)
        before = sum(changes)
        await asyncio.wait([task])
        await asyncio.sleep(0)
        return before, sum(changes), pending.nbytes

    assert asyncio.run(expected()) == (MIB, 0, 0)
