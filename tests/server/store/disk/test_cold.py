"""Commands and transactions over values that lie on disk alone: they run when all of it is in memory, or not at all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import redis
from servers import RunningServer, start_server
from test_tiered import damage, disk_info, settle
from waiting import until
from wire import Wire, encode_command, parse

from kvpage_server.core import NewPages
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.prefetch import HeldUnits
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.index import Block

MB = 1024**2
UNREADABLE = Path(__file__).parents[3] / "support" / "unreadable.py"
BLOCK = (1, 1, 1, 0, 1, 0, 8, MB)  # layers heads page_size ttl P, then a plane of bytes: one page of 1 MiB


@contextmanager
def tiered(directory: Path, *options: str) -> Iterator[tuple[RunningServer, redis.Redis]]:
    """A server on a directory, and a client of it. It must stop cleanly, without a traceback in its log."""
    with start_server("--store", "tiered", *options, directory=directory) as server, server.client() as client:
        yield server, client


def body(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def cold_strings(client: redis.Redis, count: int, size: int = 3 * MB) -> None:
    """Store strings, and see to it that all but the last lie on disk alone."""
    for seed in range(count):
        client.set(f"k{seed}", body(size, seed))
        settle(client)
    client.set("z", body(size, 999))
    settle(client)


def cold_blocks(client: redis.Redis, count: int) -> None:
    for seed in range(count):
        assert client.execute_command("KVBLOCKSET", f"v{seed}", 0, *BLOCK, body(MB, seed))
    settle(client)


def page(req: str, layer: int, value: bytes | str) -> tuple[Any, ...]:
    """A page as KVPAGESET takes it."""
    return (req, layer, 0, 0, 0, 8, 1, len(value), 0, value)


def transaction(client: redis.Redis, *commands: tuple[Any, ...]) -> list[Any]:
    """The replies of EXEC, errors among them."""
    with client.pipeline(transaction=True) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        return pipe.execute(raise_on_error=False)


def test_loaded_values_with_a_lease_count_as_protected(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "8mb") as (_, client):
        cold_strings(client, 4)
        assert client.exists("k0") == 1  # a client that gets 1 must find it
        assert client.info()["leased_or_pinned_bytes"] < 3 * MB
        assert client.getrange("k0", 0, 10) == body(3 * MB, 0)[:11]
        assert client.info()["leased_or_pinned_bytes"] >= 3 * MB


# -- transactions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, 3 * MB])
def test_a_transaction_that_writes_first_reads_values_on_disk(tmp_path: Path, value: int) -> None:
    with tiered(tmp_path, "--maxmemory", "4mb") as (_, client):
        cold_strings(client, 3)
        for seed in (0, 1, 2, 0):
            written = body(value, 50 + seed)
            assert transaction(client, ("SET", "y", written), ("GET", f"k{seed}"), ("GET", "y")) == [
                True,
                body(3 * MB, seed),
                written,
            ]


def test_a_transaction_may_read_more_than_memory_has_room_for(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "4mb") as (_, client):
        cold_strings(client, 5)
        commands = [command for seed in range(5) for command in (("SET", f"n{seed}", "1"), ("GET", f"k{seed}"))]
        replies = transaction(client, *commands)
        assert replies == [reply for seed in range(5) for reply in (True, body(3 * MB, seed))]
        client.set("after", "1")
        assert client.info("memory")["used_memory"] < 4.5 * MB


def test_pages_and_block_parts_are_loaded_for_transactions(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "8mb") as (_, client):
        cold_blocks(client, 16)
        words = [word for seed in range(16) for word in (f"v{seed}", 0)]
        replies = transaction(
            client,
            ("SET", "y", body(3 * MB)),
            ("KVPAGEGET", "v0", 0, 0, 0, 0),
            ("KVBLOCKGET", "v1", 0),
            ("KVPAGESET", *page("v2", 1, "abcd")),
            ("KVPAGEMSET", 2, *page("fresh", 0, "abcd"), *page("v3", 1, "abcd")),
            ("KVPAGEVERIFY", "v4"),
            ("EXPIRE", "kv:v5:0:0:0:0", 100),
            ("KVPAGEGET", "v3", 1, 0, 0, 0),
            ("KVBLOCKMGET", 16, *words),
        )
        assert replies[:3] == [True, body(MB, 0), body(MB, 1)]
        assert replies[3:5] == [b"OK", b"OK"]
        assert replies[5][b"checked"] == 1
        assert replies[6:8] == [1, b"abcd"]
        assert replies[8] == [None if seed in (2, 3) else body(MB, seed) for seed in range(16)]


def test_too_large_a_transaction_is_refused_before_it_runs(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb", "--maxmemory-clients", "4mb") as (_, client):
        cold_blocks(client, 8)
        reads = [("KVBLOCKGET", f"v{seed}", 0) for seed in range(8)]
        with pytest.raises(redis.exceptions.ExecAbortError, match=r"OOM .* maxmemory-clients .* less at a time"):
            transaction(client, ("SET", "y", "1"), *reads)
        assert client.exists("y") == 0
        assert transaction(client, ("SET", "y", "1"), *reads[:3])[1:] == [body(MB, seed) for seed in range(3)]
        keys = [f"kv:v{seed}:0:0:0:0" for seed in range(8)]
        with pytest.raises(redis.ResponseError, match="ask for less at a time"):
            client.mget(keys)
        assert [value[64:] for value in client.mget(keys[3:6])] == [body(MB, seed) for seed in range(3, 6)]
        with pytest.raises(redis.ResponseError, match="ask for less at a time"):
            client.mset({"new": "1", **dict.fromkeys(keys, "text")})
        assert client.dbsize() == 9


def test_concurrent_loads_take_turns_in_memory(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb", "--maxmemory-clients", "4mb") as (server, client):
        cold_blocks(client, 12)

        def work(number: int) -> None:
            with server.client() as mine:
                for turn in range(6):
                    seeds = random.Random(f"{number} {turn}").sample(range(12), 2)
                    reads = [("KVPAGEVERIFY", f"v{seed}") for seed in seeds]
                    replies = transaction(mine, ("INCR", "turns"), *reads)
                    assert [reply[b"checked"] for reply in replies[1:]] == [1, 1]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert client.get("turns") == b"48"
        client.set("after", "1")
        assert client.info("memory")["used_memory"] < 2.5 * MB


def test_a_damaged_value_is_missing_for_a_whole_transaction(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        client.set("a", body(9000, 1))
        client.set("b", body(9000, 2))
    damage(tmp_path, body(9000, 1))
    with tiered(tmp_path, "--scrub-rate", "0") as (_, client):
        assert transaction(client, ("SET", "y", 1), ("EXISTS", "a"), ("GET", "a"), ("GET", "b")) == [
            True,
            0,
            None,
            body(9000, 2),
        ]
        assert disk_info(client)["disk_corrupt"] == 1


def test_a_watched_value_found_damaged_has_changed(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        client.mset({f"{seed}": body(9000, seed) for seed in range(20)})
        client.set("a", body(9000, 21))
    damage(tmp_path, body(9000, 21))
    with tiered(tmp_path, "--scrub-rate", "0") as (server, client), Wire(server.port) as wire:
        assert wire.ask(b"WATCH", b"a") == b"+OK\r\n"
        for words in ((b"MULTI",), (b"SET", b"y", b"1"), (b"GET", b"a")):
            wire.ask(*words)
        assert parse(wire.ask(b"EXEC")) is None
        assert client.exists("y") == 0


def test_an_unreadable_value_stays_and_fails_its_transaction(tmp_path: Path) -> None:
    """A page that cannot be read now is a miss in a batch. Else it is an error, and the next time may be better."""
    with tiered(tmp_path) as (_, client):
        client.set("a", body(9000, 1))
        for seed in range(2):
            assert client.execute_command("KVPAGESET", *page("p", seed, body(9000, seed)))
            assert client.execute_command(
                "KVBLOCKSET", f"b{seed}", 0, 1, 1, 1, 0, 1, 0, 8, 200_000, body(200_000, seed)
            )
    switch = tmp_path / "unreadable"
    switch.touch()
    with (
        start_server("--store", "tiered", directory=tmp_path, program=[str(UNREADABLE)]) as server,
        server.client() as client,
    ):
        batch = ("KVPAGEMGET", 3, *("p", 0, 0, 0, 0), *("p", 1, 0, 0, 0), *("b0", 0, 0, 0, 0))
        blocks = ("KVBLOCKMGET", 2, "b0", 0, "p", 0)
        for _ in range(2):
            with pytest.raises(redis.exceptions.ExecAbortError, match=r"disk failed: Input/output error"):
                transaction(client, ("SET", "y", 1), ("GET", "a"))
            for words in (
                ("GET", "a"),
                ("MSET", "y", 1, "kv:b0:0:0:0:0", 1),
                ("KVPAGEMSET", 2, *page("fresh", 0, "abcd"), *page("b0", 1, "abcd")),
                ("KVPAGEVERIFY", "b1"),
            ):
                with pytest.raises(redis.ResponseError, match="reading from disk failed: Input/output error"):
                    client.execute_command(*words)
            assert client.execute_command(*batch) == [None, None, None]
            assert client.execute_command(*blocks) == [None, None]
        assert client.exists("y", "kv:fresh:0:0:0:0") == 0
        switch.unlink()
        assert transaction(client, ("SET", "y", 1), ("GET", "a")) == [True, body(9000, 1)]
        assert client.execute_command(*batch) == [body(9000, 0), body(9000, 1), body(200_000, 0)]
        assert client.execute_command(*blocks) == [body(200_000, 0), body(9000, 0) + body(9000, 1)]
        assert client.execute_command("KVPAGEVERIFY", "b1")[b"checked"] == 1
        assert disk_info(client)["disk_corrupt"] == 0


def test_a_disk_error_is_reported_to_commands_of_its_time_only(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        client.set("a", body(9000, 1))
        for seed in range(2):
            assert client.execute_command("KVBLOCKSET", f"v{seed}", 0, *BLOCK, body(MB, seed))
    slow, unreadable = tmp_path / "slow", tmp_path / "unreadable"
    with start_server("--store", "tiered", directory=tmp_path, program=[str(UNREADABLE)]) as server:
        for words, found in (
            (("GET", "a"), body(9000, 1)),
            (("KVPAGEMGET", 1, "v0", 0, 0, 0, 0), [body(MB, 0)]),
            (("KVPAGESET", *page("v1", 1, "abcd")), b"OK"),
        ):
            slow.touch()
            unreadable.touch()
            with server.client() as client:
                with Wire(server.port) as gone:
                    gone.send(
                        encode_command([word if isinstance(word, bytes) else str(word).encode() for word in words])
                    )
                    until(lambda: any(one["cmd"] == words[0].lower() for one in client.client_list()))  # noqa: B023
                    assert client.client_kill_filter(skipme=True) == 1
                times = disk_info(client)["disk_fetch_times"]
                slow.unlink()
                until(lambda: disk_info(client)["disk_fetch_times"] != times)  # noqa: B023
                unreadable.unlink()
                assert client.execute_command(*words) == found


def test_a_transaction_after_a_pause_sees_the_current_values(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "4mb") as (server, client), Wire(server.port) as wire:
        cold_strings(client, 2)
        client.pexpire("k0", 400)
        for words in ((b"MULTI",), (b"SET", b"y", b"1"), (b"GET", b"k0"), (b"STRLEN", b"k1"), (b"GET", b"k1")):
            wire.ask(*words)
        client.execute_command("CLIENT", "PAUSE", 800)
        assert parse(wire.ask(b"EXEC")) == ["OK", None, 3 * MB, body(3 * MB, 1)]


def test_a_client_that_leaves_during_a_load_leaves_nothing(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb", "--maxmemory-clients", "4mb") as (server, client):
        cold_blocks(client, 12)
        for turn in range(30):
            first, second = random.Random(turn).sample(range(12), 2)
            reads = [[b"KVBLOCKGET", b"v%d" % seed, b"0"] for seed in (first, second)]
            writes = [b"KVPAGEMSET", b"1", *(str(word).encode() for word in page(f"v{first}", 0, "abcd")[:-1]), b"abcd"]
            with Wire(server.port) as wire:
                wire.send(
                    b"".join(
                        map(encode_command, [[b"MULTI"], *reads, writes, [b"EXEC"]] if turn % 2 else [*reads, writes])
                    )
                )
        client.set("after", "1")
        until(lambda: client.info("memory")["used_memory"] < 2.2 * MB, "the memory of those who left being free")
        assert client.execute_command("KVPAGEVERIFY", "v11")[b"checked"] == 1


def test_a_hold_ends_with_its_owner_or_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    holds, ended = HeldUnits(), []
    holds.on_end = lambda: ended.append(holds.bytes)
    first, second = holds.begin([b"a", b"b"]), holds.begin([b"b"])
    holds.grow(first, 10, stays=True)
    holds.grow(second, 5, stays=False)
    assert (holds.bytes, holds.bytes_to_stay) == (15, 10)
    holds.end_old()
    assert [b"a" in holds, b"b" in holds] == [True, True]
    del first
    assert [b"a" in holds, b"b" in holds, ended] == [False, True, [5]]
    monkeypatch.setattr("kvpage_server.store.disk.prefetch.LONGEST_HOLD", 0.0)
    holds.end_old()
    assert [b"b" in holds, ended] == [False, [5, 0]]
    del second
    assert [holds.bytes, holds.bytes_to_stay, ended] == [0, 0, [5, 0]]


# -- single commands ---------------------------------------------------------------------------------------------------


def test_pages_written_into_cold_blocks_are_stored_all_or_none(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "8mb") as (_, client):
        cold_blocks(client, 16)
        for seed in range(12):
            words = (*page("fresh", seed, "abcd"), *page(f"v{seed}", 1, "abcd"))
            assert client.execute_command("KVPAGEMSET", 2, *words) == b"OK"
            assert client.execute_command("KVPAGEGET", f"v{seed}", 1, 0, 0, 0) == b"abcd"
            assert client.execute_command("KVPAGEGET", f"v{seed}", 0, 0, 0, 0) == body(MB, seed)
        for seed in range(12, 16):
            assert client.execute_command("KVPAGESET", *page(f"v{seed}", 1, "abcd")) == b"OK"
            assert client.execute_command("KVPAGEGET", f"v{seed}", 0, 0, 0, 0) == body(MB, seed)


MANY = 1000  # pages that are stored in several steps


def batch_into(blocks: int) -> tuple[Any, ...]:
    """A KVPAGEMSET of very many new pages, and behind them one for each block of `cold_blocks`."""
    new = [word for number in range(MANY) for word in page("fresh", number, "abcd")]
    return "KVPAGEMSET", MANY + blocks, *new, *(word for seed in range(blocks) for word in page(f"v{seed}", 1, "abcd"))


def test_a_batch_into_more_blocks_than_the_limit_is_stored(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        cold_blocks(client, 5)
    with tiered(tmp_path, "--maxmemory", "2mb", "--maxmemory-clients", "2mb") as (_, client):
        assert client.execute_command(*batch_into(5)) == b"OK"
        assert client.scard("kv:fresh:index") == MANY
        for seed in range(5):
            assert client.execute_command("KVPAGEGET", f"v{seed}", 1, 0, 0, 0) == b"abcd"
            assert client.execute_command("KVPAGEGET", f"v{seed}", 0, 0, 0, 0) == body(MB, seed)


def test_an_unreadable_block_fails_a_batch_of_many_steps(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        cold_blocks(client, 2)
    switch = tmp_path / "unreadable"
    switch.touch()
    with (
        start_server("--store", "tiered", directory=tmp_path, program=[str(UNREADABLE)]) as server,
        server.client() as client,
    ):
        with pytest.raises(redis.ResponseError, match="reading from disk failed: Input/output error"):
            client.execute_command(*batch_into(2))
        assert client.dbsize() == 2
        switch.unlink()
        assert client.execute_command(*batch_into(2)) == b"OK"
        assert client.dbsize() == MANY + 4
        for seed in range(2):
            assert client.execute_command("KVPAGEGET", f"v{seed}", 0, 0, 0, 0) == body(MB, seed)


def test_a_page_is_written_into_a_block_larger_than_memory(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "768kb") as (_, client):
        cold_blocks(client, 3)
        for seed in range(3):
            assert client.execute_command("KVPAGESET", *page(f"v{seed}", 1, "abcd")) == b"OK"
            blob = client.get(f"kv:v{seed}:1:0:0:0")
            assert client.mset({f"kv:v{seed}:1:0:0:0": blob, "x": body(2000), f"kv:v{seed}:0:0:0:0": "text"})
            assert client.execute_command("KVPAGEGET", f"v{seed}", 1, 0, 0, 0) == b"abcd"
            assert client.get(f"kv:v{seed}:0:0:0:0") == b"text"


def test_a_transaction_that_needs_eviction_is_refused_under_pins() -> None:
    with (
        start_server("--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as server,
        server.client() as client,
        Wire(server.port) as wire,
    ):
        assert wire.ask(b"MULTI") == b"+OK\r\n"
        assert wire.ask(b"SET", b"y", b"1") == b"+QUEUED\r\n"
        client.set("k", body(MB // 2))
        client.config_set("maxmemory", "100kb")
        assert wire.ask(b"SET", b"y", b"2").startswith(b"-OOM command not allowed")
        assert wire.ask(b"EXEC").startswith(b"-EXECABORT")
        assert wire.ask(b"EXISTS", b"y") == b":0\r\n"


def test_commands_without_replies_wait_for_the_disk(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "1mb") as (server, client), server.connect() as sock:
        for seed in range(8):
            client.set(f"k{seed}", body(MB // 2, seed))
        client.save()
        silenced = [[b"SAVE"], [b"MGET", *(b"k%d" % seed for seed in range(8))], [b"DEL", b"k0"]]
        for words in silenced:
            sock.sendall(encode_command([b"CLIENT", b"REPLY", b"SKIP"]) + encode_command(words))
        sock.sendall(b"PING\r\n")
        assert sock.recv(100) == b"+PONG\r\n"
        assert client.exists("k0") == 0


def test_a_read_behind_an_unsynced_write_waits_for_both(tmp_path: Path) -> None:
    """A command behind a write, in one packet, waits for its own values and not only until the write is durable."""
    pages, size = 64, 64 * 1024
    names = [words for number in range(pages) for words in (b"r", b"0", b"0", b"%d" % number, b"0")]
    read = encode_command([b"KVPAGEMGET", b"%d" % pages, *names])
    options = ("--appendfsync", "always")
    with tiered(tmp_path, *options) as (_, client):
        for number in range(pages):
            client.execute_command("KVPAGESET", "r", 0, 0, number, 0, 8, 1, size, 0, body(size, number))
    with tiered(tmp_path, *options) as (server, client), Wire(server.port) as wire:
        wire.send(encode_command([b"SET", b"s", b"0"]) + read)
        assert wire.reply() == b"+OK\r\n"
        assert parse(wire.reply()) == [body(size, number) for number in range(pages)]
        for number in range(50):
            value = b"%d" % number
            wire.send(
                encode_command([b"SET", b"s", value]) + encode_command([b"SAVE"]) + encode_command([b"GET", b"s"])
            )
            assert [wire.reply(), wire.reply(), parse(wire.reply())] == [b"+OK\r\n", b"+OK\r\n", value]


def test_a_string_under_a_pages_key_is_scanned_after_a_restart(tmp_path: Path) -> None:
    """The pages of a block that rests are listed as a block; a string that takes the place of one is no page of it."""
    with tiered(tmp_path) as (_, client):
        client.execute_command("KVPAGESET", *page("r", 0, b"abc"))
        client.execute_command("KVPAGESET", *page("r", 1, b"abc"))
        client.execute_command("KVPAGESET", *page("s", 0, b"abc"))
    with tiered(tmp_path) as (_, client):
        cursor, first = client.scan(count=1)
        assert cursor
        assert len(set(client.scan_iter())) == 3
        client.mset({"kv:r:0:0:0:0": "x", "kv:s:0:0:0:0": "y"})
        there = {b"kv:r:0:0:0:0", b"kv:r:1:0:0:0", b"kv:s:0:0:0:0"}
        assert set(client.scan_iter()) == there
        while cursor:  # an earlier scan returns all keys that existed all the time
            cursor, more = client.scan(cursor)
            first += more
        assert set(first) == there
        assert set(client.scan_iter(_type="string")) >= {b"kv:r:0:0:0:0", b"kv:s:0:0:0:0"}
        assert {client.randomkey() for _ in range(200)} == there


def test_a_block_on_disk_is_scanned_after_it_is_stored_whole(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        client.execute_command("KVPAGESET", *page("r", 0, b"abc"))
        client.execute_command("KVPAGESET", *page("s", 0, b"abc"))
    with tiered(tmp_path) as (_, client):
        cursor, found = client.scan(count=1)
        for req in "rs":
            client.execute_command("KVBLOCKSET", req, 0, 1, 1, 1, 0, 1, 0, 8, 1, b"a")
        while cursor:
            cursor, more = client.scan(cursor)
            found += more
        assert {b"kv:r:0:0:0:0", b"kv:s:0:0:0:0"} <= {*found}


# -- values that must stay in memory -----------------------------------------------------------------------------------


def test_finding_blocks_that_wait_to_be_written_is_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot leave memory yet. Eviction examines very many of them, while other clients wait."""
    calls = 0
    each = Block.page_names

    def counted(block: Block) -> Iterator[tuple[bytes, int, int, int]]:
        nonlocal calls
        for name in each(block):
            calls += 1
            yield name

    async def make_room() -> None:
        keyspace = Keyspace(maxmemory=64 * 1024, disk=Disk(tmp_path))
        tier = keyspace.tier
        assert tier is not None
        tier.connect(mode="everysec", limit=64 * MB, scrub_rate=0, moved=lambda: None)
        for block in range(20):
            names = [(b"r", b"%d" % layer, b"0", b"%d" % block, b"0") for layer in range(500)]
            words = [word for name in names for word in (*name, b"8", b"1", b"64", b"0", bytes(64))]
            keyspace.contents.set_pages(NewPages(words, 0, 500, keyspace.arena, 1, False, True))
        monkeypatch.setattr(Block, "page_names", counted)
        assert keyspace.memory.shrink()
        assert keyspace.memory.is_full()
        await tier.close()

    asyncio.run(make_room())
    assert calls < 20 * 10


def test_a_block_that_leaves_memory_during_reads_is_verified(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", "allkeys-lru") as (server, client):
        shape = (1, 4096, 1, 0, 1, 0, 8, 256)  # of many pages: a verification has many steps
        for seed in range(2):
            client.execute_command("KVBLOCKSET", "v", seed, *shape, body(MB, seed))
        for seed in range(6):
            client.set(f"s{seed}", body(MB // 2, seed))
        done = Event()

        def read() -> None:
            with server.client() as mine:
                while not done.is_set():
                    for seed in range(6):
                        mine.get(f"s{seed}")

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            try:
                for _ in range(20):
                    assert client.execute_command("KVPAGEVERIFY", "v")[b"checked"] == 2 * 4096
            finally:
                done.set()
            reading.result()
