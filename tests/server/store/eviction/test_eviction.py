"""Eviction at full memory: each policy alone, and all of them in the keyspace."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import tracemalloc
from collections import OrderedDict
from contextlib import suppress
from itertools import islice, permutations
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from servers import start_server, with_constants
from stored_pages import Here, set_block, set_page
from waiting import PATIENCE, until

from kvpage_server.page import unix_ms
from kvpage_server.service import regular_work
from kvpage_server.store import keyspace
from kvpage_server.store.evict import KEYS_PER_STEP, OverLimit
from kvpage_server.store.eviction.policies import LRU, POLICIES, S3FIFO
from kvpage_server.store.eviction.prefix import Prefix
from kvpage_server.store.eviction.queues import BURST, OrderedMap, Queues, Unit, successor
from kvpage_server.store.keyspace import Keyspace

KINDS: list[type[Queues]] = [LRU, S3FIFO, Prefix]


def evict(policy: Queues, count: int = 1) -> list[Unit]:
    gone = []
    for unit in islice(policy.victims(), max(count, 0)):
        policy.evicted(unit)
        gone.append(unit)
    return gone


def write(policy: Queues, *units: bytes) -> None:
    for unit in units:
        policy.used(unit)
    policy.follows(units)


class PolicyMachine(RuleBasedStateMachine):
    """Any policy, compared with a plain set of units and their last use."""

    @initialize(make=st.sampled_from(KINDS))
    def start(self, make: type[Queues]) -> None:
        self.policy: Queues = make()
        self.used = dict[bytes, int]()

    @rule(numbers=st.lists(st.integers(0, 30), max_size=6, unique=True), seconds=st.integers(0, 5))
    def use(self, numbers: list[int], seconds: int) -> None:
        self.policy.now += seconds
        for unit in (b"%d" % number for number in numbers):
            self.policy.used(unit)
            self.used[unit] = self.policy.now

    @rule(numbers=st.lists(st.integers(0, 30), max_size=6))
    def follow(self, numbers: list[int]) -> None:
        self.policy.follows([b"%d" % number for number in numbers])

    @rule(number=st.integers(0, 30))
    def remove(self, number: int) -> None:
        self.policy.removed(b"%d" % number)
        self.used.pop(b"%d" % number, None)

    @rule(kind=st.sampled_from(KINDS), most=st.integers(0, 9))
    def give_way_to_another(self, kind: type[Queues], most: int) -> None:
        if not self.policy.hands_over:
            self.policy = successor(self.policy, kind)
        self.policy.hand_over(most)

    @rule(count=st.integers(1, 5), guarded=st.sets(st.integers(0, 30)))
    def evict_what_is_not_guarded(self, count: int, guarded: set[int]) -> None:
        spared = {b"%d" % number for number in guarded}
        free = self.used.keys() - spared
        gone: set[Unit] = set()
        for unit in self.policy.victims():
            assert unit in self.used, "a victim that is not there"
            if unit not in spared:
                self.policy.evicted(unit)
                gone.add(unit)
                del self.used[unit]  # type: ignore[arg-type]
                if len(gone) == count:
                    break
        assert len(gone) == min(count, len(free)), "a unit that could have gone was not found"

    @precondition(lambda self: hasattr(self, "policy"))
    @invariant()
    def it_knows_what_there_is_and_since_when(self) -> None:
        assert set(self.policy) == self.used.keys()
        assert len(self.policy) == len(self.used)
        assert all(unit in self.policy for unit in self.used)
        assert all(self.policy.idle(unit) == self.policy.now - at for unit, at in self.used.items())

    def teardown(self) -> None:
        if hasattr(self, "policy"):
            assert set(evict(self.policy, 100)) == self.used.keys()
            assert len(self.policy) == 0


PolicyMachine.TestCase.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestEveryPolicy = PolicyMachine.TestCase


@pytest.mark.parametrize("kind", KINDS)
def test_a_clock_set_back_does_not_make_idle_times_negative(kind: type[Queues]) -> None:
    """OBJECT IDLETIME answered -2."""
    policy = kind()
    policy.now = 1000
    policy.used(b"unit")
    policy.now = 998
    assert policy.idle(b"unit") == 0


@pytest.mark.parametrize(("start", "to"), list(permutations(KINDS, 2)))
def test_a_new_policy_takes_over_uses_in_steps(start: type[Queues], to: type[Queues]) -> None:
    old = start()
    for number in range(100):
        old.now += 10
        old.used(b"%d" % number)
    policy = successor(old, to)
    while policy.hands_over:
        policy.hand_over(7)
        policy.now += 10
        policy.used(b"50")
        policy.used(b"new %d" % policy.now)
    assert [policy.idle(b"%d" % number) for number in (0, 49, 50)] == [policy.now - 10, policy.now - 500, 0]
    new = [unit for unit in policy if isinstance(unit, bytes) and unit.startswith(b"new")]
    steps = 100 if start.in_order_of_use else 200  # units that were not used again take two
    assert steps // 7 <= len(new) <= steps // 7 + 1
    assert evict(policy, 99) == [b"%d" % number for number in range(100) if number != 50]
    assert set(policy) == {b"50", *new}


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("to", ["allkeys-lru", "allkeys-s3fifo", "allkeys-prefix"])
def test_a_change_of_policy_delays_no_client(to: str) -> None:
    keys = Keyspace(policy="allkeys-prefix" if to != "allkeys-prefix" else "allkeys-lru")
    for number in range(50_000):
        keys.contents.set_string(b"%d" % number, b"")
    took = []
    started = time.thread_time()
    keys.eviction_order.policy = to
    while True:
        took.append(time.thread_time() - started)
        started = time.thread_time()
        if keys.sweep(unix_ms(), 2000) < 2000:
            break
    assert max(took) < max(0.05, sum(took) / 4), "a step does much of the work"
    keys.memory.limit = 1
    steps = 1
    while not keys.memory.shrink():
        steps += 1
    assert steps >= 50_000 // KEYS_PER_STEP
    assert not len(keys)


# -- S3-FIFO -------------------------------------------------------------------------------------------------------


def test_s3fifo_keeps_twice_used_units_through_a_scan() -> None:
    policy = S3FIFO()
    for second in (0, 10, 20):
        policy.now = second
        policy.used(b"hot")
    for number in range(100):
        policy.used(b"%d" % number)
    assert evict(policy, 95) == [b"%d" % number for number in range(95)]
    assert b"hot" in set(policy)


def test_s3fifo_puts_quickly_returning_units_into_the_main_queue() -> None:
    policy = S3FIFO()
    for number in range(20):
        policy.used(b"%d" % number)
    assert evict(policy) == [b"0"]
    policy.used(b"0")
    assert evict(policy, 18) == [b"%d" % number for number in range(1, 19)]
    assert set(policy) == {b"0", b"19"}


def test_s3fifo_offers_every_unit_once_despite_protected_ones() -> None:
    """A frequently used unit has rounds left, in which the others are not offered again."""
    policy = S3FIFO()
    policy.used(b"hot")
    policy.used(b"cold")
    assert list(policy.victims()) == [b"hot", b"cold"]
    for second in (10, 20):
        policy.now = second
        policy.used(b"hot")
    assert list(policy.victims()) == [b"cold", b"hot"]


def test_s3fifo_reaches_new_units_if_the_main_queue_is_protected() -> None:
    """Few are new, so the main queue's turn it is; when each of it was offered and stays, the new ones are."""
    policy = S3FIFO()
    for second in (0, 10, 20, 30):
        policy.now = second
        for number in range(30):
            policy.used(b"main%d" % number)
    assert len(list(policy.victims())) == 30  # to the main queue
    policy.used(b"new")
    policy.now = 40
    offered = list(policy.victims())
    assert sorted(offered) == sorted([b"new", *(b"main%d" % number for number in range(30))])


