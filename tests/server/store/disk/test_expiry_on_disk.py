"""When a value expires is written without the value, and with the commit that its transaction is part of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_tiered import MB, body, disk_info, settle, tiered
from waiting import PATIENCE

from kvpage_server.core import NewPages
from kvpage_server.page import unix_ms
from kvpage_server.store import contents
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import Change, Value
from kvpage_server.store.disk.lmdb_file import DiskError
from kvpage_server.store.disk.tier import DiskTier
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.records import Record

PAGE, LONG, SHORT = b"kv:r:0:0:0:0", b"long", b"short"
LATER = unix_ms() + 3_600_000


@asynccontextmanager
async def with_disk(directory: Path) -> AsyncIterator[tuple[Keyspace, DiskTier, Disk]]:
    """A keyspace that has a page, a long string and a short one, none of which is on its disk yet."""
    disk = Disk(directory, maxdisk=64 * MB)
    keyspace = Keyspace(disk=disk, maxdisk=64 * MB)
    tier = keyspace.tier
    assert tier is not None
    tier.connect(mode="always", limit=64 * MB, scrub_rate=0, moved=lambda: None)
    words: list[Any] = [b"r", b"0", b"0", b"0", b"0", b"8", b"1", b"2000", b"0", bytes(2000)]
    keyspace.contents.set_pages(NewPages(words, 0, 1, keyspace.arena, 1, False, True))
    keyspace.contents.set_string(LONG, bytes(2000))
    keyspace.contents.set_string(SHORT, b"value")
    try:
        yield keyspace, tier, disk
    finally:
        await tier.close()


def expiries(disk: Disk) -> dict[bytes, int]:
    return {record.name[1:]: record.expires for _, record in disk.records() if isinstance(record, Record)}


async def test_a_write_in_progress_keeps_its_expiry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, goes_on = threading.Event(), threading.Event()
    async with with_disk(tmp_path) as (keyspace, tier, disk):
        change_of = tier.behind._writer._change_of

        def wait(name: bytes, value: Value) -> Change:
            started.set()
            assert goes_on.wait(PATIENCE)
            return change_of(name, value)

        monkeypatch.setattr(tier.behind._writer, "_change_of", wait)
        assert await asyncio.to_thread(started.wait, PATIENCE)
        first: list[dict[bytes, int]] = []
        tier.behind.when_durable(tier.behind.position, lambda: first.append(expiries(disk)))
        keyspace.contents.set_string(b"marker", b"of the next commit")
        for key in (PAGE, LONG, SHORT):
            keyspace.contents.set_expiry(key, LATER - 1)
            keyspace.contents.set_expiry(key, LATER)
        goes_on.set()
        await tier.behind.settle()
        assert first == [{PAGE: 0, LONG: 0, SHORT: 0}]
        assert expiries(disk) == {PAGE: LATER, LONG: LATER, SHORT: LATER, b"marker": 0}
        assert tier.stored.usage.replaced == 0
        assert tier.stored.usage.expected == tier.stored.usage.used


async def test_an_expiry_set_during_a_failed_commit_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_disk(tmp_path) as (keyspace, tier, disk):
        write, fails, goes_on = disk.write, threading.Event(), threading.Event()

        def fail(changes: Any) -> None:
            list(changes)
            fails.set()
            assert goes_on.wait(PATIENCE)
            monkeypatch.setattr(disk, "write", write)
            raise DiskError("it does not write")

        monkeypatch.setattr(disk, "write", fail)
        assert await asyncio.to_thread(fails.wait, PATIENCE)
        for key in (PAGE, LONG, SHORT):
            keyspace.contents.set_expiry(key, LATER)
        goes_on.set()
        while not tier.behind.settled:
            await tier.behind.settle()
        assert expiries(disk) == {PAGE: LATER, LONG: LATER, SHORT: LATER}


@pytest.mark.parametrize("stale", [1090, 1115, 1140])
async def test_all_pages_of_a_block_expire_during_a_tidy_up(tmp_path: Path, stale: int) -> None:
    pages = [b"kv:r:0:%d:0:0" % head for head in range(60)]
    async with with_disk(tmp_path) as (keyspace, _, _):
        for head, key in enumerate(pages):
            words = [b"r", b"0", b"%d" % head, b"0", b"0", b"8", b"1", b"32", b"0", bytes(32)]
            keyspace.contents.set_pages(NewPages(words, 0, 1, keyspace.arena, 1, False, True))
            keyspace.contents.set_expiry(key, LATER)
    disk = Disk(tmp_path, maxdisk=64 * MB)
    keyspace = Keyspace(disk=disk, maxdisk=64 * MB)
    assert keyspace.tier is not None
    keyspace.tier.load()
    keyspace.tier.connect(mode="always", limit=64 * MB, scrub_rate=MB, moved=lambda: None)
    assert keyspace.index.unloaded_pages == 60
    for more in range(stale):  # of which one counts
        keyspace.contents.set_expiry(SHORT, LATER + 100_000 + more)
    while keyspace.sweep(LATER + 2000, 100) == 100:
        pass
    assert sorted(keyspace.listing.keys()) == [LONG, SHORT]
    assert keyspace.contents.expiry_order.keys == 1
    await keyspace.tier.close()


async def test_expired_pages_of_a_block_leave_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [b"kv:r:0:%d:0:0" % head for head in range(1, 60)]
    async with with_disk(tmp_path) as (keyspace, tier, disk):
        for head, key in enumerate(pages, start=1):
            words = [b"r", b"0", b"%d" % head, b"0", b"0", b"8", b"1", b"32", b"0", bytes(32)]
            keyspace.contents.set_pages(NewPages(words, 0, 1, keyspace.arena, 1, False, True))
            keyspace.contents.set_expiry(key, LATER)
        await tier.behind.settle()
        monkeypatch.setattr(contents, "unix_ms", lambda: LATER)
        block = keyspace.reader.block(b"r", 0)
        assert block is not None
        assert block.pages == 1
        await tier.behind.settle()
        assert expiries(disk) == {PAGE: 0, LONG: 0, SHORT: 0}
        assert tier.stored.usage.expected == tier.stored.usage.used
        assert tier.stored.usage.replaced == 0


def test_a_value_with_changing_expiries_is_not_rewritten(tmp_path: Path) -> None:
    options = ("--maxdisk", "16mb", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction")
    with tiered(tmp_path, *options) as (_, client):
        client.set("large", body(11 * MB, 1))
        settle(client)
        with client.pipeline() as pipe:
            for seconds in range(1000, 1020):
                pipe.expire("large", seconds)
                pipe.getex("large", persist=True)
            pipe.expire("large", 2000)
            pipe.execute()
        assert disk_info(client)["disk_waiting_bytes"] < 1000
        settle(client)
        assert disk_info(client)["disk_failing"] == ""
    with tiered(tmp_path, *options) as (_, client):
        assert 1000 < client.ttl("large") <= 2000
        assert client.get("large") == body(11 * MB, 1)
