"""Values that a reply borrows from the map of the disk's file: they do not change, and delay no client."""

from __future__ import annotations

import random
import sys
import time
from itertools import chain
from pathlib import Path

import redis
from servers import start_server
from wire import Wire, encode_command, parse

from kvpage_server.store.disk.borrowed_reads import COPIED_PER_STEP, LONGEST, MOST, Mapped, MappedBody, MappedReads
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import Write
from kvpage_server.store.memory.index import OnDisk
from kvpage_server.store.records import name_of_block

SHAPE = (2, 2, 64, 0, 1, 0, 1, 1024)  # layers heads page_size ttl P, then the plane: 512 KiB of float16
BLOCK = 2 * 2 * 64 * 1024 * 2


def body(seed: int, version: int) -> bytes:
    return random.Random(1000 * version + seed).randbytes(BLOCK)


def store(disk: Disk, version: int, count: int = 8) -> None:
    disk.write(Write(name_of_block(b"b", seed), b"", body(seed, version)) for seed in range(count))


def lend(disk: Disk, *seeds: int) -> tuple[Mapped, list[OnDisk], list[MappedBody]]:
    """One read of several blocks: their placeholders, and their borrowed bodies."""
    values = [OnDisk(name_of_block(b"b", seed), BLOCK) for seed in seeds]
    reading, found = disk.find([(value.name, BLOCK) for value in values])
    read, bodies = Mapped(reading), list[MappedBody]()
    for value, views in zip(values, found, strict=True):
        assert isinstance(views, list)
        bodies.append(MappedBody(read, value, views))
    return read, values, bodies


def reply_bytes(value: OnDisk, body: MappedBody) -> bytes:
    pieces = body.pieces([value])
    assert pieces is not None
    return b"".join(piece if isinstance(piece, bytes) else piece.view for piece in pieces)


def test_a_borrowed_value_is_unchanged_by_an_overwrite(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    store(disk, 0)
    read, (value,), (borrowed,) = lend(disk, 3)
    for version in range(1, 6):
        store(disk, version)
    assert reply_bytes(value, borrowed) == b"$%d\r\n%b\r\n" % (BLOCK, body(3, 0))
    del borrowed, read
    disk.close()


def test_the_file_grows_only_during_borrowed_reads(tmp_path: Path) -> None:
    moved: list[None] = []
    disk, loans = Disk(tmp_path), MappedReads(lambda: moved.append(None))
    for version in range(3):
        store(disk, version)
    read, (value,), (borrowed,) = lend(disk, 3)
    loans.add(read)
    held = disk.size
    for version in range(3, 6):
        store(disk, version)
    assert disk.size > held + 2 * 8 * BLOCK

    loans.copy_to_memory()
    assert moved
    called_in = disk.size
    for version in range(6, 12):
        store(disk, version)
    assert disk.size == called_in
    assert reply_bytes(value, borrowed) == b"$%d\r\n%b\r\n" % (BLOCK, body(3, 2))
    disk.close()


def test_old_and_surplus_borrowed_reads_are_ended(tmp_path: Path) -> None:
    moved: list[None] = []
    disk, loans = Disk(tmp_path), MappedReads(lambda: moved.append(None))
    store(disk, 0)
    ended, *rest = lend(disk, 0)
    loans.add(ended)
    del ended, rest
    reads = [lend(disk, seed % 8) for seed in range(MOST)]
    for read, _, _ in reads:
        loans.add(read)
    loans.copy_old_to_memory()
    assert not moved
    reads[0][0].since -= 2 * LONGEST
    loans.copy_old_to_memory()
    assert [read.is_copied for read, _, _ in reads[:2]] == [True, False]
    loans.add(Mapped(None))  # ends immediately: nothing refers to it
    surplus = [lend(disk, seed) for seed in range(2)]
    for read, _, _ in surplus:
        loans.add(read)
    assert [read.is_copied for read, _, _ in reads[:3]] == [True, True, False]
    assert len(moved) == 2
    del read, reads, surplus
    disk.close()


def test_a_long_borrowed_read_is_copied_in_steps(tmp_path: Path) -> None:
    disk, loans = Disk(tmp_path), MappedReads(lambda: None)
    store(disk, 0)
    seeds = [seed % 8 for seed in range(2 * COPIED_PER_STEP // BLOCK)]
    read, values, bodies = lend(disk, *seeds)
    loans.add(read)
    read.since -= 2 * LONGEST
    loans.copy_old_to_memory()
    assert not read.is_copied
    loans.copy_old_to_memory()
    assert read.is_copied
    for seed, value, borrowed in zip(seeds, values, bodies, strict=True):
        assert reply_bytes(value, borrowed) == b"$%d\r\n%b\r\n" % (BLOCK, body(seed, 0))
    disk.close()


def test_sent_values_of_a_borrowed_read_are_not_copied(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    store(disk, 0)
    read, values, bodies = lend(disk, *range(8))
    del values[:5], bodies[:5]
    assert read.copy_to_memory(sys.maxsize) == 3 * BLOCK
    assert read.is_copied
    disk.close()


def test_a_slow_reader_gets_whole_blocks_during_overwrites(tmp_path: Path) -> None:
    """It reads longer than a borrowed read lasts: the rest continues from memory."""
    count, rounds = 128, 4  # 64 MB: several times the buffers of server and kernel for a client
    names = [(b"b", b"%d" % seed) for seed in range(count)]
    options = ("--store", "tiered", "--maxmemory", "2mb", "--appendfsync", "everysec")
    with start_server(*options, directory=tmp_path) as server, server.client() as writer:
        for seed in range(count):
            _set(writer, seed, 0)
        writer.execute_command("SAVE")
        with Wire(server.port) as reader:
            reader.send(encode_command([b"KVBLOCKMGET", b"%d" % count, *chain.from_iterable(names)]))
            for version in range(1, rounds):
                time.sleep(0.5 * LONGEST)
                for seed in range(count):
                    _set(writer, seed, version)
                writer.execute_command("SAVE")
            found = parse(reader.reply())
        versions = [_version(seed, got, rounds) for seed, got in enumerate(found)]
        assert versions[0] == 0
        assert versions[-1] == rounds - 1
        assert writer.info("kvpage")["disk_corrupt"] == 0


def _set(client: redis.Redis, seed: int, version: int) -> None:
    assert client.execute_command("KVBLOCKSET", "b", seed, *SHAPE, body(seed, version))


def _version(seed: int, got: bytes, versions: int) -> int:
    for version in range(versions):
        if got == body(seed, version):
            return version
    raise AssertionError(f"block {seed} is none that was ever written")
