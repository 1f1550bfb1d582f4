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
from turns import Turns, measured
from waiting import until
from wire import encode_command

from kvpage_server.core import Arena, Part
from kvpage_server.core.pieces import copied_parts
from kvpage_server.page import DType

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


BLOCK, PAGE, PAGES = 8 << 20, 16 << 10, 8  # bytes of a block and of its page; blocks of which a page is not read
ECHOED = 8 * 900_000  # bytes, more than fit in the kernel's buffers


@pytest.mark.parametrize("kind", ["page", "range"])
def test_an_unread_part_of_a_value_is_copied(kind: str) -> None:
    """Otherwise a page of 16 KiB, which counts for its reader, keeps its whole block in memory after the deletion."""
    shape = [0, 1, BLOCK // PAGE, 1, 0, 1, 0, int(DType.FLOAT16), PAGE // 2]
    with (
        measured() as turns,
        redis.Redis(port=turns.server.port) as client,
        slow_reader(turns.server.port) as reader,
    ):

        def used() -> int:
            """The bytes of values, without those of replies that are not read."""
            return int(turns.on_loop(lambda: turns.server.keyspace.memory.used)) - ECHOED

        reader.sendall(ECHOED // 900_000 * encode_command([b"ECHO", bytes(900_000)]))
        until(
            lambda: max(one.connection.unread for one in [*turns.server.clients.values()]) > 1 << 20, "unread replies"
        )
        for i in range(PAGES):
            if kind == "page":
                client.execute_command("KVBLOCKSET", f"r{i}", *shape, bytes(BLOCK))
                words = [b"KVPAGEGET", b"r%d" % i, b"0", b"5", b"0", b"0"]
            else:
                client.set(f"r{i}", bytes(BLOCK))
                words = [b"GETRANGE", b"r%d" % i, b"0", b"%d" % PAGE]
            before = turns.server.stats.calls[words[0].decode().lower()].count
            reader.sendall(encode_command(words))
            until(lambda words=words, before=before: calls_of(turns, words[0]) > before, "the call")  # type: ignore[misc]
        assert used() > PAGES * BLOCK - BLOCK
        client.flushall()
        assert used() < BLOCK


def calls_of(turns: Turns, command: bytes) -> int:
    return turns.server.stats.calls[command.decode().lower()].count


def test_parts_are_copied_if_they_are_a_small_share() -> None:
    arena = Arena()
    slot = arena.allocate(1000)
    slot.body[:] = bytes(range(250)) * 4
    few = [b"$1", Part(slot, 0, 100), b"$2", Part(slot, 200, 300), b"$3"]
    assert copied_parts(few) == [b"$1", bytes(range(100)), b"$2", bytes(slot.body[200:300]), b"$3"]
    much = [Part(slot, 0, 100), b"$2", Part(slot, 200, 352), slot]
    assert copied_parts(much) == much
