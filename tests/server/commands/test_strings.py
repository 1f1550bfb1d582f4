"""Strings: behaviour that the differential test cannot see, because Redis has no pages, and long values."""

from __future__ import annotations

import random
import time
from itertools import product

import pytest
import redis
from servers import RunningServer, start_server
from waiting import until

from kvpage_server.page import HEADER_SIZE, DType, PageHeader, PageKey, encode_page

KEY = PageKey(b"strings", 3, 1, 4, 1)
BODY = bytes(range(256)) * 32
BLOB = encode_page(KEY, BODY, dtype=DType.FLOAT16, page_size=64, head_dim=64)
NAME = b"strings", 3, 1, 4, 1


@pytest.fixture
def page(client: redis.Redis) -> bytes:
    """The key of a page that is there."""
    assert client.set(bytes(KEY), BLOB)
    assert client.execute_command("KVPAGEEXISTS", *NAME) == 1
    return bytes(KEY)


class TestAPageAsAString:
    def test_reading_it_gives_its_blob(self, client: redis.Redis, page: bytes) -> None:
        assert client.get(page) == BLOB
        assert client.mget(page, "missing", page) == [BLOB, None, BLOB]
        assert client.strlen(page) == len(BLOB)
        assert client.getex(page, ex=100) == BLOB
        assert 0 < client.ttl(page) <= 100

    @pytest.mark.parametrize(
        ("start", "end"),
        [(0, 3), (0, 63), (60, 70), (64, -1), (-10, -1), (100, 99), (0, -1), (8000, 99999), (-99999, 5)],
    )
    def test_any_part_of_it_can_be_read(self, client: redis.Redis, page: bytes, start: int, end: int) -> None:
        client.set("plain", BLOB)
        assert client.execute_command("KVPAGEEXISTS", *NAME) == 1
        assert client.getrange(page, start, end) == client.getrange("plain", start, end)

    def test_it_is_no_number(self, client: redis.Redis, page: bytes) -> None:
        for command in ("INCR", "DECR"):
            with pytest.raises(redis.ResponseError, match="value is not an integer or out of range"):
                client.execute_command(command, page)
        assert client.get(page) == BLOB

    def test_it_can_be_taken_and_replaced(self, client: redis.Redis, page: bytes) -> None:
        assert client.getset(page, "plain") == BLOB
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.execute_command("KVPAGEGET", *NAME)
        assert client.set(page, BLOB, get=True) == b"plain"
        assert client.getdel(page) == BLOB
        assert client.execute_command("KVPAGEEXISTS", *NAME) == 0

    @pytest.mark.parametrize("command", ["APPEND key x", "SETRANGE key 0 x", "RENAME key other", "COPY key other"])
    def test_nothing_can_make_its_bytes_and_its_header_disagree(
        self, client: redis.Redis, page: bytes, command: str
    ) -> None:
        with pytest.raises(redis.ResponseError, match="unknown command"):
            client.execute_command(*command.replace("key", page.decode()).split())

    def test_every_way_to_write_a_string_writes_a_page(self, client: redis.Redis) -> None:
        ways = [
            ("SET", [bytes(KEY), BLOB, "EX", 100]),
            ("SETEX", [bytes(KEY), 100, BLOB]),
            ("PSETEX", [bytes(KEY), 100_000, BLOB]),
            ("SETNX", [bytes(KEY), BLOB]),
            ("GETSET", [bytes(KEY), BLOB]),
            ("MSET", ["other", "1", bytes(KEY), BLOB]),
            ("MSETNX", [bytes(KEY), BLOB]),
        ]
        for command, arguments in ways:
            client.flushall()
            client.execute_command(command, *arguments)
            assert client.execute_command("KVPAGEGET", *NAME) == BODY, command

    def test_a_blob_under_another_key_is_a_plain_string(self, client: redis.Redis) -> None:
        client.set("kv:strings:3:1:5:1", BLOB)
        assert client.get("kv:strings:3:1:5:1") == BLOB
        assert client.execute_command("KVPAGEEXISTS", "strings", 3, 1, 5, 1) == 0

    def test_a_damaged_blob_is_refused_with_its_whole_batch(self, client: redis.Redis) -> None:
        damaged = BLOB[:-1] + b"?"
        for write in (client.mset, client.msetnx):
            with pytest.raises(redis.ResponseError, match="does not match the checksum"):
                write({"before": "1", bytes(KEY): damaged, "after": "1"})
        assert client.keys("*") == []

    def test_its_header_has_the_ttl_of_the_write(self, client: redis.Redis) -> None:
        client.execute_command("KVPAGESET", *NAME, 1, 64, 64, 3600, BODY)
        blob = client.get(bytes(KEY))
        assert PageHeader.parse(blob).ttl == 3600
        assert blob[HEADER_SIZE:] == BODY


