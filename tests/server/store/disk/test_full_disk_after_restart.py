"""A store that starts with a full disk evicts as it did before: it refuses nothing, whatever it is asked first."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import redis
from test_disk_policies import SMALL, taken
from test_tiered import BLOCK, MB, body, disk_info, page_args, set_block, set_page, settle, tiered

FULL = (*SMALL, "--maxmemory", "4mb")
TTL = 5000  # seconds
STRINGS, PAGES, BLOCKS = range(500), range(240), range(5)


def fill(client: redis.Redis, ttl: int) -> None:
    for seed in STRINGS:
        client.set(f"old:{seed}", body(7000, seed), ex=ttl or None)
    for seed in PAGES:
        set_page(client, seed, ttl=ttl)
    for seed in BLOCKS:
        client.execute_command("KVBLOCKSET", "old", seed, 2, 2, 64, ttl, 1, 0, 1, 1024, body(BLOCK, seed))
    settle(client)


def ask_about_everything(client: redis.Redis) -> None:
    """Run the first queries of an engine and of a string client: each answer is a lease, within the limit."""
    with client.pipeline(transaction=False) as pipe:
        for seed in STRINGS:
            pipe.exists(f"old:{seed}")
        for seed in PAGES:
            pipe.exists(":".join(map(str, ("kv", *page_args(seed)))))
        pipe.execute()
    for page in range(len(PAGES) // 4):
        client.execute_command("KVPAGEPREFIX", 4, 600_000, 1, "r", page)
    assert client.execute_command("KVPAGELEASE", "old", 600_000) <= len(BLOCKS)


@pytest.mark.parametrize("policy", ["allkeys-prefix", "volatile-ttl"])
def test_a_restart_refuses_no_write_under_a_policy_that_evicts(tmp_path: Path, policy: str) -> None:
    ttl = TTL if policy == "volatile-ttl" else 0
    options = (*FULL, "--maxmemory-policy", policy)
    with tiered(tmp_path, *options) as (_, client):
        fill(client, ttl)
    with tiered(tmp_path, *options) as (_, client):
        ask_about_everything(client)
        assert disk_info(client)["leased_or_pinned"] > 100
        asked = client.dbsize()
        assert taken(client, range(1500), size=8000, ex=ttl or None) == list(range(1500))
        for seed in range(300):
            set_page(client, seed, ttl=ttl, req="new")
        for seed in range(20):
            client.execute_command("KVBLOCKSET", "new", seed, 2, 2, 64, ttl, 1, 0, 1, 1024, body(BLOCK, seed))
        assert disk_info(client)["disk_evicted"] > 1000
        assert asked == 500 + 240 + 5 * 4


def test_a_restart_refuses_values_that_noeviction_cannot_hold(tmp_path: Path) -> None:
    options = (*FULL, "--maxmemory-policy", "noeviction")
    with tiered(tmp_path, *options) as (_, client):
        before = taken(client, range(1600), size=8000)
    with tiered(tmp_path, *options) as (_, client):
        assert client.dbsize() == len(before)
        assert taken(client, range(1600, 1700), size=8000) == []


def test_leases_on_disk_are_limited_to_half_of_it(tmp_path: Path) -> None:
    with tiered(tmp_path, *FULL) as (_, client):
        for seed in range(20):
            set_block(client, seed)
    with tiered(tmp_path, *FULL) as (_, client):
        names: list[Any] = [word for page in range(20) for word in ("b", page)]
        assert client.execute_command("KVPAGEPREFIX", 4, 0, 20, *names) == 20
        assert client.execute_command("KVPAGEPREFIX", 4, 600_000, 20, *names) == 11  # of 12 MiB and their pieces
        with pytest.raises(redis.ResponseError, match="6291456 bytes together, half of what maxdisk has for values"):
            client.execute_command("KVPAGEPIN", "b")


def test_a_quota_used_up_before_a_restart_is_used_up_after_it(tmp_path: Path) -> None:
    options = ("--quota", "kv:r:*", "5mb", "--maxmemory-policy", "noeviction")

    def store(client: redis.Redis, first: int) -> bool:
        names = (("r", 0, 0, page, 0) for page in range(first, first + 500))
        pages = [word for name in names for word in (*name, 8, 1, 2000, 0, bytes(2000))]
        try:
            return bool(client.execute_command("KVPAGEMSET", 500, *pages))
        except redis.OutOfMemoryError as error:
            assert "the quota of 'kv:r:*'" in str(error)  # noqa: PT017 - nothing else is refused
            return False

    with tiered(tmp_path, *options) as (_, client):
        stored = sum(takewhile(bool, (store(client, first) for first in range(0, 50_000, 500))))
        assert stored == 5 * MB // (500 * 2064)
    with tiered(tmp_path, *options) as (_, client):
        assert not any(store(client, first) for first in range(50_000, 55_000, 500))


@pytest.mark.parametrize("mode", ["everysec", "always"])
@pytest.mark.parametrize("lower", [20 * MB, 29 * MB, 31 * MB])
def test_file_larger_than_a_lowered_maxdisk_accepts_writes(tmp_path: Path, lower: int, mode: str) -> None:
    """One commit of 30 MB leaves no free page in LMDB's file, and a removal needs free pages, too."""
    with tiered(tmp_path, "--maxmemory", "300mb", "--maxdisk", "1gb") as (_, client):
        with client.pipeline(transaction=True) as pipe:
            for seed in range(30):
                pipe.set(f"old:{seed}", body(MB, seed))
            pipe.execute()
        settle(client)
    lowered = ("--maxmemory", "5mb", "--maxdisk", str(lower), "--appendfsync", mode)
    with tiered(tmp_path, *lowered) as (_, client):
        for seed in range(20):
            client.set(f"new:{seed}", body(MB, seed))
        settle(client)
        assert disk_info(client)["disk_failing"] == ""
        assert disk_info(client)["disk_bytes"] <= lower
        assert disk_info(client)["disk_file_bytes"] <= 31 * MB + lower // 8
    with tiered(tmp_path, *lowered) as (_, client):
        for seed in range(10, 20):
            assert client.get(f"new:{seed}") == body(MB, seed)