# -- allkeys-prefix ------------------------------------------------------------------------------------------------


def test_a_chain_is_evicted_from_its_end() -> None:
    policy = Prefix()
    write(policy, *(b"%d" % number for number in range(50)))
    assert evict(policy, 50) == [b"%d" % number for number in reversed(range(50))]


def test_a_common_part_of_two_chains_outlives_both_ends() -> None:
    policy = Prefix()
    write(policy, b"a", b"b", b"c1", b"d1")
    write(policy, b"a", b"b", b"c2", b"d2")
    gone = evict(policy, 6)
    assert gone.index(b"d1") < gone.index(b"c1") < gone.index(b"b") < gone.index(b"a")
    assert gone.index(b"d2") < gone.index(b"c2") < gone.index(b"b")


def test_a_chain_written_block_by_block_keeps_its_beginning() -> None:
    policy = Prefix()
    for number in range(200):
        policy.used(b"old %d" % number)
    chain = [b"%d" % number for number in range(20)]
    for before, block in zip([None, *chain], chain, strict=False):
        evict(policy)
        policy.used(block)
        policy.follows([before, block] if before is not None else [block])
    assert set(chain) <= set(policy)


def test_a_protected_end_protects_the_rest_of_its_chain() -> None:
    policy = Prefix()
    write(policy, b"a", b"b", b"c")
    write(policy, b"x", b"y")
    gone = []
    for unit in policy.victims():
        if unit != b"c":
            policy.evicted(unit)
            gone.append(unit)
    assert gone == [b"y", b"x", b"b", b"a"]


