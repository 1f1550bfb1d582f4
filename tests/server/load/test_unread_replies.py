"""Unread replies borrow values. They count for maxmemory-clients until they are read, and evict no other values."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from servers import start_server
from turns import measured
from waiting import until
from wire import encode_command

LARGE, SMALL = 6 << 20, 300 << 10  # bytes of values; a large one does not fit in the kernel's buffers
READERS, WRITES = 8, 190
MAXMEMORY = 64 << 20


def keys() -> Iterator[str]:
    return (f"small {i}" for i in range(WRITES))


def slow_reader(port: int) -> socket.socket:
    """A connection for which the kernel keeps little."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", port))
    return reader


@pytest.mark.parametrize("store", ["memory", "tiered"])
def test_unread_replies_evict_and_demote_no_other_values(tmp_path: Path, store: str) -> None:
    options = ["--maxmemory", "64mb", "--maxmemory-clients", "64mb", "--maxmemory-policy", "allkeys-lru"]
    with start_server("--store", store, *options, "--dir", str(tmp_path)) as server, server.client() as client:
        with ExitStack() as readers:
            for i in range(READERS):
                client.set(f"large {i}", bytes(LARGE))
                reader = readers.enter_context(slow_reader(server.port))
                reader.sendall(encode_command([b"GET", b"large %d" % i]))
            until(lambda: client.info("memory")["mem_clients_normal"] > READERS * (LARGE - SMALL), "all replies")
            for key in keys():
                client.set(key, bytes(SMALL))
            assert client.exists(*keys()) >= 0.9 * WRITES
            if store == "tiered":
                assert client.info("everything")["disk_dropped_from_memory"] <= READERS + 0.1 * WRITES
        until(lambda: client.info("memory")["used_memory"] <= MAXMEMORY, "the end of the replies")


@pytest.mark.parametrize(("size", "count", "readers"), [(2 << 20, 16, 1), (9 << 20, 3, 1), (256 << 10, 64, 16)])
def test_long_replies_from_disk_stay_within_the_limit(tmp_path: Path, size: int, count: int, readers: int) -> None:
    options = ["--store", "tiered", "--maxmemory", "64mb", "--maxmemory-clients", "16mb"]
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        for page in range(count):
            client.execute_command("KVPAGESET", "r", page, 0, 0, 0, 8, 1, 1, 0, bytes([page]) * size)
    names = [word for page in range(count) for word in ("r", page, 0, 0, 0)]

    def read(port: int) -> bool:
        with redis.Redis(port=port) as client:
            pages: list[bytes] = client.execute_command("KVPAGEMGET", count, *names)
            return [(page[0], len(page)) for page in pages] == [(page, size) for page in range(count)]

    with start_server(*options, directory=tmp_path) as server, ThreadPoolExecutor(readers) as threads:
        assert all(threads.map(read, [server.port] * readers))


def test_a_block_larger_than_the_limit_is_an_error() -> None:
    options = ["--store", "memory", "--maxmemory", "64mb", "--maxmemory-clients", "16mb"]
    with start_server(*options) as server, server.client() as client:
        for head in range(20):
            client.execute_command("KVPAGESET", "r", 0, head, 0, 0, 8, 1, 1 << 20, 0, bytes(1 << 20))
        client.execute_command("KVPAGESET", "r", 0, 0, 1, 0, 8, 1, 1, 0, b"x")
        with pytest.raises(redis.ResponseError, match="the block has 20971520 bytes, maxmemory-clients allows"):
            client.execute_command("KVBLOCKGET", "r", 0)
        large, small = client.execute_command("KVBLOCKMGET", 2, "r", 0, "r", 1)
        assert str(large).startswith("the block has")
        assert small == b"x"
        assert client.execute_command("KVBLOCKEXISTS", "r", 0) == 1


def test_read_replies_are_counted_no_longer() -> None:
    with measured("--maxmemory", "64mb") as turns:
        memory = turns.server.keyspace.memory
        with slow_reader(turns.server.port) as reader:
            value = bytes(900_000)
            reader.sendall(encode_command([b"SET", b"k", value]) + 8 * encode_command([b"GET", b"k"]))
            until(lambda: memory.unread > len(value), "unread replies")
            left = len(b"+OK\r\n") + 8 * len(b"$900000\r\n%b\r\n" % value)
            while left:
                left -= len(reader.recv(1 << 20))
            until(lambda: (memory.unread, turns.server.in_flight) == (0, 0), "that all replies are read")
