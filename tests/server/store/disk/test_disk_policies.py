"""At `maxdisk`, the policy determines evictions and errors, as at maxmemory."""

from __future__ import annotations

import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import start_server
from test_tiered import BLOCK, MB, TIERED, body, disk_info, get_page, page_args, set_block, set_page, settle, tiered

from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import Delete, Write
from kvpage_server.store.disk.lmdb_file import MaxDisk
from kvpage_server.store.disk.usage import DiskUsage
from kvpage_server.store.records import Record

SMALL = ("--maxdisk", "16mb")  # of which 12 are for values
USED_UP = "command not allowed when used disk > 'maxdisk'"


def taken(client: redis.Redis, names: range, size: int = MB, **options: Any) -> list[int]:
    found = []
    for i in names:
        try:
            client.set(f"key:{i}", body(size, i), **options)
            found.append(i)
        except redis.OutOfMemoryError as error:
            assert USED_UP in str(error)  # noqa: PT017 - others are not refused
    return found


def test_a_pinned_page_under_a_strings_former_key_stays(tmp_path: Path) -> None:
    key, options = "kv:r:0:0:0:0", ("--appendfsync", "always", "--maxmemory-policy", "allkeys-lru")
    with start_server(*TIERED, *SMALL, *options, directory=tmp_path) as server, server.client() as client:
        client.set(key, body(600, 1))
        client.execute_command("KVPAGESET", "r", 0, 0, 0, 0, 3, 1, 6, 0, "a page")
        assert client.execute_command("KVPAGEPIN", "r", 0) == 1
        assert taken(client, range(30)) == list(range(30))
        assert disk_info(client)["disk_evicted"] > 0
        assert client.execute_command("KVPAGEGET", "r", 0, 0, 0, 0) == b"a page"


@pytest.mark.parametrize("maxmemory", ["4mb", "64mb"])
def test_a_lowered_quota_is_evicted_from_first_at_maxdisk(tmp_path: Path, maxmemory: str) -> None:
    """Values on disk only go first, too, before those of other tenants that were used longer ago."""
    options = (*SMALL, "--maxmemory", maxmemory, "--maxmemory-policy", "allkeys-lru", "--quota", "a*", "0")
    with tiered(tmp_path, *options) as (_, client):
        for i in range(4):
            client.set(f"b{i}", body(MB, i))
        for i in range(6):
            client.set(f"a{i}", body(MB, i))
        settle(client)
        client.config_set("quota", f"a* {2 * MB}")
        for i in range(6):
            client.set(f"c{i}", body(MB, i))
        assert client.exists(*(f"b{i}" for i in range(4))) == 4
        left = [i for i in range(6) if client.exists(f"a{i}")]
        assert left == [3, 4, 5][-len(left) :], "the least recently used ones were evicted"


@pytest.mark.parametrize(("mode", "maxmemory"), [("always", "0"), ("everysec", "4mb"), ("no", "4mb")])
def test_noeviction_refuses_writes_beyond_the_disk_limit(tmp_path: Path, mode: str, maxmemory: str) -> None:
    options = ("--maxmemory-policy", "noeviction", "--appendfsync", mode, "--maxmemory", maxmemory)
    with start_server(*TIERED, *SMALL, *options, directory=tmp_path, killed=True) as server, server.client() as client:
        assert taken(client, range(30)) == list(range(11))
        client.set("key:3", body(MB, 100))  # in place of another
        with pytest.raises(redis.OutOfMemoryError, match=USED_UP):
            client.mset({"key:5": body(100_000, 200), "one": body(MB, 1), "two": body(MB, 2)})
        with pytest.raises(redis.OutOfMemoryError, match=USED_UP):
            set_page(client, 0, size=MB)
        with pytest.raises(redis.OutOfMemoryError, match=USED_UP):
            client.execute_command("KVPAGEMSET", 2, *_page(0, 600_000), *_page(1, 600_000))
        with pytest.raises(redis.OutOfMemoryError, match=USED_UP):
            client.execute_command("KVBLOCKSET", "b", 0, 2, 2, 64, 0, 1, 0, 1, 4096, bytes(4 * BLOCK))
        assert client.delete("key:7", "key:8") == 2
        assert taken(client, range(40, 50)) == [40, 41]
        settle(client)
        assert client.dbsize() == 11
        assert client.info("stats")["evicted_keys"] == disk_info(client)["disk_evicted"] == 0
        server.stop(signal.SIGKILL)
    with tiered(tmp_path) as (_, client):
        there = {i: client.get(f"key:{i}") for i in (*range(11), 40, 41)}
        assert there == {i: body(MB, 100 if i == 3 else i) if i not in (7, 8) else None for i in there}


