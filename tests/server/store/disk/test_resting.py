"""Queries about a block on disk: its pages are listed from their rows on disk, and it stays there."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_tiered import MB, settle, tiered

from kvpage_server.core import NewPages
from kvpage_server.page import unix_ms
from kvpage_server.store import reading, records
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.keyspace import Keyspace

START = unix_ms()
HOUR = 3_600_000


def key_of(number: int) -> bytes:
    """The key of a page of the one block."""
    return b"kv:r:%d:%d:7:0" % divmod(number, 64)


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Keyspace]:
    """Open a store, as at a start."""
    keyspace = Keyspace(disk=Disk(directory, maxdisk=64 * MB), maxdisk=64 * MB)
    tier = keyspace.tier
    assert tier is not None
    tier.load()
    tier.connect(mode="always", limit=64 * MB, scrub_rate=MB, moved=lambda: None)
    try:
        yield keyspace
    finally:
        await tier.close()


@asynccontextmanager
async def unloaded_pages(directory: Path, expiries: list[int]) -> AsyncIterator[Keyspace]:
    """A block that rests, with a page for each of these expiries, 0 for none."""
    async with opened(directory) as keyspace:
        for number, expires in enumerate(expiries):
            words: list[Any] = [b"r", *key_of(number).split(b":")[2:4], b"7", b"0", b"8", b"1", b"8", b"0", bytes(8)]
            keyspace.contents.set_pages(NewPages(words, 0, 1, keyspace.arena, 1, False, True))
            if expires:
                keyspace.contents.set_expiry(key_of(number), expires)
    async with opened(directory) as keyspace:
        assert keyspace.index.unloaded_pages == len(expiries)
        yield keyspace


def scanned(keyspace: Keyspace) -> list[bytes]:
    """Return the keys of a complete scan."""
    cursor, places, _ = keyspace.listing.scan(0, 10)
    found = keyspace.listing.existing_keys(places)
    while cursor:
        cursor, places, _ = keyspace.listing.scan(cursor, 10)
        some = keyspace.listing.existing_keys(places)
        found += some
    return found


@pytest.mark.parametrize("later", [0, HOUR, HOUR + 1, 2 * HOUR, 3 * HOUR + 500])
async def test_pages_of_a_block_on_disk_are_listed_unless_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    expiries = [(0, START + HOUR, START + 2 * HOUR, START + 3 * HOUR)[number % 4] for number in range(90)]
    now = START + later
    living = [key_of(number) for number, expires in enumerate(expiries) if not expires or expires > now]
    async with unloaded_pages(tmp_path, expiries) as keyspace:
        monkeypatch.setattr(reading, "unix_ms", lambda: now)
        assert sorted(keyspace.listing.keys()) == sorted(scanned(keyspace)) == sorted(living)
        assert len(keyspace.listing.names()) == keyspace.index.unloaded_pages == 90
        keyspace.index.block(b"r", 7)  # this wakes it: the scan that has begun knows it by its name still
        assert keyspace.index.unloaded_pages == 0
        assert sorted(keyspace.listing.keys()) == sorted(scanned(keyspace)) == sorted(living)


async def test_a_listing_of_a_block_on_disk_reads_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, thread = 0, threading.get_ident()

    class Counted(struct.Struct):
        def iter_unpack(self, data: Any, /) -> Iterator[tuple[Any, ...]]:
            nonlocal rows
            for row in super().iter_unpack(data):
                rows += threading.get_ident() == thread  # the disk's own thread verifies rows meanwhile
                yield row

    async with unloaded_pages(tmp_path, [START + HOUR] * 500) as keyspace:
        monkeypatch.setattr(records, "_ROW", Counted(records._ROW.format))
        asked: list[Iterable[bytes]] = [keyspace.listing.keys(), scanned(keyspace), keyspace.listing.names()]
        assert [len(list(keys)) for keys in asked] == [500] * 3
        assert rows == 3 * 500


def test_a_starting_server_lists_the_pages_that_have_not_expired(tmp_path: Path) -> None:
    numbers = range(60)
    with tiered(tmp_path) as (_, client):
        for number in numbers:
            name = key_of(number).decode().split(":")[1:]
            client.execute_command("KVPAGESET", *name, 8, 1, 8, 0, bytes(8))
        soon = unix_ms() + 1000
        for number in numbers[::3]:
            client.pexpireat(key_of(number), soon)
        for number in numbers[1::3]:
            client.expire(key_of(number), 1000)
        settle(client)
    time.sleep(max(soon - unix_ms(), 0) / 1000)
    living = {key_of(number) for number in numbers if number % 3}
    with tiered(tmp_path) as (_, client):
        assert set(client.scan_iter()) == living
        assert set(client.keys()) == living


async def test_an_index_without_memory_loses_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has the pages that stay in memory when a batch fails."""
    async with opened(tmp_path) as keyspace:
        contents = keyspace.contents
        used_all = contents.eviction_order.units.used_all

        def fail(units: list[Any]) -> None:
            if contents.expiry_order.keys:
                raise MemoryError
            used_all(units)

        monkeypatch.setattr(contents.eviction_order.units, "used_all", fail)
        words: list[Any] = []
        for ttl in (b"0", b"60", b"90"):
            words += [b"r", b"0", b"%d" % len(words), b"7", b"0", b"8", b"1", b"8", ttl, bytes(8)]
        with pytest.raises(MemoryError):
            contents.set_pages(NewPages(words, 0, 3, keyspace.arena, unix_ms(), False, True))
        stored = len(contents.catalogue.entries)
    async with opened(tmp_path) as keyspace:
        assert keyspace.index.unloaded_pages == stored == 2
