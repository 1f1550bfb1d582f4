"""Damage to a record costs its value, not the space that the value took."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpage_server.page import HEADER_SIZE, DType, PageKey, encode_page
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import Clear, Delete, Quarantine, Write
from kvpage_server.store.disk.lmdb_file import DiskFull
from kvpage_server.store.records import name_of_key

MAXDISK = 16 << 20
BIG = 6 << 20  # two fit

Change = Callable[[bytes], Delete | Quarantine | Write]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path, maxdisk=MAXDISK)
    yield disk
    disk.close()


def body(seed: int, size: int = BIG) -> bytes:
    return random.Random(seed).randbytes(size)


def string(number: int) -> Write:
    return Write(b"kstring", body(number, HEADER_SIZE), body(number))


def page(number: int, size: int = BIG) -> Write:
    key = PageKey(b"r", 0, 0, number, 1)
    blob = encode_page(key, body(number, size), dtype=DType.UINT8, page_size=1, head_dim=size)
    return Write(name_of_key(bytes(key)), blob[:HEADER_SIZE], blob[HEADER_SIZE:])


def replaced(name: bytes) -> Write:
    return Write(name, bytes(HEADER_SIZE), b"")


def read(disk: Disk, name: bytes, size: int) -> bytes | None:
    into = bytearray(size)
    [outcome] = disk.read([(name, memoryview(into))])
    return bytes(into) if outcome is not None and not isinstance(outcome, Exception) and outcome else None


def damage_record(disk: Disk, meta: bytes) -> None:
    """Flip bits in every place of the file that has these bytes."""
    data = bytearray(disk.path.read_bytes())
    at = -1
    with disk.path.open("r+b") as file:
        while (at := data.find(meta, at + 1)) >= 0:
            file.seek(at)
            file.write(bytes(byte ^ 0xFF for byte in meta))


@pytest.mark.parametrize("makes", [string, page])
@pytest.mark.parametrize("then", [Delete, Quarantine, replaced])
def test_space_of_a_damaged_record_is_reused(disk: Disk, makes: Callable[[int], Write], then: Change) -> None:
    kept = Write(b"kkept", b"", body(2, 300_000))
    disk.write([kept])
    write = makes(7)
    disk.write([write])
    damage_record(disk, bytes(write.meta))
    disk.write([then(write.name)])
    for number in range(2):  # with the pieces of the damaged record, there is room for one
        disk.write([Write(b"knext%d" % number, b"", body(number))])
    assert read(disk, b"knext1", BIG) == body(1)
    assert read(disk, kept.name, 300_000) == kept.body
    with pytest.raises(DiskFull):
        disk.write([Write(b"kmore", b"", body(5))])


def test_the_neighbouring_pages_stay(disk: Disk) -> None:
    lost, beside = page(7), page(8, 300_000)
    disk.write([lost, beside])
    damage_record(disk, bytes(lost.meta))
    disk.write([Delete(lost.name)])
    disk.write([Write(b"kone", b"", body(5))])
    disk.write([Write(b"ktwo", b"", body(6))])
    assert read(disk, beside.name, 300_000) == beside.body


def test_pieces_that_were_lost_are_found_by_a_later_process(tmp_path: Path) -> None:
    first = Disk(tmp_path, maxdisk=MAXDISK)
    meta = body(1, HEADER_SIZE)
    first.write([Write(b"klost", meta, body(4))])
    damage_record(first, meta)
    first.write([Delete(b"klost")])
    first.close()
    second = Disk(tmp_path, maxdisk=MAXDISK)
    second.write([Write(b"kone", b"", body(5))])
    second.write([Write(b"ktwo", b"", body(6))])
    second.close()


def test_the_rest_of_a_damaged_body_stays_in_quarantine(disk: Disk) -> None:
    disk.write([Write(b"kaside", b"", body(1))])
    disk.write([Quarantine(b"kaside")])
    disk.write([Write(b"kone", b"", body(5))])
    with pytest.raises(DiskFull):
        disk.write([Write(b"ktwo", b"", body(6))])
    assert disk.quarantined == 1


def test_a_quarantine_before_a_flush_frees_no_new_pieces(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.write([Write(b"kold", b"", body(1, 5000))])
    disk.write([Quarantine(b"kold")])
    disk.write([Clear()])
    assert disk.quarantined == 0
    disk.close()
    disk = Disk(tmp_path)
    assert disk.quarantined == 0
    disk.write([Write(b"klive", b"", body(2, 5000))])  # its pieces may have the numbers that those of the other had
    for number in range(20):  # more than are kept: the first ones leave, with their pieces
        disk.write([Write(b"k%d" % number, b"", body(number, 5000))])
        disk.write([Quarantine(b"k%d" % number)])
    assert disk.quarantined == 16
    assert read(disk, b"klive", 5000) == body(2, 5000)
    disk.close()


def test_a_failed_commit_does_not_change_the_quarantine(disk: Disk) -> None:
    disk.write([Write(b"kaside", b"", body(1, 5000))])
    with pytest.raises(DiskFull):
        disk.write([Quarantine(b"kaside"), Write(b"kmore", b"", body(2, 2 * MAXDISK))])
    assert disk.quarantined == 0
    assert read(disk, b"kaside", 5000) == body(1, 5000)
