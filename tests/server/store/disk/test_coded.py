"""Bodies that are stored on disk with the lossless code: the same bytes, fewer of them on disk, and damage is found.

`stored_before/coded.tar.xz` has the store of `write_all`, written with `page-code disk`.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
import redis
import xxhash
from archives import unpack
from keyspaces import CACHE_DIM as DIM
from keyspaces import cache
from servers import start_server
from test_disk import flip, read
from test_kvpage_cli import kvpage
from test_tiered import disk_info, settle, tiered
from test_tiered_stored_before import STORED, check
from waiting import until

from kvpage_server.app import _check
from kvpage_server.configuration.config import ConfigError, from_arguments
from kvpage_server.lossless import encode_block_body, encode_page_body
from kvpage_server.page import BlockShape, DType, PageKey, Plane, encode_page
from kvpage_server.store.disk.database import FILE, Coded, Disk
from kvpage_server.store.disk.encoding import Change, Clear, Quarantine, SetExpiry, Write, code_of
from kvpage_server.store.records import PIECE, SHORT_PIECE, Damaged, Record, name_of_block, name_of_key

CODED = ("--page-code", "disk")
BFLOAT16 = Plane(0, DType.BFLOAT16, DIM)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path, codes=True)
    yield disk
    disk.close()


def page(head: int, body: bytes, dtype: DType = DType.BFLOAT16, rows: int = 128, dim: int = DIM) -> Write:
    key = PageKey(b"r", 0, head, 3, 0)
    blob = encode_page(key, body, dtype=dtype, page_size=rows, head_dim=dim)
    return Write(name_of_key(bytes(key)), blob[:64], blob[64:], expires=5, used=7)


def meta_of(shape: BlockShape) -> bytes:
    head = b"".join(n.to_bytes(4, "little") for n in (shape.layers, shape.heads, shape.page_size)) + bytes(16)
    planes = (bytes([p.kv_type, p.dtype]) + p.head_dim.to_bytes(4, "little") for p in shape.planes)
    return head + b"".join(planes)


def block(page: int, shape: BlockShape, body: bytes) -> Write:
    return Write(name_of_block(b"b", page), meta_of(shape), body)


def format_of(disk: Disk) -> bytes:
    with disk._env.begin(db=disk._about) as txn:
        return txn.get(b"format", b"")


def bytes_of(disk: Disk, name: bytes, size: int) -> bytes | None:
    """Return a body after it was read in both ways, with the same result."""
    _, [found] = disk.find([(name, size)])
    if isinstance(found, Exception):
        with pytest.raises(Damaged):
            read(disk, name, size)
        raise found
    body = b"".join(found) if isinstance(found, list) else None
    assert read(disk, name, size) == body
    return body


SHAPES = [
    BlockShape(1, 2, 128, (BFLOAT16,)),
    BlockShape(30, 3, 16, (BFLOAT16, Plane(1, DType.BFLOAT16, DIM))),
    BlockShape(24, 8, 64, (BFLOAT16, Plane(1, DType.BFLOAT16, DIM))),  # 3 MB: several parts, and several pieces
]


def test_coded_pages_are_read_as_they_were_written(disk: Disk) -> None:
    dtypes = [DType.BFLOAT16, DType.FLOAT32, DType.FLOAT16]
    pages = {head: page(head, cache(head, 128, dtypes[head % 3]), dtypes[head % 3]) for head in range(30)}
    sizes = disk.write(pages.values())
    assert sizes == {one.name: len(code_of(one) or b"") for one in pages.values()}
    for one in pages.values():
        assert bytes_of(disk, one.name, len(one.body)) == one.body
        assert disk.check(one.name) == sizes[one.name] < 0.9 * len(one.body)
    assert disk.coded == Coded(sum(len(one.body) for one in pages.values()), sum(sizes.values()))
    [*found] = disk.records()
    assert {record.name: record.meta for _, record in found if isinstance(record, Record)} == {
        one.name: one.meta for one in pages.values()
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("piece", [PIECE, SHORT_PIECE])
def test_coded_blocks_are_read_as_they_were_written(disk: Disk, shape: BlockShape, piece: int) -> None:
    body = cache(1, shape.page_size, pages=shape.pages)
    write = block(0, shape, body)
    [size] = disk._commit([write], piece=piece).values()
    assert bytes_of(disk, write.name, len(body)) == body
    assert disk.check(write.name) == size < len(body) / 1.37
    disk.write([SetExpiry(write.name, 77)])
    [(_, record)] = disk.records()
    assert isinstance(record, Record)
    assert (record.expires, record.meta, record.body.size, record.body.coded) == (77, write.meta, len(body), size)
    assert bytes_of(disk, write.name, len(body)) == body


def test_other_values_stay_as_they_are(disk: Disk) -> None:
    rng = random.Random(1)
    raw = [
        page(0, rng.randbytes(16384)),  # would take more
        page(1, cache(1, 128), DType.UINT8, dim=2 * DIM),
        page(2, cache(2, 128)[:-2], rows=128),  # another length than its shape
        page(3, cache(3, 1), rows=1),
        page(4, b""),
        page(5, cache(5, 22), rows=22),  # 2816 bytes take as many pages of the file with the code
        Write(b"kstring", b"", cache(6, 128)),
        Write(b"kempty", b"", b""),
        Write(name_of_block(b"shapeless", 0), b"", cache(7, 128)),
        block(1, BlockShape(1, 1, 8, (BFLOAT16,)), cache(8, 8)),  # within its record
        block(2, BlockShape(1, 1, 128, (Plane(0, DType.UINT32, DIM // 2),)), cache(9, 128)),
    ]
    assert disk.write(raw) == {}
    for write in raw:
        assert bytes_of(disk, write.name, len(write.body)) == write.body
    assert (disk.coded, format_of(disk)) == (Coded(), b"2")


def test_a_block_of_several_dtypes_is_coded_in_parts(disk: Disk) -> None:
    planes = (BFLOAT16, Plane(1, DType.FLOAT32, DIM), Plane(2, DType.UINT8, DIM))
    shape = BlockShape(3, 2, 64, planes)
    parts = [
        cache(layer, 64, pages=2)
        + cache(layer, 64, DType.FLOAT32, pages=2)
        + random.Random(layer).randbytes(2 * 64 * DIM)
        for layer in range(3)
    ]
    write = block(0, shape, b"".join(parts))
    [size] = disk.write([write]).values()
    assert bytes_of(disk, write.name, len(write.body)) == write.body
    assert size < 0.9 * len(write.body)


def failing(change: Change) -> Iterator[Change]:
    yield change
    raise lmdb.Error("the disk fails")


def test_the_first_coded_body_raises_the_format(tmp_path: Path) -> None:
    """A version of the server that does not know the code refuses the file: it accepts format 2 alone."""
    disk = Disk(tmp_path)
    plain, coded = page(0, cache(0, 128)), page(1, cache(1, 128))
    disk.write([plain])
    assert format_of(disk) == b"2"
    disk.close()
    disk = Disk(tmp_path, codes=True)
    with pytest.raises(lmdb.Error):
        disk._commit(failing(coded))
    assert (format_of(disk), disk.coded, disk.format) == (b"2", Coded(), 2)
    disk.write([coded])
    assert format_of(disk) == b"3"
    disk.close()
    disk = Disk(tmp_path)
    assert bytes_of(disk, coded.name, 16384) == coded.body
    assert disk.write([page(1, cache(2, 128))]) == {}
    assert (disk.coded, format_of(disk)) == (Coded(), b"3")
    disk.write([Clear()])
    assert format_of(disk) == b"2"
    disk.close()


def test_sizes_of_coded_bodies_follow_every_change(tmp_path: Path) -> None:
    disk = Disk(tmp_path, codes=True)
    pages = [page(head, cache(head, 128)) for head in range(20)]
    size = sum(disk.write(pages).values())
    assert disk.coded == Coded(20 * 16384, size)
    disk.write([Quarantine(pages[0].name), SetExpiry(pages[1].name, 99)])
    again = disk.write(pages[:10])
    assert disk.coded == Coded(20 * 16384, size)  # the quarantine is not counted
    for one in pages[2:]:
        disk.write([Quarantine(one.name)])  # so that the first ones leave the quarantine
    expected = Coded(2 * 16384, again[pages[0].name] + again[pages[1].name])
    assert disk.coded == expected
    disk.close()
    disk = Disk(tmp_path)
    assert disk.coded == expected
    disk.coded = Coded(10**9, 10**9)  # as if a damaged record had not been subtracted
    disk.write([Write(b"klost", b"", bytes(5000))])
    with disk._env.begin(write=True) as txn:
        txn.delete(b"klost", db=disk._records)
        disk._lost.note(txn)
    disk.commit_removals([])
    assert disk.coded == expected
    disk.write([Clear()])
    assert disk.coded == Coded()
    disk.close()


@pytest.mark.parametrize("at", [0, 3, 5, 8, 16, 40, 5000, -1])
@pytest.mark.parametrize("kind", ["page", "block"])
def test_a_flipped_bit_of_a_code_is_found(disk: Disk, kind: str, at: int) -> None:
    shape = BlockShape(1, 2, 128, (BFLOAT16,))
    write = page(0, cache(1, 128)) if kind == "page" else block(0, shape, cache(1, 128, pages=2))
    disk.write([write])
    code = code_of(write)
    assert code is not None
    flip(disk.path, disk.path.read_bytes().index(bytes(code)) + at % len(code))
    with pytest.raises(Damaged):
        bytes_of(disk, write.name, len(write.body))
    with pytest.raises(Damaged):
        disk.check(write.name)


def test_an_intact_code_of_other_bytes_is_not_sent(disk: Disk) -> None:
    """The hash of the code is right, and that of the body is not."""
    disk.write([write := page(0, cache(1, 128))])
    code = code_of(write)
    assert code is not None
    where = disk.path.read_bytes().index(bytes(code))
    changed = bytearray(code)
    changed[1000] ^= 1
    changed[8:16] = xxhash.xxh3_64_intdigest(changed[16:], int.from_bytes(changed[:8], "little")).to_bytes(8, "little")
    with disk.path.open("r+b") as file:
        file.seek(where)
        file.write(changed)
    with pytest.raises(Damaged, match="does not match the checksum"):
        bytes_of(disk, write.name, len(write.body))


# -- with a server -----------------------------------------------------------------------------------------------------

Words = tuple[Any, ...]


def writes(rng: random.Random) -> Words:
    """Return a random command that stores, changes or removes pages. Most pages are those of a cache."""
    name, rows = rng.choice("abc"), rng.choice([16, 40, 128])
    kind = rng.random()
    if kind < 0.35:
        dtype = rng.choice([DType.BFLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT16])
        body = cache(rng.randrange(1000), rows, dtype)
        if rng.random() < 0.2:
            body = rng.randbytes(len(body))
        where = (name, rng.randrange(2), rng.randrange(4), rng.randrange(3), 0)
        return ("KVPAGESET", *where, int(dtype), rows, DIM, rng.choice([0, 0, 1000]), body)
    if kind < 0.6:
        body = cache(rng.randrange(1000), rows, pages=16)
        planes = (0, int(DType.BFLOAT16), DIM, 1, int(DType.BFLOAT16), DIM)
        return ("KVBLOCKSET", name, 3 + rng.randrange(3), 2, 4, rows, 0, 2, *planes, body)
    if kind < 0.7:  # splits a block that was stored whole
        key = f"kv:{name}:{rng.randrange(2)}:{rng.randrange(4)}:{rng.randrange(6)}:{rng.randrange(2)}"
        return rng.choice([("DEL", key), ("EXPIRE", key, 1000), ("PERSIST", key)])
    if kind < 0.75:
        return ("KVPAGEDEL", name)
    return ("SET", f"string{rng.randrange(3)}", cache(rng.randrange(1000), rows))


def shown(client: redis.Redis) -> list[Any]:
    """Return the replies of the commands that read keys, sizes and bytes."""
    keys = sorted(client.keys("*"))
    pages = [key for key in keys if key.startswith(b"kv:") and not key.endswith(b":index")]
    found: list[Any] = [keys]
    for name in "abc":
        found.append(sorted(map(str, client.execute_command("KVPAGEINDEX", name))))
        found += [client.execute_command("KVBLOCKGET", name, page) for page in range(6)]
        verified = client.execute_command("KVPAGEVERIFY", name)
        found.append((verified[b"checked"], verified[b"corrupt"]))
    for key in keys:
        found += [client.strlen(key), client.getrange(key, 60, 200), client.ttl(key) > 0]
    for key in pages:
        where = key.decode().split(":")[1:]
        stat = client.execute_command("KVPAGESTAT", *where)
        found.append({field: stat[field] for field in stat if field in (b"size", b"checksum", b"dtype", b"page_size")})
        found += [client.execute_command("KVPAGEGET", *where), without_times(client.get(key))]
    for touches in ("ON", "OFF"):  # CLIENT NO-TOUCH: values are loaded temporarily, or borrowed
        client.execute_command("CLIENT", "NO-TOUCH", touches)
        words = [word for key in pages for word in key.decode().split(":")[1:]]
        found.append(client.execute_command("KVPAGEMGET", len(pages), *words) if pages else [])
        found.append(
            client.execute_command("KVBLOCKMGET", 18, *(w for name in "abc" for p in range(6) for w in (name, p)))
        )
        found.append([*map(without_times, client.mget(keys))] if keys else [])
    return found


def without_times(blob: Any) -> Any:
    return blob if blob is None else blob[:32] + blob[48:]


def test_replies_are_those_of_a_server_without_the_code(tmp_path: Path) -> None:
    """Both restart several times; memory has no room for all values, so most are read from disk."""
    rng, directories = random.Random(46), [tmp_path / name for name in ("off", "disk")]
    for directory in directories:
        directory.mkdir()
    options = [("--maxmemory", "1mb", "--scrub-rate", "0"), ("--maxmemory", "1mb", "--scrub-rate", "0", *CODED)]
    last: list[Any] = []
    used = 0
    for _ in range(3):
        with (
            tiered(directories[0], *options[0]) as (_, plain),
            tiered(directories[1], *options[1]) as (_, coded),
        ):
            assert disk_info(coded)["disk_bytes"] == used
            if last:
                assert last == shown(plain) == shown(coded)
            for _ in range(60):
                words = writes(rng)
                assert outcome(plain, words) == outcome(coded, words)
            last = shown(plain)
            assert last == shown(coded)
            settle(coded)
            assert disk_info(coded)["disk_coded_ratio"] > 1.1
            assert disk_info(plain)["disk_coded_bytes"] == disk_info(coded)["disk_corrupt"] == 0
            settle(plain)
            used = disk_info(coded)["disk_bytes"]
            assert used < disk_info(plain)["disk_bytes"]


def outcome(client: redis.Redis, words: Words) -> Any:
    try:
        return client.execute_command(*words)
    except redis.ResponseError as error:
        return str(error)


def set_cache(client: redis.Redis, head: int, block: int = 0) -> bytes:
    body = cache(1000 * block + head, 128)
    client.execute_command("KVPAGESET", "r", 0, head, block, 0, int(DType.BFLOAT16), 128, DIM, 0, body)
    return body


def get_cache(client: redis.Redis, head: int) -> Any:
    return client.execute_command("KVPAGEGET", "r", 0, head, 0, 0)


def test_the_disk_counts_coded_bytes_also_after_a_restart(tmp_path: Path) -> None:
    with tiered(tmp_path, *CODED) as (_, client):
        bodies = {head: set_cache(client, head) for head in range(16)}
        planes = (0, int(DType.BFLOAT16), DIM)
        client.execute_command("KVBLOCKSET", "b", 0, 4, 4, 128, 0, 1, *planes, cache(99, 128, pages=16))
        settle(client)
        info = disk_info(client)
        assert info["disk_coded_raw_bytes"] == 32 * 16384
        assert info["disk_coded_ratio"] > 1.4
        assert info["disk_bytes"] < 1.1 * info["disk_coded_bytes"] + 4096 * 16
    names = "disk_bytes", "disk_coded_bytes", "disk_coded_raw_bytes"
    with tiered(tmp_path) as (_, client):  # off after disk: coded values are read, and new ones are not coded
        again = disk_info(client)
        assert [again[name] for name in names] == [info[name] for name in names]
        assert [get_cache(client, head) for head in bodies] == [*bodies.values()]
        assert disk_info(client)["disk_bytes"] == info["disk_bytes"]
        set_cache(client, 3)
        settle(client)
        assert disk_info(client)["disk_coded_raw_bytes"] == 31 * 16384
        assert disk_info(client)["disk_bytes"] > info["disk_bytes"]


def test_more_pages_fit_into_maxdisk(tmp_path: Path) -> None:
    kept = []
    for options in ((), CODED):
        directory = tmp_path / f"store{len(kept)}"
        directory.mkdir()
        with tiered(directory, "--maxdisk", "16mb", "--maxmemory", "4mb", *options) as (_, client):
            for number in range(1500):
                set_cache(client, number % 8, block=number // 8)
            settle(client)
            kept.append(client.dbsize())
            assert disk_info(client)["disk_write_errors"] == 0
    assert kept[1] > 1.38 * kept[0]


def test_a_damaged_code_is_a_miss_with_a_reason(tmp_path: Path) -> None:
    with tiered(tmp_path, *CODED) as (_, client):
        bodies = [set_cache(client, head) for head in range(4)]
        planes = (0, int(DType.BFLOAT16), DIM)
        body = cache(99, 128, pages=8)
        client.execute_command("KVBLOCKSET", "b", 0, 2, 4, 128, 0, 1, *planes, body)
    shape = BlockShape(2, 4, 128, (BFLOAT16,))
    for code in (encode_page_body(bodies[2], DType.BFLOAT16, 128, DIM), encode_block_body(body, shape)):
        assert code is not None
        flip(tmp_path / FILE, (tmp_path / FILE).read_bytes().index(bytes(code)) + len(code) // 2)
    with tiered(tmp_path, "--scrub-rate", "0") as (_, client):
        assert [get_cache(client, head) for head in range(4)] == [*bodies[:2], None, bodies[3]]
        assert client.execute_command("KVBLOCKGET", "b", 0) is None
        assert disk_info(client)["disk_corrupt"] == 2
        assert b"corrupt" in str(client.execute_command("KVPAGEWHY", "r", 0, 2, 0, 0)).encode()
        settle(client)
        assert disk_info(client)["disk_quarantined"] == 2


def test_the_scrubber_finds_a_damaged_code(tmp_path: Path) -> None:
    with tiered(tmp_path, *CODED) as (_, client):
        bodies = [set_cache(client, head) for head in range(4)]
    code = encode_page_body(bodies[2], DType.BFLOAT16, 128, DIM)
    assert code is not None
    flip(tmp_path / FILE, (tmp_path / FILE).read_bytes().index(bytes(code)) + 3000)
    with tiered(tmp_path) as (_, client):
        until(lambda: disk_info(client)["disk_corrupt"] > 0)
        assert client.dbsize() == 3


def test_acknowledged_pages_survive_a_kill(tmp_path: Path) -> None:
    bodies: dict[int, bytes] = {}
    for first in range(0, 90, 30):
        with tiered(tmp_path, *CODED, "--appendfsync", "always", killed=True) as (server, client):
            assert [get_cache(client, head) for head in bodies] == [*bodies.values()]
            bodies |= {head: set_cache(client, head) for head in range(first, first + 30)}
            server.stop(signal.SIGKILL)
    with tiered(tmp_path) as (_, client):
        assert [get_cache(client, head) for head in bodies] == [*bodies.values()]


# -- upgrade and downgrade ---------------------------------------------------------------------------------------------


def write_all(client: redis.Redis) -> list[Any]:
    """Store pages and blocks, one of them split, and return what `stored` finds."""
    for name in "abc":
        for head in range(4):
            words = (int(DType.BFLOAT16), 128, DIM, 0, cache(head, 128))
            client.execute_command("KVPAGESET", name, 0, head, 1, 0, *words)
        planes = (0, int(DType.BFLOAT16), DIM, 1, int(DType.BFLOAT16), DIM)
        body = cache(7, 16, pages=16)
        for page in (3, 4):
            client.execute_command("KVBLOCKSET", name, page, 2, 4, 16, 0, 2, *planes, body)
    client.expire("kv:b:0:0:3:0", 3_000_000_000)  # splits the block
    client.set("string", cache(9, 128))
    return stored(client)


def stored(client: redis.Redis) -> list[Any]:
    """Return the values that `write_all` has stored."""
    blocks = [client.execute_command("KVBLOCKGET", name, page) for name in "abc" for page in (1, 3, 4)]
    pages = [client.execute_command("KVPAGEGET", name, 0, head, 1, 0) for name in "abc" for head in range(4)]
    return [*blocks, *pages, client.get("string"), client.ttl("kv:b:0:0:3:0") > 2_000_000_000]


def check_format_2(directory: Path) -> None:
    """Check that a store has nothing that an older version, which knows only format 2, does not read."""
    disk = Disk(directory)
    assert (disk.coded, format_of(disk)) == (Coded(), b"2")
    found = [record for _, record in disk.records()]
    assert found
    assert not [record for record in found if isinstance(record, Damaged) or record.body.coded]
    with disk._env.begin() as txn:
        pieces = {int.from_bytes(key, "big") for key, _ in txn.cursor(disk._pieces)}
        assert pieces == {number for body in disk._lost._bodies(txn) for number in body.pieces}
    disk.close()


def test_a_coded_store_of_an_earlier_commit_is_opened(tmp_path: Path) -> None:
    unpack(STORED / "coded.tar.xz", tmp_path)
    with start_server() as server, server.client() as client:
        expected = write_all(client)
    for options in (CODED, ()):
        with tiered(tmp_path, *options) as (_, client):
            assert disk_info(client)["disk_format"] == 3
            assert stored(client) == expected


def test_a_store_without_codes_is_upgraded_and_downgraded(tmp_path: Path) -> None:
    unpack(STORED / "kvpage.lmdb.tar.xz", tmp_path)
    with tiered(tmp_path, *CODED) as (_, client):
        check(client)
        assert disk_info(client)["disk_format"] == 2  # until the first coded value
        expected = write_all(client)
        settle(client)
        assert disk_info(client)["disk_format"] == 3
    with tiered(tmp_path, "--scrub-rate", "0") as (_, client):
        client.execute_command("KVPAGEGET", "a", 0, 0, 1, 0)  # its block is loaded, the others are not
        assert client.execute_command("KVDECODE") == b"OK"
        info = disk_info(client)
        assert (info["disk_format"], info["disk_coded_bytes"], info["disk_corrupt"]) == (2, 0, 0)
        assert stored(client) == expected
        check(client)
    check_format_2(tmp_path)
    with tiered(tmp_path) as (_, client):
        again = disk_info(client)
        assert [again[name] for name in ("disk_bytes", "disk_values")] == [info["disk_bytes"], info["disk_values"]]
        assert stored(client) == expected


def test_clients_change_values_while_all_are_decoded(tmp_path: Path) -> None:
    """The counted bytes on disk are those of a restarted server."""
    with tiered(tmp_path, *CODED) as (_, client):
        for number in range(400):
            set_cache(client, number % 8, block=number // 8)
    with tiered(tmp_path, "--maxmemory", "2mb", "--maxdisk", "64mb") as (server, client), server.client() as other:
        waiting = client.connection_pool.get_connection()
        waiting.send_command("KVDECODE")
        bodies = {}
        for number in range(0, 400, 3):
            bodies[number] = set_cache(other, number % 8, block=number // 8)
            other.delete(f"kv:r:0:{(number + 1) % 8}:{(number + 1) // 8}:0")
        assert waiting.read_response() == b"OK"
        settle(other)
        info = disk_info(other)
        assert (info["disk_coded_bytes"], info["disk_format"]) == (0, 2)
    check_format_2(tmp_path)
    with tiered(tmp_path, "--maxdisk", "64mb") as (_, client):
        assert client.dbsize() == 400 - 133
        assert disk_info(client)["disk_bytes"] == info["disk_bytes"]
        for number, body in bodies.items():
            assert client.execute_command("KVPAGEGET", "r", 0, number % 8, number // 8, 0) == body


def test_damaged_codes_do_not_prevent_a_downgrade(tmp_path: Path) -> None:
    with tiered(tmp_path, *CODED) as (_, client):
        bodies = [set_cache(client, head) for head in range(4)]
    code = encode_page_body(bodies[2], DType.BFLOAT16, 128, DIM)
    assert code is not None
    flip(tmp_path / FILE, (tmp_path / FILE).read_bytes().index(bytes(code)) + 3000)
    with tiered(tmp_path, "--scrub-rate", "0") as (_, client):
        assert client.execute_command("KVDECODE") == b"OK"
        assert [get_cache(client, head) for head in range(4)] == [*bodies[:2], None, bodies[3]]
        info = disk_info(client)
        assert [info[name] for name in ("disk_corrupt", "disk_quarantined", "disk_format")] == [1, 0, 2]
    check_format_2(tmp_path)


def test_a_downgrade_without_enough_space_is_an_error(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxdisk", "16mb", "--maxmemory", "4mb", *CODED) as (_, client):
        for number in range(1200):
            set_cache(client, number % 8, block=number // 8)
        settle(client)
        kept = client.dbsize()
    with tiered(tmp_path, "--maxdisk", "16mb", "--maxmemory", "4mb") as (_, client):
        with pytest.raises(redis.ResponseError, match="Errors writing to disk: maxdisk is used up"):
            client.execute_command("KVDECODE")
        assert client.dbsize() == kept
    with tiered(tmp_path, "--maxdisk", "64mb") as (_, client):
        assert client.execute_command("KVDECODE") == b"OK"
        assert client.dbsize() == kept
    check_format_2(tmp_path)


def test_values_are_decoded_only_without_a_code(tmp_path: Path) -> None:
    refusal = pytest.raises(redis.ResponseError, match="needs `page-code off`, and page-code is disk")
    with tiered(tmp_path, *CODED) as (_, client), refusal:
        client.execute_command("KVDECODE")
    with (
        start_server() as server,
        server.client() as client,
        pytest.raises(redis.ResponseError, match="there is no disk"),
    ):
        client.execute_command("KVDECODE")


def test_the_code_needs_a_disk() -> None:
    config = from_arguments(["--page-code", "disk", "--store", "memory"])
    with pytest.raises(ConfigError, match="page-code disk needs `store tiered`, and store is memory"):
        _check(config)


def test_status_shows_the_saved_bytes(tmp_path: Path) -> None:
    with tiered(tmp_path, *CODED) as (server, client):
        for head in range(16):
            set_cache(client, head)
        settle(client)
        _, text, _ = kvpage("status", url=server.url)
        assert re.search(r"256 KiB coded in 18\d KiB: 1\.4\d to 1, 7\d KiB saved", re.sub(r"\.\d+ KiB", " KiB", text))
        figures = kvpage("status", "--json", url=server.url)[1]
        assert '"coded_raw_bytes": 262144' in figures
