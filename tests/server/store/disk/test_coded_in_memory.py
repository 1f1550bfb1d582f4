"""`page-code idle` and `always`: blocks that rest are coded in memory, and every reply is that of a server without."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from keyspaces import CACHE_DIM as DIM
from keyspaces import cache
from test_disk import flip
from test_kvpage_cli import kvpage
from test_tiered import disk_info, settle, tiered
from turns import Turns, measured
from waiting import until

import kvpage_server.commands.families  # noqa: F401 - it fills the table
from kvpage_server.client import PageClient
from kvpage_server.commands.specs import TABLE
from kvpage_server.lossless import decode_body, encode_block_body, seal_of
from kvpage_server.page import BlockShape, DType, Plane, checksum
from kvpage_server.store.disk import fetching
from kvpage_server.store.disk.database import FILE, Disk
from kvpage_server.store.disk.lmdb_file import DiskError
from kvpage_server.store.memory.index import OnDisk

BF16 = int(DType.BFLOAT16)
SHAPE = BlockShape(2, 4, 32, (Plane(0, DType.BFLOAT16, DIM), Plane(1, DType.BFLOAT16, DIM)))
SIZE = SHAPE.nbytes  # 64 KiB
WORDS = (SHAPE.layers, SHAPE.heads, SHAPE.page_size, 0, 2, 0, BF16, DIM, 1, BF16, DIM)
ALWAYS = ("--page-code", "always", "--appendfsync", "always")


def body(seed: int) -> bytes:
    return cache(seed, SHAPE.page_size, pages=SHAPE.pages)


def set_block(client: redis.Redis, page: int, name: str = "b") -> bytes:
    client.execute_command("KVBLOCKSET", name, page, *WORDS, body(page))
    return body(page)


def get_block(client: redis.Redis, page: int, name: str = "b") -> Any:
    return client.execute_command("KVBLOCKGET", name, page)


def coded(client: redis.Redis) -> int:
    return int(disk_info(client)["memory_coded_values"])


# -- the replies of all commands ---------------------------------------------------------------------------------------

_BLOCKS, _PAGES = 3, 8
_CODED = _BLOCKS + _PAGES  # values that the server codes after `prepare`


def prepare(client: redis.Redis) -> None:
    """Store blocks, single pages of which some are not coded, and strings."""
    client.flushall()
    for page in range(_BLOCKS):
        set_block(client, page)
    for head in range(_PAGES):
        client.execute_command("KVPAGESET", "p", 0, head, 0, 0, BF16, 128, DIM, 0, cache(head, 128))
    client.execute_command("KVPAGESET", "p", 1, 0, 0, 0, int(DType.UINT8), 8, DIM, 0, bytes(8 * DIM))
    client.mset({"short": "1", "long": bytes(10_000)})


_PAGE, _OF_BLOCK = ("p", 0, 3, 0, 0), ("b", 1, 2, 1, 0)
_KEYS = ["kv:p:0:3:0:0", "kv:b:1:2:1:0"]
_SHAPED = (BF16, 8, DIM, 0, cache(5, 8))
_READS: list[tuple[Any, ...]] = [
    *(words for key in _KEYS for words in (
        ("GET", key), ("STRLEN", key), ("GETRANGE", key, 0, 99), ("GETRANGE", key, 3000, 3100), ("SUBSTR", key, 70, 90),
        ("EXISTS", key), ("TTL", key), ("PTTL", key), ("EXPIRETIME", key), ("PEXPIRETIME", key), ("TYPE", key),
        ("TOUCH", key), ("OBJECT", "ENCODING", key), ("OBJECT", "REFCOUNT", key), ("OBJECT", "IDLETIME", key),
        ("OBJECT", "FREQ", key), ("MGET", key, "short", "none"), ("WATCH", key),
    )),
    ("MGET", *_KEYS, "long"), ("KEYS", "*"), ("SCAN", 0, "COUNT", 1000), ("DBSIZE",), ("KVLOST",), ("KVLOST", _KEYS[0]),
    ("SCARD", "kv:b:index"), ("SMEMBERS", "kv:b:index"), ("SSCAN", "kv:b:index", 0, "COUNT", 1000),
    ("SISMEMBER", "kv:b:index", _KEYS[1]),
    *(words for page in (_PAGE, _OF_BLOCK) for words in (
        ("KVPAGEGET", *page), ("KVPAGEEXISTS", *page), ("KVPAGESTAT", *page), ("KVPAGEWHY", *page),
    )),
    ("KVPAGEMGET", 3, *_PAGE, *_OF_BLOCK, "none", 0, 0, 0, 0), ("KVPAGEMEXISTS", 2, *_PAGE, *_OF_BLOCK),
    ("KVPAGEINDEX", "b"), ("KVPAGEINDEX", "p"), ("KVPAGEVERIFY", "b"), ("KVPAGEVERIFY", "p"), ("KVPAGEWHY", "b"),
    ("KVBLOCKGET", "b", 0), ("KVBLOCKEXISTS", "b", 0), ("KVBLOCKMGET", 4, "b", 0, "b", 1, "b", 2, "b", 3),
    ("KVBLOCKMGETCODED", 2, "b", 0, "b", 9), ("KVPAGEPREFIX", SHAPE.pages, 0, 2, "b", 0, "b", 1),
    ("ECHO", "x"),
]  # fmt: skip
_WRITES: list[tuple[Any, ...]] = [
    *(words for key in _KEYS for words in (
        ("DEL", key), ("UNLINK", key), ("EXPIRE", key, 100), ("PEXPIRE", key, 100_000),
        ("EXPIREAT", key, 4_000_000_000), ("PEXPIREAT", key, 4_000_000_000_000), ("PERSIST", key),
        ("GETDEL", key), ("GETEX", key, "EX", 100),
        ("GETSET", key, "x"), ("SET", key, "x"), ("SETEX", key, 100, "x"), ("PSETEX", key, 100_000, "x"),
        ("SETNX", key, "x"), ("MSET", key, "x"), ("MSETNX", key, "x"), ("INCR", key), ("DECR", key), ("INCRBY", key, 2),
        ("DECRBY", key, 2), ("SET", key, "x", "XX", "GET"),
    )),
    ("KVPAGESET", *_PAGE, *_SHAPED), ("KVPAGESET", *_OF_BLOCK, *_SHAPED), ("KVPAGEDEL", "b", 1), ("KVPAGEDEL", "p"),
    ("KVPAGEMSET", 2, *_PAGE, *_SHAPED, *_OF_BLOCK, *_SHAPED), ("KVBLOCKSET", "b", 0, *WORDS, body(9)),
    ("KVBLOCKSETCODED", "b", 0, *WORDS, f"{checksum(body(9)):016x}", bytes(encode_block_body(body(9), SHAPE) or b"")),
    ("KVPAGELEASE", "b", 1000, 0, 1), ("KVPAGEPIN", "b", 0), ("KVPAGEUNPIN", "b", 0),
    ("KVPAGEKEEP", "t", 1, 1000, _KEYS[1]), ("FLUSHDB",), ("FLUSHALL",), ("SAVE",),
]  # fmt: skip
# These neither read nor change values of keys, or the two lists above have them as RANDOMKEY, whose reply is random.
_OTHERS = re.compile(
    r"(acl|client|cluster|command|config|kvmap|latency|memory|module|object\|help|pubsub|slowlog)\b.*|auth|bgsave|discard|exec"
    r"|hello|info|kvdecode|lastsave|monitor|multi|object|ping|psubscribe|publish|punsubscribe|quit|randomkey|readonly"
    r"|readwrite|reset|role|select|shutdown|subscribe|time|unsubscribe|unwatch|wait"
)
_TIMES = {b"since", b"at", b"created_ms", b"ttl_left_ms", b"lease_left_ms", b"coded_size"}


def outcome(client: redis.Redis, words: tuple[Any, ...]) -> Any:
    """Return a command's reply, or its error, without times."""
    try:
        reply = client.execute_command(*words)
        return type(reply) if "IDLETIME" in words else timeless(reply)
    except redis.ResponseError as error:
        return str(error)


