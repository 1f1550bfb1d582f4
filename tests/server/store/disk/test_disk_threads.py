"""Writes, reads and checks of the disk on background threads."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import random
import re
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest
from waiting import PATIENCE, until

from kvpage_server.net.connection_memory import keep_large_blocks_apart
from kvpage_server.store.disk import readers
from kvpage_server.store.disk.database import Disk, Outcome
from kvpage_server.store.disk.encoding import Write
from kvpage_server.store.disk.lmdb_file import DiskError, DiskFull
from kvpage_server.store.disk.readers import THREADS, DiskReader, Scrubber
from kvpage_server.store.disk.write_behind import MOVES, Batch, Event, State, WriteBehind, after
from kvpage_server.store.records import Damaged
from kvpage_server.system.process import HAS_GLIBC

MB = 1024**2


def body(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@asynccontextmanager
async def behind(
    directory: Path,
    mode: str,
    *,
    limit: int = 8 * MB,
    maxdisk: int = 0,
    evict_for_full_disk: Callable[[DiskFull, int], Iterator[None]] = lambda error, size: iter(()),
    noting: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[WriteBehind[bytes], Disk, list[set[bytes]]]]:
    """A write-behind, its disk, and the names in each batch that it has stored."""
    disk = Disk(directory, maxdisk=maxdisk)
    stored: list[set[bytes]] = []

    class Values:
        """Bytes, as they are."""

        def change_of(self, name: bytes, value: bytes) -> Write:
            return Write(name, b"", value)

        def note_stored(self, batch: Batch[bytes]) -> Iterator[None]:
            stored.append(set(batch.changes))
            noting()
            yield

        def evict_for_full_disk(self, error: DiskFull, size: int) -> Iterator[None]:
            return evict_for_full_disk(error, size)

        def find_refused(self) -> Iterator[None]:
            return iter(())

        def drop_refused(self) -> None:
            pass

        def is_removed(self, name: bytes) -> bool:
            return True

    writer = WriteBehind(disk, Values(), mode, limit)
    try:
        yield writer, disk, stored
    finally:
        await writer.close()
        disk.close()


def found(disk: Disk, name: bytes, size: int) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if disk.read([(name, memoryview(into))]) == [True] else None


async def durable(writer: WriteBehind[bytes]) -> None:
    done = asyncio.Event()
    writer.when_durable(writer.position, done.set)
    await asyncio.wait_for(done.wait(), PATIENCE)


async def test_always_commits_at_once_and_later_changes_together(tmp_path: Path) -> None:
    async with behind(tmp_path, "always") as (writer, disk, stored):
        writer.note(b"k0", b"first", 5)
        await asyncio.sleep(0.001)
        for i in range(1, 100):
            writer.note(b"k%d" % i, b"%d" % i, 2)
        await durable(writer)
        assert writer.commits <= 3
        assert set.union(*stored) == {b"k%d" % i for i in range(100)}
        assert found(disk, b"k99", 2) == b"99"


async def test_everysec_commits_the_last_change_once_a_second(tmp_path: Path) -> None:
    async with behind(tmp_path, "everysec") as (writer, disk, stored):
        for i in range(1000):
            writer.note(b"kx", b"%03d" % i, 3)
        writer.note(b"ky", b"y", 1)
        writer.note(b"ky", None, 0)
        assert writer.waits(b"kx")
        assert writer.size < 1000  # two changes, and not 1002
        began = time.monotonic()
        await durable(writer)
        assert time.monotonic() - began > 0.1
        assert stored == [{b"kx", b"ky"}]
        assert found(disk, b"kx", 3) == b"999"
        assert found(disk, b"ky", 1) is None
        assert not writer.waits(b"kx")


async def test_a_commit_waits_less_if_the_last_was_noted_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change waited for the noting of the last commit's values, and then for the whole delay."""
    late = 0.0

    def noting() -> None:
        nonlocal late
        if not late:
            late = 0.8
            writer.note(b"ky", b"y", 1)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late, monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr("kvpage_server.store.disk.write_behind.time", clock)
    async with behind(tmp_path, "everysec", noting=noting) as (writer, _, _):
        writer.note(b"kx", b"x", 1)
        writer.commit_soon()
        await durable(writer)
        assert writer.state is State.PLANNED
        assert writer._timer is not None
        assert writer._timer.when() - asyncio.get_running_loop().time() < 0.2