def test_a_circle_of_names_keeps_nothing_for_ever() -> None:
    policy = Prefix()
    for unit in (b"a", b"b", b"c"):
        policy.used(unit)
    for pair in ((b"a", b"b"), (b"b", b"c"), (b"c", b"a"), (b"a", b"a")):
        policy.follows(pair)
    assert len(evict(policy, 3)) == 3


def test_repeatedly_used_units_outlive_a_flood_of_others() -> None:
    policy = Prefix()
    hot = [b"hot %d" % number for number in range(10)]
    for turn in range(30):
        policy.now += 10
        write(policy, *hot)
        write(policy, *(b"%d %d" % (turn, number) for number in range(30)))
        evict(policy, len(policy) - 100)
    policy.now += 10
    for first in range(0, 80, 10):
        write(policy, *(b"flood %d" % number for number in range(first, first + 10)))
    evict(policy, 120)
    assert set(hot) <= set(policy)


def test_a_formerly_hot_unit_is_evicted() -> None:
    policy = Prefix()
    for _ in range(10):
        policy.now += 10
        write(policy, *(b"was hot %d" % number for number in range(50)))
    for turn in range(200):
        policy.now += 10
        for _ in range(2):
            policy.now += 10
            write(policy, *(b"%d %d" % (turn, number) for number in range(20)))
        evict(policy, len(policy) - 100)
    assert not any(isinstance(unit, bytes) and unit.startswith(b"was hot") for unit in policy)


def test_pages_of_a_block_written_one_by_one_are_one_use() -> None:
    once, paged = Prefix(), Prefix()
    for number in range(20):
        once.used(b"%d" % number)
        for _ in range(64):
            paged.used(b"%d" % number)
    assert evict(once, 20) == evict(paged, 20)


def test_a_unit_takes_few_bytes() -> None:
    names = [b"%d" % number for number in range(100_000)]
    policy = Prefix()
    tracemalloc.start()
    try:
        for name in names:
            policy.used(name)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / len(names) < 200


# -- in the keyspace -----------------------------------------------------------------------------------------------


def text(key: int) -> bytes:
    return b"key %05d" % key


