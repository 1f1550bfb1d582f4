"""A server with a disk below its memory: its values exist, in memory or not, before a restart and after."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import RunningServer, answers, free_port, start_server
from test_kvpage_cli import kvpage
from turns import measured
from waiting import until
from wire import encode_command

from kvpage_server.app import _open_store
from kvpage_server.configuration.config import from_arguments
from kvpage_server.page import DType, PageKey, encode_page
from kvpage_server.store.disk.database import FILE

MB = 1024**2
TIERED = ("--store", "tiered", "--loglevel", "debug")


@contextmanager
def tiered(directory: Path, *options: str, **how: Any) -> Iterator[tuple[RunningServer, redis.Redis]]:
    """A server on a directory, and a client of it."""
    with start_server(*TIERED, *options, directory=directory, **how) as server, server.client() as client:
        yield server, client


def body(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def set_page(client: redis.Redis, seed: int, size: int = 20_000, ttl: int = 0, req: str = "r") -> None:
    name = (req, 0, seed % 4, seed // 4, 0)
    assert client.execute_command("KVPAGESET", *name, 8, 1, size, ttl, body(size, seed))


def get_page(client: redis.Redis, seed: int, req: str = "r") -> Any:
    return client.execute_command("KVPAGEGET", req, 0, seed % 4, seed // 4, 0)


def page_args(seed: int, req: str = "r") -> tuple[Any, ...]:
    return (req, 0, seed % 4, seed // 4, 0)


SHAPE = (2, 2, 64, 0, 1, 0, 1, 1024)  # layers heads page_size ttl P, then the plane: 512 KiB of float16
BLOCK = 2 * 2 * 64 * 1024 * 2


def set_block(client: redis.Redis, seed: int) -> None:
    assert client.execute_command("KVBLOCKSET", "b", seed, *SHAPE, body(BLOCK, seed))


def disk_info(client: redis.Redis) -> dict[str, Any]:
    return dict(client.info("kvpage"))


def settle(client: redis.Redis) -> None:
    client.execute_command("SAVE")


def test_memory_holds_a_part_and_every_page_is_read_back(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb") as (_, client):
        for seed in range(400):
            set_page(client, seed)
        assert client.dbsize() == 400
        assert client.info("memory")["used_memory"] <= 2.1 * MB
        for seed in random.Random(1).sample(range(400), 400):
            assert get_page(client, seed) == body(20_000, seed), seed
        assert client.info("stats")["evicted_keys"] == 0
        assert disk_info(client)["disk_fetched"] > 200


def test_a_batch_of_pages_on_disk_streams_in_order(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb") as (_, client):
        client.set("kv:r:0:0:250:0", body(9000))  # a string, where page 1000 would be
        for seed in range(300):
            set_page(client, seed)
        assert client.execute_command("KVPAGEMGET", 1, *page_args(1000)) == [None]
        words = [word for seed in [*range(300), 1000] for word in page_args(seed)]
        for _ in range(2):
            found = client.execute_command("KVPAGEMGET", 301, *words)
            assert found == [*(body(20_000, seed) for seed in range(300)), None]


def tier_of(client: redis.Redis, seed: int) -> bytes:
    return bytes(client.execute_command("KVPAGESTAT", *page_args(seed))[b"tier"])


def test_a_batch_read_once_evicts_nothing_and_read_again_is_kept(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb") as (_, client):
        for seed in range(300):
            set_page(client, seed)
        settle(client)
        for seed in range(100):
            get_page(client, seed)
        kept = {seed for seed in range(100) if tier_of(client, seed) == b"memory"}
        assert len(kept) > 60
        words = [word for seed in range(100, 300) for word in page_args(seed)]
        assert client.execute_command("KVPAGEMGET", 200, *words) == [body(20_000, seed) for seed in range(100, 300)]
        assert len([seed for seed in kept if tier_of(client, seed) == b"memory"]) > len(kept) - 8
        again = [word for seed in (290, 291, 290, 292) for word in page_args(seed)]
        assert {tier_of(client, seed) for seed in (290, 291, 292)} == {b"disk"}
        expected = [body(20_000, seed) for seed in (290, 291, 290, 292)]
        assert client.execute_command("KVPAGEMGET", 4, *again) == expected
        assert {tier_of(client, seed) for seed in (290, 291, 292)} == {b"memory"}


def test_a_batch_read_during_changes_has_a_state_of_each_page(tmp_path: Path) -> None:
    def versions(seed: int) -> list[bytes]:
        return [body(20_000, seed + 1000 * version) for version in range(3)]

    every = {seed: versions(seed) for seed in range(120)}
    with tiered(tmp_path, "--maxmemory", "1mb") as (server, client), server.client() as writer:
        for seed in every:
            set_page(client, seed)
        settle(client)
        words = [word for seed in [*every, *every] for word in page_args(seed)]
        with ThreadPoolExecutor(1) as pool:
            for version in (1, 2):
                writes = (
                    ("KVPAGESET", *page_args(seed), 8, 1, 20_000, 0, every[seed][version])
                    for seed in random.Random(version).sample(sorted(every), 120)
                )
                writing = pool.submit(lambda writes: [writer.execute_command(*write) for write in writes], writes)
                while not writing.done():
                    found = client.execute_command("KVPAGEMGET", 240, *words)
                    assert all(page in every[seed] for page, seed in zip(found, [*every, *every], strict=True))
                writing.result()
            found = client.execute_command("KVPAGEMGET", 240, *words)
            assert found == [every[seed][2] for seed in [*every, *every]]


def test_whole_blocks_are_restored_whole_and_page_by_page(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb") as (_, client):
        for seed in range(20):
            set_block(client, seed)
        settle(client)
        words = [word for seed in range(20) for word in ("b", seed)]
        assert client.execute_command("KVBLOCKMGET", 20, *words) == [body(BLOCK, seed) for seed in range(20)]
        for seed in range(20):
            assert client.execute_command("KVBLOCKGET", "b", seed) == body(BLOCK, seed)
            page = client.execute_command("KVPAGEGET", "b", 1, 0, seed, 0)
            assert page == body(BLOCK, seed)[BLOCK // 2 : BLOCK * 3 // 4]


def test_one_page_of_a_block_on_disk_can_be_changed_expire_or_go(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb") as (_, client):
        for seed in range(20):
            set_block(client, seed)
        settle(client)
        page = body(1000, 99)
        client.execute_command("KVPAGESET", "b", 0, 0, 0, 0, 8, 1, 1000, 0, page)
        client.execute_command("KVPAGEMSET", 1, "b", 0, 0, 1, 0, 8, 1, 1000, 0, page)
        assert client.delete("kv:b:1:0:2:0", "kv:b:1:0:3:0", "kv:b:7:7:7:0") == 2
        assert client.expire("kv:b:1:1:4:0", 100)
        settle(client)
    with tiered(tmp_path) as (_, client):
        assert client.execute_command("KVPAGEGET", "b", 0, 0, 0, 0) == page
        assert client.execute_command("KVPAGEGET", "b", 0, 0, 1, 0) == page
        quarter = BLOCK // 4
        assert client.execute_command("KVPAGEGET", "b", 1, 1, 0, 0) == body(BLOCK, 0)[3 * quarter :]
        assert client.exists("kv:b:1:0:2:0", "kv:b:1:0:3:0", "kv:b:1:1:2:0") == 1
        assert 90 < client.ttl("kv:b:1:1:4:0") <= 100
        assert client.ttl("kv:b:1:0:4:0") == -1
        assert client.execute_command("KVBLOCKGET", "b", 4) == body(BLOCK, 4)


def test_a_restart_is_warm(tmp_path: Path) -> None:
    blob = encode_page(PageKey(b"blob", 0, 0, 0, 0), body(5000, 7), dtype=DType.UINT8, page_size=50, head_dim=100)
    with tiered(tmp_path) as (_, client):
        for seed in range(40):
            set_page(client, seed)
        set_block(client, 3)
        client.set("short", "s")
        client.set("long", body(50_000, 5))
        client.set("soon", "gone", px=100)
        client.set("later", "there", ex=1000)
        client.set(b"k" * 3000, "of a long key")
        client.set("kv:blob:0:0:0:0", blob)
        client.delete("kv:r:0:3:9:0")
        keys = set(client.keys()) - {b"soon"}
    with tiered(tmp_path) as (_, client):
        until(lambda: not client.exists("soon"), "what expires soon to be gone")
        assert set(client.keys()) == keys
        assert set(client.scan_iter()) == keys
        assert client.execute_command("KVPAGESTAT", *page_args(2))[b"tier"] == b"disk"
        assert [get_page(client, seed) for seed in range(39)] == [body(20_000, seed) for seed in range(39)]
        assert client.execute_command("KVPAGESTAT", *page_args(2))[b"tier"] == b"memory"
        assert get_page(client, 39) is None
        assert client.execute_command("KVBLOCKGET", "b", 3) == body(BLOCK, 3)
        assert client.mget("short", "long", "soon", "later") == [b"s", body(50_000, 5), None, b"there"]
        assert 900 < client.ttl("later") <= 1000
        assert client.get(b"k" * 3000) == b"of a long key"
        assert client.get("kv:blob:0:0:0:0") == blob
        assert client.execute_command("KVBLOCKEXISTS", "b", 3) == 1


def test_pages_not_loaded_since_a_start_exist_for_all_commands(tmp_path: Path) -> None:
    names = {seed: b"kv:r:0:%d:%d:0" % (seed % 4, seed // 4) for seed in range(160)}
    with tiered(tmp_path) as (_, client):
        for seed in names:
            set_page(client, seed, size=500, ttl=500 if seed // 4 == 7 else 0)
        client.pexpire(names.pop(38), 1000)
    with tiered(tmp_path) as (_, client):
        until(lambda: client.dbsize() <= 159)
        assert client.info("keyspace")["db0"]["expires"] == 4
        client.set(names[9], "no page any more")
        set_page(client, 13, size=300)
        assert client.delete(names.pop(18)) == 1
        assert client.expire(names[23], 100)
        client.execute_command("KVBLOCKSET", "r", 6, 1, 4, 1, 0, 1, 0, 8, 10, body(40))
        assert client.execute_command("KVPAGEDEL", "r", 8) == 4
        for seed in range(32, 36):
            del names[seed]
        assert 0 < client.ttl(names[29]) <= 500
        assert client.execute_command("KVPAGEPREFIX", 4, 0, 5, "r", 10, "r", 11, "r", 12, "r", 40, "r", 13) == 3
        assert client.exists(names[60], names[61], "kv:r:0:4:15:0") == 2
        assert client.dbsize() == 154
        assert client.randomkey() in names.values()
        assert sorted(client.keys("kv:r:*")) == sorted(names.values())
        assert sorted(set(client.scan_iter(count=7))) == sorted(names.values())
    with tiered(tmp_path) as (_, client):
        assert client.dbsize() == 154
        assert client.get(names.pop(9)) == b"no page any more"
        assert client.execute_command("KVBLOCKGET", "r", 6) == body(40)
        assert 0 < client.ttl(names[23]) <= 100
        expected = {seed: body(500, seed) for seed in names}
        expected |= {13: body(300, 13), **{24 + head: body(40)[head * 10 :][:10] for head in range(4)}}
        assert {seed: get_page(client, seed) for seed in names} == expected


def test_the_index_answers_queries_while_bodies_are_on_disk(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        for seed in range(8):
            set_page(client, seed, ttl=500)
        set_block(client, 0)
    with tiered(tmp_path) as (_, client):
        assert client.execute_command("KVPAGEEXISTS", *page_args(1)) == 1
        assert client.execute_command("KVPAGEPREFIX", 4, 0, 3, "r", 0, "r", 1, "r", 2) == 2
        assert client.exists("kv:r:0:0:0:0") == 1
        assert 0 < client.ttl("kv:r:0:0:0:0") <= 500
        assert client.strlen("kv:r:0:0:0:0") == 20_064
        assert client.memory_usage("kv:r:0:0:0:0") is not None
        assert client.object("idletime", "kv:r:0:0:0:0") < 100
        [index] = client.execute_command("KVPAGEINDEX", "b", "WITHSIZES")
        assert (index[b"complete"], index[b"bytes"], index[b"memory"]) == (1, BLOCK, 0)
        assert client.execute_command("KVPAGEDEL", "r", 1) == 4
        assert disk_info(client)["disk_fetched"] == 0


def test_the_last_use_of_a_string_is_its_write_for_any_size(tmp_path: Path) -> None:
    sizes = 5, 60, 100, 200, 1000, 9000
    began = time.time()
    with tiered(tmp_path) as (_, client):
        for size in sizes:
            client.set(f"s{size}", body(size))
        settle(client)  # a record says when it was written to the disk
        time.sleep(1.1)
    with tiered(tmp_path) as (_, client):
        idle = [client.object("idletime", f"s{size}") for size in sizes]
        elapsed = time.time() - began
        # Two times are rounded down to whole seconds: that of the start and that of the question.
        assert all(1 <= seconds <= elapsed + 2 for seconds in idle), (idle, elapsed)


def test_a_transaction_loads_its_reads_before_it_begins(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        for seed in range(8):
            set_page(client, seed)
        set_block(client, 0)
        client.set("long", body(9000))
    with tiered(tmp_path) as (_, client), client.pipeline(transaction=True) as pipe:
        pipe.set("n", 1)
        pipe.execute_command("KVPAGEMGET", 2, *page_args(1), *page_args(2))
        pipe.execute_command("KVBLOCKGET", "b", 0)
        pipe.execute_command("KVPAGEVERIFY", "r")
        pipe.getset("long", "x")
        pipe.get("long")
        _, pages, block, verified, long, now = pipe.execute()
        assert pages == [body(20_000, 1), body(20_000, 2)]
        assert block == body(BLOCK, 0)
        assert verified[b"checked"] == 8
        assert (long, now) == (body(9000), b"x")


def test_flushall_empties_the_disk_too(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        set_page(client, 0)
        settle(client)
        client.flushall()
        set_page(client, 1)
    with tiered(tmp_path) as (_, client):
        assert client.keys() == [b"kv:r:0:1:0:0"]


@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
def test_values_on_disk_leave_memory_without_an_eviction(tmp_path: Path, policy: str) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", policy) as (_, client):
        for seed in range(300):
            set_page(client, seed)
            if seed % 40 == 0:
                settle(client)
        assert client.dbsize() == 300


def test_maxdisk_evicts_first_dropped_values_first(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb", "--maxdisk", "16mb") as (server, client):
        req = "r{}".format  # a request for each block: none extends another
        for seed in range(1500):
            set_page(client, seed, req=req(seed // 4))
        settle(client)
        until(lambda: client.dbsize() < 900)
        assert client.dbsize() > 300
        assert client.info("stats")["evicted_keys"] >= 600
        assert (tmp_path / FILE).stat().st_size <= 16 * MB
        assert get_page(client, 1499, req(374)) == body(20_000, 1499)
        assert get_page(client, 0, req(0)) is None
        why = client.execute_command("KVPAGEWHY", *page_args(0, req(0)))
        assert (why[b"reason"], why[b"policy"], why[b"limit"]) == (b"evicted", b"allkeys-prefix", b"maxdisk")
        every = ((seed, page_args(seed, req(seed // 4))) for seed in range(1500))
        there = [seed for seed, page in every if client.execute_command("KVPAGEEXISTS", *page)]
        assert len(there) == client.dbsize()
        assert all(seed // 4 * 4 in there for seed in there if seed % 4 == 0)
        assert "internal error" not in server.log


def test_a_server_without_options_keeps_its_values(tmp_path: Path) -> None:
    for turn in range(2):
        port = free_port()
        command = [sys.executable, "-m", "kvpage_server.app", "--port", str(port)]
        home = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
        with subprocess.Popen(command, env=home, stderr=subprocess.DEVNULL) as process:
            until(partial(answers, port))
            with redis.Redis(port=port) as client:
                assert client.set("key", "value", get=True) == (b"value" if turn else None)
            process.terminate()
    assert list(tmp_path.rglob(FILE))


# -- durability --------------------------------------------------------------------------------------------------------


def test_writes_acknowledged_under_always_survive_a_kill(tmp_path: Path) -> None:
    for turn in range(3):
        with (
            start_server(*TIERED, "--appendfsync", "always", directory=tmp_path, killed=True) as server,
            server.client() as client,
        ):
            assert all(get_page(client, seed) == body(20_000, seed) for seed in range(turn * 10))
            for seed in range(turn * 10, turn * 10 + 10):
                set_page(client, seed)
            server.stop(signal.SIGKILL)


def test_under_always_a_pipeline_shares_commits(tmp_path: Path) -> None:
    with tiered(tmp_path, "--appendfsync", "always") as (_, client):
        before = disk_info(client)["disk_commits"]
        with client.pipeline(transaction=False) as pipe:
            for i in range(500):
                pipe.set(f"key:{i}", i)
            assert pipe.execute() == [True] * 500
        assert disk_info(client)["disk_commits"] - before < 50


def test_under_everysec_writes_older_than_a_second_survive(tmp_path: Path) -> None:
    with start_server(*TIERED, directory=tmp_path, killed=True) as server, server.client() as client:
        for seed in range(50):
            set_page(client, seed)
        time.sleep(1.1)
        until(lambda: disk_info(client)["disk_values"] == 50, "what a busy machine wrote later")
        server.stop(signal.SIGKILL)
    with tiered(tmp_path) as (_, client):
        assert all(get_page(client, seed) == body(20_000, seed) for seed in range(50))


def test_without_fsync_values_survive_the_death_of_the_process(tmp_path: Path) -> None:
    """Redis's meaning: the operating system has the values that were written seconds ago."""
    options = (*TIERED, "--appendfsync", "no")
    with start_server(*options, directory=tmp_path, killed=True) as server, server.client() as client:
        for seed in range(50):
            set_page(client, seed)
        set_block(client, 0)
        client.mset({f"key:{i}": body(1000, i) for i in range(500)})
        until(lambda: client.info("persistence")["rdb_changes_since_last_save"] == 0, "nothing was read a second time")
        server.stop(signal.SIGKILL)
    with tiered(tmp_path, "--appendfsync", "no") as (_, client):
        assert client.dbsize() == 554
        assert all(get_page(client, seed) == body(20_000, seed) for seed in range(50))
        assert all(client.get(f"key:{i}") == body(1000, i) for i in range(500))


