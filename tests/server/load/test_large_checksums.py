"""Checksums of much are computed on a thread: no client waits for another one's large pages or blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from keyspaces import block, set_block
from servers import RunningServer, start_server
from turns import Turns, measured
from wire import encode_command

from kvpage_server.page import DType, PageKey, encode_page

SIZE, LARGER = 2 << 20, 128 << 20  # bytes of large pages
KEY = PageKey(b"r", 0, 0, 0, 0)
BLOB, LARGER_BLOB = (
    encode_page(KEY, bytes(size), dtype=DType.UINT8, page_size=1, head_dim=size) for size in (SIZE, LARGER)
)
WRONG = BLOB[:-1] + b"\xff"
WHOLE = [b"KVBLOCKSET", b"w", b"0", b"1", b"1", b"1", b"0", b"1", b"0", b"8", b"%d" % LARGER, bytes(LARGER)]
MANY = [  # 40 blocks of 4,000 pages
    [b"KVBLOCKSET", b"m", b"%d" % page, b"100", b"40", b"1", b"0", b"1", b"0", b"8", b"1", bytes(4000)]
    for page in range(40)
]
SPLIT = [  # a block of 100,000 pages of 640 bytes, and a page that splits it
    [b"KVBLOCKSET", b"s", b"0", b"100", b"1000", b"1", b"0", b"1", b"0", b"8", b"640", bytes(64_000_000)],
    [b"KVPAGESET", b"s", b"0", b"0", b"0", b"0", b"8", b"1", b"640", b"0", bytes(640)],
]
LONGEST = 0.015  # seconds of a turn; on the loop, these take 0.01 to 0.05 s, and more on a busy machine


@pytest.fixture(scope="module")
def turns() -> Iterator[Turns]:
    with measured() as turns:
        yield turns


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server() as server:
        yield server


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ([], [b"SET", bytes(KEY), LARGER_BLOB]),
        ([], [b"MSET", bytes(KEY), LARGER_BLOB, b"k", b"v"]),
        ([WHOLE], [b"KVPAGESTAT", b"w", b"0", b"0", b"0", b"0"]),
        ([WHOLE], [b"GETRANGE", b"kv:w:0:0:0:0", b"0", b"10"]),
        (MANY, [b"MGET", *(b"kv:m:0:0:%d:0" % page for page in range(len(MANY)))]),
        (SPLIT, [b"KVBLOCKEXISTS", b"s", b"0"]),
        (SPLIT, [b"KVPAGEVERIFY", b"s"]),
    ],
    ids=["SET", "MSET", "KVPAGESTAT", "GETRANGE", "MGET", "KVBLOCKEXISTS of a split block", "KVPAGEVERIFY"],
)
def test_much_is_hashed_in_short_turns(turns: Turns, before: list[list[bytes]], words: list[bytes]) -> None:
    with ExitStack() as stack:
        turns.join(stack, encode_command([b"CONFIG", b"SET", b"maxmemory-clients", b"1gb"]))
    first = b"".join(map(encode_command, [[b"FLUSHALL"], *before]))
    assert turns.takes_short_turns(first, encode_command(words), LONGEST, tries=3)


def test_a_split_block_is_demoted_without_hashing_it(tmp_path: Path) -> None:
    """The thread that wrote its pages to disk has hashed them."""
    size = 16_000_000
    before = [
        [b"KVBLOCKSET", b"s", b"0", b"4", b"1", b"1", b"0", b"1", b"0", b"8", b"%d" % size, bytes(4 * size)],
        [b"KVPAGESET", b"s", b"0", b"0", b"0", b"0", b"8", b"1", b"%d" % size, b"0", bytes(size)],
        [b"SAVE"],
    ]
    demoting = encode_command([b"CONFIG", b"SET", b"maxmemory", b"1mb"]) + encode_command([b"SET", b"k", b"v"])
    with measured(directory=tmp_path) as turns:
        cost = turns.cost(b"".join(map(encode_command, before)), demoting)
        assert turns.server.keyspace.memory.used < 1 << 20
    assert cost.longest < LONGEST


@pytest.mark.parametrize("in_exec", [False, True], ids=["alone", "in EXEC"])
def test_large_blobs_become_pages_and_wrong_ones_are_refused(client: redis.Redis, in_exec: bool) -> None:
    def run(*words: bytes | str) -> object:
        with client.pipeline(transaction=in_exec) as pipe:
            pipe.execute_command(*words)
            return pipe.execute(raise_on_error=False)[0]

    assert run("SET", bytes(KEY), BLOB) is True
    assert client.execute_command("KVPAGEGET", "r", 0, 0, 0, 0) == bytes(SIZE)
    assert run("GETSET", bytes(KEY), BLOB) == BLOB
    for words in (("SET", bytes(KEY), WRONG), ("MSET", "k", "v", bytes(KEY), WRONG), ("SETNX", "no page", "v")):
        client.delete("no page")
        reply = run(*words)
        assert reply is True or "the body does not match the checksum" in str(reply)
    assert client.get(bytes(KEY)) == BLOB
    assert not client.exists("k")
    assert client.info("memory")["arena_used"] < 2 * SIZE


@pytest.mark.parametrize(
    "words",
    [
        ["GET", "{key}"],
        ["GETRANGE", "{key}", 0, -1],
        ["MGET", "{key}"],
        ["GETSET", "{key}", BLOB],
        ["SET", "{key}", BLOB, "GET"],
        ["GETEX", "{key}"],
        ["GETDEL", "{key}"],
    ],
    ids=lambda words: words[0],
)
def test_a_read_that_waits_for_checksums_counts_once(client: redis.Redis, words: list[bytes | str | int]) -> None:
    set_block(client, "r", 0, block([(0, DType.UINT8, SIZE)], layers=2, heads=1, page_size=1))
    client.config_resetstat()
    client.execute_command(*(bytes(KEY) if word == "{key}" else word for word in words))
    stats = client.info("stats")
    assert (stats["keyspace_hits"], stats["keyspace_misses"]) == (1, 0)


def test_a_large_blob_in_a_long_mset_becomes_a_page(client: redis.Redis) -> None:
    client.mset({**{f"k{i}": "v" for i in range(1000)}, bytes(KEY): BLOB})
    assert client.execute_command("KVPAGEGET", "r", 0, 0, 0, 0) == bytes(SIZE)
    assert client.dbsize() == 1001


@pytest.mark.parametrize("in_exec", [False, True], ids=["alone", "in EXEC"])
def test_pages_of_many_whole_blocks_are_read(client: redis.Redis, in_exec: bool) -> None:
    shape = block([(0, DType.UINT8, 1)], layers=100, heads=40, page_size=1)
    for page in range(5):
        set_block(client, "m", page, shape)
    keys = [PageKey(b"m", 99, 39, page, 0) for page in range(5)]
    with client.pipeline(transaction=in_exec) as pipe:
        pipe.mget(map(bytes, keys))
        pipe.execute_command("KVPAGESTAT", "m", 99, 39, 4, 0)
        values, fields = pipe.execute()
    bodies = [client.execute_command("KVPAGEGET", "m", 99, 39, page, 0) for page in range(5)]
    expected = [
        encode_page(key, body, dtype=DType.UINT8, page_size=1, head_dim=1)
        for key, body in zip(keys, bodies, strict=True)
    ]
    assert [value[56:] for value in values] == [blob[56:] for blob in expected]
    assert dict(fields)[b"checksum"] == b"%016x" % int.from_bytes(values[4][56:64], "little")