async def test_no_leaves_it_until_there_is_much_or_the_end(tmp_path: Path) -> None:
    async with behind(tmp_path, "no", limit=2000) as (writer, _, stored):
        writer.note(b"kx", b"x" * 400, 400)
        await asyncio.sleep(0.3)
        assert stored == []
        writer.note(b"ky", b"y" * 400, 400)
        await durable(writer)
        assert stored == [{b"kx", b"ky"}]
        writer.note(b"kz", b"z", 1)
    disk = Disk(tmp_path)
    assert found(disk, b"kz", 1) == b"z"
    disk.close()


async def test_a_clear_precedes_later_writes(tmp_path: Path) -> None:
    async with behind(tmp_path, "everysec") as (writer, disk, _):
        writer.note(b"kold", b"old", 3)
        writer.commit_soon()
        await durable(writer)
        writer.note(b"knever", b"never", 5)
        writer.clear()
        writer.note(b"knew", b"new", 3)
        writer.commit_soon()
        await durable(writer)
        assert [found(disk, name, 3) for name in (b"kold", b"knew")] == [None, b"new"]
        assert len(disk) == 1


async def test_the_queue_is_full_beyond_its_limit_until_a_commit(tmp_path: Path) -> None:
    async with behind(tmp_path, "everysec", limit=100_000) as (writer, _, _):
        writer.note(b"kx", bytes(150_000), 150_000)
        assert writer.full
        there_is_room = asyncio.Event()
        writer.when_not_full(there_is_room.set)
        await asyncio.wait_for(there_is_room.wait(), PATIENCE)
        assert not writer.full


