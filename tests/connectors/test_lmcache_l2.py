"""The L2 adapter of LMCache with a stub of LMCache's controllers, on a real server."""

from __future__ import annotations

import importlib
import os
import select
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import documents
import lmcache
import pytest
import redis
from kvpage_connectors import lmcache_l2
from kvpage_connectors.lmcache_l2 import KvpageL2Adapter, key_named, name_of
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryObj
from proxy import start_proxy
from servers import RunningServer, start_server
from waiting import until

MODEL, SIZE = "org/model-7B", 5000


def key(chunk: int, **fields: Any) -> ObjectKey:
    return ObjectKey(bytes([chunk]) * 32, **{"model_name": MODEL, "kv_rank": 0x1000100, **fields})


def body(chunk: int, size: int = SIZE) -> MemoryObj:
    return MemoryObj(memoryview(bytearray([chunk]) * size))


def empty(size: int = SIZE) -> MemoryObj:
    return MemoryObj(memoryview(bytearray(size)))


@dataclass
class Host:
    """Calls of LMCache's two controllers, which wait for the event of a task."""

    adapter: KvpageL2Adapter

    def store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> bool:
        task = self.adapter.submit_store_task(keys, objects)
        results = wait(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
        assert [*results] == [task]
        return bool(results[task].is_successful())

    def lookup(self, keys: list[ObjectKey]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        fd = self.adapter.get_lookup_and_lock_event_fd()
        return bits(wait(fd, lambda: self.adapter.query_lookup_and_lock_result(task)))

    def load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        found = bits(wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task)))
        assert self.adapter.query_load_result(task) is None
        return found


def wait(fd: int, query: Any) -> Any:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(60_000)
    os.read(fd, 8)
    return query()


def bits(bitmap: Any) -> list[bool]:
    return [bitmap.test(at) for at in range(len(bitmap))]


@contextmanager
def host_on(url: str, **options: Any) -> Iterator[Host]:
    adapter = KvpageL2Adapter({"url": url, "lookup_seconds": 30, "transfer_seconds": 30, **options})
    try:
        yield Host(adapter)
    finally:
        adapter.close()


@pytest.fixture
def host(server: RunningServer, client: redis.Redis) -> Iterator[Host]:
    with host_on(server.url) as host:
        yield host


def test_another_process_loads_stored_objects(host: Host, server: RunningServer) -> None:
    keys = [key(chunk) for chunk in range(4)]
    assert host.store(keys[:3], [body(chunk) for chunk in range(3)])
    with host_on(server.url) as other:
        assert other.lookup(keys) == [True, True, True, False]
        buffers = [empty() for _ in keys]
        assert other.load(keys, buffers) == [True, True, True, False]
        assert [bytes(one.byte_array) for one in buffers[:3]] == [bytes([chunk]) * SIZE for chunk in range(3)]
        assert other.adapter.accessed == keys[:3]
        assert other.adapter.reasons.counts == {("load", "absent"): 1}


def test_objects_behind_a_missing_one_are_found(host: Host) -> None:
    keys = [key(chunk) for chunk in range(6)]
    host.store([keys[0], keys[2], keys[5]], [body(0), body(2), body(5)])
    assert host.lookup(keys) == [True, False, True, False, False, True]


def test_groups_and_ranks_have_objects_of_their_own(host: Host) -> None:
    keys = [key(1), key(1, object_group_id=1), key(1, kv_rank=2), key(1, cache_salt="a b"), key(1, model_name="other")]
    host.store(keys[1:4], [body(1, 100), body(2, 200), body(3, 100)])
    assert host.lookup(keys) == [False, True, True, True, False]
    buffers = [empty(100), empty(200), empty(100)]
    assert host.load(keys[1:4], buffers) == [True] * 3
    assert [one.byte_array[0] for one in buffers] == [1, 2, 3]


def test_a_complete_lookup_is_one_command(server: RunningServer, client: redis.Redis) -> None:
    keys = [key(chunk) for chunk in range(8)]
    with host_on(server.url, threads=1) as host:
        host.store(keys, [body(chunk) for chunk in range(8)])
        assert host.lookup([key(9)]) == [False]  # both threads have connected, which is a command
        client.config_resetstat()
        assert all(host.lookup(keys))
        stats = client.info("commandstats")
    assert stats["cmdstat_kvpageprefix"]["calls"] == 1
    assert "cmdstat_kvpagelease" not in stats


