"""Memory of pages after every kind of addition and removal: as a batch, interrupted, or during a read."""

from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import redis
from health import MIB
from servers import RunningServer, start_server
from waiting import until
from wire import encode_command

SIZE = 16 * 1024
BATCH = 60  # pages: a megabyte


def body(number: int) -> bytes:
    return b"%d" % number * 40 + bytes(SIZE - 40 * len(str(number)))


def words(numbers: Iterable[int]) -> list[bytes]:
    pages = [
        [b"request-%d" % number, b"1", b"2", b"3", b"1", b"1", b"64", b"128", b"0", body(number)] for number in numbers
    ]
    return [b"KVPAGEMSET", b"%d" % len(pages), *(word for page in pages for word in page)]


def store(client: redis.Redis, numbers: Iterable[int]) -> None:
    assert client.execute_command(*words(numbers)) == b"OK"


def fetch(client: redis.Redis, number: int) -> bytes | None:
    found: bytes | None = client.execute_command("KVPAGEGET", b"request-%d" % number, 1, 2, 3, 1)
    return found


def used(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def test_pages_are_equal_as_bodies_and_as_blobs(client: redis.Redis) -> None:
    store(client, range(200))
    for number in range(200):
        assert fetch(client, number) == body(number)
        blob = client.get(b"kv:request-%d:1:2:3:1" % number)
        assert blob[64:] == body(number)
    for number in range(200):
        assert client.execute_command("KVPAGEVERIFY", b"request-%d" % number)[b"corrupt"] == []


def test_the_rest_of_a_batch_does_not_keep_evicted_memory(client: redis.Redis) -> None:
    store(client, range(8 * BATCH))
    full = used(client)
    assert full < 1.1 * 8 * BATCH * SIZE + MIB
    stay = range(0, 8 * BATCH, 20)
    client.delete(*(b"kv:request-%d:1:2:3:1" % number for number in range(8 * BATCH) if number not in stay))
    until(lambda: used(client) < 3 * len(stay) * SIZE, "the memory of what went being free")
    for number in stay:
        assert fetch(client, number) == body(number)
    client.delete(*(b"kv:request-%d:1:2:3:1" % number for number in stay))
    until(lambda: used(client) < SIZE, "all of it being free")


def test_pages_in_use_survive_the_eviction_of_their_batch() -> None:
    with start_server("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru") as server, server.client() as client:
        hot: list[int] = []
        for batch in range(60):
            store(client, range(batch * BATCH, (batch + 1) * BATCH))
            hot.append(batch * BATCH + 7)
            for number in hot[-40:]:
                assert fetch(client, number) == body(number), number
        assert used(client) <= 26 * MIB
        assert int(client.info("memory")["arena_held"]) < 110 * MIB  # including the reserve for new values


def arena_used(client: redis.Redis) -> int:
    return int(client.info("memory")["arena_used"])


def test_a_thousand_uploads_that_are_cut_short_leave_nothing(server: RunningServer, client: redis.Redis) -> None:
    """A page, a block, a batch, each cut anywhere."""
    page = encode_command(words(range(1))[2:]).replace(b"*10\r\n", b"*11\r\n$9\r\nKVPAGESET\r\n", 1)
    block = encode_command(
        [b"KVBLOCKSET", b"r", b"0", b"1", b"1", b"64", b"0", b"1", b"0", b"1", b"500", bytes(64_000)]
    )
    for data, times in ((page, 500), (block, 350), (encode_command(words(range(40))), 150)):
        for i in range(times):
            with socket.create_connection(("127.0.0.1", server.port)) as peer:
                peer.sendall(data[: len(data) * (i + 1) // (times + 1)])
    until(lambda: arena_used(client) == 0, "the memory of what was cut short being free")
    assert client.dbsize() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can limit another process")
def test_without_system_memory_the_server_reports_it_and_runs_on(server: RunningServer, client: redis.Redis) -> None:
    store(client, range(5))
    pid = client.info("server")["process_id"]
    size = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size + 30 * MIB, resource.RLIM_INFINITY))
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.sendall(b"*3\r\n$3\r\nSET\r\n$5\r\nlarge\r\n$%d\r\n" % (200 * MIB) + bytes(2000))
        assert peer.makefile("rb").readline() == b"-OOM the system has no memory left for this value\r\n"
    for number in range(5):
        assert fetch(client, number) == body(number)
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    client.set("large", bytes(200 * MIB))
    assert client.strlen("large") == 200 * MIB


def test_a_page_read_during_its_deletion_stays_intact(server: RunningServer, client: redis.Redis) -> None:
    store(client, range(BATCH))
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(encode_command([b"KVPAGEGET", b"request-7", b"1", b"2", b"3", b"1"]) * 2000)
        answers = slow.makefile("rb")
        assert answers.readline() == b"$%d\r\n" % SIZE
        client.flushall()
        for batch in range(1, 5):
            store(client, range(batch * BATCH, batch * BATCH + BATCH))
        assert answers.read(SIZE + 2) == body(7) + b"\r\n"
        whole = b"$%d\r\n%b\r\n" % (SIZE, body(7))
        answered = 1
        while (line := answers.readline()) != b"$-1\r\n":  # the position of the deletion
            assert line + answers.read(SIZE + 2) == whole
            answered += 1
        assert answered < 2000
        assert answers.read(5 * (2000 - answered - 1)) == b"$-1\r\n" * (2000 - answered - 1)
    assert arena_used(client) < 1.1 * 4 * BATCH * SIZE
