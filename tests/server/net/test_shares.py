"""A tenant's requests, pins and leases use its own share: they take no memory from others."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

import numpy as np
import pytest
import redis
from servers import RunningServer, start_server
from stored_pages import held, set_block, set_page
from waiting import until
from wire import encode_command

from kvpage_server.client import Page, PageClient
from kvpage_server.page import BlockShape, DType, PageKey, Plane

MIB = 1024**2


@contextmanager
def two_tenants(*options: str) -> Iterator[tuple[RunningServer, redis.Redis, redis.Redis]]:
    """A full store, nearly all of which is tenant B's; the server, and a client of each."""
    quotas = ["--quota", "kv:a.*", "8mb", "kv:b.*", "48mb"]
    users = ["--user", "a", "on", ">a", "~kv:a.*", "+@all", "--user", "b", "on", ">b", "~kv:b.*", "+@all"]
    with start_server("--maxmemory", "64mb", *users, *quotas, *options) as server, ExitStack() as stack:
        a, b = (stack.enter_context(server.client(username=name, password=name)) for name in "ab")
        for page in range(40):
            set_page(b, "b.x", page, body=b"b" * MIB)
        yield server, a, b


def half_sent(server: RunningServer, size: int) -> socket.socket:
    """A connection of tenant A that declares a value, and sends a byte of it."""
    sock = server.connect()
    sock.sendall(b"AUTH a a\r\n*3\r\n$3\r\nSET\r\n$6\r\nkv:a.v\r\n$%d\r\nx" % size)
    assert sock.recv(5) == b"+OK\r\n"
    return sock


READERS_LIMIT = 65 * MIB  # limit of all clients of a small server: one large page


@pytest.fixture(scope="module")
def full() -> Iterator[RunningServer]:
    """A store of 100 MiB, more than clients may hold together."""
    with start_server("--maxmemory", "160mb") as server, server.client() as client:
        for i in range(100):
            client.set(f"k{i}", bytes([i]) * MIB)
        yield server


def asking(server: RunningServer, *commands: list[bytes]) -> socket.socket:
    """A connection that has asked, and does not read yet."""
    sock = server.connect()
    sock.sendall(b"".join(map(encode_command, commands)))
    return sock


def mget(count: int) -> list[bytes]:
    return [b"MGET", *(b"k%d" % i for i in range(count))]


def answered(stream: BinaryIO, count: int) -> bool:
    """Return whether the whole reply to an `mget` arrives, and is right."""
    wanted = b"*%d\r\n" % count + b"".join(b"$%d\r\n%b\r\n" % (MIB, bytes([i]) * MIB) for i in range(count))
    return stream.read(len(wanted)) == wanted


@pytest.mark.parametrize(("count", "times"), [(10, 30), (100, 3)], ids=["short replies", "long replies"])
def test_a_late_reader_of_much_waits_and_is_not_closed(full: RunningServer, count: int, times: int) -> None:
    with full.client() as admin, ExitStack() as stack:
        socks = [stack.enter_context(asking(full, *[mget(count)] * times)) for _ in range(2)]
        until(lambda: admin.info("memory")["mem_clients_normal"] > 2 * MIB)
        for _ in range(20):
            assert admin.info("memory")["mem_clients_normal"] < READERS_LIMIT
        for sock in socks:
            with sock.makefile("rb") as stream:
                assert all(answered(stream, count) for _ in range(times))
        assert admin.info("stats")["evicted_clients"] == 0