@pytest.mark.parametrize("policy", ["allkeys-prefix", "allkeys-lru", "allkeys-s3fifo"])
def test_plain_strings_take_part_and_memory_keeps_its_limit(policy: str) -> None:
    keys = Keyspace(maxmemory=100_000, policy=policy)
    for number in range(1000):
        keys.contents.set_string(text(number), b"x" * 300)
        keys.memory.shrink()
        assert keys.memory.used <= 100_000
    assert keys.counters.evicted == 1000 - len(keys)
    assert keys.contents.find(text(999)) is not None


@pytest.mark.parametrize("stored", ["pages", "blocks", "strings"])
def test_the_index_is_limited_too(stored: str) -> None:
    """Small values with long names take more memory in the index than in the arena."""
    program = with_constants("kvpage_server.store.evict", LEAST_INDEX=100_000)
    with start_server("--maxmemory", "80000", program=program) as server, server.client() as client:
        for number in range(1000):
            name = f"{number}".zfill(200)
            if stored == "pages":
                set_page(client, name, body=b"x")
            elif stored == "blocks":
                set_block(client, name, 0, size=1)
            else:
                client.set(name, "x")
            memory = client.info("memory")
            assert memory["used_memory_index"] <= 101_000  # room is made before a write
            assert memory["used_memory"] <= 81_000
        assert 50 < client.dbsize() < 900
        client.config_set("maxmemory-policy", "noeviction")
        with suppress(redis.ResponseError):
            client.mset({f"more {number}": "x" for number in range(1000)})
        index = r"the index takes more than 100000 bytes \(maxmemory, and at least 64mb\)"
        full = "used memory > 'maxmemory'" if stored == "strings" else index
        with pytest.raises(redis.ResponseError, match=f"command not allowed when {full}\\."):
            client.set("another", "x")


def test_with_a_disk_a_full_index_evicts_the_oldest_units(tmp_path: Path) -> None:
    options = ("--store", "tiered", "--maxmemory", "4mb", "--maxdisk", "256mb")
    program = with_constants("kvpage_server.store.evict", LEAST_INDEX=1 << 20)
    with start_server(*options, directory=tmp_path, program=program) as server, server.client() as client:
        for start in range(0, 10_000, 1000):
            pipeline = client.pipeline(transaction=False)
            for number in range(start, start + 1000):
                name = f"{number}".zfill(200)
                pipeline.execute_command("KVPAGESET", name, 0, 0, 0, 0, 1, 1, 1, 0, b"ab")
            pipeline.execute()
        until(lambda: client.info("memory")["used_memory_index"] <= 4 << 20)  # after this, nothing more is evicted
        assert 1_250 < client.dbsize() < 5_000
        assert client.info("stats")["evicted_keys"] == 10_000 - client.dbsize()
        assert client.execute_command("KVPAGEGET", "9999".zfill(200), 0, 0, 0, 0) == b"ab"
        assert client.execute_command("KVPAGEGET", "0".zfill(200), 0, 0, 0, 0) is None


def test_volatile_ttl_evicts_the_soonest_expiry_only() -> None:
    keys = Keyspace(maxmemory=0, policy="volatile-ttl")
    now = unix_ms()
    order = random.Random(1).sample(range(50), 50)
    for number in order:
        keys.contents.set_string(text(number), b"x" * 300, now + 100_000 + number * 5_000)
    for number in range(50, 60):
        keys.contents.set_string(text(number), b"x" * 300)
    keys.memory.limit = keys.memory.used * 40 // 60
    keys.memory.shrink()
    assert sorted(keys.listing.keys()) == [text(number) for number in range(20, 60)]
    keys.memory.limit = keys.memory.used * 11 // 40
    keys.memory.shrink()
    assert len(keys) == 11
    keys.memory.limit = 1
    with pytest.raises(OverLimit):
        keys.memory.shrink()
    assert sorted(keys.listing.keys()) == [text(number) for number in range(50, 60)]


