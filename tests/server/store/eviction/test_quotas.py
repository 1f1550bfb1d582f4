"""Quotas: limits of keys that match a pattern, the exactness of the count, and the order of eviction."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from servers import RunningServer, start_server, with_constants
from stored_pages import Here, ask, held, prefix, set_block, set_page
from waiting import until

from kvpage_server.commands.families.server.config import apply
from kvpage_server.configuration.config import Config, ConfigError
from kvpage_server.glob import glob
from kvpage_server.page import unix_ms
from kvpage_server.store import evict
from kvpage_server.store.eviction.quotas import Quota, Rule
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.entry import is_page
from kvpage_server.store.memory.index import Block

BLOCK = 4 * (64 + 100)  # bytes that `set_block` counts as
A, B = "kv:tenantA.*", "kv:tenantB.*"


def string_size(key: str, value: bytes) -> int:
    return len(key) + len(value) + 200


def quota(client: redis.Redis, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = client.info("quotas")[f"quota{number}"]
    return found


def count_all(keys: Keyspace) -> None:
    while keys.quotas.go_on():
        pass


def check_units(keys: Keyspace, quota: Quota) -> None:
    """Check that every unit of a quota exists, with its actual size."""
    for unit in {*quota.sizes, *quota.units}:
        there = keys.index.still_has(unit) if isinstance(unit, Block) else unit in keys.contents.catalogue.entries
        assert there, f"{unit!r} does not exist"
    assert quota.sizes == {unit: keys.contents.size_for_quota(unit) for unit in quota.sizes}
    assert quota.bytes == sum(quota.sizes.values())
    assert quota.index == sum(map(quota.index_costs.of_unit, quota.sizes))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server("--maxmemory", "64mb") as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        client.config_set("quota", "")
        client.config_set("maxmemory-policy", "allkeys-prefix")
        yield client


# -- counting ------------------------------------------------------------------------------------------------------


def test_stored_values_count_and_removed_ones_do_not(client: redis.Redis) -> None:
    client.config_set("quota", f"{A} 1mb note:* 1mb")
    set_block(client, "tenantA.x", 0)
    set_block(client, "tenantB.x", 0)
    assert quota(client)["bytes"] == BLOCK
    set_block(client, "tenantA.x", 0, size=200)
    assert quota(client)["bytes"] == 4 * (64 + 200)
    client.delete("kv:tenantA.x:0:1:0:1")  # splits the block
    assert quota(client)["bytes"] == 3 * (64 + 200)
    set_page(client, "tenantA.x", head=1, kv_type=1, body=b"x" * 10)
    set_page(client, "tenantA.x", head=1, kv_type=1, body=b"x" * 30)
    assert quota(client)["bytes"] == 3 * (64 + 200) + 64 + 30
    client.set("kv:tenantA.x:0:1:0:1", "plain")
    plain = string_size("kv:tenantA.x:0:1:0:1", b"plain")
    assert quota(client)["bytes"] == 3 * (64 + 200) + plain
    set_block(client, "tenantA.x", 0)
    assert quota(client)["bytes"] == BLOCK
    set_page(client, "tenantA.y", ttl=1)
    client.mset({"kv:tenantA.note": "1234", "note:a": "x" * 5000, "other": "x"})
    note = string_size("kv:tenantA.note", b"1234")
    assert quota(client)["bytes"] == BLOCK + 164 + note
    assert quota(client, 1)["bytes"] == string_size("note:a", b"x" * 5000)
    client.incrby("kv:tenantA.note", 99_999)
    client.set("note:a", "short")
    assert quota(client)["bytes"] == BLOCK + 164 + note + 2
    assert quota(client, 1)["bytes"] == string_size("note:a", b"short")
    client.pexpire("kv:tenantA.y:0:0:0:0", 1)
    while client.exists("kv:tenantA.y:0:0:0:0"):
        pass
    client.execute_command("KVPAGEDEL", "tenantA.x")
    client.getdel("kv:tenantA.note")
    assert quota(client)["bytes"] == 0
    assert quota(client, 1)["bytes"] == string_size("note:a", b"short")
    client.flushall()
    assert quota(client, 1)["bytes"] == 0


class Quotas(RuleBasedStateMachine):
    """After any operation the count is exact, and within the limit except for the last written value."""

    @initialize(
        policy=st.sampled_from(["allkeys-prefix", "allkeys-lru", "allkeys-s3fifo", "volatile-ttl", "noeviction"])
    )
    def start(self, policy: str) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(evict, "_PATTERNS_PER_STEP", 1)
        self.here = Here(policy=policy)
        self.keys = self.here.keyspace
        self.counts = False  # whether a quota does not know everything yet
        self.give(6000, 4000)

    def give(self, first: int, second: int) -> None:
        self.here.server.config.change("quota", f"kv:a* {first} kv:b:* {second} text:* 3000")
        apply(self.here.server, ["quota"])
        self.counts = True

    def write(self, *words: Any) -> None:
        before = self.here.keyspace.listing.keys()
        received = self.here.call(*words)
        if received.startswith(b"-"):
            assert received.startswith(b"-OOM command not allowed when the quota of '")
            if self.keys.eviction_order.policy == "noeviction":
                assert self.here.keyspace.listing.keys() == before
        else:
            assert received in (b"+OK\r\n", b":1\r\n")

    @rule(
        req=st.sampled_from("abcd"),
        page=st.integers(0, 3),
        size=st.integers(1, 400),
        heads=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    )
    def set_pages(self, req: str, page: int, size: int, heads: list[int]) -> None:
        pages = [word for head in heads for word in (req, 0, head, page, 0, 3, 1, size, 0, b"x" * size)]
        self.write("KVPAGEMSET", len(heads), *pages)

    @rule(req=st.sampled_from("abcd"), page=st.integers(0, 3), size=st.integers(1, 400), heads=st.integers(1, 4))
    def set_block(self, req: str, page: int, size: int, heads: int) -> None:
        self.write("KVBLOCKSET", req, page, 1, heads, 1, 0, 1, 0, 3, size, bytes(heads * size))

    @rule(req=st.sampled_from("ab"), size=st.integers(1, 400))
    def set_blocks(self, req: str, size: int) -> None:
        for page in range(4):
            self.set_block(req, page, size, 1)

    @rule(key=st.sampled_from(["kv:a:0:1:0:0", "kv:b:0:9:2:0", "text:1", "text:2", "other"]), size=st.integers(0, 2500))
    def set_string(self, key: str, size: int) -> None:
        self.write("SET", key, b"x" * size, *(["PX", 10**7] if size % 2 else []))

    @rule(sizes=st.lists(st.integers(0, 900), min_size=1, max_size=5))
    def set_strings(self, sizes: list[int]) -> None:
        self.write("MSET", *(word for i, size in enumerate(sizes) for word in (f"text:{i % 3}", b"x" * size)))

    @rule(key=st.sampled_from(["kv:a:0:1:0:0", "kv:b:0:0:1:0", "kv:a:0:2:3:0", "text:1"]))
    def remove(self, key: str) -> None:
        self.here.call("DEL", key)

    @rule(req=st.sampled_from("abcd"), pages=st.sets(st.integers(0, 3)))
    def remove_blocks(self, req: str, pages: set[int]) -> None:
        self.here.call("KVPAGEDEL", req, *pages)

    @rule(key=st.sampled_from(["kv:a:0:1:0:0", "kv:b:0:0:1:0", "text:1"]))
    def expire(self, key: str) -> None:
        self.here.call("PEXPIREAT", key, unix_ms() - 1)

    @rule(key=st.sampled_from(["kv:a:0:1:0:0", "kv:b:0:0:1:0"]))
    def read(self, key: str) -> None:
        self.here.call("GET", key)

    @rule(first=st.integers(0, 8000), second=st.integers(1, 8000), steps=st.integers(0, 6))
    def change(self, first: int, second: int, steps: int) -> None:
        self.give(first, second)
        self.count(steps)

    @rule(policy=st.sampled_from(["allkeys-prefix", "allkeys-lru", "allkeys-s3fifo", "volatile-ttl", "noeviction"]))
    def change_policy(self, policy: str) -> None:
        self.keys.eviction_order.policy = policy

    @rule()
    def flush(self) -> None:
        self.here.call("FLUSHALL")

    @rule(steps=st.sampled_from([1, 2, 30]))
    def count(self, steps: int) -> None:
        self.counts = all(self.keys.quotas.go_on() for _ in range(steps))

    def teardown(self) -> None:
        if hasattr(self, "here"):
            self.patch.undo()
            count_all(self.keys)
            self.counts = False
            self.what_is_counted_is_what_there_is()

    @invariant()
    def nothing_counts_that_is_not_there(self) -> None:
        if hasattr(self, "here"):
            for quota in self.keys.eviction_order.quotas.all:
                check_units(self.keys, quota)

    @invariant()
    def what_is_counted_is_what_there_is(self) -> None:
        if not hasattr(self, "here") or self.counts:
            return
        sizes = [0, 0, 0]
        for key in self.keys.listing.names():
            entry = self.keys.contents.find(key)
            assert entry is not None
            whose = 0 if key.startswith(b"kv:a") else 1 if key.startswith(b"kv:b:") else 2 if key[:5] == b"text:" else 3
            if whose < 3:
                sizes[whose] += 64 + entry.size if is_page(entry) else len(key) + entry.size + 200
        assert [quota.bytes for quota in self.keys.eviction_order.quotas.all] == sizes


Quotas.TestCase.settings = settings(stateful_step_count=30)
TestCountedExactly = Quotas.TestCase


# -- whose values go -------------------------------------------------------------------------------------------------


def misses(client: redis.Redis) -> int:
    return int(client.info("kvpage")["page_misses_over_quota"])


@pytest.mark.parametrize("policy", ["allkeys-prefix", "allkeys-lru", "allkeys-s3fifo"])
def test_a_writer_over_its_quota_loses_its_own_values(client: redis.Redis, policy: str) -> None:
    client.config_set("maxmemory-policy", policy)
    client.config_set("quota", f"{A} {5 * BLOCK} {B} 1mb")
    before = misses(client), quota(client)["evicted_keys"]
    set_block(client, "tenantB.x", 0)
    for page in range(12):
        set_block(client, f"tenantA.{page}", 0)
        assert quota(client)["bytes"] == min(page + 1, 5) * BLOCK
    gone = [page for page in range(12) if not client.execute_command("KVBLOCKEXISTS", f"tenantA.{page}", 0)]
    assert len(gone) == 7
    assert 11 not in gone
    if policy != "allkeys-prefix":  # which keeps those for a while that nobody may be through with
        assert gone == list(range(7))
    assert client.execute_command("KVBLOCKEXISTS", "tenantB.x", 0)
    assert quota(client)["evicted_keys"] - before[1] == 7 * 4
    why = ask(client, "KVPAGEWHY", f"tenantA.{gone[0]}", 0, 1, 0, 1)
    assert (why["reason"], why["quota"]) == ("over quota", A)
    assert "policy" not in why
    assert unix_ms() - 60_000 < why["at"] <= unix_ms()
    client.execute_command("KVPAGEGET", f"tenantA.{gone[0]}", 0, 1, 0, 1)
    client.execute_command("KVBLOCKGET", f"tenantA.{gone[1]}", 0)
    assert misses(client) - before[0] == 2


def test_kvpage_why_names_the_quota(server: RunningServer, client: redis.Redis) -> None:
    client.config_set("quota", f"kv:tenant[a-z].* {BLOCK}")
    for page in range(2):
        set_block(client, f"tenanta.{page}", 0)
    words = [sys.executable, "-m", "kvpage_server.cli", "why", "tenanta.0", "--url", server.url]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("over quota of kv:tenant[a-z].*, ")


def test_chains_go_from_their_ends_for_a_quota_too(client: redis.Redis) -> None:
    client.config_set("quota", f"{A} {8 * BLOCK}")
    for page in range(6):
        set_block(client, "tenantA.long", page)
    for page in range(4):
        set_block(client, "tenantA.new", page)
    there = held(client, "tenantA.long")
    assert there == list(range(4))
    assert held(client, "tenantA.new") == list(range(4))


def test_a_value_larger_than_its_quota_is_stored_alone(client: redis.Redis) -> None:
    client.config_set("quota", f"{A} {3 * BLOCK}")
    for page in range(3):
        set_block(client, "tenantA.x", page)
    client.set("kv:tenantA.large", b"x" * 5000)
    assert client.keys("*tenantA*") == [b"kv:tenantA.large"]
    set_block(client, "tenantA.y", 0)
    assert quota(client)["bytes"] == BLOCK


def test_leased_and_pinned_units_stay_and_others_are_evicted(client: redis.Redis) -> None:
    client.config_set("quota", f"{A} {4 * BLOCK}")  # half of which may be protected
    for page in range(4):
        set_block(client, f"tenantA.{page}", 0)
    client.execute_command("KVPAGELEASE", "tenantA.0", 60_000)
    client.execute_command("KVPAGEPIN", "tenantA.1")
    set_block(client, "tenantA.4", 0)
    there = [page for page in range(5) if client.execute_command("KVBLOCKEXISTS", f"tenantA.{page}", 0)]
    assert there == [0, 1, 3, 4]


def test_full_memory_evicts_those_over_their_quota_first() -> None:
    with start_server("--maxmemory", "256kb", "--maxmemory-policy", "allkeys-lru") as server, server.client() as client:
        for page in range(20):
            set_block(client, f"tenantB.{page}", 0, size=800)
        for page in range(20):
            set_block(client, f"tenantA.{page}", 0, size=800)
        client.config_set("quota", f"{A} {5 * 4 * 864}")
        assert quota(client)["bytes"] == 20 * 4 * 864  # the limit is lower now, which evicts nothing by itself
        for page in range(60):
            set_block(client, f"other.{page}", 0, size=800)
        assert quota(client)["bytes"] == 5 * 4 * 864
        assert ask(client, "KVPAGEWHY", "tenantA.0")["reason"] == "over quota"
        assert ask(client, "KVPAGEWHY", "tenantA.19")["reason"] == "stored"
        evicted = [page for page in range(20) if ask(client, "KVPAGEWHY", f"tenantB.{page}")["reason"] == "evicted"]
        assert evicted == list(range(len(evicted)))


@pytest.mark.parametrize("policy", ["noeviction", "volatile-ttl"])
def test_without_evictable_units_a_quota_refuses_a_write(client: redis.Redis, policy: str) -> None:
    client.config_set("maxmemory-policy", policy)
    client.config_set("quota", f"{A} {2 * BLOCK} n:* {string_size('n:1', b'9')}")
    set_block(client, "tenantA.x", 0)
    set_block(client, "tenantA.x", 1)
    client.set("n:1", "9")
    before = quota(client)["bytes"], quota(client, 1)["bytes"], sorted(client.keys())
    page = ("tenantA.y", 0, 0, 0, 0, 3, 1, 10, 0, b"x" * 10)
    other = ("tenantB.y", 0, 0, 0, 0, 3, 1, 10, 0, b"x" * 10)
    writes: list[tuple[Any, ...]] = [
        ("KVPAGESET", *page),
        ("KVPAGEMSET", 2, *other, *page),
        ("KVBLOCKSET", "tenantA.y", 0, 1, 1, 1, 0, 1, 0, 3, 10, bytes(10)),
        ("SET", "kv:tenantA.note", "x"),
        ("MSET", "kv:tenantB.note", "x", "kv:tenantA.note", "x"),
        ("INCR", "n:1"),
    ]
    for words in writes:
        with pytest.raises(redis.OutOfMemoryError, match=r"^command not allowed when the quota of '.*', \d+ bytes, is"):
            client.execute_command(*words)
        assert (quota(client)["bytes"], quota(client, 1)["bytes"], sorted(client.keys())) == before
    with client.pipeline() as pipe:
        pipe.execute_command(*writes[1])
        pipe.set("kv:tenantB.note", "x")
        received = pipe.execute(raise_on_error=False)
    assert isinstance(received[0], redis.OutOfMemoryError)
    assert received[1]
    set_block(client, "tenantA.x", 1)  # in place of another of its size
    assert client.decr("n:1") == 8
    client.execute_command("KVPAGEDEL", "tenantA.x", 1)
    client.execute_command("KVPAGESET", *page)


def store_tiny_pages(client: redis.Redis, tenant: str, first: int, count: int) -> None:
    """Store empty pages, each in a request of its own with a long name: most of their memory is in the index."""
    names = (f"{tenant}.{number}".ljust(249, "n") for number in range(first, first + count))
    pages = (word for name in names for word in (name, 0, 0, 0, 0, 8, 1, 1, 0, b""))
    client.execute_command("KVPAGEMSET", count, *pages)


@pytest.mark.parametrize("store", ["memory", "tiered"])
def test_tiny_values_of_a_tenant_do_not_evict_others(store: str, tmp_path: Path) -> None:
    with (
        start_server("--store", store, "--maxmemory", "64mb", directory=tmp_path) as server,
        server.client() as client,
    ):
        client.config_set("quota", f"{A} 16mb {B} 16mb")
        for number in range(100):
            set_block(client, f"tenantB.{number}", 0)
        for first in range(0, 40_000, 1000):
            store_tiny_pages(client, "tenantA", first, 1000)
        a, b = quota(client), quota(client, 1)
        assert a["bytes"] < 16 << 20
        assert a["index_bytes"] <= 1.01 * ((1 << 20) + (62 << 20) // 4)
        assert a["evicted_keys"] > 10_000
        assert b["bytes"] == 100 * BLOCK
        assert all(held(client, f"tenantB.{number}") == [0] for number in range(100))
        client.config_set("maxmemory-policy", "noeviction")
        with pytest.raises(
            redis.OutOfMemoryError, match=r"'kv:tenantA\.\*', 16777216 bytes, has so many keys that their"
        ):
            store_tiny_pages(client, "tenantA", 50_000, 1000)
        set_block(client, "tenantB.more", 0)


def test_volatile_ttl_keeps_pages_that_were_persisted(client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "volatile-ttl")
    client.config_set("quota", f"{A} 20000")
    page = (0, 0, 0, 0, 8, 1, 12_000)
    client.execute_command("KVPAGESET", "tenantA.x", *page, 100, bytes(12_000))
    assert client.persist("kv:tenantA.x:0:0:0:0")
    with pytest.raises(redis.ResponseError, match="is used up"):
        client.execute_command("KVPAGESET", "tenantA.y", *page, 0, bytes(12_000))
    assert client.keys("kv:tenantA*") == [b"kv:tenantA.x:0:0:0:0"]


def test_volatile_ttl_evicts_expiring_units_of_the_tenant(client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "volatile-ttl")
    client.config_set("quota", f"{A} {3 * BLOCK}")
    for page, ttl in enumerate((0, 100, 0)):
        set_block(client, "tenantA.x", page, ttl=ttl)
    set_block(client, "tenantA.y", 0)
    assert held(client, "tenantA.x") == [0, 2]
    with pytest.raises(redis.OutOfMemoryError):
        set_block(client, "tenantA.y", 1)


# -- the order of eviction after a change of quotas, and after a restart ---------------------------------------------


@pytest.mark.parametrize("policy", ["allkeys-prefix", "allkeys-lru", "allkeys-s3fifo"])
def test_a_change_of_other_quotas_keeps_the_order(policy: str) -> None:
    def set_quotas(limit: int, *patterns: bytes) -> Quota:
        rules = [Rule(pattern, limit, glob(pattern)) for pattern in patterns]
        keys.quotas.set_rules(rules)
        count_all(keys)
        return keys.eviction_order.quotas.all[0]

    keys = Keyspace(policy=policy)
    before = set_quotas(10**6, b"a:*", b"b:*")
    for number in range(100):
        keys.contents.set_string(b"a:%d" % number, b"x")
    units = keys.eviction_order.units
    for number in range(30, 0, -1):
        units.now += 3
        units.used(b"a:%d" % number)
    again = set_quotas(10**5, b"a:*", b"b:*", b"c:*")
    assert again is before
    assert again.limit == 10**5
    assert [*set_quotas(10**5, b"c:*", b"a:*").units] == [], "it may have others now"
    new = keys.eviction_order.quotas.all[1]
    check_units(keys, new)
    assert new.evicted == before.evicted
    assert [*islice(new.units, 70, 100)] == [b"a:%d" % number for number in range(30, 0, -1)]


def test_a_new_quota_takes_the_order_of_use_and_the_prefixes(client: redis.Redis) -> None:
    names = [f"tenantA.{name}" for name in ("z", "y", "x", "w")]
    for name in names:
        set_block(client, name, 0)
    assert prefix(client, *(word for name in names for word in (name, 0))) == 4
    set_block(client, "tenantA.later", 0)
    client.config_set("quota", f"{A} {5 * BLOCK}")
    until(lambda: quota(client)["bytes"] == 5 * BLOCK)
    for page in range(2):
        set_block(client, "tenantA.new", page)
    assert [bool(held(client, name)) for name in names] == [True, True, False, False], "ends go first"


@pytest.mark.parametrize("policy", ["allkeys-prefix", "allkeys-lru", "allkeys-s3fifo"])
def test_after_a_restart_a_quota_evicts_the_oldest_first(tmp_path: Path, policy: str) -> None:
    options = ("--store", "tiered", "--maxmemory-policy", policy, "--quota", A, str(8 * BLOCK))
    names = [f"tenantA.{name}" for name in "hgfedcba"]
    program = with_constants("kvpage_server.store.disk.tier", _TOGETHER=8)  # uses within 256 ms count as one
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        for name in names[:4]:
            set_block(client, name, 0)
        client.save()  # the time of a first write is that of its commit
        time.sleep(1.1)
        for name in names[4:]:
            set_block(client, name, 0)
    with start_server(*options, directory=tmp_path, program=program) as server, server.client() as client:
        for page in range(4):
            set_block(client, "tenantA.new", page)
        assert [bool(held(client, name)) for name in names] == [False] * 4 + [True] * 4


# -- which quota -----------------------------------------------------------------------------------------------------


def test_the_first_pattern_that_matches_counts(client: redis.Redis) -> None:
    client.config_set("quota", f"kv:tenantA.vip* 0 {A} {2 * BLOCK}")
    for page in range(4):
        set_block(client, "tenantA.vip", page)
        set_block(client, "tenantA.x", page)
    assert (quota(client)["bytes"], quota(client, 1)["bytes"]) == (4 * BLOCK, 2 * BLOCK)


def test_a_name_is_matched_once_for_any_number_of_uses() -> None:
    asked: list[bytes] = []

    def matches(name: bytes) -> bool:
        asked.append(name)
        return name.startswith(b"kv:a")

    here = Here()
    never = Rule(b"[n]ever", 1, lambda name: asked.append(name))
    here.keyspace.quotas.set_rules([never, Rule(b"[k]?:a*", 10**6, matches)])
    for page in range(20):
        here.call("KVBLOCKSET", "a", page, 1, 1, 1, 0, 1, 0, 3, 100, bytes(100))
        here.call("KVBLOCKGET", "a", page)
        here.call("SET", "b", "x")
    assert sorted(asked) == [b"b", b"b", b"kv:a:", b"kv:a:"]


def test_many_quotas_cost_a_command_nothing() -> None:
    def count(quotas: int) -> int:
        """Return the number of calls of Python functions for 100 new keys and the work between them."""
        here = Here()
        patterns = [b"kv:tenant%d.*" % number for number in range(quotas)]
        here.keyspace.quotas.set_rules([Rule(pattern, 10**6, glob(pattern)) for pattern in patterns])
        calls = 0

        def note(frame: object, event: str, function: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(note)
        for number in range(100):
            here.keyspace.contents.set_string(b"kv:tenant0.%d" % number, b"x")
            here.keyspace.sweep(0, 100)
        sys.setprofile(None)
        return calls

    assert count(1000) < 1.1 * count(1)


def test_a_quota_without_values_has_no_policy_of_its_own() -> None:
    here = Here()
    patterns = [b"a*", b"b*", b"c*"]
    here.keyspace.quotas.set_rules([Rule(pattern, 10**6, glob(pattern)) for pattern in patterns])
    here.call("SET", "b", "x")
    here.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    here.keyspace.sweep(0, 100)
    a, b, c = here.keyspace.eviction_order.quotas.all
    assert (a.known_units, c.known_units) == (None, None)
    assert [type(quota.units) for quota in (a, b, c)] == [type(here.keyspace.eviction_order.quotas.every)] * 3
    assert [*b.units] == [b"b"]


def test_a_batch_that_fits_is_not_refused_half_way(client: redis.Redis) -> None:
    """The first values grow past the quota for as long as the last has not become smaller."""
    client.config_set("maxmemory-policy", "noeviction")
    client.mset({"note:a": "1", "note:b": "2", "note:c": "c" * 800})
    client.config_set("quota", "note:* 1800")
    new = {"note:a": "a" * 300, "note:b": "b" * 300, "note:c": "3"}
    assert client.mset(new)
    assert client.mget(new) == list(map(str.encode, new.values()))
    with pytest.raises(redis.ResponseError, match="is used up"):
        client.set("note:d", "d" * 2000)
    client.set("note:d", "d" * 350)
    with pytest.raises(redis.ResponseError, match="is used up"):
        client.incr("note:e")


def test_a_large_store_is_counted_in_steps() -> None:
    keys = Keyspace()
    for number in range(10_000):
        keys.contents.set_string(b"a:%d" % number if number % 2 else b"b:%d" % number, b"x" * 10)
    keys.quotas.set_rules([Rule(b"a:*", 10**7, lambda name: name.startswith(b"a:"))])
    (quota,) = keys.eviction_order.quotas.all
    assert quota.bytes < 5000 * 210
    keys.contents.set_string(b"a:99999", b"new")
    keys.contents.delete(b"a:9999")
    steps = 0
    while keys.sweep(unix_ms(), 100) == 100:
        steps += 1
    assert 2 <= steps <= 20
    assert quota.bytes == sum(len(key) + 210 for key in keys.listing.names() if key.startswith(b"a:")) - 7


KINDS: dict[str, Callable[[Here, int], bytes]] = {
    "pages": lambda here, page: here.call("KVPAGESET", "a", 0, 0, page, 0, 3, 1, 100, 0, bytes(100)),
    "blocks": lambda here, page: here.call("KVBLOCKSET", "a", page, 1, 1, 1, 0, 1, 0, 3, 100, bytes(100)),
    "strings": lambda here, page: here.call("SET", f"kv:a:{page:03}", bytes(100)),
}


def being_counted(monkeypatch: pytest.MonkeyPatch, kind: str, limit: int = 10**6) -> tuple[Here, Quota]:
    """Ten values, of which a quota that was just set knows one."""
    monkeypatch.setattr(evict, "_PATTERNS_PER_STEP", 1)
    here = Here(policy="allkeys-lru")
    for page in range(10):
        assert KINDS[kind](here, page) == b"+OK\r\n"
    here.keyspace.quotas.set_rules([Rule(b"kv:a:*", limit, lambda name: name.startswith(b"kv:a:"))])
    (quota,) = here.keyspace.eviction_order.quotas.all
    assert len(quota.sizes) == 1
    return here, quota


def remove(here: Here, kind: str, page: int) -> None:
    gone = here.call("DEL", f"kv:a:{page:03}") if kind == "strings" else here.call("KVPAGEDEL", "a", page)
    assert gone == b":1\r\n"


@pytest.mark.parametrize("kind", KINDS)
def test_units_removed_during_a_count_do_not_count(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    here, quota = being_counted(monkeypatch, kind)
    one = quota.bytes
    here.keyspace.quotas.go_on()
    for page in range(3, 8):
        remove(here, kind, page)
    for page in (4, 5, 20):  # some are stored again, with other content
        KINDS[kind](here, page)
    remove(here, kind, 5)
    count_all(here.keyspace)
    assert quota.bytes == 7 * one
    check_units(here.keyspace, quota)
    assert len(quota.units) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_all_may_go_while_a_quota_is_counted(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    here, quota = being_counted(monkeypatch, kind)
    one = quota.bytes
    here.keyspace.contents.flush()
    KINDS[kind](here, 5)
    count_all(here.keyspace)
    assert here.keyspace.contents.flushed  # nothing of it has been freed yet
    assert quota.bytes == one
    check_units(here.keyspace, quota)


@pytest.mark.parametrize("kind", KINDS)
def test_units_rewritten_during_a_count_are_evicted_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    limit = 10 * (64 + 100 if kind != "strings" else string_size("kv:a:000", bytes(100)))
    here, quota = being_counted(monkeypatch, kind, limit)
    here.keyspace.quotas.go_on()
    for page in (4, 5, 6):
        remove(here, kind, page)
    count_all(here.keyspace)
    for page in (4, 5, 6):
        KINDS[kind](here, page)
    for page in range(100, 110):  # in place of all that there is
        assert KINDS[kind](here, page) == b"+OK\r\n"
        assert len(here.keyspace) == len(here.keyspace.listing.keys())
        check_units(here.keyspace, quota)
    assert (len(here.keyspace), quota.evicted) == (10, 10)
    if kind != "strings":
        assert b"over quota" in here.call("KVPAGEWHY", "a", 0, 0, 5, 0)


def test_quotas_are_counted_after_a_restart(tmp_path: Path) -> None:
    options = ("--store", "tiered", "--maxmemory", "64mb", "--quota", A, "1mb", "--quota", "note:*", "1mb")
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        for page in range(5):
            set_block(client, "tenantA.x", page)
            set_page(client, "tenantA.y", page)
        client.delete("kv:tenantA.x:0:1:0:1")
        client.mset({"note:1": "short", "note:2": b"x" * 3000, "kv:tenantA.z": "x"})
        before = quota(client)["bytes"], quota(client, 1)["bytes"]
        assert before[0] == 5 * BLOCK - 164 + 5 * 164 + string_size("kv:tenantA.z", b"x")
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        assert (quota(client)["bytes"], quota(client, 1)["bytes"]) == before
        client.config_set("quota", f"{A} {3 * BLOCK}")
        client.execute_command("KVBLOCKGET", "tenantA.x", 3)
        set_block(client, "tenantA.new", 0)
        assert quota(client)["bytes"] <= 3 * BLOCK
        gone = [(req, page) for req in ("tenantA.x", "tenantA.y") for page in range(5) if page not in held(client, req)]
        assert gone
        for req, page in gone:
            assert ask(client, "KVPAGEWHY", req, 0, 0, page, 0)["reason"] == "over quota"
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        assert quota(client)["bytes"] <= 3 * BLOCK


# -- the parameter ---------------------------------------------------------------------------------------------------


def test_quotas_are_in_the_file_options_and_config_get(tmp_path: Path) -> None:
    file = tmp_path / "kvpage.conf"
    file.write_text("# tenants\nquota kv:tenantA.* 1mb\nquota note:* 3kb other:* 1gb\n", encoding="utf-8")
    with start_server("--quota", "note:*", "4kb", file=file) as server, server.client() as client:
        shown = "kv:tenantA.* 1048576 note:* 4096 other:* 1073741824"
        assert client.config_get("quota") == {"quota": shown}
        client.config_set("quota", "kv:tenantA.* 2mb b* 0")
        assert client.config_get("quota") == {"quota": "kv:tenantA.* 2097152 b* 0"}
        client.config_rewrite()
        assert file.read_text(encoding="utf-8").splitlines()[:2] == ["# tenants", "quota kv:tenantA.* 2097152"]
        again = Config()
        again.load(file)
        assert again.quota == {"kv:tenantA.*": 2 << 20, "b*": 0}
        with pytest.raises(redis.ResponseError, match="must be a number of bytes"):
            client.execute_command("CONFIG", "SET", "quota", "kv:x:* 1mb", "maxmemory", "much")
        assert client.config_get("quota") == {"quota": "kv:tenantA.* 2097152 b* 0"}
        client.config_set("quota", "")
        assert client.config_get("quota") == {"quota": ""}
        client.config_rewrite()
        again = Config()
        again.load(file)
        assert again.quota == {}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("quota", "takes 2 values a quota: a pattern of keys, bytes (0 for no limit); got 0"),
        ("quota kv:a.*", "takes 2 values a quota: a pattern of keys, bytes (0 for no limit); got 1"),
        ("quota kv:a.* much", "must be a number of bytes such as 0, 512mb or 4gb, got 'much'"),
        ("quota kv:a.* -1", "must be a number of bytes such as 0, 512mb or 4gb, got '-1'"),
        ("quota ~kv:a.* 1mb", "a quota's pattern has no ~ in front (\\~ for a key that has one), got '~kv:a.*'"),
        ("quota kv:a.* 1mb kv:a.* 2mb", "pattern 'kv:a.*' is given twice"),
        ('quota "" 1mb', "pattern must not be empty or have spaces (use ? instead), got ''"),
        ('quota "a b" 1mb', "pattern must not be empty or have spaces (use ? instead), got 'a b'"),
        (f"quota {'x' * 1025} 1mb", "a pattern has at most 1024 bytes, got 1025"),
        ("quota " + " ".join(f"{number} 1mb" for number in range(1025)), "has at most 1024 quotas, got 1025"),
    ],
)
def test_a_bad_quota_is_refused_with_the_line_and_the_reason(
    tmp_path: Path, client: redis.Redis, line: str, complaint: str
) -> None:
    file = tmp_path / "kvpage.conf"
    file.write_text(f"port 0\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        Config().load(file)
    assert str(refused.value) == f"{file}, line 2: quota {complaint}"
    value = line.removeprefix("quota").strip()
    if '"' not in value and value:
        with pytest.raises(redis.ResponseError) as received:
            client.execute_command("CONFIG", "SET", "quota", value)
        assert str(received.value).endswith(complaint)


@pytest.mark.parametrize(
    "words",
    [("SET", "%s", "v"), ("SET", "%s", "v", "EX", "900"), ("KVPAGEKEEP", "al", "1", "600", "%s"), ("SCAN", "0")],
    ids=["string", "expiry", "lifetime", "scan"],
)
def test_long_keys_that_were_deleted_take_little_memory(words: tuple[str, ...]) -> None:
    """250 keys of 256 KiB: a copy of each would be 62 MiB."""
    here = Here()
    here.server.config.change("quota", "kv:t* 20mb")
    apply(here.server, ["quota"])
    tracemalloc.start()
    try:
        for number in range(250):
            key = f"{number}:".ljust(1 << 18, "y")
            here.call("SET", key, "v")
            here.call(*(key if word == "%s" else word for word in words))
            assert here.call("DEL", key) == b":1\r\n"
        assert tracemalloc.get_traced_memory()[0] < 40 << 20
    finally:
        tracemalloc.stop()