def test_page_clients_read_more_at_once_than_clients_may_hold() -> None:
    pages = [
        Page(PageKey(b"r", 0, 0, i, 0), np.full(MIB // 2, i, np.uint8), DType.UINT8, 1, MIB // 2) for i in range(150)
    ]
    keys = [page.key for page in pages]
    with start_server("--maxmemory", "160mb") as server, PageClient(server.url, deadline=60) as writer:
        for start in range(0, len(pages), 50):
            writer.mset(pages[start : start + 50])

        def read(number: int) -> bool:
            rooms = [np.zeros(MIB // 2, np.uint8) for _ in keys]
            with PageClient(server.url, deadline=60, verify=number % 2 == 0) as reader:
                found = all(reader.mget_into(keys, rooms))
            return found and all((a == page.body).all() for a, page in zip(rooms, pages, strict=True))

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(read, range(8)))
        with server.client() as admin:
            assert admin.info("stats")["evicted_clients"] == 0


def test_reads_of_a_transaction_beyond_the_limit_are_refused(full: RunningServer) -> None:
    with full.client() as client:
        with client.pipeline() as pipe:
            replies = (
                pipe.set("a", 1)
                .mget([f"k{i}" for i in range(40)])
                .mget([f"k{i}" for i in range(40)])
                .incr("a")
                .execute(raise_on_error=False)
            )
        first, read, refused, last = replies
        assert (first, len(read), last) == (True, 40, 2)
        assert isinstance(refused, redis.exceptions.OutOfMemoryError)
        assert str(refused).startswith(
            f"with the reply of 'mget' this transaction has {80 * MIB} bytes to be read, "
            f"maxmemory-clients allows {READERS_LIMIT}"
        )
        assert client.info("stats")["evicted_clients"] == 0


def test_the_log_names_the_closed_client_and_the_limit() -> None:
    with start_server("--maxmemory", "64mb") as server, server.client() as client:
        socks = [asking(server, [b"PING"]) for _ in range(2)]
        for sock in socks:
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nv\r\n$50000000\r\nx")
        until(lambda: client.info("stats")["evicted_clients"])
        assert re.search(
            rf"client \S+ held 5\d+ bytes, all together 10\d+, and maxmemory-clients allows {READERS_LIMIT}: closed",
            server.log,
        )
        for sock in socks:
            sock.close()


def test_values_that_are_half_sent_evict_nothing() -> None:
    with two_tenants("--maxmemory-clients", "1gb") as (server, _, b), ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(half_sent(server, 40 * MIB))
        with server.client() as admin:
            until(lambda: admin.info("memory")["arena_used"] > 190 * MIB)
            set_page(b, "b.x", 40)
            assert held(b, "b.x") == list(range(41))
            assert admin.info("memory")["used_memory"] < 64 * MIB


def test_only_the_client_that_sends_too_much_is_closed() -> None:
    with two_tenants("--maxmemory-clients", "100mb") as (server, _, b), ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(half_sent(server, 40 * MIB))
        with server.client() as admin:
            until(lambda: admin.info("memory")["arena_used"] < 150 * MIB)
        assert b.ping()
        assert held(b, "b.x") == list(range(40))


def test_commands_queued_for_exec_count_for_their_sender() -> None:
    with two_tenants("--maxmemory-clients", "1gb") as (server, a, b):
        connection = a.connection_pool.get_connection()
        connection.send_command("MULTI")
        connection.read_response()
        for at in range(4):
            connection.send_command("SET", f"kv:a.{at}", b"x" * 15 * MIB)
            assert connection.read_response() == b"QUEUED"
        set_page(b, "b.x", 40)
        assert held(b, "b.x") == list(range(41))
        connection.send_command("DISCARD")
        assert connection.read_response() == b"OK"
        with server.client() as admin:
            until(lambda: admin.info("memory")["arena_used"] < 64 * MIB)
        a.connection_pool.release(connection)


def test_a_tenant_at_its_quota_costs_others_one_write_at_most() -> None:
    with two_tenants("--maxmemory-policy", "allkeys-lru", "--maxmemory", "52mb") as (_, a, b):
        for page in range(40, 44):
            set_page(b, "b.x", page, body=b"b" * MIB)
        for page in range(60):
            set_page(a, "a.x", page, body=b"a" * MIB)
        assert held(b, "b.x") == list(range(1, 44))
        assert len(held(a, "a.x")) == 7


def test_a_tenants_pins_and_leases_count_against_its_own_quota() -> None:
    with two_tenants() as (_, a, b):
        for page in range(6):
            set_page(a, "a.x", page, body=b"a" * MIB)
        assert a.execute_command("KVPAGELEASE", "a.x", 60_000) == 3  # half of its quota, and no more
        with pytest.raises(redis.ResponseError, match=r"half of the quota, .* more would be too many"):
            a.execute_command("KVPAGEPIN", "a.x")
        assert b.execute_command("KVPAGEPIN", "b.x", *range(20)) == 20  # what A holds takes nothing from B
        assert b.execute_command("KVPAGELEASE", "b.x", 60_000) < 40


def test_pins_are_counted_anew_when_quotas_change() -> None:
    with start_server("--maxmemory", "1mb") as server, server.client() as client:
        for page in range(4):
            set_block(client, "a.x", page, size=10_000)
        assert client.execute_command("KVPAGEPIN", "a.x") == 4
        set_block(client, "a.y", 0, size=10_000)
        client.config_set("quota", "kv:a.* 300kb")  # half of which the pins take
        with pytest.raises(redis.ResponseError, match=r"half of the quota, .* more would be too many"):
            client.execute_command("KVPAGEPIN", "a.y")
        client.config_set("quota", "")
        assert client.execute_command("KVPAGEPIN", "a.y") == 1
        assert client.execute_command("KVPAGEUNPIN", "a.x") == 4


def test_a_refused_transaction_counts_for_no_client() -> None:
    """It is free again at once: counted as its sender's, it would seem that much less were stored."""
    with two_tenants("--maxmemory-clients", "1gb") as (_, a, b):
        connection = a.connection_pool.get_connection()
        connection.send_command("MULTI")
        assert connection.read_response() == b"OK"
        for _ in range(20):
            connection.send_command("GET", b"x" * 8 * MIB)
            with pytest.raises(redis.ResponseError, match="only a value"):
                connection.read_response()
        for page in range(100):
            set_page(b, "b.y", page, body=b"b" * MIB)
        assert len(held(b, "b.y")) + len(held(b, "b.x")) <= 64
        a.connection_pool.release(connection)


def test_a_slowly_received_command_counts_once() -> None:
    """The received part does not count in addition to the receive buffer."""
    body = bytes(70_000)
    pages = [[b"r", b"0", b"0", b"%d" % page, b"0", b"8", b"1", b"70000", b"0", body] for page in range(40)]
    data = encode_command([b"KVPAGEMSET", b"40", *(word for page in pages for word in page)])
    with start_server("--client-query-buffer-limit", "4mb") as server, server.connect() as sock:
        for start in range(0, len(data), 200_000):
            sock.sendall(data[start : start + 200_000])
            time.sleep(0.01)
        assert sock.recv(100) == b"+OK\r\n"


def test_a_closed_client_is_counted_once() -> None:
    """Its release frees memory, which is a reason to look at the connections again."""
    shape = BlockShape(1024, 16, 1, (Plane(0, DType.BFLOAT16, 256),))
    numbers = np.random.default_rng(1).standard_normal(shape.nbytes // 2).astype(np.float32)
    body = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    with start_server("--maxmemory-clients", "64mb") as server, server.client() as admin, ExitStack() as stack:
        with PageClient(server.url, deadline=60) as client:
            client.mset_blocks([(b"r", page) for page in range(2)], shape, [body, body])
        read = encode_command([b"KVBLOCKMGETCODED", b"40", *(b"r", b"0", b"r", b"1") * 20])
        for _ in range(20):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(read * 3)
        until(lambda: admin.info("stats")["evicted_clients"] > 2, "closed clients")
        closed = re.findall(r"client (\S+) held .*: closed", server.log)
        assert len(closed) == len({*closed})