def timeless(reply: Any) -> Any:
    if isinstance(reply, dict):
        return {field: timeless(value) for field, value in reply.items() if field not in _TIMES}
    if isinstance(reply, (list, tuple)):
        return [*map(timeless, reply)]
    if isinstance(reply, set):
        return sorted(reply)
    if isinstance(reply, bytes) and reply[:4] == b"KVPG":
        return reply[:32] + reply[40:]
    return reply // 10_000 if isinstance(reply, int) and reply > 50_000 else reply


def test_all_commands_reply_as_without_the_code(tmp_path: Path) -> None:
    said = {"|".join(map(str.lower, map(str, words[:count]))) for words in _READS + _WRITES for count in (1, 2)}
    assert {name for name in TABLE if name not in said and not _OTHERS.fullmatch(name)} == set()
    directories = [tmp_path / name for name in ("off", "always")]
    for directory in directories:
        directory.mkdir()
    with tiered(directories[0]) as (_, plain), tiered(directories[1], *ALWAYS) as (_, client):
        for words in _WRITES:
            for each in (plain, client):
                prepare(each)
            until(lambda: coded(client) == _CODED, "the code")
            assert outcome(plain, words) == outcome(client, words), words[:3]
            settle(client)
            for reads in _READS:
                assert outcome(plain, reads) == outcome(client, reads), (words[:3], reads)
        for each in (plain, client):
            prepare(each)
        for words in _READS:
            until(lambda: coded(client) == _CODED, "the code")
            assert outcome(plain, words) == outcome(client, words), words
        until(lambda: coded(client) == _CODED, "the code")
        for each in (plain, client):
            each.execute_command("CLIENT", "NO-TOUCH", "ON")
        for words in _READS:
            assert outcome(plain, words) == outcome(client, words), words
        assert coded(client) == _CODED  # such reads decode values only for themselves
        assert disk_info(client)["disk_fetched"] == 0


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_counts_the_codes(tmp_path: Path) -> None:
    with tiered(tmp_path, *ALWAYS) as (server, client):
        bodies = [set_block(client, page) for page in range(32)]
        until(lambda: coded(client) == 32, "the code")
        assert re.search(r"in memory, 2\.\d+ MiB coded in 1\.\d+ MiB: 1\.\d+ to 1", kvpage("ls", url=server.url)[1])
        info = disk_info(client)
        assert info["memory_coded_raw_bytes"] == 32 * SIZE
        assert info["memory_coded_ratio"] > 1.37
        assert info["memory_coded_bytes"] < client.info("memory")["used_memory"] < 32 * SIZE / 1.2
        stat = client.execute_command("KVPAGESTAT", *_OF_BLOCK)
        assert (stat[b"bytes"], stat[b"tier"]) == (32 * DIM * 2, b"memory")
        assert 0.6 < stat[b"coded_size"] / stat[b"bytes"] < 0.75
        assert client.memory_usage(_KEYS[1]) == len(_KEYS[1]) + stat[b"coded_size"]
        assert [get_block(client, page) for page in range(32)] == bodies
        assert disk_info(client)["memory_decoded_values"] == 32
        until(lambda: coded(client) == 32, "the code")  # again, after the reads
        client.execute_command("DEL", *(f"kv:b:0:0:{page}:0" for page in range(8)))
        client.execute_command("KVPAGEDEL", "b", *range(8, 16))
        for page in range(16, 20):
            set_block(client, page)
        client.flushall()
        assert coded(client) == 0
        until(lambda: client.info("memory")["used_memory"] == 0, "free memory")


