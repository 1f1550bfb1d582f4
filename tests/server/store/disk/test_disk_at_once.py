"""A replaced value stays on the disk until the commit that replaces it: the limits of `maxdisk`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import start_server
from test_tiered import MB, TIERED, body, disk_info, settle, tiered

from kvpage_server.page import HEADER_SIZE

SMALL = ("--maxdisk", "16mb")  # of which 12 are for values
AT_ONCE = "those that they replace"
N = 50_000  # bytes of a page of a block
BLOCKS = 55  # which fill most of it


def fill(client: redis.Redis) -> None:
    for i in range(BLOCKS):
        client.execute_command("KVBLOCKSET", f"r{i}", 0, 1, 4, 1, 0, 1, 0, 3, N, body(4 * N, i))
    client.execute_command("SAVE")


def page_of(i: int) -> str:
    return f"kv:r{i}:0:0:0:0"


def split_all(client: redis.Redis, *, transaction: bool) -> list[Any]:
    """Have one page of each block expire, so that it is a value of its own, and the others are, too."""
    with client.pipeline(transaction=transaction) as pipe:
        for i in range(BLOCKS):
            pipe.pexpire(page_of(i), 900_000_000)
        return pipe.execute(raise_on_error=False)


def have_room(client: redis.Redis) -> None:
    """Check that the disk accepts writes, and everything is durable."""
    client.execute_command("SAVE")
    info = disk_info(client)
    assert (info["disk_failing"], info["disk_waiting_bytes"]) == ("", 0)
    client.set("one", "more")


def whole(client: redis.Redis, i: int) -> bool:
    """Whether all pages of a block are there, as they were stored."""
    found = client.mget(*(f"kv:r{i}:0:{head}:0:0" for head in range(4)))
    bodies = [page and page[HEADER_SIZE:] for page in found]
    return bodies == [body(4 * N, i)[head * N : (head + 1) * N] for head in range(4)]


@pytest.mark.parametrize("mode", ["always", "everysec", "no"])
@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_pipeline_may_split_all_the_blocks_that_fill_the_disk(tmp_path: Path, mode: str, policy: str) -> None:
    options = (*SMALL, "--appendfsync", mode, "--maxmemory-policy", policy)
    with tiered(tmp_path, *options) as (_, client):
        fill(client)
        assert split_all(client, transaction=False) == [True] * BLOCKS
        have_room(client)
        assert disk_info(client)["disk_write_errors"] == 0
    with tiered(tmp_path, *options) as (_, client):
        assert all(whole(client, i) and client.pttl(page_of(i)) > 0 for i in range(BLOCKS))


@pytest.mark.parametrize("mode", ["always", "everysec"])
def test_a_transaction_of_too_many_replacements_is_refused(tmp_path: Path, mode: str) -> None:
    options = (*SMALL, "--appendfsync", mode, "--maxmemory-policy", "noeviction")
    with start_server(*TIERED, *options, directory=tmp_path, killed=True) as server, server.client() as client:
        fill(client)
        replies = split_all(client, transaction=True)
        done = [i for i, reply in enumerate(replies) if reply is True]
        refused = [reply for reply in replies if reply is not True]
        assert len(done) > 10
        assert len(refused) > 10
        assert all(isinstance(reply, redis.OutOfMemoryError) and AT_ONCE in str(reply) for reply in refused)
        have_room(client)
        server.stop(signal.SIGKILL)
    with tiered(tmp_path, *options) as (_, client):
        assert all(whole(client, i) for i in range(BLOCKS))
        assert [i for i in range(BLOCKS) if client.pttl(page_of(i)) > 0] == done
        for start in range(0, BLOCKS, 10):
            with client.pipeline() as pipe:
                for i in range(start, min(start + 10, BLOCKS)):
                    pipe.persist(page_of(i))
                pipe.execute()
        have_room(client)


@pytest.mark.parametrize("mode", ["always", "everysec", "no"])
def test_a_transaction_evicts_for_its_replacements(tmp_path: Path, mode: str) -> None:
    with tiered(tmp_path, *SMALL, "--appendfsync", mode, "--maxmemory-policy", "allkeys-lru") as (_, client):
        for i in range(58):
            client.set(f"key:{i}", body(190_000, i))
            client.get(f"key:{i}")
        client.execute_command("SAVE")
        with client.pipeline() as pipe:
            for i in range(58):
                pipe.set(f"key:{i}", body(190_000, 100 + i))
            replies = pipe.execute(raise_on_error=False)
        done = [i for i, reply in enumerate(replies) if reply is True]
        assert len(done) > 30
        assert all(reply is True or AT_ONCE in str(reply) for reply in replies)
        have_room(client)
        assert all(client.get(f"key:{i}") in (body(190_000, 100 * (i in done) + i), None) for i in range(58))


def test_a_replacement_of_most_of_the_disk_is_refused(tmp_path: Path) -> None:
    with tiered(tmp_path, *SMALL, "--appendfsync", "always", "--maxmemory-policy", "noeviction") as (_, client):
        client.set("large", body(9 * MB, 1))
        with pytest.raises(redis.OutOfMemoryError, match=AT_ONCE):
            client.set("large", body(9 * MB, 2))
        client.execute_command("KVBLOCKSET", "r", 0, 1, 1, 1, 0, 1, 0, 3, 2 * MB, body(2 * MB, 1))
        assert client.get("large") == body(9 * MB, 1)
        have_room(client)


@pytest.mark.parametrize("is_page", [False, True])
def test_a_new_expiry_alone_is_written_not_the_value(tmp_path: Path, is_page: bool) -> None:
    page, key = ("KVPAGESET", "r", 0, 0, 0, 0, 8, 1, 1_000_000, 0), "kv:r:0:0:0:0" if is_page else "key"
    with tiered(tmp_path, "--appendfsync", "everysec") as (_, client):
        client.execute_command(*(page if is_page else ("SET", key)), body(MB, 1)[:1_000_000])
        settle(client)
        assert client.expire(key, 1000)
        assert 0 < disk_info(client)["disk_waiting_bytes"] < 1000
        assert client.expire(key, 2000)
    with tiered(tmp_path) as (_, client):
        assert 1000 < client.ttl(key) <= 2000
        assert client.get(key)[-1_000_000:] == body(MB, 1)[:1_000_000]
        settle(client)
        assert client.persist(key)
    with tiered(tmp_path) as (_, client):
        assert client.ttl(key) == -1


def test_blocks_split_in_their_own_commit_are_evicted(
    tmp_path: Path,
) -> None:
    with tiered(tmp_path, *SMALL, "--appendfsync", "everysec") as (_, client):
        for i in range(300):
            with client.pipeline(transaction=False) as pipe:
                pipe.execute_command("KVPAGESET", f"q{i}", 0, 0, 0, 0, 3, 1, 2 * N, 0, body(2 * N, i))
                pipe.execute_command("KVBLOCKSET", f"q{i}", 0, 1, 1, 1, 0, 1, 0, 3, 2 * N, body(2 * N, i))
                pipe.pexpire(f"kv:q{i}:0:0:0:0", 100_000_000)
                pipe.execute()
        settle(client)
        assert disk_info(client)["disk_evicted"] > 0
        assert client.set("key", body(200_000))


@pytest.mark.parametrize(("mode", "size"), [("always", 1_000_000), ("everysec", 262_000), ("everysec", 20_000)])
def test_long_values_fit_where_many_short_ones_were(tmp_path: Path, mode: str, size: int) -> None:
    """The free space consists of single pages, none of them adjacent."""
    options = (*SMALL, "--appendfsync", mode, "--maxmemory-policy", "noeviction")
    with start_server(*TIERED, *options, directory=tmp_path, killed=True) as server, server.client() as client:
        with client.pipeline(transaction=False) as pipe:
            for i in range(2900):
                pipe.set(f"short:{i}", bytes(4000))
            pipe.execute()
            client.execute_command("SAVE")
            for i in range(0, 2900, 2):
                pipe.delete(f"short:{i}")
            pipe.execute()
        client.execute_command("SAVE")
        stored = range(5_800_000 // size)
        for i in stored:
            client.set(f"long:{i}", body(size, i))
        have_room(client)
        assert disk_info(client)["disk_write_errors"] == 0
        server.stop(signal.SIGKILL)
    with tiered(tmp_path, *options) as (_, client):
        assert all(client.get(f"long:{i}") == body(size, i) for i in stored)
        assert [client.delete(*(f"long:{i}" for i in stored)), client.get("short:1")] == [len(stored), bytes(4000)]
        client.execute_command("SAVE")
        assert disk_info(client)["disk_bytes"] < 1450 * 8500
        for i in stored:
            client.set(f"long:{i}", body(size, i + 1))
        have_room(client)
        assert all(client.get(f"long:{i}") == body(size, i + 1) for i in stored)


def test_strings_under_page_keys_leave_nothing_to_their_blocks(tmp_path: Path) -> None:
    options = (*SMALL, "--maxmemory", "2mb", "--appendfsync", "always", "--maxmemory-policy", "allkeys-lru")
    with tiered(tmp_path, *options) as (_, client):
        for i in range(55):
            client.execute_command("KVPAGESET", f"p{i}", 0, 0, 0, 0, 3, 1, 150_000, 0, body(150_000, i))
            client.set(f"kv:p{i}:0:1:0:0", body(200_000, i))
            client.delete(f"kv:p{i}:0:1:0:0")
        with client.pipeline(transaction=False) as pipe:
            for i in range(55):
                pipe.execute_command("KVPAGEPIN", f"p{i}")
            pinned = [i for i, reply in enumerate(pipe.execute(raise_on_error=False)) if reply == 1]
        assert 30 < len(pinned) < 55  # half of the space for values
        assert [client.set(f"key:{i}", body(300_000, i)) for i in range(60)] == [True] * 60
        assert all(client.get(f"kv:p{i}:0:0:0:0")[HEADER_SIZE:] == body(150_000, i) for i in pinned)


def test_strings_set_together_are_stored_all_or_none(tmp_path: Path) -> None:
    with tiered(tmp_path, *SMALL, "--maxmemory-policy", "noeviction") as (_, client):
        client.execute_command("KVBLOCKSET", "r", 0, 1, 2, 1, 0, 1, 0, 3, 4_000_000, body(8_000_000))
        client.execute_command("SAVE")
        with pytest.raises(redis.OutOfMemoryError, match=AT_ONCE):
            client.mset({"new": "value", "kv:r:0:0:0:0": "takes the place of a page"})
        assert client.exists("new") == 0
        assert client.strlen("kv:r:0:0:0:0") == HEADER_SIZE + 4_000_000
        assert client.mset({"new": "value", "kv:r:0:0:0:9": "takes no page's place"})


def test_keys_are_deleted_all_or_none_on_a_full_disk(tmp_path: Path) -> None:
    with tiered(tmp_path, *SMALL, "--maxmemory-policy", "noeviction") as (_, client):
        client.execute_command("KVBLOCKSET", "r", 0, 1, 2, 1, 0, 1, 0, 3, 4_000_000, body(8_000_000))
        client.set("plain", "value")
        client.execute_command("SAVE")
        with pytest.raises(redis.OutOfMemoryError, match=AT_ONCE):
            client.delete("plain", "kv:r:0:0:0:0")
        assert client.exists("plain", "kv:r:0:0:0:0") == 2
        assert client.execute_command("KVPAGEDEL", "r") == 2
        client.execute_command("SAVE")
        for delete in (("DEL",), ("UNLINK", "plain"), ("GETDEL",), ("PEXPIREAT",)):
            client.execute_command("KVBLOCKSET", "r", 0, 1, 1, 1, 0, 1, 0, 3, 8_000_000, body(8_000_000))
            client.execute_command("SAVE")
            client.execute_command(*delete, "kv:r:0:0:0:0", *([1] if delete[0] == "PEXPIREAT" else []))
            assert client.exists("kv:r:0:0:0:0", "plain") == (delete[0] == "DEL")
            client.execute_command("SAVE")
            assert disk_info(client)["disk_bytes"] < 1000


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-prefix"])
def test_a_replaced_value_and_the_new_one_must_fit_together(tmp_path: Path, policy: str) -> None:
    """In nine tenths of `maxdisk`, 15,099,494 bytes: eviction frees nothing for a value that replaces itself."""
    with tiered(tmp_path, *SMALL, "--maxmemory-policy", policy) as (_, client):
        for size, larger in (7_400_000, 7_500_000), (4_000_000, 11_000_000), (12_000_000, 3_000_000):
            client.set("value", body(size))
            client.execute_command("SAVE")
            assert client.set("value", body(larger))
            client.delete("value")
            client.execute_command("SAVE")
        client.set("value", body(8_000_000))
        with pytest.raises(redis.OutOfMemoryError, match=AT_ONCE):
            client.set("value", body(8_100_000))
        client.delete("value")
        client.execute_command("SAVE")
        assert client.set("value", body(8_100_000))