@pytest.mark.parametrize("to", [LRU, Prefix])
def test_units_used_again_under_s3fifo_are_evicted_last(to: type[Queues]) -> None:
    old = S3FIFO()
    names = [text(number) for number in range(100)]
    for name in names:
        old.used(name)
    old.now = 10 * BURST
    used = random.Random(1).sample(names, 30)
    for name in used:
        old.used(name)
    policy = successor(old, to)
    for _ in range(50):
        policy.hand_over(7)
    assert not policy.hands_over
    order = evict(policy, 100)
    assert set(order[70:]) == set(used)
    assert order[:70] == [name for name in names if name not in used]


@pytest.mark.parametrize("to", list(POLICIES))
@pytest.mark.parametrize("start", list(POLICIES))
def test_a_new_policy_knows_units_and_their_ages(start: str, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keyspace(policy=start)
    for number in range(10):
        monkeypatch.setattr(keyspace, "monotonic_ms", lambda now=number * 10_000: now)
        keys.sweep(unix_ms(), 100)
        keys.contents.set_string(text(number), b"x")
    keys.eviction_order.policy = to
    assert keys.eviction_order.policy == to
    assert [keys.reader.idle(text(number)) for number in range(10)] == [90 - number * 10 for number in range(10)]
    keys.memory.limit = keys.memory.used // 2
    if to.startswith("allkeys"):
        keys.memory.shrink()
        assert sorted(keys.listing.keys()) == [text(number) for number in range(5, 10)]


def test_blocks_are_evicted_from_the_end_after_a_policy_change() -> None:
    options = ("--maxmemory", "0", "--maxmemory-policy", "allkeys-lru")
    with start_server(*options) as server, server.client() as client:
        for page in (3, 1, 0, 2, 4):
            set_block(client, "r", page, size=3000)
        client.config_set("maxmemory-policy", "allkeys-prefix")
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-prefix"}
        assert client.info("memory")["maxmemory_policy"] == "allkeys-prefix"
        client.config_set("maxmemory", client.info("memory")["used_memory"] * 3 // 5)
        client.set("something", "new")
        there = [page for page in range(5) if client.execute_command("KVBLOCKEXISTS", "r", page)]
        assert there == list(range(len(there)))
        assert 0 < len(there) < 5


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (("--store", "memory", "--maxmemory", "1200kb"), 10**5),
        (("--store", "memory", "--maxmemory", "50mb", "--quota", "kv:r* 1mb"), 10**5),
        (("--store", "tiered", "--maxmemory", "4mb", "--maxdisk", "16mb"), 10**6),
    ],
    ids=["memory", "quota", "disk"],
)
def test_the_beginning_of_a_context_that_does_not_fit_stays(
    options: tuple[str, ...], size: int, tmp_path: Path
) -> None:
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        for page in range(31):
            client.execute_command("KVPAGESET", "r", 0, 0, page, 0, 8, 1, size, 0, bytes(size))
            if "tiered" in options:
                client.save()
        there = [page for page in range(31) if client.execute_command("KVPAGEEXISTS", "r", 0, 0, page, 0)]
        assert there[:-1] == list(range(len(there) - 1))
        assert there[-1] == 30
        assert len(there) > 6


def test_content_named_blocks_are_evicted_from_the_requested_end() -> None:
    with start_server("--maxmemory", "0") as server, server.client() as client:
        for req in "abcde":
            set_block(client, req, 0, size=3000)
        assert client.execute_command("KVPAGEPREFIX", 4, 0, 5, *(word for req in "abcde" for word in (req, 0))) == 5
        client.config_set("maxmemory", client.info("memory")["used_memory"] * 3 // 5)
        client.set("something", "new")
        there = "".join(req for req in "abcde" if client.execute_command("KVBLOCKEXISTS", req, 0))
        assert there
        assert "abcde".startswith(there)
        assert there != "abcde"


def test_units_leave_at_once_when_maxmemory_is_lowered() -> None:
    with start_server("--maxmemory", "64mb") as server, server.client() as client:
        for number in range(50):
            client.set(f"key:{number}", bytes(1_000_000))
        client.config_set("maxmemory", "10mb")
        until(lambda: client.info("memory")["used_memory"] <= 10 * 1024**2)
        assert 0 < client.dbsize() < 12
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "5mb")
        assert client.ping()
        assert client.dbsize() > 5


