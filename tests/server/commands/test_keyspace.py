"""The keyspace family beyond single replies: scans during changes, expiry, globs, OBJECT and MEMORY."""

from __future__ import annotations

import fnmatch
import random
import time
from collections.abc import Iterator

import pytest
import redis
from random_commands import PATTERNS
from servers import NO_REDIS, REDIS_SERVER, RunningServer
from waiting import until

from kvpage_server import core
from kvpage_server.core import LONGEST_PART, LONGEST_PATTERN
from kvpage_server.glob import PatternTooLong, glob
from kvpage_server.store.memory.index import REST_AFTER, ScanOrder


class TestScan:
    def test_a_scan_returns_every_key_once_when_nothing_changes(self, client: redis.Redis) -> None:
        keys = {b"key:%d" % i for i in range(2500)}
        client.mset(dict.fromkeys(keys, "1"))
        for count in (None, 1, 7, 10_000):
            found = list(client.scan_iter(count=count))
            assert len(found) == len(keys)
            assert set(found) == keys

    @pytest.mark.parametrize("seed", range(5))
    def test_a_permanent_key_is_returned_during_any_changes(self, client: redis.Redis, seed: int) -> None:
        rng = random.Random(seed)
        staying = {b"stays:%d" % i for i in range(500)}
        passing = [b"passes:%d" % i for i in range(2000)]
        client.mset(dict.fromkeys([*staying, *rng.sample(passing, 1000)], "1"))
        cursor, found = client.scan(0, count=20)
        while cursor:
            client.delete(*rng.sample(passing, 150))
            client.mset(dict.fromkeys(rng.sample(passing, 150), "2"))
            client.mset(dict.fromkeys(rng.sample(sorted(staying), 10), "overwritten"))
            if rng.random() < 0.2:
                client.scan(0)  # somebody else's, which may begin a new list
            cursor, some = client.scan(cursor, count=20)
            found += some
        assert staying <= set(found)

    def test_pages_that_become_a_block_meanwhile_are_returned(self, client: redis.Redis) -> None:
        for layer in range(4):
            client.execute_command("KVPAGESET", "r", layer, 0, 0, 0, 8, 1, 1, 0, b"x")
        client.mset({f"key:{i}": "1" for i in range(100)})
        cursor, found = client.scan()
        client.execute_command("KVBLOCKSET", "r", 0, 4, 1, 1, 0, 1, 0, 8, 1, b"abcd")
        while cursor:
            cursor, more = client.scan(cursor)
            found += more
        assert {b"kv:r:%d:0:0:0" % layer for layer in range(4)} <= {*found}

    def test_many_scans_at_once_each_return_everything(self, client: redis.Redis) -> None:
        keys = {b"key:%d" % i for i in range(300)}
        client.mset(dict.fromkeys(keys, "1"))
        scans: list[tuple[Iterator[bytes], set[bytes]]] = [(client.scan_iter(count=9), set()) for _ in range(20)]
        for i in range(40):
            client.mset({b"new:%d:%d" % (i, j): b"1" for j in range(100)})
            for scan, found in scans:
                found.update(key for _, key in zip(range(20), scan, strict=False))
            client.delete(*client.keys("new:*"))
        for scan, found in scans:
            found.update(scan)
            assert keys <= found

    def test_a_scan_ends_despite_fast_insertions(self, client: redis.Redis) -> None:
        client.mset({b"old:%d" % i: b"1" for i in range(100)})
        cursor, steps = client.scan(0, count=10)[0], 1
        while cursor:
            client.mset({b"new:%d:%d" % (steps, i): b"1" for i in range(50)})
            cursor = client.scan(cursor, count=10)[0]
            steps += 1
        assert steps == 10

    def test_match_type_and_expiry_select_the_returned_keys(self, client: redis.Redis) -> None:
        client.mset({b"key:%d" % i: b"1" for i in range(50)})
        client.set("key:overdue", "1", pxat=1)
        assert sorted(client.scan_iter("key:1?")) == [b"key:%d" % i for i in range(10, 20)]
        assert len(list(client.scan_iter(_type="string"))) == 50
        assert list(client.scan_iter(_type="hash")) == []

    def test_a_cursor_from_before_a_flush_begins_anew(self, client: redis.Redis) -> None:
        client.mset({b"old:%d" % i: b"1" for i in range(100)})
        cursor, _ = client.scan(0, count=10)
        client.flushall()
        client.mset({b"new:%d" % i: b"1" for i in range(100)})
        found = set()
        while cursor:
            cursor, some = client.scan(cursor, count=10)
            found.update(some)
        assert found == {b"new:%d" % i for i in range(100)}

    def test_memory_of_scans_is_bounded_and_freed(self) -> None:
        living = [b"%d" % i for i in range(1000)]
        order = ScanOrder(living.copy, living.__len__)
        order.visit(0, 1, now=0)
        for i in range(100_000):  # keys that are added and removed
            if order.current is None:
                order.visit(0, 1, now=0)
            order.add(b"passing:%d" % i)
        lists = order._lists
        assert len(lists) <= 3
        assert sum(map(len, lists.values())) < 3 * (2 * len(living) + 2000)
        order.drop_idle_scans(REST_AFTER + 1)
        assert not lists
        assert order.current is None


