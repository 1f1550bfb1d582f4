"""Reads of leased and pinned values that are only on disk keep memory within `maxmemory`."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from servers import start_server
from turns import measured
from wire import encode_command

from kvpage_server.store.disk.tier import _MOST_OFFERED
from kvpage_server.store.evict import make_room
from kvpage_server.store.memory.index import OnDisk

MB = 1 << 20


@pytest.mark.parametrize("protect", [("KVPAGELEASE", "60000"), ("KVPAGEPIN",)], ids=["lease", "pin"])
def test_reads_of_protected_values_keep_memory_within_its_limit(protect: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--store", "tiered", "--maxmemory", "16mb", "--maxdisk", "256mb")
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        for number in range(60):
            client.execute_command("KVPAGESET", f"r{number}", 0, 0, 0, 0, 8, 1, MB, 0, bytes([number]) * MB)
        client.save()
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        command, *milliseconds = protect
        for number in range(60):
            assert client.execute_command(command, f"r{number}", *milliseconds) == 1
        for number in range(60):
            assert client.execute_command("KVPAGEGET", f"r{number}", 0, 0, 0, 0) == bytes([number]) * MB
            assert client.info("memory")["used_memory"] < 24 * MB
        assert client.info("everything")["leased_or_pinned"] == 60


@pytest.mark.parametrize("page_code", ["off", "always"])
def test_protected_values_leave_half_of_memory_to_others(page_code: str, tmp_path: Path) -> None:
    """Pins of values on disk only count no memory, and reads bring them there."""
    options = ("--store", "tiered", "--maxmemory", "16mb", "--maxdisk", "256mb", "--page-code", page_code)
    numbers = [*range(50)] * 2
    random.Random(3).shuffle(numbers)
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        for number in range(50):
            client.execute_command("KVPAGESET", f"r{number}", 0, 0, 0, 0, 4, 512, 1024, 0, bytes([number]) * MB)
        client.save()
        for number in numbers:
            with suppress(redis.ResponseError):  # half of memory is protected
                client.execute_command("KVPAGEPIN", f"r{number}")
            assert client.execute_command("KVPAGEGET", f"r{number}", 0, 0, 0, 0) == bytes([number]) * MB
        for number in range(12):
            client.execute_command("KVPAGESET", f"other{number}", 0, 0, 0, 0, 4, 512, 1024, 0, bytes(MB))
        found = client.info("everything")
        assert found["leased_or_pinned_bytes"] <= 9 * MB
        assert found["leased_or_pinned"] == client.info("everything")["leased_or_pinned"] > 8


@pytest.mark.parametrize("protect", [True, False])
def test_a_block_of_many_single_pages_leaves_memory_in_steps(protect: bool, tmp_path: Path) -> None:
    layers, heads, size = 80, 100, 64
    words = [b"KVPAGEMSET", b"%d" % (layers * heads)]
    for layer in range(layers):
        for head in range(heads):
            words += [b"r", b"%d" % layer, b"%d" % head, *b"0 0 8 1 64 0".split(), bytes(size)]
    with measured("--maxmemory", "64mb", directory=tmp_path) as turns:
        turns.cost(b"", encode_command(words))
        before = turns.on_loop(lambda: turns.server.keyspace.memory.used)
        commands = [[b"SAVE"], *([[b"KVPAGEPIN", b"r"]] if protect else [])]
        turns.cost(b"", b"".join(map(encode_command, commands)))
        keyspace = turns.server.keyspace

        def steps() -> list[tuple[bool, int]]:
            """Return whether memory is within its limit, and the pages in memory, after each step."""
            keyspace.memory.limit, found = 1, []
            while not found or not found[-1][0]:
                done = keyspace.memory.shrink()
                entries = keyspace.contents.catalogue.entries.values()
                found.append((done, sum(1 for entry in entries if type(entry) is not OnDisk)))
            keyspace.memory.limit = 64 * MB
            return found

        pages = layers * heads
        assert turns.on_loop(steps) == [(False, left) for left in range(pages - 2048, 0, -2048)] + [(True, 0)]
        assert turns.on_loop(lambda: keyspace.memory.used) == 0 < before
        read = encode_command([b"KVPAGEGET", *b"r 79 99 0 0".split()])
        turns.cost(b"", read)
        assert turns.on_loop(lambda: turns.server.keyspace.counters.misses) == 0


def test_protected_values_leave_memory_one_by_one_in_turn(tmp_path: Path) -> None:
    """Many of them are not examined in one step; the next search goes on after the examined ones."""
    count = _MOST_OFFERED + 100
    with measured("--maxmemory", "64mb", directory=tmp_path) as turns:
        for number in range(count):
            page = [b"KVPAGESET", b"r%d" % number, *b"0 0 0 0 8 1 1000 0".split(), bytes(1000)]
            turns.cost(encode_command(page), encode_command([b"KVPAGEPIN", b"r%d" % number]))
        turns.cost(b"", encode_command([b"SAVE"]))
        memory = turns.server.keyspace.memory

        def dropped() -> list[int]:
            """Return the number of steps of three searches. The first one drops a single value."""
            memory.limit = memory.used - 1
            steps = [sum(1 for _ in make_room(memory))]
            memory.limit = 1
            return steps + [sum(1 for _ in make_room(memory)) for _ in range(2)]

        assert turns.on_loop(dropped) == [1, _MOST_OFFERED, 99]