def test_found_objects_are_leased_and_leases_end(server: RunningServer, client: redis.Redis) -> None:
    with host_on(server.url, lease_ms=300) as host:
        keys = [key(0), key(1), key(2)]
        host.store([keys[0], keys[2]], [body(0), body(2)])
        host.lookup(keys)
        assert client.info("kvpage")["leased_or_pinned"] == 2
        host.adapter.submit_unlock(keys)
        until(lambda: client.info("kvpage")["leased_or_pinned"] == 0)


def test_a_changed_byte_is_a_miss(server: RunningServer, client: redis.Redis) -> None:
    with start_proxy(server.port) as proxy, host_on(proxy.url, threads=1) as host:
        host.store([key(0), key(1)], [body(0), body(1)])
        proxy.flip_at, proxy._passed = SIZE // 2, 0
        assert host.load([key(0), key(1)], [empty(), empty()]) == [False, True]
        assert host.adapter.reasons.counts == {("load", "checksum"): 1}


def test_an_object_of_another_size_is_a_miss(host: Host) -> None:
    host.store([key(0)], [body(0)])
    assert host.load([key(0)], [empty(SIZE + 1)]) == [False]


def test_usage_follows_stores_and_deletions(host: Host) -> None:
    keys = [key(0), key(1)]
    host.store(keys, [body(0), body(1)])
    host.store(keys[:1], [body(0)])
    assert host.adapter.used == 2 * SIZE
    host.adapter.delete([*keys[1:], key(7)])
    assert host.adapter.used == SIZE
    assert host.lookup(keys) == [True, False]


def test_a_replaced_object_counts_its_new_size(host: Host) -> None:
    for size in (SIZE, 2 * SIZE, 100):
        assert host.store([key(0)], [body(0, size)])
        assert host.adapter.used == size