def _page(seed: int, size: int) -> tuple[Any, ...]:
    return (*page_args(seed), 8, 1, size, 0, body(size, seed))


@pytest.mark.parametrize("maxmemory", ["0", "2mb"])
def test_volatile_ttl_evicts_only_the_soonest_expiring(tmp_path: Path, maxmemory: str) -> None:
    options = (*SMALL, "--maxmemory-policy", "volatile-ttl", "--maxmemory", maxmemory)
    with tiered(tmp_path, *options) as (_, client):
        for seed in range(200):
            set_page(client, seed, req="stays")
        lives = dict(zip(range(0, 600, 4), random.Random(1).sample(range(1000, 9000), 150), strict=True))
        for seed, ttl in lives.items():
            for head in range(4):
                set_page(client, seed + head, ttl=ttl, req="goes")
        settle(client)
        gone = {seed for seed in lives if get_page(client, seed, "goes") is None}
        assert 40 < len(gone) < 130
        # the last ones did not exist during the evictions
        left = set(lives) - gone - set(list(lives)[-len(lives) // 8 :])
        assert max(map(lives.__getitem__, sorted(gone)[: len(gone) // 2])) < max(map(lives.__getitem__, left))
        assert sum(lives[a] < lives[b] for a in gone for b in left) > 0.9 * len(gone) * len(left)
        assert client.info("stats")["evicted_keys"] == disk_info(client)["disk_evicted"] == 4 * len(gone)
        why = client.execute_command("KVPAGEWHY", "goes", 0, 0, min(gone) // 4, 0)
        assert b"evicted" in str(why).encode()
        assert b"volatile-ttl" in str(why).encode()
        assert all(get_page(client, seed, "stays") == body(20_000, seed) for seed in range(200))
        stored = len(taken(client, range(20)))
        assert stored < 12
        assert all(get_page(client, seed, "goes") is None for seed in lives)
        assert all(get_page(client, seed, "stays") == body(20_000, seed) for seed in range(200))


@pytest.mark.parametrize(
    ("policy", "maxmemory"), [("allkeys-prefix", "0"), ("allkeys-lru", "2mb"), ("allkeys-s3fifo", "2mb")]
)
def test_an_allkeys_policy_counts_evictions_and_keeps_the_rest(tmp_path: Path, policy: str, maxmemory: str) -> None:
    options = (*SMALL, "--appendfsync", "always", "--maxmemory-policy", policy, "--maxmemory", maxmemory)
    with start_server(*TIERED, *options, directory=tmp_path, killed=True) as server, server.client() as client:
        for i in range(100):
            client.set(f"key:{i}", body(200_000, i))
        there = set(client.keys())
        assert 40 < len(there) < 65
        assert client.info("stats")["evicted_keys"] == disk_info(client)["disk_evicted"] == 100 - len(there)
        assert disk_info(client)["disk_values"] == len(there)
        assert client.info("persistence")["rdb_changes_since_last_save"] == 0
        server.stop(signal.SIGKILL)
    with tiered(tmp_path) as (_, client):
        assert set(client.keys()) == there
        assert all(client.get(key) == body(200_000, int(key[4:])) for key in there)


def test_a_value_larger_than_the_disk_is_refused_unevicted(tmp_path: Path) -> None:
    with tiered(tmp_path, *SMALL) as (_, client):
        client.set("key", "value")
        with pytest.raises(redis.OutOfMemoryError, match=USED_UP):
            client.set("large", bytes(13 * MB))
        assert client.keys() == [b"key"]


@pytest.mark.parametrize("protect", [("KVPAGEPIN",), ("KVPAGELEASE", 100_000)])
def test_pinned_and_leased_units_stay_on_the_disk(tmp_path: Path, protect: tuple[Any, ...]) -> None:
    with tiered(tmp_path, "--maxmemory", "2mb") as (_, client):
        for seed in range(8):
            set_page(client, seed, req="mine")
    name, *how = protect
    with tiered(tmp_path, *SMALL, "--maxmemory", "2mb") as (_, client):
        assert client.execute_command(name, "mine", *how) == 2
        for seed in range(60):
            set_block(client, seed)
        assert disk_info(client)["disk_evicted"] > 30
        assert all(get_page(client, seed, "mine") == body(20_000, seed) for seed in range(8))


@pytest.mark.parametrize("mode", ["everysec", "no"])
def test_noeviction_accepts_writes_that_fit_after_commits(tmp_path: Path, mode: str) -> None:
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction", "--appendfsync", mode)
    with tiered(tmp_path, *options) as (_, client):
        for i in range(12):
            client.set(f"key:{i}", body(3 * MB // 2, i))
        assert all(client.get(f"key:{i}") == body(3 * MB // 2, i) for i in range(12))


def test_short_strings_are_evicted_when_memory_is_full_of_them(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "1mb", "--maxmemory-policy", "allkeys-lru") as (_, client):
        client.set("manifest", "of an agent")
        for start in range(0, 12_000, 500):
            with client.pipeline(transaction=False) as pipe:
                for i in range(start, start + 500):
                    pipe.set(f"key:{i}", i)
                pipe.get("manifest")
                assert pipe.execute()[-1] == b"of an agent"
        settle(client)
        client.set("one", "more")
        assert client.info("memory")["used_memory"] <= 1.1 * MB
        keys, stats = client.pipeline(transaction=True).dbsize().info("stats").execute()  # nothing is evicted between
        assert keys + stats["evicted_keys"] == 12_002


def test_the_expected_size_equals_the_final_size() -> None:
    rng = random.Random(5)
    for _ in range(200):
        on_disk, waits, batch = DiskUsage(), {}, {}
        names = [b"k%d" % i for i in range(6)]
        expected: dict[bytes, int] = {}
        there: dict[bytes, int] = {}
        for _ in range(60):
            act, name = rng.random(), rng.choice(names)
            if act < 0.5:
                expected[name] = waits[name] = rng.choice((0, 10, 20, 30))
                on_disk.expect(name, waits[name])
            elif act < 0.7 and not batch:
                waits, batch = {}, waits
            elif act < 0.8:  # it could not be written
                waits, batch = batch | waits, {}
            elif act < 0.98:
                for written, size in batch.items():
                    if size:
                        on_disk.add(written, written, size, again=written in waits)
                    else:
                        on_disk.remove(written, written, again=written in waits)
                    there[written] = size
                batch = {}
            assert on_disk.expected == sum(expected.values())
            assert all(on_disk.size_of(name) == expected.get(name, 0) for name in names)
            assert on_disk.replaced == sum(there.get(name, 0) for name in {**waits, **batch} if expected.get(name))
            if not waits and not batch:
                assert on_disk.used == on_disk.expected


def test_a_disk_of_short_strings_replaces_all_of_them_at_once(tmp_path: Path) -> None:
    """Each of them shares a database page with others, and all of these pages are written again."""
    options = (*SMALL, "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")

    def put(client: redis.Redis, keys: list[str], value: str) -> None:
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.set(key, value * 200)
            assert pipe.execute() == [True] * len(keys)

    with tiered(tmp_path, *options) as (_, client):
        filled = 0
        while not disk_info(client)["disk_evicted"]:
            put(client, [f"key:{i}" for i in range(filled, filled + 1000)], "0")
            filled += 1000
        keys = sorted(key.decode() for key in client.scan_iter(count=1000))
        changed = [*keys[::2], "one more"]
        put(client, changed, "1")
        settle(client)
        assert disk_info(client)["disk_failing"] == ""
    with tiered(tmp_path, *options) as (_, client):
        found = client.mget(changed)
        assert set(found) <= {b"1" * 200, None}
        assert found.count(None) < 100  # evicted


def test_many_removals_at_maxdisk_are_committed_in_parts(tmp_path: Path) -> None:
    disk = Disk(tmp_path, maxdisk=16 * MB)
    names = [b"k%d" % i for i in range(100_000)]
    random.Random(1).shuffle(names)

    def write(first: int) -> None:
        disk.write(Write(name, b"", bytes(200)) for name in names[first : first + 100])

    written = 0
    with suppress(MaxDisk):
        for written in range(0, len(names), 100):
            write(written)
    gone = sorted(names[:written])[::2]
    disk.commit_removals(map(Delete, gone))
    write(written)
    there = {record.name for _, record in disk.records() if isinstance(record, Record)}
    assert there == {*names[: written + 100]} - {*gone}
    disk.close()
