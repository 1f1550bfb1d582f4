"""A disk that is full or read-only: no false reply, and no harm."""

from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb
import pytest
import redis
from servers import STOP_WITHIN, RunningServer, start_server, with_constants
from small_disks import disk_to_freeze, frozen, small_disk
from test_kvpage_cli import kvpage
from test_tiered import TIERED, body, disk_info, get_page, page_args, set_page, settle, tiered
from waiting import until

from kvpage_server.store.disk.database import FILE
from kvpage_server.store.disk.lmdb_file import DiskFull, lmdb_errors

SIZE = 100_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 12 MB, where that may be mounted."""
    with small_disk(tmp_path / "small", megabytes=12) as place:
        yield place


@contextmanager
def filled(disk: Path) -> Iterator[Path]:
    """Fill a file system with a file, which is yielded."""
    theirs = disk / "others"
    with suppress(OSError), theirs.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield theirs
    finally:
        theirs.unlink()


def try_to_set(server: RunningServer, names: range) -> tuple[list[int], set[str]]:
    """Set values, each over a connection of its own; return the stored ones, and the errors of the others."""
    done, refused = [], set()
    for i in names:
        with server.client() as client:
            try:
                client.set(f"key:{i}", body(SIZE, i))
                done.append(i)
            except redis.ResponseError as error:
                refused.add(str(error).split(":")[0])
    return done, refused


def wait_until_it_works(client: redis.Redis) -> None:
    until(lambda: client.info("persistence")["rdb_last_bgsave_status"] != "err")


@pytest.mark.parametrize("policy", ["allkeys-prefix", "noeviction"])
def test_always_is_durable_on_a_full_disk_and_refuses_the_rest(disk: Path, policy: str) -> None:
    options = (*TIERED, "--appendfsync", "always", "--maxmemory-policy", policy)
    with start_server(*options, directory=disk, killed=True) as server, server.client() as client:
        done, refused = try_to_set(server, range(20))
        assert (len(done), refused) == (20, set())
        with filled(disk):
            more, refused = try_to_set(server, range(20, 80))
            assert len(more) < 40
            assert refused == {
                "MISCONF Errors writing to disk",
                "MISCONF Errors writing to disk, and appendfsync is always",
            }
            received = client.info("persistence")
            assert (received["rdb_last_bgsave_status"], received["aof_last_write_status"]) == ("err", "err")
            assert received["rdb_changes_since_last_save"] > 0
            with pytest.raises(redis.ResponseError, match=r"No space left on device \(\d+ changes are in memory alone"):
                client.execute_command("SAVE")
            assert all(client.get(f"key:{i}") == body(SIZE, i) for i in done + more)
        settle(client)
        assert client.info("persistence")["rdb_changes_since_last_save"] == 0
        assert client.info("persistence")["rdb_last_bgsave_status"] == "ok"
        assert client.info("stats")["evicted_keys"] == 0
        later, refused = try_to_set(server, range(80, 90))
        assert (len(later), refused) == (10, set())
        server.stop(signal.SIGKILL)
    with tiered(disk) as (_, client):
        assert all(client.get(f"key:{i}") == body(SIZE, i) for i in done + more + later)


def accepted(server: RunningServer, name: str, value: bytes) -> bool:
    """Store a value over a connection of its own, and return whether the server has accepted it."""
    with server.client() as client:
        try:
            return bool(client.set(name, value))
        except redis.ResponseError as error:
            if not str(error).startswith("MISCONF Errors writing to disk"):
                raise
            return False


def delete(server: RunningServer, count: int) -> None:
    """Delete the first keys. The reply is an error until the rest of the queue is on disk, too."""
    with server.client() as client, suppress(redis.ResponseError):
        client.delete(*[f"key:{i}" for i in range(count)])


LARGE = {"string": ("SET", "large"), "block": ("KVBLOCKSET", "large", 0, 1, 1, 1, 0, 1, 0, 8, 4_000_000)}


@pytest.mark.parametrize("freed", ["by deletions", "by others"])
@pytest.mark.parametrize("kind", LARGE)
def test_a_refused_large_value_does_not_refuse_others(disk: Path, kind: str, freed: str) -> None:
    options = (*TIERED, "--appendfsync", "always", "--maxmemory-policy", "noeviction")
    with start_server(*options, directory=disk, killed=True) as server, server.client() as client:
        stored = {f"key:{i}": body(SIZE, i) for i in range(30)}
        for name, value in stored.items():
            client.set(name, value)
        with filled(disk) as theirs:
            with server.client() as other, pytest.raises(redis.ResponseError, match="MISCONF"):
                other.execute_command(*LARGE[kind], body(4_000_000))
            assert not accepted(server, "early", body(SIZE))
            if freed == "by deletions":
                delete(server, 15)
                stored = {name: stored[name] for name in list(stored)[15:]}
            else:
                os.truncate(theirs, theirs.stat().st_size - 1_500_000)
            until(lambda: accepted(server, "later", body(SIZE, 99)), "space for a value that fits")
            stored["later"] = body(SIZE, 99)
            assert client.exists("large", "kv:large:0:0:0:0", "early") == 0
            settle(client)
            assert client.info("persistence")["rdb_last_bgsave_status"] == "ok"
            server.stop(signal.SIGKILL)
    with tiered(disk) as (_, client):
        assert {name: client.get(name) for name in stored} == stored
        assert client.dbsize() == len(stored)


def test_a_refused_change_of_a_value_keeps_the_value(disk: Path) -> None:
    """Nothing that was stored before is dropped with a refused value: not the pages of a block that was split."""
    options = (*TIERED, "--appendfsync", "always", "--maxmemory-policy", "noeviction")
    shape = (2, 2, 64, 0, 1, 0, 1, 256)
    whole = body(2 * 2 * 64 * 256 * 2)
    with start_server(*options, directory=disk) as server, server.client() as client:
        client.execute_command("KVBLOCKSET", "b", 0, *shape, whole)
        client.set("old", body(SIZE, 1))
        client.mset({f"key:{i}": body(SIZE, i) for i in range(10)})
        with filled(disk):
            words = ("KVPAGESET", "b", 0, 0, 0, 0, 8, 1, 3_000_000, 0, body(3_000_000))
            for change in (words, ("SET", "old", body(4_000_000))):
                with server.client() as other, suppress(redis.ResponseError):
                    other.execute_command(*change)
            delete(server, 10)
            for _ in range(3):  # each is an attempt to write the queue
                with suppress(redis.ResponseError):
                    client.execute_command("SAVE")
            assert client.exists("old", "kv:b:1:1:0:0") == 2
        settle(client)
        assert client.get("kv:b:1:1:0:0")[64:] == whole[-64 * 256 * 2 :]


@pytest.mark.parametrize("mode", ["always", "everysec", "no"])
def test_no_save_succeeds_while_another_file_has_the_name(tmp_path: Path, mode: str) -> None:
    with start_server(*TIERED, "--appendfsync", mode, directory=tmp_path) as server, server.client() as client:
        client.set("key", "value")
        assert client.save()
        opened = (tmp_path / FILE).rename(tmp_path / "opened")
        shutil.copy(opened, tmp_path / FILE)
        with pytest.raises(redis.ResponseError, match="another file has replaced the open one"):
            client.save()
        opened.replace(tmp_path / FILE)
        assert client.save()


def test_no_save_succeeds_while_another_directory_has_the_name(tmp_path: Path) -> None:
    place, aside = tmp_path / "store", tmp_path / "aside"
    place.mkdir()
    with start_server(*TIERED, directory=place) as server, server.client() as client:
        assert client.save()
        place.rename(aside)
        place.mkdir()
        client.set("key", "value")
        with pytest.raises(redis.ResponseError, match=re.escape(f"{place}/{FILE}: No such file or directory")):
            client.save()
        place.rmdir()
        aside.rename(place)
        assert client.save()


def test_an_earlier_successful_save_does_not_hide_a_full_disk(disk: Path) -> None:
    options = (*TIERED, "--appendfsync", "always")
    with start_server(*options, directory=disk, killed=True) as server, server.client() as client:
        assert client.save()
        values = {f"key:{i}": body(SIZE, i) for i in range(60)}
        with filled(disk), pytest.raises(redis.ResponseError, match="MISCONF Errors writing to disk"):
            [client.set(name, value) for name, value in values.items()]
        server.stop(signal.SIGKILL)


def test_everysec_continues_in_memory_on_a_full_disk(disk: Path) -> None:
    with start_server(*TIERED, directory=disk, killed=True) as server, server.client() as client:
        for i in range(20):
            client.set(f"key:{i}", body(SIZE, i))
        settle(client)
        with filled(disk):
            for i in range(20, 60):
                client.set(f"key:{i}", body(SIZE, i))
            with pytest.raises(redis.ResponseError, match="No space left on device"):
                client.execute_command("SAVE")
            assert client.info("persistence")["rdb_changes_since_last_save"] > 0
        assert all(client.get(f"key:{i}") == body(SIZE, i) for i in range(60))
        settle(client)
        server.stop(signal.SIGKILL)
    with tiered(disk) as (_, client):
        assert all(client.get(f"key:{i}") == body(SIZE, i) for i in range(60))


def test_waiting_values_are_evicted_while_the_disk_is_full(tmp_path: Path) -> None:
    """`maxdisk` counts them. Without eviction, it would refuse writes until the disk has space."""
    values = {f"key:{i}": body(1_000_000, i) for i in range(25)}
    with small_disk(tmp_path / "large", megabytes=30) as disk, tiered(disk, "--maxdisk", "16mb") as (_, client):
        with filled(disk):
            client.set("first", body(1_000_000))
            until(lambda: disk_info(client)["disk_failing"])
            for name, value in values.items():
                client.set(name, value)
            assert all(client.get(f"key:{i}") == values[f"key:{i}"] for i in range(15, 25))
            info = client.info("kvpage")
            assert info["evictions_allkeys-prefix_filesystem"] >= 10
            assert "evictions_allkeys-prefix_disk" not in info
            client.config_set("maxmemory-policy", "noeviction")
            with pytest.raises(redis.ResponseError, match=r"'maxdisk': .* bytes wait: .*No space left on device"):
                client.mset(values)
        settle(client)
        assert disk_info(client)["disk_values"] >= 10


def test_a_full_disk_keeps_values_that_make_too_little_room(tmp_path: Path) -> None:
    """The waiting values would not fit without them, so their eviction would only lose values."""
    values, options = {f"key:{i}": body(1_000_000, i) for i in range(20)}, ("--maxdisk", "0", "--maxmemory", "24mb")
    with small_disk(tmp_path / "large", megabytes=30) as disk:
        with start_server(*TIERED, *options, directory=disk, killed=True) as server, server.client() as client:
            client.mset({f"old:{i}": body(1_000_000, i) for i in range(6)})
            client.execute_command("SAVE")
            with filled(disk):
                client.mset(values)
                until(lambda: disk_info(client)["disk_failing"])
                assert "evictions_allkeys-prefix_filesystem" not in client.info("kvpage")
                server.stop(signal.SIGKILL)
        with tiered(disk, *options) as (_, again):
            assert all(again.get(f"old:{i}") == body(1_000_000, i) for i in range(6))


@pytest.mark.parametrize("how", ["DEL", "FLUSHALL"])
def test_deletions_free_space_on_a_full_disk(disk: Path, how: str) -> None:
    options = ("--maxmemory-policy", "noeviction", "--maxmemory", "4mb")
    with tiered(disk, *options) as (_, client):
        stored = 0
        with suppress(redis.OutOfMemoryError):
            for stored in range(200):
                client.set(f"key:{stored}", body(SIZE, stored))
        assert stored < 150
        with suppress(redis.ResponseError):
            client.execute_command("SAVE")
        if how == "DEL":
            assert client.delete(*(f"key:{i}" for i in range(60))) == 60
        else:
            client.flushall()
        settle(client)
        wait_until_it_works(client)
        for i in range(300, 320):
            client.set(f"key:{i}", body(SIZE, i))
        settle(client)
        assert all(client.get(f"key:{i}") == body(SIZE, i) for i in range(300, 320))
        if how == "DEL":
            assert all(client.get(f"key:{i}") == body(SIZE, i) for i in range(60, stored))


def test_a_failed_change_of_a_blocks_form_keeps_the_old_form(disk: Path) -> None:
    with start_server(*TIERED, "--appendfsync", "always", directory=disk, killed=True) as server:
        with server.client() as client:
            for block in range(4):
                shape = (2, 2, 64, 0, 1, 0, 1, 256)
                client.execute_command("KVBLOCKSET", "b", block, *shape, body(2 * 2 * 64 * 256 * 2, block))
        with filled(disk):
            for block in range(4):
                with server.client() as client, pytest.raises(redis.ResponseError, match="MISCONF"):
                    client.execute_command("KVPAGESET", "b", 0, 0, block, 0, 8, 1, 300_000, 0, body(300_000))
                with server.client() as client, suppress(redis.ResponseError, redis.ConnectionError):
                    client.delete(f"kv:b:1:0:{block}:0")
            server.stop(signal.SIGKILL)
    with tiered(disk) as (_, client):
        found = [client.execute_command("KVBLOCKGET", "b", block) for block in range(4)]
        assert found == [body(2 * 2 * 64 * 256 * 2, block) for block in range(4)]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process can be set on Linux alone")
def test_a_retried_deletion_is_confirmed_after_its_commit(tmp_path: Path) -> None:
    options = (*TIERED, "--appendfsync", "always")
    again = [("DEL", "a"), ("UNLINK", "a", "none"), ("GETDEL", "a"), ("SET", "a", "new", "XX"), ("EXPIRE", "a", 100)]
    with start_server(*options, directory=tmp_path, killed=True) as server:
        with server.client() as client:
            client.set("a", body(100_000))
            settle(client)
        unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
        for words in (("SET", "big", body(3_000_000)), ("DEL", "a"), *again):
            with server.client() as client, pytest.raises(redis.ResponseError, match="Errors writing to disk"):
                client.execute_command(*words)
        with server.client() as client, pytest.raises((redis.ResponseError, redis.ConnectionError)):
            client.pipeline().delete("a").execute()  # the connection ends with the first of its replies
        with server.client() as client:
            assert client.exists("a") == 0  # it is done in memory
        server.stop(signal.SIGKILL)
    with tiered(tmp_path) as (_, client):
        assert client.get("a") == body(100_000)


@contextmanager
def with_values_that_wait(disk: Path) -> Iterator[tuple[RunningServer, redis.Redis]]:
    """Yield a server on a full disk that cannot write its values. It has to end with an exit code of 1."""
    with start_server(*TIERED, directory=disk, killed=True) as server, server.client() as client:
        settle(client)
        with filled(disk):
            for i in range(20):
                client.set(f"key:{i}", body(SIZE, i))
            yield server, client
            assert server.process.wait(STOP_WITHIN) == 1
        server.process.returncode = -signal.SIGKILL


def test_shutdown_is_refused_with_unwritten_values_unless_forced(disk: Path) -> None:
    with with_values_that_wait(disk) as (_, client):
        with pytest.raises(redis.ResponseError, match=r"Errors trying to SHUTDOWN\. .*No space left on device"):
            client.execute_command("SHUTDOWN")
        assert client.get("key:3") == body(SIZE, 3)
        with pytest.raises(redis.ConnectionError):
            client.execute_command("SHUTDOWN", "FORCE")
    with tiered(disk) as (server, client):
        assert client.dbsize() == 0
        client.set("key", "value")
        client.shutdown()
        assert server.process.wait(STOP_WITHIN) == 0


def test_a_stop_with_unwritten_values_ends_with_an_error(disk: Path) -> None:
    with with_values_that_wait(disk) as (server, _):
        server.process.send_signal(signal.SIGTERM)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process can be set on Linux alone")
def test_a_stop_without_promises_reports_unwritten_values(tmp_path: Path) -> None:
    options = (*TIERED, "--appendfsync", "no")
    prompt = with_constants("kvpage_server.store.disk.write_behind", LONGEST=1.0)
    with start_server(*options, directory=tmp_path, killed=True, program=prompt) as server:
        limits = ((tmp_path / FILE).stat().st_size, resource.RLIM_INFINITY)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, limits)
        with server.client() as client:
            for _ in range(2):  # the second time it is worth a place on disk
                client.set("used", body(SIZE))
            until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
            client.mset({"key:0": body(SIZE), "key:1": body(SIZE)})
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_WITHIN) == 1
        server.process.returncode = -signal.SIGKILL
    assert re.search(r" E the last save: ", server.log), server.log
    received = re.search(r"(\d+) queued values could not be written", server.log)
    assert received
    assert int(received[1]) >= 3


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process can be set on Linux alone")
def test_a_read_only_disk_is_reported_and_retried(tmp_path: Path) -> None:
    options = (*TIERED, "--appendfsync", "always")
    prompt = with_constants("kvpage_server.store.disk.write_behind", RETRY_AFTER=0.001)
    with (
        start_server(*options, directory=tmp_path, killed=True, program=prompt) as server,
        server.client() as client,
    ):
        done, _ = try_to_set(server, range(5))
        unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, ((tmp_path / FILE).stat().st_size, unlimited[1]))
        more, refused = try_to_set(server, range(5, 20))
        assert refused == {
            "MISCONF Errors writing to disk",
            "MISCONF Errors writing to disk, and appendfsync is always",
        }
        with pytest.raises(redis.ResponseError, match=r"File too large .* in memory alone"):
            client.execute_command("SAVE")
        assert disk_info(client)["disk_write_errors"] == 1  # retries do not count
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, unlimited)
        settle(client)
        server.stop(signal.SIGKILL)
    with tiered(tmp_path) as (_, client):
        assert all(client.get(f"key:{i}") == body(SIZE, i) for i in done + more)


def fill(client: redis.Redis, pages: int) -> int:
    """Write pages until one is refused; how many were taken."""
    for seed in range(pages):
        try:
            set_page(client, seed)
        except redis.ResponseError as error:
            if "MISCONF" not in str(error):
                raise
            return seed
        except redis.ConnectionError:
            return seed
    return pages


def test_a_full_disk_evicts_the_least_valuable_values(disk: Path) -> None:
    with tiered(disk, "--maxmemory", "2mb") as (server, client):
        assert fill(client, 1500) == 1500
        with suppress(redis.ConnectionError):
            client.execute_command("SAVE")
        assert disk_info(client)["disk_write_errors"] > 0
        found = {seed: get_page(client, seed) for seed in range(1500)}
        assert 50 < sum(value is not None for value in found.values()) < 700
        assert all(value in (None, body(20_000, seed)) for seed, value in found.items())
        info = client.info("kvpage")
        assert info["evictions_allkeys-prefix_filesystem"] > 700
        assert "evictions_allkeys-prefix_disk" not in info
        code, shown, _ = kvpage("status", url=server.url)
        assert (code, "the file system was full: " in shown) == (0, True)
        evicted = next(seed for seed, value in found.items() if value is None)
        why = kvpage("why", *map(str, page_args(evicted)), url=server.url)[1]
        assert "evicted by allkeys-prefix at a full file system" in why
        assert 0 < server.log.count("No space left on device: remove ") < 5  # one a minute
        assert "internal error" not in server.log


def test_the_last_acknowledged_write_under_always_is_durable(disk: Path) -> None:
    (disk / "ballast").write_bytes(bytes(7 * 1024**2))
    with start_server(*TIERED, "--appendfsync", "always", directory=disk, killed=True) as server:
        acknowledged = []
        for start in range(0, 400, 20):  # a connection may end; the next one goes on
            with server.client() as client, suppress(redis.ConnectionError, redis.ResponseError):
                for seed in range(start, start + 20):
                    set_page(client, seed)
                    acknowledged.append(seed)
        assert "No space left on device" in server.log
        server.stop(signal.SIGKILL)
    (disk / "ballast").unlink()
    with tiered(disk) as (_, client):
        assert all(get_page(client, seed) == body(20_000, seed) for seed in acknowledged)
        assert all(get_page(client, seed) in (None, body(20_000, seed)) for seed in range(400))


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    directory.chmod(0o500)
    try:
        yield
    finally:
        directory.chmod(0o700)


def start(directory: Path) -> subprocess.CompletedProcess[bytes]:
    """A server that is expected to refuse its directory."""
    command = [sys.executable, "-m", "kvpage_server.app", *TIERED, "--dir", str(directory), "--port", "0"]
    return subprocess.run(command, capture_output=True, timeout=STOP_WITHIN)


def test_an_unwritable_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], capture_output=True).returncode:
            pytest.skip("root may write everywhere")
        try:
            refused = start(tmp_path)
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)
        assert refused.returncode == 1
        assert b"Read-only file system" in refused.stderr
        return
    with read_only(tmp_path):
        refused = start(tmp_path)
    assert refused.returncode == 1
    assert b"Permission denied" in refused.stderr


def test_a_damaged_store_is_refused_with_reason_and_remedy(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        for seed in range(100):
            set_page(client, seed)
    os.truncate(tmp_path / FILE, 500_000)
    with pytest.raises(RuntimeError, match=rf"{tmp_path}/.* is damaged: .*Restore it from a backup, or move it away"):  # noqa: SIM117
        with start_server(*TIERED, directory=tmp_path):
            pass


def test_arguments_of_a_failed_write_are_freed_at_once(tmp_path: Path) -> None:
    class Value:
        """Something that memory has."""

    def write(value: Value) -> None:
        with pytest.raises(DiskFull), lmdb_errors(tmp_path, writing=True):
            fail(value)

    def fail(value: Value) -> None:
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    value = Value()
    known = weakref.ref(value)
    gc.disable()
    try:
        write(value)
        del value
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process can be set on Linux alone")
def test_removals_of_new_values_take_no_memory(tmp_path: Path) -> None:
    """While the disk cannot be written, a value that is removed before it was written leaves the queue."""
    with start_server(*TIERED, directory=tmp_path, killed=True) as server, server.client() as client:
        client.set("first", body(SIZE))
        settle(client)
        unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
        client.set("second", body(SIZE))
        until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        before = disk_info(client)["disk_waiting_bytes"]
        for i in range(100):
            key = f"{i}".encode().ljust(1 << 20, b"k")
            client.set(key, "text")
            client.delete(key)
            client.execute_command("KVPAGESET", f"r{i}", 0, 0, 0, 0, 1, 1, 1, 0, b"ab")
            client.delete(f"kv:r{i}:0:0:0:0")
        # A value that an attempt to commit has taken meanwhile leaves a removal: a few of the 100 MB at most.
        assert disk_info(client)["disk_waiting_bytes"] < before + (20 << 20)
        assert server.rss() < 300 << 20
        client.delete("first")  # it is on disk, so its removal waits for the next commit
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, unlimited)
        settle(client)
        server.stop(signal.SIGKILL)
    with tiered(tmp_path) as (_, client):
        assert client.keys() == [b"second"]


def test_a_limit_of_file_sizes_lowers_maxdisk(tmp_path: Path) -> None:
    """With `ulimit -f`, values are evicted as with `maxdisk`, and everything is written."""
    most = 24 << 20
    limited = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({most}, {most}))"
    program = ("-c", f"{limited}; from kvpage_server.app import main; main()")
    options = (*TIERED, "--maxmemory", "8mb")
    with start_server(*options, directory=tmp_path, program=program) as server, server.client() as client:
        assert client.config_get("maxdisk") == {"maxdisk": str(most)}
        for i in range(600):
            client.set(f"key:{i}", body(SIZE, i))
        settle(client)
        assert disk_info(client)["disk_failing"] == ""
        assert (tmp_path / FILE).stat().st_size <= most
        assert client.info("stats")["evicted_keys"] > 300
        assert client.get("key:599") == body(SIZE, 599)
        assert "no larger file (ulimit -f)" in server.log


def test_a_removed_directory_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(AssertionError, match="exit code 1"):
        stop_without_a_directory(tmp_path / "store", log)
    shown = log.read_text(encoding="utf-8")
    assert "the store cannot be closed, 1 queued value could not be written" in shown
    assert "Traceback" not in shown


def stop_without_a_directory(directory: Path, log: Path) -> None:
    directory.mkdir()
    with start_server(*TIERED, directory=directory, name=str(log)) as server, server.client() as client:
        client.set("key", body(SIZE))
        settle(client)
        shutil.rmtree(directory)
        client.set("other", body(SIZE))
        until(lambda: "No such file" in disk_info(client)["disk_failing"])


def test_a_frozen_disk_delays_only_commits(tmp_path: Path) -> None:
    """A snapshot of the machine freezes it. LMDB has its table of readers elsewhere."""
    options = ("--store", "tiered", "--maxdisk", "32mb", "--maxmemory", "4mb")
    with disk_to_freeze(tmp_path / "frozen") as disk:
        with start_server(*options, directory=disk) as server, server.client(socket_timeout=20) as client:
            for i in range(100):
                client.set(f"key:{i}", body(SIZE, i))
            client.save()
            with frozen(disk):
                assert all(client.get(f"key:{i}") == body(SIZE, i) for i in range(100))
                client.set("new", "value")
                time.sleep(1.5)  # longer than `everysec` waits for a commit
                assert client.get("new") == b"value"
                assert client.info("everything")["disk_fetched"] > 0
            client.save()
        with start_server(*options, directory=disk) as server, server.client() as client:
            assert client.get("new") == b"value"
