"""The default limit of the disk, and the order in which its values go when it is reached."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from browsing import start_seen_server
from keyspaces import set_block
from test_kvpage_cli import kvpage
from test_tiered import MB, TIERED, body, disk_info, tiered
from waiting import until

from kvpage_server.app import _open_store
from kvpage_server.configuration import config
from kvpage_server.configuration.config import from_arguments
from kvpage_server.page import BlockShape, DType, Plane
from kvpage_server.store.disk.database import FILE
from kvpage_server.store.disk.disk_full import Chains
from kvpage_server.store.memory.index import Block, PageIndex

ROOT = Path(__file__).parents[4]
SMALL = ("--maxdisk", "16mb")  # of which 12 are for values
SHAPE = BlockShape(1, 1, 64, (Plane(0, DType.FLOAT16, 2048),))  # 256 KiB: 46 of them fit


class Usage(NamedTuple):
    total: int
    used: int
    free: int


# -- the default -------------------------------------------------------------------------------------------------------


def test_the_default_limit_is_half_of_the_space_and_shown(tmp_path: Path) -> None:
    with start_seen_server(*TIERED, directory=tmp_path) as seen, seen.server.client() as client:
        limit = disk_info(client)["maxdisk"]
        assert 0.4 * shutil.disk_usage(tmp_path).free < limit < 0.6 * shutil.disk_usage(tmp_path).free
        assert client.config_get("maxdisk") == {"maxdisk": str(limit)}
        assert "maxdisk auto: half of the free space and the store together" in seen.server.log
        assert "no limit, appendfsync" not in seen.server.log
        assert seen.metrics()["kvpage_disk_limit_bytes",] == limit
        assert "maxdisk is " in kvpage("status", url=seen.server.url)[1]
        with seen.browser() as browser:
            assert seen.event("overview", browser)["disk"]["limit"] == limit


def test_zero_is_still_no_limit(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxdisk", "0") as (server, client):
        assert disk_info(client)["maxdisk"] == 0
        assert client.config_get("maxdisk") == {"maxdisk": "0"}
        assert "no limit, appendfsync" in server.log


def test_the_default_limit_is_at_least_the_stored_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiered(tmp_path) as (_, client):
        client.mset({f"key:{i}": body(MB, i) for i in range(40)})
        client.mset({f"short:{i}": body(600, i) for i in range(20_000)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 40, 0))
    keyspace = _open_store(from_arguments(list(TIERED)))
    assert keyspace.tier is not None
    assert keyspace.tier.stored.maxdisk >= (tmp_path / FILE).stat().st_size
    assert keyspace.tier.account.limit >= keyspace.tier.stored.usage.used > 70 * MB
    assert keyspace.tier.disk._env.info()["map_size"] >= keyspace.tier.stored.maxdisk
    keyspace.tier.disk.close()


def test_the_default_limit_includes_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * MB, 0, 80 * MB))
    assert config.default_maxdisk(tmp_path) == 40 * MB
    (tmp_path / FILE).write_bytes(bytes(20 * MB))
    assert config.default_maxdisk(tmp_path) == 50 * MB
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * MB, 0, 0))
    assert config.default_maxdisk(tmp_path) == 20 * MB


def test_a_disk_that_is_full_is_shown_in_red(tmp_path: Path) -> None:
    with start_seen_server(*TIERED, *SMALL, directory=tmp_path) as seen, seen.server.client() as client:
        with seen.browser() as browser:
            assert seen.event("overview", browser)["disk"]["full"] is False
        assert "maxdisk is reached" not in kvpage("status", url=seen.server.url)[1]
        for i in range(60):
            set_block(client, f"r{i}", 0, SHAPE)
        until(lambda: client.info("persistence")["rdb_changes_since_last_save"] == 0)
        with seen.browser() as browser:
            until(lambda: seen.event("overview", browser)["disk"]["full"], "figures of the full disk")
            assert seen.event("overview", browser)["disk"]["for_values"] == 12 * MB
        page = ROOT / "kvpage_server" / "web" / "store" / "main.html"
        assert 'class="bad" id="full"' in page.read_text(encoding="utf-8")
        assert seen.metrics()["kvpage_disk_full",] == 1
        assert "maxdisk is reached: " in kvpage("status", url=seen.server.url)[1]


# -- the order ---------------------------------------------------------------------------------------------------------


def prompt(client: redis.Redis, name: str, blocks: int, *first: str) -> list[str]:
    """Store a prompt that begins with blocks of others, and say which block extends which. Returns its blocks."""
    own = [f"{name}.{i}" for i in range(blocks)]
    for block in own:
        set_block(client, block, 0, SHAPE)
    names = [*first, *own]
    flat = [word for block in names for word in (block, 0)]
    assert client.execute_command("KVPAGEPREFIX", SHAPE.pages, 0, len(names), *flat) == len(names)
    return own


def left(client: redis.Redis, blocks: list[str]) -> list[bool]:
    return [bool(client.execute_command("KVBLOCKEXISTS", block, 0)) for block in blocks]


@pytest.fixture(params=["0", "1mb"], ids=["in memory", "on disk only"])
def full(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """A client of a server that has room for 46 blocks."""
    options: tuple[Any, ...] = (*SMALL, "--maxmemory", request.param, "--appendfsync", "always")
    with tiered(tmp_path, *options) as (_, client):
        yield client


def test_ends_are_evicted_first_and_a_shared_beginning_last(full: redis.Redis) -> None:
    shared = prompt(full, "shared", 2)
    prompts = [prompt(full, f"p{i}", 10, *shared) for i in range(8)]
    found = [left(full, blocks) for blocks in prompts]
    assert all(there[: sum(there)] == [True] * sum(there) for there in found), "no prompt has a hole"
    assert left(full, shared) == [True, True]
    assert all(found[-1]), "the last one is whole"
    assert not all(found[0])


def test_a_prompt_that_is_read_from_disk_keeps_its_beginning(full: redis.Redis) -> None:
    """Each block is read by itself, the first one first, so the first one was read the longest ago."""
    first = prompt(full, "first", 10)
    prompt(full, "second", 10)
    for block in first:
        assert full.execute_command("KVBLOCKGET", block, 0)
    for i in range(3):
        prompt(full, f"later.{i}", 10)
    there = left(full, first)
    assert there == [True] * sum(there) + [False] * (10 - sum(there))


def test_a_pinned_end_keeps_its_beginning(full: redis.Redis) -> None:
    first = prompt(full, "first", 5)
    assert full.execute_command("KVPAGEPIN", first[-1]) == 1
    for i in range(8):
        prompt(full, f"later.{i}", 10)
    assert all(left(full, first))


@pytest.mark.parametrize("maxmemory", ["64mb", "5mb"])
def test_a_beginning_is_evicted_after_lmdbs_reserve_is_used(tmp_path: Path, maxmemory: str) -> None:
    """All ends are pinned. The reserve has space for some more blocks, which break no prompt."""
    with tiered(tmp_path, *SMALL, "--maxmemory", maxmemory, "--appendfsync", "always") as (_, client):
        first = prompt(client, "first", 44)
        client.execute_command("KVPAGEPIN", first[-1])
        for i in range(7):
            set_block(client, f"pinned.{i}", 0, SHAPE)
            client.execute_command("KVPAGEPIN", f"pinned.{i}")
            if i == 5:
                assert all(left(client, first))
        for i in range(20):
            set_block(client, f"later.{i}", 0, SHAPE)
        assert left(client, first)[-1]
        assert all(left(client, [f"pinned.{i}" for i in range(7)]))


def test_digests_stay_as_long_as_their_blocks(full: redis.Redis) -> None:
    """Short strings are the oldest keys, and gain nothing."""
    full.mset({f"seal:{i}": "0123456789abcdef" for i in range(500)})
    for i in range(100):
        set_block(full, f"r{i}", 0, SHAPE)
    assert full.exists(*(f"seal:{i}" for i in range(500))) == 500


def test_short_strings_go_when_they_take_most_of_the_disk(full: redis.Redis) -> None:
    for start in range(0, 40_000, 1000):
        full.mset({f"text:{start + i}": body(400, i) for i in range(1000)})
    assert full.info("stats")["evicted_keys"] > 1000
    set_block(full, "r", 0, SHAPE)
    assert full.execute_command("KVBLOCKEXISTS", "r", 0)


def test_other_policies_know_no_prefixes_on_disk(tmp_path: Path) -> None:
    with tiered(tmp_path, *SMALL, "--maxmemory", "1mb", "--appendfsync", "always") as (_, client):
        first = prompt(client, "first", 10)
        prompt(client, "fill", 34)
        prompt(client, "more", 4)
        assert left(client, first)[0], "it was deferred"
        client.config_set("maxmemory-policy", "allkeys-lru")
        prompt(client, "rest", 44)
        assert not any(left(client, first))


# -- links -------------------------------------------------------------------------------------------------------------


def test_links_between_blocks_follow_the_existing_blocks() -> None:
    index = PageIndex()
    chains = Chains(index)
    a, b, c = (index.open(name, 0) for name in (b"a", b"b", b"c"))

    def gone(block: Block) -> list[tuple[bytes, int]]:
        index.remove(block)
        return [*chains.removed(block)]

    chains.follow([a, b])
    chains.follow([a, c])
    chains.follow([b, a])  # a circle
    assert [chains.is_extended(name, 0) for name in (b"a", b"b", b"c")] == [True, False, False]
    assert gone(b) == [(b"a", 0)]
    assert chains.is_extended(b"a", 0)
    assert gone(a) == []
    other = index.open(b"d", 0)
    chains.follow([other, c])  # the block that it extended does not exist any more
    assert chains.is_extended(b"d", 0)
    assert gone(c) == [(b"d", 0)]
    assert not chains.is_extended(b"d", 0)
    assert not chains._before
    assert not chains._extensions


def test_page_ids_are_links_too() -> None:
    index = PageIndex()
    chains = Chains(index)
    first, second = index.open(b"r", 0), index.open(b"r", 1)
    assert chains.is_extended(b"r", 0)
    assert not chains.is_extended(b"r", 1)
    index.remove(second)
    assert [*chains.removed(second)] == [(b"r", 0)]
    assert not chains.is_extended(first.req_id, first.page)