class TestRandomKey:
    def test_every_key_is_drawn_and_no_other(self, client: redis.Redis) -> None:
        assert client.randomkey() is None
        client.mset({b"key:%d" % i: b"1" for i in range(40)})
        client.delete(*(b"key:%d" % i for i in range(20)))
        client.set("overdue", "1", pxat=1)
        with client.pipeline(transaction=False) as pipe:
            for _ in range(600):
                pipe.randomkey()
            assert set(pipe.execute()) == {b"key:%d" % i for i in range(20, 40)}


class TestLargeBlock:
    KEYS = frozenset(b"kv:r:%d:%d:0:%d" % (at // 2, at % 2, kind) for at in range(1400) for kind in (0, 1))

    @pytest.fixture(autouse=True)
    def store(self, client: redis.Redis) -> None:
        client.execute_command("KVBLOCKSET", "r", 0, 700, 2, 1, 0, 2, 0, 3, 1, 1, 3, 1, bytes(2800))

    def test_its_keys_are_listed_once_beside_others(self, client: redis.Redis) -> None:
        others = {b"key:%d" % i: b"1" for i in range(30)}
        client.mset(others)
        for found in (client.keys("*"), [*client.scan_iter(count=7)]):
            assert len(found) == 2830
            assert {*found} == self.KEYS | others.keys()
        assert sorted(client.scan_iter("*:699:*")) == sorted(key for key in self.KEYS if b":699:" in key)
        with client.pipeline() as pipe:  # without steps
            pipe.keys("*")
            assert len(pipe.execute()[0]) == 2830

    def test_its_keys_are_drawn_and_no_others(self, client: redis.Redis) -> None:
        drawn = {client.randomkey() for _ in range(200)}
        assert drawn <= self.KEYS
        assert len(drawn) > 150
        client.delete("kv:r:0:0:0:0")  # now they are single pages
        assert {client.randomkey() for _ in range(50)} <= self.KEYS - {b"kv:r:0:0:0:0"}

    def test_its_keys_are_found_by_a_scan_while_it_is_split(self, client: redis.Redis) -> None:
        client.mset({b"key:%d" % i: b"1" for i in range(30)})
        cursor, found = client.scan(0, count=5)
        client.delete("kv:r:0:0:0:0")
        while cursor:
            cursor, some = client.scan(cursor, count=5)
            found += some
        assert self.KEYS - {b"kv:r:0:0:0:0"} <= {*found}


class TestExpiry:
    def test_a_key_expires_at_its_time(self, client: redis.Redis) -> None:
        client.mset(dict.fromkeys(["a", "b", "c"], "1"))
        with client.pipeline() as pipe:  # all of it at one time
            pipe.pexpire("a", 150)
            pipe.pexpireat("b", int(time.time() * 1000) + 1000)
            pipe.pexpire("c", 150)
            pipe.persist("c")
            pipe.exists("a", "b", "c")
            assert pipe.execute()[-1] == 3
        time.sleep(1.05)
        assert client.exists("a", "b", "c") == 1
        assert client.ttl("c") == -1

    def test_overdue_keys_are_swept_without_a_lookup(self, client: redis.Redis) -> None:
        with client.pipeline() as pipe:
            for i in range(5000):
                pipe.set(b"key:%d" % i, "1", px=50)
            pipe.execute()
        until(lambda: client.dbsize() == 0)
        assert client.info("memory")["used_memory"] == 0

    def test_the_reported_times_agree(self, client: redis.Redis) -> None:
        at = int(time.time()) + 1000
        client.set("key", "1", exat=at)
        assert client.expiretime("key") == at
        assert client.pexpiretime("key") == at * 1000
        assert abs(client.pttl("key") - 1_000_000) < 5000
        assert abs(client.ttl("key") - 1000) <= 5

    def test_conditions_compare_with_the_time_that_a_key_has(self, client: redis.Redis) -> None:
        client.set("key", "1")
        assert client.expire("key", 100, xx=True) == 0
        assert client.expire("key", 100, gt=True) == 0  # living for ever is longer
        assert client.expire("key", 100, lt=True) == 1
        assert client.expire("key", 50, nx=True) == 0
        assert client.expire("key", 200, gt=True) == 1
        assert client.expire("key", 100, gt=True) == 0
        assert client.expire("key", -1, lt=True) == 1
        assert client.exists("key") == 0


class TestGlob:
    @pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
    def test_random_patterns_choose_the_keys_that_redis_chooses(self, redis_server: RunningServer) -> None:
        rng = random.Random(7)

        def word(longest: int) -> bytes:
            return bytes(rng.choices(b"abc-^[]\\*?", k=rng.randrange(longest)))

        with redis_server.client() as client:
            for _ in range(20):
                client.flushall()
                keys = {word(7) for _ in range(60)}
                client.mset(dict.fromkeys(keys, "1"))
                patterns = [*PATTERNS, *(word(9) for _ in range(150))]
                with client.pipeline(transaction=False) as pipe:
                    for pattern in patterns:
                        pipe.keys(pattern)
                    for pattern, found in zip(patterns, pipe.execute(), strict=True):
                        matches = glob(pattern)
                        assert {key for key in keys if pattern == b"*" or matches(key)} == set(found), pattern
            client.flushall()

    def test_bytes_count_as_themselves_and_case_when_asked(self) -> None:
        assert glob(b"\x00?\xff")(b"\x00\n\xff")
        assert glob(b"[\x80-\xff]")(b"\x90")
        assert not glob(b"[\x80-\xff]")(b"a")
        assert not glob(b"MAX*")(b"maxmemory")
        assert glob(b"MAX[L-N]*\\Y", ignore_case=True)(b"maxmemory")

    def test_a_hostile_pattern_costs_little(self) -> None:
        """It would take longer than there is time if it were tried in every way."""
        started = time.thread_time()
        for pattern in (b"*a" * 500 + b"b", b"a*" * 500 + b"b", b"*" + b"?" * 1000 + b"b", b"*" + b"[ab]" * 250 + b"c"):
            assert not glob(pattern)(b"a" * 10_000)
        long = [b"*" + b"a" * 900 + b"b*", b"*" + b"?" * 1000 + b"b", b"*" + b"a" * 500 + b"b" + b"a" * 500]
        long += [b"*" + b"[ab]" * 63 + b"c*"] * (core.NAME == "native")
        for pattern in long:
            assert not glob(pattern)(b"a" * (4 << 20))  # 20 seconds for each if every place is compared in full
        assert time.thread_time() - started < 5

    @pytest.mark.skipif(core.NAME != "native", reason="the core in Python compiles regular expressions")
    def test_thousands_of_new_patterns_are_compiled_in_no_time(self) -> None:
        """With regular expressions, each takes 2 to 9 ms."""
        started = time.thread_time()
        for part in (b"*a", b"[a-z]", b"[^a]*", b"?", b"[b-d]*e"):
            for i in range(1000):
                assert not glob(b"%d" % i + part * (1000 // len(part)))(b"b")
        assert time.thread_time() - started < 2  # usually 0.03

    @pytest.mark.skipif(core.NAME != "native", reason="the core in Python compares with regular expressions")
    @pytest.mark.parametrize("size", [70, 100, 256, 3000, 40_000])
    @pytest.mark.parametrize(
        "part", [b"[ab]" * 63 + b"c", b"?" * 63 + b"b", b"a" * 32 + b"b" + b"a" * 31, b"a" * 49 + b"b" + b"a" * 49]
    )
    def test_hostile_parts_cost_little_for_names_of_any_length(self, part: bytes, size: int) -> None:
        matches, name = glob(b"*" + part + b"*"), b"a" * size
        started = time.thread_time()
        for _ in range((1 << 23) // size):
            assert not matches(name)
        assert time.thread_time() - started < 1  # usually 0.01 to 0.1; up to 3.3 with a comparison at each position

    def test_parts_with_classes_match_in_long_names(self) -> None:
        rng = random.Random(7)
        for _ in range(2000):
            parts = ["".join(rng.choices(["a", "b", "?", "[ab]", "[!a]"], k=rng.randrange(6))) for _ in range(6)]
            name = "".join(rng.choices("abc", k=rng.randrange(1, 20)))
            pattern, padding = "*".join(["", *parts]), "c" * rng.choice([0, 300])
            expected = fnmatch.fnmatchcase(padding + name, pattern)
            assert bool(glob(pattern.replace("!", "^").encode())((padding + name).encode())) == expected

    def test_long_parts_match_like_short_ones(self) -> None:
        rng = random.Random(11)

        def word(longest: int, letters: bytes) -> bytes:
            return bytes(rng.choices(letters, k=rng.randrange(longest)))

        for _ in range(3000):
            long = word(3, b"ab") + b"a" * (LONGEST_PART + 1) + word(3, b"ab")
            pattern = b"%b*%b*%b*%b" % (word(3, b"ab?"), long, word(3, b"ab?"), word(4, b"ab?"))
            name = word(3, b"ab") + long[: rng.randrange(60, len(long) + 1)] + word(5, b"ab")
            name = rng.choice([name, name + long + word(5, b"ab")])
            expected = fnmatch.fnmatchcase(name.decode(), pattern.decode())
            assert bool(glob(pattern)(name)) == expected, (pattern, name)

    def test_a_long_part_with_wildcards_is_refused(self, client: redis.Redis) -> None:
        for part in (b"?" * (LONGEST_PART + 1), b"[ab]" * (LONGEST_PART + 1), b"a" * LONGEST_PART + b"?"):
            assert glob(b"*" + part)
            assert glob(part + b"*")
            with pytest.raises(redis.ResponseError, match=r"between two stars .* matches at most 64 bytes, got 65"):
                client.keys(b"*" + part + b"*")

    def test_an_endless_pattern_is_refused(self, client: redis.Redis) -> None:
        with pytest.raises(PatternTooLong):
            glob(b"a" * (LONGEST_PATTERN + 1))
        for command in (["KEYS", "*" * 2000], ["SCAN", "0", "MATCH", "*" * 2000], ["PSUBSCRIBE", "*" * 2000]):
            with pytest.raises(redis.ResponseError, match="a pattern has at most 1024 bytes, got 2000"):
                client.execute_command(*command)


class TestInspection:
    def test_idle_time_counts_from_the_last_use(self, client: redis.Redis) -> None:
        client.mset({"key": "1", "other": "1"})
        time.sleep(1.5)
        assert client.touch("other") == 1
        assert client.exists("key") == 1  # a look is no use
        assert client.object("idletime", "key") >= 1
        assert client.object("idletime", "other") < client.object("idletime", "key")

    def test_a_page_is_used_when_its_block_is(self, client: redis.Redis) -> None:
        for head in (0, 1):
            client.execute_command("KVPAGESET", "idle", 0, head, 0, 0, 1, 1, 4, 0, b"8 bytes.")
        client.set("other", "1")
        time.sleep(1.2)
        client.execute_command("KVPAGEGET", "idle", 0, 0, 0, 0)
        assert client.object("idletime", "kv:idle:0:1:0:0") < client.object("idletime", "other")

    def test_encodings_equal_those_of_redis(self, client: redis.Redis) -> None:
        values = {"12345": b"int", "0012": b"embstr", "x" * 44: b"embstr", "x" * 45: b"raw", "x" * 5000: b"raw"}
        for value, encoding in values.items():
            client.set("key", value)
            assert client.object("encoding", "key") == encoding

    def test_memory_usage_is_the_memory_of_a_key(self, client: redis.Redis) -> None:
        for value in (b"short", bytes(2000), bytes(100_000)):
            client.flushall()
            client.set("key", value)
            assert len(value) < client.memory_usage("key") <= len(value) * 1.3 + 400
            assert abs(client.memory_usage("key", samples=5) - client.info("memory")["used_memory"]) < 10

    def test_memory_stats_and_doctor_know_the_store(self, client: redis.Redis) -> None:
        client.mset({b"key:%d" % i: bytes(5000) for i in range(100)})
        stats = client.memory_stats()
        assert stats["keys.count"] == 100
        assert stats["dataset.bytes"] == client.info("memory")["used_memory"]
        assert stats["keys.bytes-per-key"] == stats["dataset.bytes"] // 100
        assert stats["allocator.active"] >= stats["allocator.allocated"] >= 500_000
        assert client.execute_command("MEMORY", "DOCTOR").strip()


class TestFlush:
    def test_a_flush_leaves_nothing(self, client: redis.Redis) -> None:
        client.mset({b"key:%d" % i: bytes(3000) for i in range(100)})
        client.execute_command("KVPAGESET", "flushed", 0, 0, 0, 0, 1, 1, 4, 100, b"8 bytes.")
        assert client.flushdb(asynchronous=True)
        assert client.dbsize() == 0
        assert client.execute_command("KVPAGEGET", "flushed", 0, 0, 0, 0) is None
        assert client.info("memory")["used_memory"] == 0
        assert "db0" not in client.info("keyspace")