def test_more_blocks_stay_in_memory(tmp_path: Path) -> None:
    """A store of 1 MiB has no room for 18 blocks of 64 KiB, unless they are coded."""
    with tiered(tmp_path, *ALWAYS, "--maxmemory", "1mb") as (_, client):
        for page in range(18):
            set_block(client, page)
            until(lambda page=page: coded(client) == page + 1, "the code")
        assert disk_info(client)["disk_dropped_from_memory"] == 0


def test_reads_on_a_full_server_get_all_bytes(tmp_path: Path) -> None:
    """Blocks are decoded, demoted, read from disk, and coded again."""
    with tiered(tmp_path, *ALWAYS, "--maxmemory", "2mb") as (server, client), server.client() as looker:
        looker.execute_command("CLIENT", "NO-TOUCH", "ON")
        bodies = [set_block(client, page) for page in range(20)]  # memory has space for all of them
        until(lambda: coded(client) == 20, "the code")
        bodies += [set_block(client, page) for page in range(20, 60)]
        for _ in range(3):
            assert [get_block(client, page) for page in range(60)] == bodies
            assert [get_block(looker, page) for page in reversed(range(60))] == bodies[::-1]
            names = [word for page in range(60) for word in ("b", page)]
            assert client.execute_command("KVBLOCKMGET", 60, *names) == bodies
        info = disk_info(client)
        assert info["memory_decoded_values"] > 60
        assert info["disk_corrupt"] == 0
        until(lambda: client.info("memory")["used_memory"] <= 2 << 20, "memory within its limit")