async def test_at_maxdisk_the_least_valuable_value_is_evicted(tmp_path: Path) -> None:
    names = [b"k%d" % i for i in range(60)]
    oldest = iter(names)

    def evict_for_full_disk(error: DiskFull, size: int) -> Iterator[None]:
        for _ in range(size // 200_000 + 4):
            writer.note(next(oldest), None, 0)
            yield

    async with behind(tmp_path, "always", maxdisk=4 * MB, evict_for_full_disk=evict_for_full_disk) as (writer, disk, _):
        for i, name in enumerate(names):
            writer.note(name, body(200_000, i), 200_000)
            await durable(writer)
            while writer.failing:
                await durable(writer)
        assert next(oldest) != names[0]  # maxdisk was reached
        assert found(disk, names[-1], 200_000) == body(200_000, 59)
        assert found(disk, names[0], 200_000) is None


async def test_while_room_is_made_others_have_their_turn(tmp_path: Path) -> None:
    """A whole batch was evicted in one turn, which took a second for many small values."""
    steps = turns = 0

    def evict_for_full_disk(error: DiskFull, size: int) -> Iterator[None]:
        nonlocal steps
        while steps < 20:
            steps += 1
            time.sleep(0.002)  # as long as a turn may take
            yield

    async with behind(tmp_path, "always", maxdisk=2 * MB, evict_for_full_disk=evict_for_full_disk) as (writer, _, _):
        writer.note(b"kx", body(3 * MB), 3 * MB)
        while not writer.failing:
            turns += 0 < steps < 20
            await asyncio.sleep(0)
        assert steps == 20
        assert turns >= 10
        writer.note(b"kx", None, 0)


async def test_a_failing_disk_is_retried_and_blocks_no_client(tmp_path: Path) -> None:
    async with behind(tmp_path, "always", limit=100_000, maxdisk=2 * MB) as (writer, disk, _):
        writer.note(b"kx", body(3 * MB), 3 * MB)
        await durable(writer)
        assert "maxdisk" in writer.failing
        assert not writer.full
        assert writer.waits(b"kx")
        writer.note(b"kx", b"small", 5)
        while writer.failing:
            await durable(writer)
        assert found(disk, b"kx", 5) == b"small"


async def test_values_are_fetched_without_the_loop_waiting(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.write(Write(b"k%d" % i, b"", body(1_000_000, i)) for i in range(20))
    disk.write([Write(b"kbad", b"", body(5000, 99))])
    where = disk.path.read_bytes().index(body(5000, 99)[:4000])
    with disk.path.open("r+b") as file:
        file.seek(where + 77)
        file.write(b"!!")
    fetcher = DiskReader(disk)
    outcomes: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
    memory = [memoryview(bytearray(1_000_000)) for _ in range(20)]
    wanted = [(b"k%d" % i, into, None) for i, into in enumerate(memory)]
    wanted += [(b"kbad", memoryview(bytearray(5000)), None), (b"knone", memoryview(bytearray(5000)), None)]
    fetcher.fetch(wanted, outcomes.set_result)
    assert not outcomes.done()
    *good, bad, none = await asyncio.wait_for(outcomes, 10)
    assert good == [True] * 20
    assert isinstance(bad, Damaged)
    assert none is False
    assert [bytes(into) for into in memory] == [body(1_000_000, i) for i in range(20)]
    await fetcher.close()
    disk.close()


async def test_the_scrubber_continues_after_the_disk_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_PAUSE", 0.01)
    disk = Disk(tmp_path)
    disk.write([Write(b"key", b"", body(100))])
    failing, records = [DiskError("for a moment")], disk.records

    def failing_once(after: bytes, most: int) -> Any:
        if failing:
            raise failing.pop()
        return records(after, most)

    monkeypatch.setattr(disk, "records", failing_once)
    scrubber = Scrubber(disk, 1 << 20, lambda _: None)
    await asyncio.to_thread(until, lambda: scrubber.rounds, "a round")
    await scrubber.close()
    disk.close()


@pytest.mark.parametrize("rate", [1_000_000, 10 * MB])
async def test_the_scrubber_finds_damage_at_its_rate(tmp_path: Path, rate: int) -> None:
    disk = Disk(tmp_path)
    disk.write(Write(b"k%d" % i, b"", body(100_000, i)) for i in range(10))
    where = disk.path.read_bytes().index(body(100_000, 7)[:200])
    with disk.path.open("r+b") as file:
        file.seek(where + 77)
        file.write(b"!!")
    damaged: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    began = time.monotonic()
    scrubber = Scrubber(disk, rate, lambda name: damaged.done() or damaged.set_result(name))
    assert await asyncio.wait_for(damaged, PATIENCE) == b"k7"
    assert time.monotonic() - began > 0.6 * 700_000 / rate
    await scrubber.close()
    disk.close()


async def test_small_values_count_as_pages_of_the_file_for_the_scrubbe(tmp_path: Path) -> None:
    """With their own bytes only, 80,000 pages of a byte each took most of a processor, again and again."""
    disk = Disk(tmp_path)
    disk.write(Write(b"k%d" % i, b"", b"x") for i in range(100))
    began = time.monotonic()
    scrubber = Scrubber(disk, 100 * 4096, lambda _: None)
    await asyncio.to_thread(until, lambda: scrubber.rounds, "a round")
    assert 0.9 < time.monotonic() - began < PATIENCE
    assert scrubber.checked >= 100
    await scrubber.close()
    disk.close()


_EXPECTED = """
                IDLE     PLANNED  WRITING      NOTING   MAKING_ROOM  RETRYING
    CHANGED     PLANNED  PLANNED  WRITING      NOTING   MAKING_ROOM  RETRYING
    HURRIED     PLANNED  PLANNED  WRITING      NOTING   MAKING_ROOM  RETRYING
    TIME        -        WRITING  -            -        -            WRITING
    COMMITTED   -        -        NOTING       -        PLANNED      -
    FAILED      -        -        RETRYING     -        RETRYING     -
    FULL        -        -        MAKING_ROOM  -        -            -
    NOTED       -        -        -            IDLE     -            -
    NOTED_SOME  -        -        -            PLANNED  -            -
"""


def test_every_event_is_in_the_table_or_impossible() -> None:
    [states, *rows] = [line.split() for line in _EXPECTED.strip().splitlines()]
    assert {*states} == {state.name for state in State} == {state.name for state in MOVES}
    assert {row[0] for row in rows} == {event.name for event in Event}
    for event, *leads_to in rows:
        for state, expected in zip(states, leads_to, strict=True):
            if expected == "-":
                with pytest.raises(RuntimeError, match=f"{event} cannot happen while {state}"):
                    after(State[state], Event[event])
            else:
                assert after(State[state], Event[event]) is State[expected], (state, event)


async def test_it_is_idle_without_changes_and_retries_after_a_delay(tmp_path: Path) -> None:
    async with behind(tmp_path, "everysec", maxdisk=2 * MB) as (writer, _, _):
        assert writer.state is State.IDLE
        writer.note(b"ka", b"a", 1)
        assert writer.state is State.PLANNED
        await writer.settle()
        assert writer.state is State.IDLE
        writer.note(b"kb", bytes(3 * MB), 3 * MB)
        await writer.settle()
        assert writer.failing
        assert writer.state is State.RETRYING
        writer.commit_soon()
        writer.note(b"kb", None, 0)
        assert writer.state is State.RETRYING
        await writer.settle()
        assert writer.state is State.IDLE


async def test_a_failed_read_on_a_full_disk_is_an_error_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads ended, and all who asked it waited for ever."""
    disk = Disk(tmp_path)
    reader = DiskReader(disk)
    refusing = Refusing()
    monkeypatch.setattr("shutil.disk_usage", lambda path: refusing)
    monkeypatch.setattr(disk, "_env", refusing)
    for _ in range(2 * THREADS):
        received: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        reader.fetch([(b"kname", memoryview(bytearray(4)), None)], received.set_result)
        (outcome,) = await asyncio.wait_for(received, PATIENCE)
        assert isinstance(outcome, DiskError)
    monkeypatch.undo()
    await reader.close()
    disk.close()


class Refusing:
    """A file system that has no room and cannot be read."""

    free = 0

    def begin(self, **options: object) -> None:
        raise lmdb.Error(os.strerror(errno.EIO))


@pytest.mark.skipif(not HAS_GLIBC, reason="another C library keeps what is freed as it likes")
class TestMemoryOfCommits:
    """LMDB copies its writes, and frees the copy at every commit."""

    async def test_it_is_reused_and_returned_after_an_idle_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep_large_blocks_apart()
        large, count = body(256 * 1024), 256

        async def write(writer: WriteBehind[bytes]) -> None:
            for number in range(count):
                writer.note(b"%d" % number, large, len(large))
            await writer.settle()

        async with behind(tmp_path, "no", limit=1 << 30) as (writer, _, _):
            for _ in range(10):  # the idle writer of another test in this process may return memory between two rounds
                before, faults = _own_memory(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                await write(writer)
                faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
                if faults < count * len(large) // mmap.PAGESIZE // 2:
                    break
            else:
                pytest.fail(f"the last round had {faults} page faults")
            monkeypatch.setattr("kvpage_server.store.disk.write_behind._SPARE_FOR", 0.1)
            await write(writer)
            until(lambda: _own_memory() < before - count * len(large) // 2)


def _own_memory() -> int:
    """Bytes of this process that are no file's."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


async def test_maxdisk_and_retries_are_no_failures_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpage_server.store.disk.write_behind.RETRY_AFTER", 0.001)
    async with behind(tmp_path, "always", maxdisk=16 * MB) as (writer, disk, _):

        async def failing(what: str) -> None:
            """Wait until three attempts have failed."""
            for _ in range(3):
                tried = asyncio.Event()
                writer.note(b"large", bytes(32 * MB), 32 * MB)
                writer.when_durable(writer.position, tried.set)
                await asyncio.wait_for(tried.wait(), PATIENCE)
                assert what in writer.failing

        await failing("maxdisk is used up")
        assert writer.errors == 0
        with monkeypatch.context() as broken:
            broken.setattr(disk, "write", refuse)
            await failing("no device")
            assert writer.errors == 1
        writer.note(b"large", b"small", 5)
        async with asyncio.timeout(PATIENCE):
            while writer.failing:
                await durable(writer)
        with monkeypatch.context() as broken:
            broken.setattr(disk, "write", refuse)
            await failing("no device")
            assert writer.errors == 2
        writer.note(b"large", None, 0)
        await writer.settle()


def refuse(changes: Iterator[object]) -> None:
    raise DiskError("no device")
