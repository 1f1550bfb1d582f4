"""kv:{req}:index, the read-only set of the page keys that a request has."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from servers import RunningServer, start_server
from stored_pages import set_block, set_page
from waiting import until

import kvpage_server.commands.families  # noqa: F401  # fills the table
from kvpage_server.commands.specs import TABLE
from kvpage_server.page import DType, PageKey, encode_page


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
    assert client.touch("kv:r:index", "kv:r2:index", "kv:r3:index") == 2
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
    # pages that are added or removed meanwhile do not disturb the rest
    client.execute_command("KVPAGEDEL", "r", 0, 1, 2)
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


def test_requests_are_listed_by_index_keys_in_sets_only(client: redis.Redis) -> None:
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
    assert client.mget("kv:r:index") == [None]  # Redis' reply for a key that is not a string
    client.set("plain", "x")
    for command in ("SMEMBERS", "SCARD"):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.execute_command(command, "plain")
    client.set("kv:a:b:index", "a key of another shape is a key like any other")
    assert client.get("kv:a:b:index")


NEW = PageKey(b"r", 0, 0, 9, 0)
BLOB = encode_page(NEW, b"page", dtype=DType.INT8, page_size=1, head_dim=4)
CHANGES: dict[str, list[object]] = {
    "a new page": ["KVPAGESET", "r", 0, 0, 9, 0, 3, 1, 4, 0, b"page"],
    "a page written again": ["KVPAGESET", "r", 0, 0, 7, 0, 3, 1, 4, 0, b"page"],
    "several pages": ["KVPAGEMSET", 1, "r", 0, 0, 9, 0, 3, 1, 4, 0, b"page"],
    "a page as a string": ["SET", bytes(NEW), BLOB],
    "pages as strings": ["MSET", "other", "1", bytes(NEW), BLOB],
    "a new block": ["KVBLOCKSET", "r", 1, 1, 2, 1, 0, 2, 0, 3, 1, 1, 3, 1, bytes(4)],
    "a block written again": ["KVBLOCKSET", "r", 0, 1, 2, 1, 0, 2, 0, 3, 1, 1, 3, 1, bytes(4)],
    "a deleted request": ["KVPAGEDEL", "r"],
    "a deleted block": ["KVPAGEDEL", "r", 0],
    "a deleted page": ["DEL", "kv:r:0:0:7:0"],
    "a page of a block deleted": ["UNLINK", "kv:r:0:0:0:0"],
    "a page read and deleted": ["GETDEL", "kv:r:0:0:7:0"],
    "an expiry in the past": ["EXPIRE", "kv:r:0:0:7:0", -1],
    "a string in place of a page": ["SET", "kv:r:0:0:7:0", "text"],
    "a flush": ["FLUSHALL"],
}
WATCHED = ["kv:r:index", "kv:r:"]


def is_cancelled(server: RunningServer, watched: str, *change: object) -> bool:
    """Whether a change by another client cancels a transaction that watches a key."""
    with server.client() as watcher, server.client() as other, watcher.pipeline() as pipe:
        pipe.watch(watched)
        if change:
            other.execute_command(*change)
        pipe.multi()
        pipe.ping()
        try:
            return pipe.execute() != [True]
        except redis.WatchError:
            return True


@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_page_cancels_a_watch_of_the_index(
    server: RunningServer, client: redis.Redis, watched: str, change: list[object]
) -> None:
    set_block(client, "r", 0)
    set_page(client, "r", 7)
    assert is_cancelled(server, watched, *change)
    assert not is_cancelled(server, watched), "the next transaction is free again"


@pytest.mark.parametrize("watched", WATCHED)
def test_the_first_page_cancels_a_watch_of_the_index(server: RunningServer, client: redis.Redis, watched: str) -> None:
    assert is_cancelled(server, watched, *CHANGES["a new page"])


@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize(
    "change",
    [
        *("GET kv:r:0:0:7:0", "KVPAGEGET r 0 0 8 0", "KVPAGEPIN r", "KVPAGELEASE r 1000", "DEL kv:r:0:0:8:0"),
        *("KVPAGESET r2 0 0 0 0 3 1 4 0 page", "KVPAGEDEL r3", "SET kv:r 1", "SET r 1", "FLUSHALL ASYNC"),
    ],
)
def test_other_changes_leave_a_watch_of_the_index(
    server: RunningServer, client: redis.Redis, watched: str, change: str
) -> None:
    if change == "FLUSHALL ASYNC":  # there is nothing to flush
        assert not is_cancelled(server, watched, *change.split())
        return
    set_page(client, "r", 7)
    set_page(client, "r3", 7)
    assert not is_cancelled(server, watched, *change.split())


@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("as_block", [False, True], ids=["pages", "block"])
def test_a_page_that_expires_cancels_a_watch_of_the_index(
    server: RunningServer, client: redis.Redis, watched: str, as_block: bool
) -> None:
    with server.client() as watcher, watcher.pipeline() as pipe:
        set_page(client, "r", 7)
        set_block(client, "r", 0)
        if as_block:
            set_block(client, "r", 1, ttl=1)
        else:
            set_page(client, "r", 1, ttl=1)
        pipe.watch(watched)
        until(lambda: not client.exists("kv:r:0:0:1:0"))
        pipe.multi()
        pipe.ping()
        with pytest.raises(redis.WatchError):
            pipe.execute()
    assert not is_cancelled(server, watched)


@pytest.mark.parametrize("watched", WATCHED)
def test_an_overdue_page_cancels_a_watch_before_it_is_swept(
    server: RunningServer, client: redis.Redis, watched: str
) -> None:
    set_page(client, "r", 7)
    with server.client() as watcher, watcher.pipeline() as pipe:
        pipe.watch("another")  # it is connected now
        now = client.time()
        client.pexpireat("kv:r:0:0:7:0", at := (now[0] * 1000 + now[1] // 1000) + 500)
        pipe.watch(watched)

        def is_over() -> bool:
            seconds, microseconds = client.time()
            return seconds * 1000 + microseconds // 1000 > at

        until(is_over)
        pipe.multi()
        pipe.ping()
        with pytest.raises(redis.WatchError):
            pipe.execute()


@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("options", [("--maxmemory", "2mb"), ("--quota", "kv:*", "1mb")], ids=["memory", "quota"])
def test_eviction_cancels_a_watch_of_the_index(watched: str, options: tuple[str, ...]) -> None:
    with start_server(*options) as server, server.client() as client, server.client() as watcher:
        set_page(client, "r", body=bytes(200_000))
        with watcher.pipeline() as pipe:
            pipe.watch(watched)
            for number in range(12):
                set_page(client, f"other{number}", body=bytes(200_000))
            assert not client.exists("kv:r:0:0:0:0")
            pipe.multi()
            pipe.ping()
            with pytest.raises(redis.WatchError):
                pipe.execute()


def test_many_blocks_of_a_request_are_watched_in_steps(server: RunningServer, client: redis.Redis) -> None:
    with client.pipeline(transaction=False) as pipe:
        for page in range(500):
            pipe.execute_command("KVPAGESET", "r", 0, 0, page, 0, 3, 1, 4, 100 * (page == 499), b"page")
        pipe.execute()
    assert not is_cancelled(server, "kv:r:index")
    assert is_cancelled(server, "kv:r:index", "DEL", "kv:r:0:0:499:0")
    with server.client() as watcher:
        watcher.execute_command("WATCH", *(f"absent:{number}" for number in range(2000)), "kv:r:index")
        assert client.execute_command("KVPAGEDEL", "r", 3) == 1
        watcher.execute_command("MULTI")
        assert watcher.execute_command("EXEC") is None


@pytest.mark.parametrize("watched", WATCHED)
def test_pages_loaded_at_a_start_are_watched(tmp_path: Path, watched: str) -> None:
    with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
        set_page(client, "r", 7)
        set_block(client, "r", 0)
    with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
        assert not is_cancelled(server, watched)
        assert is_cancelled(server, watched, "DEL", "kv:r:0:0:7:0")
        assert is_cancelled(server, watched, "KVPAGEDEL", "r", 0)