def test_codes_in_memory_are_sent_without_decoding(tmp_path: Path) -> None:
    with tiered(tmp_path, *ALWAYS) as (_, client):
        bodies = [set_block(client, page) for page in range(12)]
        until(lambda: coded(client) == 12, "the code")
        names = [word for page in range(12) for word in ("b", page)]
        for _ in range(2):
            found = client.execute_command("KVBLOCKMGETCODED", 12, *names)
            for (digest, code), sent in zip(found, bodies, strict=True):
                into = bytearray(SIZE)
                decode_body(code, memoryview(into))
                assert (bytes(into), int(digest, 16)) == (sent, checksum(sent))
        info = disk_info(client)
        assert (info["memory_decoded_values"], info["memory_coded_values"]) == (0, 12)
        assert client.info("stats")["keyspace_hits"] == 24


# -- in this process ---------------------------------------------------------------------------------------------------


@contextmanager
def server(directory: Path, mode: str, *options: str) -> Iterator[tuple[Turns, redis.Redis]]:
    words = "--store", "tiered", "--page-code", mode, *options
    with measured(*words, directory=directory) as turns, redis.Redis(port=turns.server.port, protocol=3) as client:
        yield turns, client


def test_blocks_that_are_used_or_protected_stay_raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "IDLE", 2)
    with server(tmp_path, "idle") as (_, client):
        for page in range(6):
            set_block(client, page)
        client.execute_command("KVPAGELEASE", "b", 60_000, 1)
        client.execute_command("KVPAGEPIN", "b", 2)

        def rest() -> bool:
            get_block(client, 0)
            return coded(client) == 3

        until(rest, "the code of the other three")
        sizes = [client.execute_command("KVPAGESTAT", "b", 0, 0, page, 0)[b"coded_size"] for page in range(6)]
        assert [size > 0 for size in sizes] == [False, False, False, True, True, True]
        client.execute_command("KVPAGEUNPIN", "b", 2)
        until(lambda: coded(client) == 5, "the code of all but the leased one")