def test_sizes_of_old_objects_are_known_to_the_store(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember two objects of five. All five are deleted, an object of somebody else is none of ours."""
    monkeypatch.setattr(lmcache_l2, "_REMEMBERED", 2)
    keys = [key(chunk) for chunk in range(5)]
    for chunk in range(5):
        host.store(keys[chunk : chunk + 1], [body(chunk)])
    assert host.adapter.used == 5 * SIZE
    assert len(host.adapter._sizes._bytes) == 2
    host.adapter.delete([key(9), *keys])
    assert host.adapter.used == 0
    assert host.lookup(keys) == [False] * 5


def test_an_object_that_is_stored_again_much_later_counts_once() -> None:
    sizes = lmcache_l2._Sizes()
    assert sizes.add(key(0), SIZE) == SIZE
    for chunk in range(1, 150_000):
        sizes.add(key(1, kv_rank=chunk), SIZE)
    assert sizes.add(key(0), SIZE + 1) == 1


def test_objects_of_others_are_deleted_but_not_counted(host: Host, server: RunningServer) -> None:
    with host_on(server.url) as other:
        other.store([key(1)], [body(1)])
    host.store([key(0)], [body(0)])
    host.adapter.delete([key(1)])
    assert host.adapter.used == SIZE
    assert host.lookup([key(0), key(1)]) == [True, False]


def test_listing_returns_keys_and_sizes(host: Host, client: redis.Redis) -> None:
    long = key(9, model_name="long" * 100)
    keys = [*(key(chunk) for chunk in range(30)), key(1, model_name="a b:c", cache_salt="salt")]
    host.store([*keys, long], [body(1) for _ in range(32)])
    client.set("other", "value")

    def listed(model: str | None) -> dict[Any, int]:
        entries, cursor = {}, None
        while True:
            page = host.adapter.list_l2_keys(model, 10, cursor)
            entries |= {entry.key: entry.size_bytes for entry in page.entries}
            if (cursor := page.next_page_token) is None:
                return entries

    assert listed(None) == dict.fromkeys(map(key_named, map(name_of, keys)), SIZE)
    assert [one.cache_salt for one in listed("a b:c")] == ["salt"]
    assert host.lookup([long]) == [True]
    for arguments in ((None, 0, None), (None, 10, "x")):
        with pytest.raises(ValueError, match="page_size must be positive and cursor a number"):
            host.adapter.list_l2_keys(*arguments)


def test_documented_rights_are_sufficient() -> None:
    [line] = [
        line
        for line in (documents.ROOT / "docs/lmcache.md").read_text(encoding="utf-8").splitlines()
        if "'~kv:lmcache" in line
    ]
    words = shlex.split(line.partition("redis-cli -p 9221 ")[2])
    with start_server() as server, server.client() as client:
        client.execute_command(*words)
        with host_on(server.url, username="lmcache", password="secret") as host:
            host.store([key(0), key(2)], [body(0), body(2)])
            assert host.lookup([key(0), key(1), key(2)]) == [True, False, True]
            assert host.load([key(0), key(2)], [empty(), empty()]) == [True, True]
            assert len(host.adapter.list_l2_keys(page_size=100).entries) == 2
            host.adapter.delete([key(0)])
            assert host.lookup([key(0)]) == [False]
            assert host.adapter.reasons.counts == {}


def test_without_a_server_everything_is_a_miss() -> None:
    with host_on("redis://127.0.0.1:1", lookup_seconds=1, transfer_seconds=1) as host:
        assert not host.store([key(0)], [body(0)])
        assert host.lookup([key(0)]) == [False]
        assert host.load([key(0)], [empty()]) == [False]
        host.adapter.delete([key(0)])
        with pytest.raises(RuntimeError, match="did not answer"):
            host.adapter.list_l2_keys()
        assert {reason for _, reason in host.adapter.reasons.counts} == {"away"}
        assert host.adapter.report_status()["is_healthy"]


def test_a_silent_server_delays_nothing_beyond_the_deadline(server: RunningServer) -> None:
    with start_proxy(server.port) as proxy, host_on(proxy.url, lookup_seconds=0.5, transfer_seconds=0.5) as host:
        host.store([key(0)], [body(0)])
        proxy.stall_after = 0
        begun = time.monotonic()
        assert host.lookup([key(0)]) == [False]
        assert host.load([key(0)], [empty()]) == [False]
        assert time.monotonic() - begun < 5


def test_a_dead_server_of_several_loses_only_its_objects(server: RunningServer, client: redis.Redis) -> None:
    """Each server has some of the objects. Those of the other one are found, loaded and deleted."""
    keys = [key(chunk) for chunk in range(16)]
    with start_server() as second:
        urls = f"{server.url},{second.url}"
        with host_on(urls) as host:
            assert host.store(keys, [body(chunk) for chunk in range(16)])
    lives = [client.exists(b"kv:%b:0:0:0:0" % name_of(each)) == 1 for each in keys]
    assert 0 < sum(lives) < 16
    with host_on(urls) as host:
        assert host.lookup([each for each, live in zip(keys, lives, strict=True) if not live][:1]) == [False]
        assert host.lookup(keys) == lives
        assert host.load(keys, [empty() for _ in keys]) == lives
        host.adapter.delete(keys)
        assert host.lookup(keys) == [False] * 16
    assert client.dbsize() == 0


def test_a_full_server_is_a_failed_store() -> None:
    with (
        start_server("--maxmemory", "1mb", "--maxmemory-policy", "noeviction", "--store", "memory") as server,
        host_on(server.url) as host,
    ):
        assert not host.store([key(0)], [body(0, 2_000_000)])
        assert host.adapter.reasons.counts == {("save", "oom"): 1}
        assert host.adapter.used == 0


def test_a_task_ends_if_a_listener_raises(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*what: Any) -> None:
        raise RuntimeError("a listener")

    monkeypatch.setattr(host.adapter, "_notify_keys_stored", fail)
    monkeypatch.setattr(host.adapter, "_notify_keys_accessed", fail)
    assert host.store([key(0)], [body(0)])
    assert host.load([key(0)], [empty()]) == [True]
    assert host.adapter.reasons.counts == {("_report", "RuntimeError"): 2}


def test_memory_that_cannot_be_read_is_a_miss(host: Host) -> None:
    class Broken(MemoryObj):
        @property
        def byte_array(self) -> memoryview:
            raise RuntimeError("memory of a GPU")

    assert not host.store([key(0)], [Broken(memoryview(b"abc"))])
    assert host.adapter.reasons.counts == {("save", "RuntimeError"): 1}
    assert host.store([], [])


def test_wrong_arguments_are_misses_of_a_task(host: Host) -> None:
    class Broken(MemoryObj):
        def get_size(self) -> int:
            raise RuntimeError("freed")

    strange: Any = "no key"
    keys = [key(0), key(1)]
    assert not host.store(keys, [body(0)])
    assert not host.store(keys, [body(0), Broken(memoryview(b"abc"))])
    assert host.load(keys, [empty()]) == [False, False]
    assert host.load(keys, [empty(), Broken(memoryview(b"abc"))]) == [False, False]
    assert host.lookup([key(0), strange]) == [False, False]
    assert host.adapter.reasons.counts == {
        ("store", "ValueError"): 2,
        ("store", "RuntimeError"): 2,
        ("load", "ValueError"): 2,
        ("load", "RuntimeError"): 2,
        ("lookup", "AttributeError"): 2,
    }
    assert host.store(keys, [body(0), body(1)])


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache, "__version__", "0.6.0")
    with pytest.raises(ImportError, match=r"needs LMCache 0\.5\.6, found 0\.6\.0"):
        importlib.reload(lmcache_l2)