class TestLongValues:
    def test_every_length_is_read_back(self, client: redis.Redis) -> None:
        rng = random.Random(5)
        lengths = [0, 1, 511, 512, 513, 1023, 1024, 1025, 4094, 4095, 4096, 4097, 70_000, 3_000_000]
        values = {f"length:{n}": rng.randbytes(n) for n in lengths}
        client.mset(values)
        assert client.mget(values) == list(values.values())
        for key, value in values.items():
            assert client.set(key, value[::-1], get=True) == value
            assert client.getrange(key, 1, -2) == value[::-1][1:-1]
            assert client.getdel(key) == value[::-1]
        assert client.dbsize() == 0

    def test_any_value_replaces_any_other_without_a_trace(self, client: redis.Redis) -> None:
        key = bytes(KEY)
        for old, new in product([b"", b"1" * 511, b"2" * 512, b"3" * 1024, b"4" * 5000, BLOB], repeat=2):
            for ex in (None, 100):
                client.set(key, old, ex=ex)
                assert client.set(key, new, ex=100 if ex is None else None, get=True) == old
                assert client.get(key) == new
                assert client.ttl(key) in ((99, 100) if ex is None else (-1,))
                assert client.execute_command("KVPAGEEXISTS", *NAME) == (new == BLOB)
                assert client.info("keyspace")["db0"] == {"keys": 1, "expires": int(ex is None), "avg_ttl": 0}
                assert client.delete(key) == 1
                assert client.info("memory")["used_memory"] == 0

    def test_a_word_may_be_long_where_a_short_one_is_meant(self, client: redis.Redis) -> None:
        key = b"k" * 600
        assert client.set(key, b"1" * 600)
        assert client.exists(key) == 1
        assert client.keys() == [key]
        for command in (("INCR", key), ("SET", key, "1", "EX", b"1" * 600), ("GETRANGE", key, b"0" * 600, 1)):
            with pytest.raises(redis.ResponseError, match="not an integer or out of range"):
                client.execute_command(*command)
        for command in (("SET", key, "1", b"X" * 600), ("SET", key, "1", b"E" * 600, 1)):
            with pytest.raises(redis.ResponseError, match="syntax error"):
                client.execute_command(*command)
        with pytest.raises(redis.ResponseError, match="unknown command"):
            client.execute_command(b"G" * 600, key)
        with pytest.raises(redis.ResponseError, match="unknown subcommand"):
            client.execute_command("CLIENT", b"G" * 600)
        with client.pipeline() as pipeline:
            pipeline.get(key).getdel(key).get(key)
            assert pipeline.execute() == [b"1" * 600, b"1" * 600, None]
        assert client.info("memory")["used_memory"] == 0

    def test_a_refused_command_keeps_no_memory(self, client: redis.Redis) -> None:
        client.set(bytes(KEY), BLOB)
        value = bytes(1024**2)
        refused = [
            ("SETEX", "key", "soon", value),
            ("SET", "key", value, "NX", "XX"),
            ("NOSUCH", value),
            ("KVPAGESET", "req", 0, 0, 0, 0, 99, 1, 1, 0, value),
            ("INCR", bytes(KEY)),
            ("MSET", "key", value, "key"),
        ]
        for command in refused * 5:
            with pytest.raises(redis.ResponseError):
                client.execute_command(*command)
        client.delete(bytes(KEY))
        assert client.info("memory")["used_memory"] == 0

    def test_a_value_that_is_being_sent_survives_its_deletion(self, server: RunningServer) -> None:
        value = random.Random(6).randbytes(8 * 1024**2)
        with server.client() as reader, server.client() as writer:
            writer.set("long", value)
            connection = reader.connection_pool.get_connection()
            connection.send_command("GET", "long")
            time.sleep(0.1)  # the reply fills the socket, and waits
            writer.delete("long")
            writer.mset({f"filler:{i}": bytes(8 * 1024**2) for i in range(3)})
            assert connection.read_response() == value
            reader.connection_pool.release(connection)
            writer.flushall()