def test_pages_without_a_code_are_not_encoded_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page of a block has no code, and another one waits for a disk that fails."""
    encoded, swept = list[int](), list[int]()

    def codes_of(bodies: Any, found: Any = fetching._codes_of) -> Any:
        encoded.append(len(bodies))
        return found(bodies)

    def sweep(coder: fetching.Coder, run: Any = fetching.Coder.sweep) -> None:
        swept.append(1)
        run(coder)

    def fail(*_: object) -> None:
        raise DiskError("the disk fails")

    monkeypatch.setattr(fetching, "_codes_of", codes_of)
    monkeypatch.setattr(fetching.Coder, "sweep", sweep)
    with server(tmp_path, "always") as (turns, client):
        client.execute_command("KVPAGESET", "p", 0, 0, 0, 0, BF16, 64, 64, 0, random.Random(1).randbytes(8192))
        settle(client)
        until(lambda: sum(encoded) == 1, "the search for a code")
        with monkeypatch.context() as patch:
            patch.setattr(Disk, "write", fail)
            client.execute_command("KVPAGESET", "p", 0, 1, 0, 0, BF16, 64, 64, 0, cache(1, 64))
            keyspace = turns.server.keyspace
            turns.on_loop(lambda: keyspace.tier.coder.add(keyspace.index.block(b"p", 0)))
            swept.clear()
            until(lambda: len(swept) > 3, "sweeps")
            assert sum(encoded) == 1
        until(lambda: coded(client) == 1, "the code of the other page")


def test_a_damaged_code_is_replaced_from_disk(tmp_path: Path) -> None:
    with server(tmp_path, "always", "--scrub-rate", "0") as (turns, client):
        bodies = [set_block(client, page) for page in range(3)]

        def placeholder_of(page: int) -> object:
            block = turns.server.keyspace.index.block(b"b", page)
            assert block is not None
            assert block.extent is not None
            return block.extent.slot

        def damage() -> None:
            for page, at in ((0, 0), (1, 5000)):
                placeholder = placeholder_of(page)
                assert isinstance(placeholder, OnDisk)
                assert placeholder.code is not None
                placeholder.code.slots[0].body[at] ^= 1

        until(lambda: turns.on_loop(lambda: all(isinstance(placeholder_of(page), OnDisk) for page in (0, 1))), "codes")
        turns.on_loop(damage)
        assert [get_block(client, page) for page in range(3)] == bodies
        assert disk_info(client)["disk_corrupt"] == 0


def test_damage_on_disk_is_repaired_from_the_code(tmp_path: Path) -> None:
    with tiered(tmp_path, *ALWAYS, "--scrub-rate", "64mb") as (_, client):
        bodies = [set_block(client, page) for page in range(3)]
        until(lambda: coded(client) == 3, "the code")
        settle(client)
        code = bytes(encode_block_body(bodies[1], SHAPE) or b"")
        assert seal_of(code)
        flip(tmp_path / FILE, (tmp_path / FILE).read_bytes().index(code[:64]) + 5000)
        until(lambda: disk_info(client)["disk_repaired"] == 1, "the repair")
        assert [get_block(client, page) for page in range(3)] == bodies
    with tiered(tmp_path) as (_, client):
        assert [get_block(client, page) for page in range(3)] == bodies
        assert disk_info(client)["disk_corrupt"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs sealed shared memory of Linux")
def test_coded_blocks_are_decoded_for_clients_that_map(tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    with (
        tiered(tmp_path, *ALWAYS, "--unixsocket", str(socket)) as (_, client),
        PageClient(f"unix://{socket}") as mapping,
    ):
        bodies = [set_block(client, page) for page in range(12)]
        for _ in range(3):
            until(lambda: coded(client) == 12, "the code")
            into = [np.zeros(SIZE, np.uint8) for _ in bodies]
            assert mapping.mget_blocks_into([(b"b", page) for page in range(12)], SHAPE, into) == [True] * 12
            assert [found.tobytes() for found in into] == bodies
        assert client.info("commandstats")["cmdstat_kvmap|blockmget"]["calls"] >= 3


# -- quotas ------------------------------------------------------------------------------------------------------------


QUOTA = ("--quota", "kv:*", "1mb")
HEADERS = 64 * SHAPE.pages  # bytes that the headers of a block count
ROWS, HEADS = 128, 8  # of single pages


def counted(turns: Turns, client: redis.Redis) -> int:
    """Return the bytes of the quota, after a check that they are the sum of those of its units."""
    contents = turns.server.keyspace.contents

    def check() -> None:
        [quota] = contents.eviction_order.quotas.all
        assert quota.sizes == {unit: contents.size_for_quota(unit) for unit in quota.sizes}
        assert quota.bytes == sum(quota.sizes.values())

    turns.on_loop(check)
    quota: dict[str, int] = client.info("quotas")["quota0"]
    return quota["bytes"]


def test_a_quota_counts_the_code_of_coded_values(tmp_path: Path) -> None:
    size = ROWS * DIM * 2  # of the body of a single page
    raw = 3 * (HEADERS + SIZE) + HEADS * (64 + size)
    with server(tmp_path, "always", *QUOTA) as (turns, client):
        for page in range(3):
            set_block(client, page)
        for head in range(HEADS):
            client.execute_command("KVPAGESET", "p", 0, head, 0, 0, BF16, ROWS, DIM, 0, cache(head, ROWS))
        until(lambda: coded(client) == 3 + HEADS, "the code")
        in_codes = 3 * HEADERS + HEADS * 64 + disk_info(client)["memory_coded_bytes"]
        until(lambda: counted(turns, client) == in_codes, "the bytes of the code in the quota")
        assert in_codes < 0.75 * raw
        client.execute_command("KVPAGEPIN", "b", 0)  # so that the block is not coded again
        code = client.execute_command("KVPAGESTAT", "b", 0, 0, 0, 0)[b"coded_size"] * SHAPE.pages
        get_block(client, 0)
        assert counted(turns, client) == pytest.approx(in_codes + SIZE - code, abs=SHAPE.pages)
        client.execute_command("KVPAGEUNPIN", "b", 0)
        until(lambda: counted(turns, client) == in_codes, "the code of the block that was read")
    with server(tmp_path, "always", *QUOTA) as (turns, client):
        assert counted(turns, client) == in_codes
        get_block(client, 1)
        client.execute_command("KVPAGESET", "p", 0, 1, 0, 0, BF16, ROWS, DIM, 0, cache(99, ROWS))
        until(lambda: coded(client) == 2, "the code of what was read and written")
        client.config_set("maxmemory", "1kb")
        client.set("x", "y")  # a write demotes
        assert coded(client) == 0
        on_disk = counted(turns, client)
        assert in_codes <= on_disk < 0.85 * raw
        client.execute_command("DEL", "kv:p:0:2:0:0")
        assert 64 + size > on_disk - counted(turns, client) > 0.7 * size
    with server(tmp_path, "off", *QUOTA) as (turns, client):
        assert counted(turns, client) < 0.75 * raw
        client.execute_command("KVDECODE")
        assert counted(turns, client) == raw - 64 - size


def test_a_full_quota_has_room_for_values_after_the_code(tmp_path: Path) -> None:
    """The quota has room for four raw blocks, or five in the code. Each is read again, and none is evicted."""
    limit = 4 * (HEADERS + SIZE) + SIZE // 8
    with server(tmp_path, "always", "--quota", "kv:*", str(limit), "--maxmemory-policy", "noeviction") as (
        turns,
        client,
    ):
        bodies = []
        for page in range(5):
            bodies.append(set_block(client, page))
            until(lambda: coded(client) == len(bodies), "the code")
        assert counted(turns, client) < limit
        with pytest.raises(redis.ResponseError, match="quota of 'kv:\\*'"):
            set_block(client, 5), set_block(client, 6)
        assert [get_block(client, page) for page in range(5)] == bodies