@pytest.mark.parametrize(("mode", "flushes"), [("always", True), ("everysec", True), ("no", False)])
def test_only_appendfsync_no_leaves_commits_to_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, flushes: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    keyspace = _open_store(from_arguments(["--store", "tiered", "--appendfsync", mode]))
    assert keyspace.tier is not None
    assert keyspace.tier.disk._env.flags()["sync"] is flushes
    keyspace.tier.disk.close()


def test_without_fsync_a_replacement_of_a_string_is_saved(tmp_path: Path) -> None:
    """A page takes the key of a string, and a block the place of the page."""
    key = "kv:b:0:0:0:0"
    with tiered(tmp_path, "--appendfsync", "no") as (_, client):
        client.set(key, body(600, 1))
        client.execute_command("KVPAGESET", "b", 0, 0, 0, 0, 3, 1, 6, 0, "a page")
        set_block(client, 0)
        assert client.execute_command("SAVE")
        assert disk_info(client)["disk_values"] == 1
        client.set("another", body(600, 2))
    with tiered(tmp_path, "--appendfsync", "no") as (_, client):
        assert client.get("another") == body(600, 2)
        assert client.exists(key)


def test_save_bgsave_and_lastsave(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        set_page(client, 0)
        assert client.execute_command("SAVE")
        assert disk_info(client)["disk_values"] == 1
        assert abs(client.lastsave().timestamp() - time.time()) < 60
        set_page(client, 1)
        assert client.bgsave()
        until(lambda: disk_info(client)["disk_values"] == 2)
        persistence = client.info("persistence")
        assert persistence["rdb_last_bgsave_status"] == "ok"
        assert persistence["rdb_last_save_time"] > 0


# -- damage ------------------------------------------------------------------------------------------------------------


def damage(directory: Path, content: bytes) -> None:
    path = directory / FILE
    where = path.read_bytes().index(content[:1000])
    with path.open("r+b") as file:
        file.seek(where + 500)
        file.write(bytes([content[500] ^ 1]))


def test_a_page_damaged_on_disk_is_a_counted_miss(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        for seed in range(8):
            set_page(client, seed)
        set_block(client, 50)
        client.set("long", body(9000, 77))
    for content in (body(20_000, 3), body(BLOCK, 50), body(9000, 77)):
        damage(tmp_path, content)
    with tiered(tmp_path, "--scrub-rate", "0") as (server, client):
        words = [word for seed in range(8) for word in page_args(seed)]
        expected = [None if seed == 3 else body(20_000, seed) for seed in range(8)]
        assert client.execute_command("KVPAGEMGET", 8, *words) == expected
        assert client.execute_command("KVBLOCKGET", "b", 50) is None
        assert client.get("long") is None
        assert client.exists("long", "kv:r:0:3:0:0") == 0
        assert disk_info(client)["disk_corrupt"] == 3
        settle(client)
        assert disk_info(client)["disk_quarantined"] == 3
        assert "3 values corrupt" in kvpage("status", url=server.url)[1]
        assert b"corrupt" in str(client.execute_command("KVPAGEWHY", *page_args(3))).encode()
        assert len(re.findall("could not be read from disk", server.log)) == 3
        for name in ("key kv:r:0:3:0:0", "block 50 of request b", "key long"):
            assert f"{name} could not be read from disk and is gone: " in server.log
        (long,) = client.execute_command("KVLOST", "long")[b"strings"]
        assert long[b"reason"] == b"corrupt"
    with tiered(tmp_path) as (_, client):
        assert client.dbsize() == 7


def test_a_dump_reports_values_that_it_finds_damaged_on_disk(tmp_path: Path) -> None:
    """The server removes them when the dump reads them. An update omits them, and reports them, too."""
    store, new, old = (tmp_path / name for name in ("store", "new", "old"))
    store.mkdir()
    with tiered(store) as (server, client):
        for seed in range(8):
            set_page(client, seed)
        client.set("z*string", body(9000, 77))
        assert kvpage("dump", str(old), url=server.url)[0] == 0
        port = server.port  # an update needs the same URL
    for content in (body(20_000, 3), body(9000, 77)):
        damage(store, content)
    lost = [f"{key}: it was damaged on the server's disk, and is lost" for key in ("kv:r:0:3:0:0", "z*string")]
    with tiered(store, "--scrub-rate", "0", port=port) as (server, client):
        code, shown, _ = kvpage("dump", str(new), "--json", url=server.url)
        found = json.loads(shown)
        assert (code, found["pages"], found["strings"], sorted(found["corrupt"])) == (1, 7, 0, lost)
        assert kvpage("dump", str(new), "--update", url=server.url)[0] == 0  # it never had them
        code, shown, _ = kvpage("dump", str(old), "--update", "--json", url=server.url)
        assert (code, sorted(json.loads(shown)["corrupt"])) == (1, lost)


def test_verify_reads_values_on_disk(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        for seed in range(8):
            set_page(client, seed)
        set_block(client, 0)
    damage(tmp_path, body(20_000, 3))
    with tiered(tmp_path, "--scrub-rate", "0") as (_, client):
        assert client.execute_command("KVPAGEVERIFY", "r") == {
            b"checked": 8,
            b"unchecked": 0,
            b"corrupt": [b"kv:r:0:3:0:0"],
        }
        assert client.execute_command("KVPAGEVERIFY", "b")[b"corrupt"] == []


def test_the_scrubber_removes_damage_and_repairs_from_memory(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        for seed in range(8):
            set_page(client, seed)
    damage(tmp_path, body(20_000, 3))
    with tiered(tmp_path) as (_, client):
        until(lambda: disk_info(client)["disk_corrupt"] > 0)
        assert client.dbsize() == 7
        assert get_page(client, 5) == body(20_000, 5)
        damage(tmp_path, body(20_000, 5))
        until(lambda: disk_info(client)["disk_repaired"] > 0)
        settle(client)
    with tiered(tmp_path) as (_, client):
        assert get_page(client, 5) == body(20_000, 5)


def test_without_a_scrub_rate_nothing_is_scrubbed(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        set_page(client, 3)
        settle(client)
        until(lambda: disk_info(client)["scrub_rounds"] > 0)
    damage(tmp_path, body(20_000, 3))
    with tiered(tmp_path, "--scrub-rate", "0") as (_, client):
        time.sleep(0.3)
        info = disk_info(client)
        assert (info["scrubbed_bytes"], info["scrub_rounds"], info["disk_corrupt"], client.dbsize()) == (0, 0, 0, 1)


def test_a_second_server_on_a_directory_is_refused_with_a_reason(tmp_path: Path) -> None:
    with (
        tiered(tmp_path) as (server, _),
        pytest.raises(RuntimeError, match=f"in use by another kvpage-server, pid {server.pid}"),
        start_server(*TIERED, directory=tmp_path, name="second"),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--maxdisk", "1mb"), "maxdisk must be auto, 0 or at least 16.00M"),
        (("--appendfsync", "often"), "appendfsync must be one of always, everysec, no"),
        (("--store", "disk"), "store must be one of memory, tiered"),
    ],
)
def test_an_impossible_setting_is_refused_with_allowed_values(
    tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(reason)), start_server(*TIERED, *options, directory=tmp_path):
        pass


@pytest.mark.parametrize("size", [512, 1024, 1025])
def test_a_restart_loads_short_strings_only(tmp_path: Path, size: int) -> None:
    """Longer ones stay on disk, also if their record contains them, so that no later write has to evict any."""
    values = {f"key:{i}": body(size, i) for i in range(2000)}
    with tiered(tmp_path, "--maxmemory", "1mb") as (_, client):
        client.mset(values)
    with tiered(tmp_path, "--maxmemory", "1mb") as (_, client):
        assert client.info("memory")["used_memory"] == 0
        client.set("another", "value")
        assert client.dbsize() == 2001
        assert all(client.get(name) == value for name, value in values.items())


def test_a_flush_frees_the_tables_of_the_disk_in_steps(tmp_path: Path) -> None:
    with measured(directory=tmp_path) as turns:
        contents = turns.server.keyspace.contents
        values = [word for i in range(500) for word in (b"key:%d" % i, b"v" * 100)]
        for last in (b"PING", b"SAVE"):
            turns.cost(encode_command([b"MSET", *values]), encode_command([last]))
            turns.on_loop(contents.flush)
            assert turns.on_loop(lambda: contents.flushed) >= 1500  # entries, places of the policy, and names
            while turns.on_loop(contents.free_flushed):
                pass


def test_the_removal_of_a_long_key_copies_it_once(tmp_path: Path) -> None:
    key = b"k" * (4 << 20)
    with measured(directory=tmp_path) as turns:
        turns.cost(encode_command([b"SET", key, b"value"]), encode_command([b"SAVE"]))
        tier = turns.server.keyspace.tier
        assert tier is not None
        tier.stored.maxdisk = 1 << 30

        def copied() -> int:
            """Delete the key. Return the most bytes that were allocated at once."""
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            assert turns.server.keyspace.contents.delete(key)
            return tracemalloc.get_traced_memory()[1] - before

        tracemalloc.start()
        try:
            assert turns.on_loop(copied) < 1.5 * len(key)
        finally:
            tracemalloc.stop()
