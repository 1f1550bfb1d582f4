"""The store on disk: writes are readable, as a whole or not at all, by one server, from our own file."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lmdb
import pytest

from kvpage_server.page import BlockShape, DType, PageKey, Plane, encode_page
from kvpage_server.store.disk.database import FILE, Disk
from kvpage_server.store.disk.encoding import Clear, Delete, Quarantine, SetExpiry, Write
from kvpage_server.store.disk.lmdb_file import CODED_FORMAT, DiskError, DiskFull
from kvpage_server.store.disk.usage import Stored
from kvpage_server.store.disk.write_behind import Batch, DiskWriter
from kvpage_server.store.memory.catalogue import Catalogue
from kvpage_server.store.memory.index import Extent, OnDisk
from kvpage_server.store.records import INLINE, PIECE, Damaged, Record, footprint, name_of_block, name_of_key

SIZES = [0, 1, INLINE, INLINE + 1, PIECE - 1, PIECE, PIECE + 1, 5_000_000]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.close()


def read(disk: Disk, name: bytes, size: int) -> bytes | None:
    into = bytearray(size)
    [outcome] = disk.read([(name, memoryview(into))])
    if isinstance(outcome, Exception):
        raise outcome
    return bytes(into) if outcome else None


def body(size: int, seed: int = 0) -> bytes:
    return random.Random(seed * 1_000_003 + size).randbytes(size)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))


def damage(disk: Disk, content: bytes) -> None:
    """Flip a bit of a body in the file, behind the store's back."""
    where = disk.path.read_bytes().index(content)
    flip(disk.path, where + len(content) // 2)


def test_a_file_system_without_links_has_a_file_of_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAT has none, for example."""

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refused)
    for value in (b"one", b"two"):
        disk = Disk(tmp_path)
        disk.write([Write(b"k", b"", value)])
        assert disk.check(b"k") == 3
        disk.close()


@pytest.mark.parametrize("size", SIZES)
def test_a_body_of_any_size_is_read_as_it_was_written(disk: Disk, size: int) -> None:
    disk.write([Write(b"kx", b"meta", body(size), expires=5, used=7)])
    assert read(disk, b"kx", size) == body(size)
    assert disk.check(b"kx") == size
    [(_, record)] = disk.records()
    assert isinstance(record, Record)
    assert (record.name, record.meta, record.expires, record.used, record.body.size) == (b"kx", b"meta", 5, 7, size)


def test_names_of_any_length_are_found(disk: Disk) -> None:
    names = [b"k" + bytes([65 + i]) * length for i, length in enumerate((0, 1, 499, 500, 511, 70_000))]
    disk.write(Write(name, b"", name) for name in names)
    assert {record.name for _, record in disk.records() if isinstance(record, Record)} == set(names)
    assert all(read(disk, name, len(name)) == name for name in names)
    disk.write(map(Delete, names))
    assert not len(disk)


def test_a_block_and_a_key_of_the_same_spelling_are_two_values(disk: Disk) -> None:
    disk.write([Write(name_of_block(b"r", 1), b"", b"block"), Write(name_of_key(b"r:1"), b"", b"value")])
    assert read(disk, name_of_block(b"r", 1), 5) == b"block"
    assert read(disk, name_of_key(b"r:1"), 5) == b"value"


def test_overwritten_and_deleted_values_free_their_space(disk: Disk) -> None:
    for turn in range(12):
        disk.write([Write(b"kx", b"", body(2_000_000, turn)), Write(b"ky", b"", body(2_000_000, turn))])
        disk.write([Delete(b"ky")])
    assert read(disk, b"ky", 2_000_000) is None
    assert read(disk, b"kx", 2_000_000) == body(2_000_000, 11)
    assert disk.size < 16_000_000  # of the 48 MB that were written
    disk.write([Clear(), Write(b"kz", b"", b"z")])
    assert [record.name for _, record in disk.records() if isinstance(record, Record)] == [b"kz"]


def test_a_value_can_get_another_expiry_and_keeps_its_body(disk: Disk) -> None:
    disk.write([Write(b"kx", b"m", body(5000), expires=5)])
    disk.write([SetExpiry(b"kx", 77), SetExpiry(b"knone", 77)])
    [(_, record)] = disk.records()
    assert isinstance(record, Record)
    assert (record.expires, record.meta) == (77, b"m")
    assert read(disk, b"kx", 5000) == body(5000)


def test_a_value_is_not_read_into_memory_of_another_size(disk: Disk) -> None:
    disk.write([Write(b"kx", b"", body(5000))])
    assert read(disk, b"kx", 4999) is None


def page(head: int, size: int = 3000, version: int = 0, expires: int = 0) -> Write:
    """A page of a block with 40 layers, which takes three sheets."""
    key = PageKey(b"r", head // 8, head % 8, 3, 0)
    blob = encode_page(key, body(size, head + 1000 * version), dtype=DType.UINT8, page_size=1, head_dim=max(size, 1))
    return Write(name_of_key(bytes(key)), blob[:64], blob[64:], expires=expires, used=7)


def test_pages_of_a_block_share_records_and_are_separate_values(disk: Disk) -> None:
    first = [page(head, expires=head) for head in range(320)]
    disk.write(first)
    assert len(disk) == 3
    disk.write(
        [page(5, 100, version=1), Delete(first[6].name), SetExpiry(first[7].name, 77), Quarantine(first[8].name)]
    )
    for head in range(9, 12):
        disk.write([page(head, 0)])
    found = {record.name: record for _, record in disk.records() if isinstance(record, Record)}
    assert found.keys() == {put.name for put in first} - {first[6].name, first[8].name}
    assert (found[first[7].name].expires, found[first[7].name].meta) == (77, first[7].meta)
    assert read(disk, first[5].name, 100) == body(100, 1005)
    assert read(disk, first[6].name, 3000) is None
    assert all(read(disk, put.name, 0) == b"" for put in first[9:12])
    assert all(read(disk, put.name, 3000) == put.body for put in first[12:])
    disk.write([Write(first[5].name, b"", b"a string, where a page was")])
    assert read(disk, first[5].name, 26) == b"a string, where a page was"
    disk.write([page(5)])
    assert read(disk, first[5].name, 3000) == body(3000, 5)
    disk.write(Delete(put.name) for put in first)
    assert len(disk) == 0


def test_pages_of_a_damaged_record_are_absent_and_writable(disk: Disk) -> None:
    pages = [page(head) for head in range(320)]
    disk.write(pages)
    where = disk.path.read_bytes().index(pages[130].meta)
    flip(disk.path, where + 70)
    with pytest.raises(Damaged, match="checksum"):
        read(disk, page(129).name, 3000)
    assert sum(isinstance(record, Damaged) for _, record in disk.records()) == 1
    assert read(disk, page(1).name, 3000) == body(3000, 1)
    disk.write([page(130)])
    assert read(disk, page(130).name, 3000) == body(3000, 130)
    assert read(disk, page(129).name, 3000) is None


def test_a_write_that_fails_half_way_leaves_nothing(disk: Disk) -> None:
    def changes() -> Iterator[Write]:
        yield Write(b"kx", b"", body(100_000))
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError):
        disk.write(changes())
    assert not len(disk)
    disk.write([Write(b"ky", b"", body(100_000))])
    assert read(disk, b"ky", 100_000) == body(100_000)


def test_values_exist_after_a_reopen(tmp_path: Path) -> None:
    first = Disk(tmp_path)
    first.write([Write(b"kx", b"", body(1_000_000))])
    first.close()
    second = Disk(tmp_path)
    assert second.id == first.id
    second.write([Write(b"ky", b"", body(1_000_000, 1))])
    assert read(second, b"kx", 1_000_000) == body(1_000_000)
    assert read(second, b"ky", 1_000_000) == body(1_000_000, 1)
    second.close()


@pytest.mark.parametrize("size", [10, 5000, 1_000_000])
def test_every_read_detects_a_flipped_bit_of_a_body(disk: Disk, size: int) -> None:
    disk.write([Write(b"kx", b"", body(size)), Write(b"ky", b"", body(5000, 1))])
    damage(disk, body(min(size, 3000)) if size < 3000 else body(size)[:3000])
    with pytest.raises(Damaged, match="checksum"):
        read(disk, b"kx", size)
    with pytest.raises(Damaged, match="checksum"):
        disk.check(b"kx")
    assert read(disk, b"ky", 5000) == body(5000, 1)


def test_quarantined_values_are_absent_and_the_last_few_are_kept(disk: Disk) -> None:
    disk.write(Write(b"k%d" % i, b"", body(3000, i)) for i in range(20))
    disk.write(Quarantine(b"k%d" % i) for i in range(20))
    disk.write([Quarantine(b"k3")])  # twice
    assert (disk.quarantined, len(disk)) == (16, 0)
    assert read(disk, b"k3", 3000) is None


def test_maxdisk_is_kept_and_a_write_beyond_it_leaves_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path, maxdisk=4 * 1024**2)
    disk.write([Write(b"kx", b"", body(1_000_000))])
    with pytest.raises(DiskFull, match="maxdisk"):
        disk.write(Write(b"k%d" % i, b"", body(500_000, i)) for i in range(10))
    assert len(disk) == 1
    assert disk.size <= 4 * 1024**2
    assert read(disk, b"kx", 1_000_000) == body(1_000_000)
    disk.write([Delete(b"kx")])
    disk.close()


def test_the_space_that_values_take_is_known_nearly(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    names = [b"k%d" % i for i in range(100)]
    disk.write(Write(name, b"", body(size)) for name in names for size in (40_000,))
    reserved = sum(footprint(name, 40_000) for name in names)
    assert 0.8 < reserved / disk.size < 1.2
    disk.close()


# -- files that are not ours -------------------------------------------------------------------------------------------


def test_the_second_server_of_a_directory_is_refused(disk: Disk) -> None:
    with pytest.raises(DiskError, match=f"in use by another kvpage-server, pid {os.getpid()}"):
        Disk(disk.path.parent)


def test_a_server_that_has_just_begun_has_no_pid_in_the_error(disk: Disk) -> None:
    os.truncate(disk.path.parent / "kvpage.lock", 0)
    with pytest.raises(DiskError, match="in use by another kvpage-server: each needs"):
        Disk(disk.path.parent)


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    Disk(tmp_path).close()
    env = lmdb.open(str(tmp_path / FILE), subdir=False, max_dbs=4)
    with env.begin(write=True, db=env.open_db(b"about")) as txn:
        txn.put(b"format", b"%d" % (CODED_FORMAT + 1))
    env.close()
    with pytest.raises(DiskError, match=f"has format {CODED_FORMAT + 1}, newer than {CODED_FORMAT}"):
        Disk(tmp_path)


def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for content in (b"", b"SQLite format 3\0" + bytes(5000)):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(DiskError, match="is not a store of kvpage-server"):
            Disk(tmp_path)
        assert (tmp_path / FILE).read_bytes() == content
        (tmp_path / FILE).unlink()


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    env = lmdb.open(str(tmp_path / FILE), subdir=False, max_dbs=4)
    with env.begin(write=True, db=env.open_db(b"users")) as txn:
        txn.put(b"alice", b"1")
    env.close()
    with pytest.raises(DiskError, match="not a store of kvpage-server"):
        Disk(tmp_path)


@pytest.mark.parametrize("replaced", [False, True])
def test_writes_fail_while_the_file_has_lost_its_name(disk: Disk, replaced: bool) -> None:
    aside = disk.path.rename(disk.path.with_name("aside"))
    if replaced:
        shutil.copy(aside, disk.path)
    error = "another file has replaced the open one" if replaced else "No such file or directory"
    for write in (lambda: disk.write([]), disk.flush):
        with pytest.raises(DiskError, match=f"{disk.path}: {error}"):
            write()
    aside.replace(disk.path)
    disk.write([])
    disk.flush()


@contextmanager
def failing_meta_page(path: Path) -> Iterator[Callable[[], object]]:
    """Let LMDB fail to write the page that refers to a commit. The result ends this.

    LMDB writes it with a descriptor of its own, which is replaced by one that only reads.
    """
    links = [*Path("/proc/self/fd").iterdir()]
    open_ones = [int(link.name) for link in links if link.exists() and link.samefile(path)]
    (own,) = (fd for fd in open_ones if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY)
    kept, only_to_read = os.dup(own), os.open(path, os.O_RDONLY)
    os.dup2(only_to_read, own)
    try:
        yield partial(os.dup2, kept, own)
    finally:
        os.close(kept)
        os.close(only_to_read)


@pytest.mark.skipif(sys.platform != "linux", reason="finds LMDB's descriptor in /proc")
def test_one_failed_write_of_the_meta_page_ends_nothing(tmp_path: Path) -> None:
    """LMDB refuses everything after such a failure, also reads."""
    disk = Disk(tmp_path)
    disk.write([Write(b"ka", b"", body(50_000, 1))])
    held, found = disk.find([(b"ka", 50_000)])
    with failing_meta_page(disk.path) as restored, ThreadPoolExecutor(2) as pool:
        writing = pool.submit(disk.write, [Write(b"kb", b"", b"lost")])
        assert not wait([writing], 0.3).done, "a read is not over"
        reading = pool.submit(read, disk, b"ka", 50_000)
        assert b"".join(map(bytes, cast(Any, found[0]))) == body(50_000, 1)
        restored()
        del found, held
        assert isinstance(writing.exception(20), DiskError)
        assert reading.result(20) == body(50_000, 1)
    disk.write([Write(b"kc", b"", b"next")])
    assert [read(disk, name, 4) for name in (b"kb", b"kc")] == [None, b"next"]
    disk.write([Write(b"kd", b"", b"last")])
    disk.close()
    disk = Disk(tmp_path)
    assert [read(disk, name, 4) for name in (b"kb", b"kc", b"kd")] == [None, b"next", b"last"]
    assert read(disk, b"ka", 50_000) == body(50_000, 1)
    disk.close()


def test_a_missing_or_read_only_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"nowhere.*No such file or directory"):
        Disk(tmp_path / "nowhere")
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(DiskError, match="Permission denied"):
        Disk(tmp_path)


def test_an_interrupted_creation_of_a_store_is_repeated(tmp_path: Path) -> None:
    (tmp_path / f"{FILE}.new").write_bytes(b"half")
    Disk(tmp_path).close()
    assert not (tmp_path / f"{FILE}.new").exists()


def filled(directory: Path) -> int:
    """A store with values of many kinds, closed; the size of its file."""
    disk = Disk(directory)
    for turn in range(4):
        disk.write(Write(b"k%d" % i, b"m" * 64, body(size, i)) for i, size in enumerate([100, 900, 5000, 40_000] * 60))
        disk.write(Delete(b"k%d" % i) for i in range(turn, 240, 7))
    disk.close()
    return (directory / FILE).stat().st_size


OPEN_AND_READ = """
import sys
from pathlib import Path
sys.path[:0] = {path}
from test_disk import body, read
from kvpage_server.store.disk.encoding import Quarantine
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.lmdb_file import DiskError
from kvpage_server.store.records import Damaged, Record
try:
    disk = Disk(Path(sys.argv[1]))
except DiskError as error:
    sys.exit(f"refused: {{error}}")
intact = damaged = 0
for key, record in list(disk.records()):
    if isinstance(record, Damaged):
        damaged += 1
        continue
    try:
        found = read(disk, record.name, record.body.size)
    except Damaged:
        damaged += 1
        disk.write([Quarantine(record.name)])
        continue
    assert found == body(record.body.size, int(record.name[1:])), record.name
    intact += 1
disk.close()
print(intact, damaged)
"""


def open_and_read(directory: Path) -> subprocess.CompletedProcess[str]:
    """Open a store in another process, which may die without harm to this one."""
    code = OPEN_AND_READ.format(path=[str(Path(__file__).parent), str(Path(__file__).parents[3] / "support")])
    return subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, encoding="utf-8", timeout=60
    )


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused_with_the_reason(tmp_path: Path, share: float) -> None:
    size = filled(tmp_path)
    os.truncate(tmp_path / FILE, int(size * share))
    found = open_and_read(tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert "refused:" in found.stderr
    assert "is damaged" in found.stderr


@pytest.mark.parametrize("cut", [20_000, 200_000])
def test_a_file_that_was_cut_within_a_value_is_opened(tmp_path: Path, cut: int) -> None:
    """The value is damaged; a read beyond the end of the file would kill the process."""
    disk = Disk(tmp_path)
    for i in (0, 1, 2):
        disk.write([Write(b"k%d" % i, b"", body(1 << 20, i))])
    disk.write([Delete(b"k0")])
    for start in range(3, 300, 10):  # the pages of the first commits take the place of k0
        disk.write([Write(b"k%d" % i, b"", body(100, i)) for i in range(start, start + 10)])
    disk.close()
    os.truncate(tmp_path / FILE, (tmp_path / FILE).stat().st_size - cut)
    assert open_and_read(tmp_path).stdout == "301 1\n"


def test_an_unclosed_store_is_opened_unless_it_was_damaged(tmp_path: Path) -> None:
    code = "import os, sys; sys.path[:0] = %r; import test_disk as t; t.left_open(t.Path(sys.argv[1])); os._exit(9)"
    program = [
        sys.executable,
        "-c",
        code % [str(Path(__file__).parent), str(Path(__file__).parents[3] / "support")],
        str(tmp_path),
    ]
    assert subprocess.run(program, timeout=60).returncode == 9
    assert open_and_read(tmp_path).stdout == "1 0\n"
    assert subprocess.run(program, timeout=60).returncode == 9
    os.truncate(tmp_path / FILE, 12_000)
    assert "is damaged" in open_and_read(tmp_path).stderr


def left_open(directory: Path) -> None:
    Disk(directory).write([Write(b"k3", b"", body(5000, 3))])


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.soak) for n in range(5, 105))])
def test_flipped_bits_are_refused_or_found_and_never_served(tmp_path: Path, seed: int) -> None:
    size = filled(tmp_path)
    rng = random.Random(seed)
    for _ in range(1 + seed % 5):
        flip(tmp_path / FILE, rng.randrange(size))
    found = open_and_read(tmp_path)
    if found.returncode:
        assert "refused:" in found.stderr, found
    else:
        intact, damaged = map(int, found.stdout.split())
        assert intact + damaged > 150


@contextmanager
def traced() -> Iterator[list[int]]:
    """Add the bytes of Python's objects, at the end and at most, to the list, without those from before."""
    found: list[int] = []
    tracemalloc.start()
    try:
        yield found
        found += tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_a_commit_has_one_change_at_a_time_in_memory(disk: Disk) -> None:
    """A batch may have 100,000 changes, whose values are in memory already."""
    batch: Batch[int] = Batch()
    for number in range(2000):
        batch.note(b"k%d" % number, number, 10_000)

    async def write() -> Exception | None:
        writer: DiskWriter[int] = DiskWriter(
            disk, lambda name, number: Write(name, b"", number.to_bytes(10_000, "little"))
        )
        done = asyncio.get_running_loop().create_future()
        writer.commit(batch, done.set_result)
        error: Exception | None = await done
        await writer.close()
        return error

    with traced() as nbytes:
        assert asyncio.run(write()) is None
    assert len(disk) == 2000
    assert nbytes[1] < 5_000_000  # all changes have 20 MB


def test_queued_pages_count_their_memory() -> None:
    catalogue, stored, batch = Catalogue(), Stored(1 << 40), Batch[Any]()
    stored.behind = cast(Any, batch)
    shape = BlockShape(64, 64, 1, (Plane(0, DType.UINT8, 1),))
    block = catalogue.index.open(b"r", 0)
    catalogue.fill(block, Extent(shape, OnDisk(b"br:0", shape.nbytes), 0, 0, 0))
    pages = catalogue.split(block)
    with traced() as nbytes:
        stored.store_pages([*pages], [*pages.values()])
    assert len(batch.changes) == shape.pages
    assert nbytes[0] < batch.size < 3 * nbytes[0]


@pytest.mark.parametrize("flushes", [True, False])
def test_save_synchronises_only_commits_that_are_not_durable(tmp_path: Path, flushes: bool) -> None:
    disk = Disk(tmp_path, flushes=flushes)
    environment, synchronised = disk._env, list[bool]()
    disk._env = cast(lmdb.Environment, SimpleNamespace(sync=synchronised.append))
    disk.flush()
    disk._env = environment
    assert synchronised == ([] if flushes else [True])
    disk.close()
