"""Everything that a server holds, to be compared before and after; and a keyspace with something of every kind."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import redis

from kvpage_server.page import BlockShape, DType, PageHeader, PageKey, Plane, encode_page

TTL_ERROR = 5000  # milliseconds by which times to live may differ: whole seconds of blocks, and a busy machine


@dataclass(frozen=True)
class Held:
    """A key's value, without the write time in a page's header."""

    value: bytes
    expires: bool


def everything(client: redis.Redis) -> tuple[dict[bytes, Held], dict[bytes, int]]:
    """Return all values, and the remaining milliseconds of keys with a TTL."""
    held, left = {}, {}
    for key in sorted(set(client.scan_iter(count=1000))):
        value, ttl = client.get(key), client.pttl(key)
        try:
            named, header = PageKey.parse(key), PageHeader.parse(value)
            geometry = (header.dtype, header.page_size, header.head_dim, header.checksum)
            value = repr((named, geometry)).encode() + value[64:]
        except ValueError:
            pass
        held[key] = Held(value, ttl >= 0)
        if ttl >= 0:
            left[key] = ttl
    return held, left


def check_same(client: redis.Redis, before: tuple[dict[bytes, Held], dict[bytes, int]]) -> None:
    """Check that a server has the values that another one had a moment before."""
    held, left = everything(client)
    assert held.keys() == before[0].keys()
    assert held == before[0]
    assert all(before[1][key] - 20_000 < ttl <= before[1][key] + TTL_ERROR for key, ttl in left.items())


def block(dtypes: list[tuple[int, DType, int]], layers: int = 2, heads: int = 2, page_size: int = 4) -> BlockShape:
    return BlockShape(layers, heads, page_size, tuple(Plane(*plane) for plane in dtypes))


def set_block(client: redis.Redis, req: Any, page: int, shape: BlockShape, *, ttl: int = 0, seed: int = 0) -> bytes:
    """Store a block of random bytes; its body."""
    body = random.Random(f"{req!r} {page} {seed}").randbytes(shape.nbytes)
    planes = [word for plane in shape.planes for word in (int(plane.kv_type), int(plane.dtype), plane.head_dim)]
    head = (req, page, shape.layers, shape.heads, shape.page_size, ttl, len(shape.planes))
    client.execute_command("KVBLOCKSET", *head, *planes, body)
    return body


HALVES = block([(0, DType.BFLOAT16, 8), (1, DType.BFLOAT16, 6)])
QUANTISED = block(
    [
        (0, DType.UINT32, 2),
        (1, DType.UINT32, 2),
        (2, DType.FLOAT16, 1),
        (3, DType.FLOAT16, 1),
        (4, DType.FLOAT16, 1),
        (5, DType.FLOAT16, 1),
    ]
)
EIGHTS = block([(0, DType.FLOAT8_E4M3, 3), (1, DType.FLOAT8_E5M2, 5)], layers=3, heads=1, page_size=1)
BINARY = b"r\xff\xe9%41*"


def fill(client: redis.Redis) -> None:
    for page in range(4):
        set_block(client, "chat-7", page, HALVES, ttl=3600 if page % 2 else 0)
    set_block(client, "quantised", 0, QUANTISED)
    set_block(client, "zähler/8", 4_294_967_295, EIGHTS, ttl=100)
    set_block(client, BINARY, 0, HALVES)
    set_block(client, "torn", 0, HALVES)
    client.delete("kv:torn:0:1:0:1")
    set_block(client, "fading", 0, HALVES)
    client.pexpire("kv:fading:1:1:0:0", 500_000)
    client.execute_command("KVPAGESET", "test_req_001", 5, 8, 42, 0, 1, 128, 64, 3600, "BLOB_DATA")
    client.execute_command("KVPAGESET", "test_req_001", 0, 0, 0, 0, 1, 128, 64, 0, "")
    client.execute_command("KVPAGESET", "single", 0, 0, 0, 0, 2, 2, 2, 0, b"0123456789abcdef")
    unchecked = PageKey(b"unchecked", 1, 2, 3, 4)
    client.set(
        bytes(unchecked), encode_page(unchecked, b"xy", dtype=DType.INT8, page_size=1, head_dim=2, with_checksum=False)
    )
    client.set("manifest:alice", b"\x00\xff" * 40, px=7_200_000)
    client.set(b"seal:\xfe%", b"12345678")
    client.set("empty", "")
    client.set("kv:plain:0:0:0:0", "no page at all")
    client.set("long", random.Random(1).randbytes(300_000))


CACHE_DIM = 64


def cache(seed: int, rows: int, dtype: DType = DType.BFLOAT16, pages: int = 1) -> bytes:
    """Return pages of values whose magnitude depends on the channel, as in a cache."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((pages, rows, CACHE_DIM)) * np.exp(rng.standard_normal((pages, 1, CACHE_DIM)))
    words = values.astype(np.float32)
    if dtype is DType.BFLOAT16:
        return (words.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return words.tobytes() if dtype is DType.FLOAT32 else words.astype(np.float16).tobytes()