def test_units_leave_full_memory_without_a_command() -> None:
    """Memory becomes full without a command when values are loaded from disk."""

    async def fill() -> None:
        for number in range(20):
            contents.set_string(b"key:%d" % number, contents.slot_of(bytes(100_000)))
        work = [asyncio.create_task(task) for task in regular_work(here.server)]
        while memory.used > memory.limit:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.01)
        for task in work:
            task.cancel()

    here = Here(maxmemory=10**6)
    contents, memory = here.server.keyspace.contents, here.server.keyspace.memory
    asyncio.run(asyncio.wait_for(fill(), PATIENCE))
    assert 0 < len(here.server.keyspace) < 10


@pytest.mark.parametrize("policy", ["noeviction", "volatile-ttl"])
def test_without_evictable_units_a_write_is_refused_completely(policy: str) -> None:
    with start_server("--maxmemory", "100kb", "--maxmemory-policy", policy) as server, server.client() as client:
        client.set("small", "1")
        body = b"x" * 30_000
        page = ("KVPAGEMSET", 4, *(word for head in range(4) for word in ("r", 0, head, 0, 0, 8, 1, 30_000, 0, body)))
        writes = [page, ("SET", "large", b"x" * 150_000), ("GETSET", "small", b"x" * 150_000)]
        for words in writes:
            with pytest.raises(redis.ResponseError, match=r"command not allowed when used memory > 'maxmemory'\."):
                client.execute_command(*words)
        assert client.keys() == [b"small"]
        assert client.get("small") == b"1"
        assert client.execute_command("KVPAGEINDEX", "r") == []


def test_an_ordered_map_has_the_order_of_an_ordered_dict() -> None:
    choices, ours, theirs = random.Random(37), OrderedMap[int, int](), OrderedDict[int, int]()
    for number in range(20_000):
        key = choices.randrange(2000) if number < 15_000 else choices.randrange(3)
        change = choices.choice(["append", "append", "prepend", "pop", "popitem"])
        if change in ("append", "prepend"):
            getattr(ours, change)(key, number)
            theirs[key] = number
            theirs.move_to_end(key, last=change == "append")
        elif change == "pop":
            assert ours.pop(key) == theirs.pop(key, None)
        elif theirs:
            assert ours.popitem() == theirs.popitem(last=False)
        assert (len(ours), key in ours, ours.get(key)) == (len(theirs), key in theirs, theirs.get(key))
        if number % 500 == 0:
            assert list(ours) == list(theirs)
            assert list(reversed(ours)) == list(reversed(theirs))
    while theirs:
        assert ours.popitem() == theirs.popitem(last=False)
    with pytest.raises(KeyError):
        ours.popitem()


def test_no_insertion_into_an_ordered_map_copies_all_items() -> None:
    """An OrderedDict copies them some twenty times, which takes a third of all time, and half of that at once."""
    items, costs = OrderedMap[int, None](), []
    gc.disable()
    try:
        for number in range(150_000):
            begin = time.thread_time()
            items.append(hash((number,)), None)
            costs.append(time.thread_time() - begin)
    finally:
        gc.enable()
    assert max(costs) < sum(costs) / 50


@pytest.mark.parametrize("kind", [LRU, S3FIFO])
def test_a_unit_that_was_only_offered_is_handed_over(kind: type[Queues]) -> None:
    old = Prefix()
    old.used_all([b"a", b"b", b"c"])
    old.follows([b"a", b"b", b"c"])
    list(islice(old.victims(), 3))  # spared, so `b` and `c` are in no queue
    new = successor(old, kind)
    offered = list(islice(new.victims(), 3))
    assert new.hand_over(10) == offered[2:]
    assert not new.hands_over
    assert sorted(islice(new.victims(), 10)) == [b"a", b"b", b"c"]