class TestSet:
    def test_conditions_and_times_go_together(self, client: redis.Redis) -> None:
        assert client.set("key", "1", xx=True) is None
        assert client.set("key", "1", nx=True, ex=100) is True
        assert client.set("key", "2", nx=True) is None
        assert client.set("key", "2", keepttl=True)
        assert 90 < client.ttl("key") <= 100
        assert client.set("key", "3", xx=True, get=True) == b"2"
        assert client.ttl("key") == -1
        assert client.set("key", "4", nx=True, get=True) == b"3"
        assert client.get("key") == b"3"

    def test_a_time_in_the_past_deletes_at_once(self, client: redis.Redis) -> None:
        client.set("key", "1")
        assert client.set("key", "2", pxat=1) is True
        assert client.get("key") is None
        assert client.set("key", "1", ex=100, nx=True)
        assert client.getex("key", pxat=1) == b"1"
        assert client.exists("key") == 0

    def test_overwriting_a_short_string_changes_only_its_ttl(self, client: redis.Redis) -> None:
        before = client.info("memory")["used_memory"]
        client.set("key", "1", px=100_000)
        client.set("key", "a longer one")
        assert client.ttl("key") == -1
        assert client.info("keyspace")["db0"]["expires"] == 0
        client.set("key", "2", px=100_000)
        assert client.info("keyspace")["db0"]["expires"] == 1
        client.pexpire("key", 10)
        until(lambda: client.dbsize() == 0)
        assert client.info("memory")["used_memory"] == before

    def test_counting_keeps_the_time_to_live(self, client: redis.Redis) -> None:
        client.set("counter", "41", ex=100)
        assert client.incr("counter") == 42
        assert client.decrby("counter", 2) == 40
        assert 90 < client.ttl("counter") <= 100

    def test_full_memory_refuses_every_write_when_nothing_may_go(self) -> None:
        with start_server("--maxmemory-policy", "noeviction") as server, server.client() as client:
            client.mset({"number": "1", "filler": bytes(1024**2)})
            client.config_set("maxmemory", "1mb")
            for command in ("SET a 1", "MSET a 1", "SETNX a 1", "SETEX a 1 1", "INCR number", "GETSET number 2"):
                with pytest.raises(redis.OutOfMemoryError):
                    client.execute_command(*command.split())
            assert client.get("number") == b"1"
            client.delete("filler")
            assert client.incr("number") == 2


def test_mget_answers_as_so_many_gets_would(client: redis.Redis, page: bytes) -> None:
    """Pages, long strings and short ones, absent and overdue keys, in any order; each is a hit or a miss."""
    client.mset({"short": b"s", "long": b"l" * 5000})
    client.set("soon", b"gone", px=1)
    keys = ["absent", page, "short", "soon", "long", page, "short", "kv:r:0:0:0:0"]
    until(lambda: client.get("soon") is None, "the end of a key")
    before = client.info("stats")
    found = client.mget(keys)
    after = client.info("stats")
    assert found == [None, BLOB, b"s", None, b"l" * 5000, BLOB, b"s", None]
    assert after["keyspace_hits"] - before["keyspace_hits"] == 5
    assert after["keyspace_misses"] - before["keyspace_misses"] == 3
    assert found == [client.get(key) for key in keys]
