"""kv:{req}:index, the read-only set of the page keys that a request has."""

from __future__ import annotations

import pytest
import redis
from stored_pages import set_block, set_page

import kvpage_server.commands.families  # noqa: F401  # fills the table
from kvpage_server.commands.table.spec import TABLE
from kvpage_server.page import PageKey


def test_a_request_s_index_is_a_set_of_its_page_keys(client: redis.Redis) -> None:
    assert client.type("kv:r:index") == b"none"
    assert client.exists("kv:r:index") == 0
    assert client.ttl("kv:r:index") == -2
    assert client.smembers("kv:r:index") == set()
    assert client.get("kv:r:index") is None
    set_block(client, "r", 0)
    set_block(client, "r", 5)
    set_page(client, req="r2")
    client.set("kv:r:0:0:9:0", "plain")
    keys = {bytes(PageKey(b"r", 0, head, page, kv_type)) for head in (0, 1) for page in (0, 5) for kv_type in (0, 1)}
    assert client.smembers("kv:r:index") == keys
    assert client.scard("kv:r:index") == 8
    assert client.type("kv:r:index") == b"set"
    assert client.exists("kv:r:index", "kv:r2:index", "kv:r3:index") == 2
    assert client.ttl("kv:r:index") == -1
    for key in keys:
        assert client.sismember("kv:r:index", key) == 1
    for key in ("kv:r:0:0:9:0", "kv:r2:0:0:0:0", "kv:r:0:0:1:0", "kv:r:index", ""):
        assert client.sismember("kv:r:index", key) == 0


def test_an_index_is_scanned_block_by_block(client: redis.Redis) -> None:
    for page in range(20):
        set_block(client, "r", page)
    assert set(client.sscan_iter("kv:r:index", count=7)) == client.smembers("kv:r:index")
    cursor, keys = client.sscan("kv:r:index", count=7)
    assert cursor
    assert len(keys) == 8
    client.execute_command("KVPAGEDEL", "r", 0, 1, 2)  # what goes or comes meanwhile does not disturb the rest
    set_block(client, "r", 30)
    rest = set()
    while cursor:
        cursor, keys = client.sscan("kv:r:index", cursor, count=7)
        rest |= set(keys)
    assert rest >= {bytes(PageKey(b"r", 0, 0, page, 0)) for page in range(3, 20)}
    assert client.sscan("kv:r:index", match="*:1:*:1", count=1000) == (
        0,
        [bytes(PageKey(b"r", 0, 1, page, 1)) for page in (*range(3, 20), 30)],
    )
    with pytest.raises(redis.ResponseError, match="syntax error"):
        client.execute_command("SSCAN", "kv:r:index", 0, "TYPE", "string")
    with pytest.raises(redis.ResponseError, match="invalid cursor"):
        client.execute_command("SSCAN", "kv:r:index", "x")


def test_requests_are_listed_by_their_index_keys_which_no_other_scan_shows(client: redis.Redis) -> None:
    for number in range(250):
        set_page(client, req=f"r{number}")
    assert set(client.scan_iter(_type="set")) == {b"kv:r%d:index" % number for number in range(250)}
    assert set(client.scan_iter(_type="set", match="kv:r1?:*")) == {b"kv:r1%d:index" % digit for digit in range(10)}
    assert not [key for key in client.scan_iter() if key.endswith(b"index")]
    assert client.keys("*:index") == []
    assert client.dbsize() == 250


WRITES = sorted(name for name, spec in TABLE.items() if spec.writes_keys)


@pytest.mark.parametrize("name", WRITES)
def test_no_command_writes_an_index_key(client: redis.Redis, name: str) -> None:
    set_page(client)
    spec = TABLE[name]
    words = name.split("|") + ["1"] * (abs(spec.arity) - spec.words)
    words[spec.keys[0]] = "kv:r:index"
    with pytest.raises(redis.ResponseError, match="an index key is read-only"):
        client.execute_command(*words)
    assert client.smembers("kv:r:index") == {b"kv:r:0:0:0:0"}
    words[spec.keys[0]] = "kv:not-there-yet:index"
    with pytest.raises(redis.ResponseError, match="an index key is read-only"):
        client.execute_command(*words)


def test_an_index_key_is_no_string(client: redis.Redis) -> None:
    set_page(client)
    for words in (("GET",), ("STRLEN",), ("GETRANGE", 0, 1), ("SUBSTR", 0, 1)):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.execute_command(words[0], "kv:r:index", *words[1:])
    assert client.mget("kv:r:index") == [None]  # as Redis answers for what is no string
    with pytest.raises(redis.ResponseError, match="an index key can't be watched"):
        client.execute_command("WATCH", "kv:r:index")
    client.set("plain", "x")
    for command in ("SMEMBERS", "SCARD"):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.execute_command(command, "plain")
    client.set("kv:a:b:index", "a key of another shape is a key like any other")
    assert client.get("kv:a:b:index")
