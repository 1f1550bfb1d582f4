"""KVBLOCKSETCODED and KVBLOCKMGETCODED: blocks in the lossless code on the wire, and the same blocks without it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import redis
from keyspaces import cache
from servers import RunningServer, start_server
from waiting import until

from kvpage_server.lossless import decode_body, encode_block_body
from kvpage_server.page import BlockShape, DType, PageKey, Plane, checksum, encode_page

BFLOAT16 = BlockShape(2, 3, 16, (Plane(0, DType.BFLOAT16, 64), Plane(1, DType.BFLOAT16, 64)))
LARGE = BlockShape(8, 8, 128, (Plane(0, DType.BFLOAT16, 64), Plane(1, DType.BFLOAT16, 64)))  # 2 MiB: in a thread
MIXED = BlockShape(1, 2, 16, (Plane(0, DType.BFLOAT16, 64), Plane(2, DType.INT8, 64)))


def body_of(shape: BlockShape, seed: int = 0) -> bytes:
    rng = random.Random(seed)
    return b"".join(
        cache(seed + layer, shape.page_size, plane.dtype, shape.heads)
        if plane.dtype is not DType.INT8
        else rng.randbytes(shape.heads * shape.page_nbytes(plane))
        for layer in range(shape.layers)
        for plane in shape.planes
    )


def numbers(shape: BlockShape, ttl: int = 0) -> list[int]:
    planes = [number for plane in shape.planes for number in (plane.kv_type, int(plane.dtype), plane.head_dim)]
    return [shape.layers, shape.heads, shape.page_size, ttl, len(shape.planes), *planes]


def set_raw(client: redis.Redis, req: str, page: int, shape: BlockShape, body: bytes) -> None:
    client.execute_command("KVBLOCKSET", req, page, *numbers(shape), body)


def set_coded(
    client: redis.Redis, req: str, page: int, shape: BlockShape, body: bytes, *, code: Any = None, digest: Any = None
) -> Any:
    code = bytes(encode_block_body(body, shape) or b"") if code is None else code
    digest = f"{checksum(body):016x}" if digest is None else digest
    return client.execute_command("KVBLOCKSETCODED", req, page, *numbers(shape), digest, code)


def get_coded(client: redis.Redis, *names: Any) -> list[Any]:
    return client.execute_command("KVBLOCKMGETCODED", len(names) // 2, *names)


def decoded(found: Any, size: int) -> bytes:
    digest, code = found
    body = bytearray(size)
    decode_body(code, memoryview(body))
    assert int(digest, 16) == checksum(body)
    return bytes(body)


@pytest.mark.parametrize("shape", [BFLOAT16, LARGE, MIXED], ids=["small", "large", "mixed"])
def test_a_coded_block_is_the_block(client: redis.Redis, shape: BlockShape) -> None:
    body = body_of(shape)
    assert set_coded(client, "r", 0, shape, body) == b"OK"
    assert client.execute_command("KVBLOCKGET", "r", 0) == body
    key = PageKey(b"r", 0, 1, 0, 0)
    assert client.get(bytes(key))[64:] == body[shape.page_span(0, 1, 0)]
    [found] = get_coded(client, "r", 0)
    assert len(found[1]) < 0.9 * len(body)
    assert decoded(found, len(body)) == body


def test_a_raw_block_is_sent_in_the_code(client: redis.Redis) -> None:
    bodies = [body_of(LARGE, seed) for seed in range(3)]
    for page, body in enumerate(bodies):
        set_raw(client, "r", page, LARGE, body)
    found = get_coded(client, "r", 0, "r", 7, "r", 2, "r", 1)
    assert found[1] is None
    assert [decoded(found[i], LARGE.nbytes) for i in (0, 3, 2)] == bodies


def test_single_pages_are_sent_as_a_coded_block(client: redis.Redis) -> None:
    body = body_of(BFLOAT16)
    for layer in range(2):
        for head in range(3):
            for plane in BFLOAT16.planes:
                key = PageKey(b"r", layer, head, 0, plane.kv_type)
                page = body[BFLOAT16.page_span(layer, head, plane.kv_type)]
                client.set(bytes(key), encode_page(key, page, dtype=DType.BFLOAT16, page_size=16, head_dim=64))
    [found] = get_coded(client, "r", 0)
    assert decoded(found, len(body)) == body


def test_a_block_without_a_code_is_sent_raw(client: redis.Redis) -> None:
    noise = random.Random(1).randbytes(BFLOAT16.nbytes)
    set_raw(client, "noise", 0, BFLOAT16, noise)
    bytes_ = BlockShape(1, 1, 4, (Plane(0, DType.INT8, 64),))
    set_raw(client, "bytes", 0, bytes_, b"b" * 256)
    assert get_coded(client, "noise", 0, "bytes", 0) == [noise, b"b" * 256]


def test_coded_blocks_work_in_a_transaction(client: redis.Redis) -> None:
    body = body_of(LARGE)
    code = bytes(encode_block_body(body, LARGE) or b"")
    with client.pipeline() as pipe:
        pipe.execute_command("KVBLOCKSETCODED", "r", 0, *numbers(LARGE), f"{checksum(body):016x}", code)
        pipe.execute_command("KVBLOCKMGETCODED", 1, "r", 0)
        ok, [found] = pipe.execute()
    assert (ok, decoded(found, len(body))) == (b"OK", body)


def test_blocks_on_disk_are_sent_in_the_code() -> None:
    with start_server("--store", "tiered", "--maxmemory", "1mb") as server, server.client() as client:
        bodies = [body_of(BFLOAT16, seed) for seed in range(60)] + [body_of(LARGE)]
        for page, body in enumerate(bodies):
            shape = BFLOAT16 if page < 60 else LARGE
            until(lambda page=page, shape=shape, body=body: set_coded(client, "r", page, shape, body) == b"OK")
        client.execute_command("SAVE")
        names = [word for page in range(61) for word in ("r", page)]
        for _ in range(2):
            found = get_coded(client, *names)
            assert [decoded(one, len(body)) for one, body in zip(found, bodies, strict=True)] == bodies
        client.execute_command("CLIENT", "NO-TOUCH", "ON")
        found = get_coded(client, *names)
        assert [decoded(one, len(body)) for one, body in zip(found, bodies, strict=True)] == bodies


@pytest.mark.parametrize("shape", [BFLOAT16, LARGE], ids=["small", "large"])
def test_a_damaged_code_is_an_error_and_stores_nothing(client: redis.Redis, shape: BlockShape) -> None:
    body = body_of(shape)
    code = bytes(encode_block_body(body, shape) or b"")
    rng = random.Random(3)
    for at in [*range(40), *(rng.randrange(len(code)) for _ in range(20))]:
        changed = bytearray(code)
        changed[at] ^= 1 << rng.randrange(8)
        with pytest.raises(redis.ResponseError, match=r"code|block"):
            set_coded(client, "r", 0, shape, body, code=bytes(changed))
    for size in (1, 16, 40, len(code) // 2, len(code) - 1):
        with pytest.raises(redis.ResponseError, match=r"code|block"):
            set_coded(client, "r", 0, shape, body, code=code[:size])
    with pytest.raises(redis.ResponseError, match="does not match its digest"):
        set_coded(client, "r", 0, shape, body, digest="0" * 16)
    assert client.dbsize() == 0


def test_wrong_arguments_are_named(client: redis.Redis) -> None:
    body = body_of(BFLOAT16)
    for digest in ("", "0" * 15, "G" * 16, "A" * 16):
        with pytest.raises(redis.ResponseError, match="digest must be 16 hexadecimal digits"):
            set_coded(client, "r", 0, BFLOAT16, body, digest=digest)
    for code in (b"", b"x"):
        with pytest.raises(redis.ResponseError, match="does not have a code of"):
            set_coded(client, "r", 0, BFLOAT16, body, code=code)
    other = BlockShape(2, 3, 16, (Plane(0, DType.BFLOAT16, 64),))
    with pytest.raises(redis.ResponseError, match="the code is that of"):
        set_coded(client, "r", 0, other, body, code=bytes(encode_block_body(body, BFLOAT16) or b""))
    with pytest.raises(redis.ResponseError, match="KVBLOCKMGETCODED"):
        get_coded(client, "r", 0, "r")


@pytest.mark.parametrize("shape", [BFLOAT16, LARGE], ids=["small", "large"])
def test_a_code_of_another_shape_is_refused(client: redis.Redis, shape: BlockShape) -> None:
    body = body_of(shape)
    code = bytes(encode_block_body(body, shape) or b"")
    others = [
        replace(shape, planes=tuple(Plane(plane.kv_type, DType.FLOAT16, 64) for plane in shape.planes)),
        replace(shape, page_size=2 * shape.page_size, planes=shape.planes[:1]),
        replace(shape, planes=(Plane(0, DType.BFLOAT16, 128),)),
    ]
    for other in others:
        assert other.nbytes == shape.nbytes
        with pytest.raises(redis.ResponseError, match="the code is that of a block with another shape or dtype"):
            set_coded(client, "r", 0, other, body, code=code)
    assert client.dbsize() == 0


def test_a_raw_block_replaces_a_coded_one(client: redis.Redis) -> None:
    set_coded(client, "r", 0, BFLOAT16, body_of(BFLOAT16))
    set_raw(client, "r", 0, MIXED, body_of(MIXED))
    assert client.execute_command("KVBLOCKGET", "r", 0) == body_of(MIXED)


def test_a_user_needs_the_right_to_the_keys(server: RunningServer, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "+@read", "%R~kv:r:*")
    set_raw(client, "r", 0, BFLOAT16, body_of(BFLOAT16))
    try:
        with redis.Redis.from_url(server.url, username="reader", password="secret") as reader:
            assert decoded(get_coded(reader, "r", 0)[0], BFLOAT16.nbytes) == body_of(BFLOAT16)
            with pytest.raises(redis.exceptions.NoPermissionError):
                get_coded(reader, "s", 0)
            with pytest.raises(redis.exceptions.NoPermissionError):
                set_coded(reader, "r", 0, BFLOAT16, body_of(BFLOAT16))
    finally:
        client.execute_command("ACL", "DELUSER", "reader")


def test_a_code_that_exceeds_maxmemory_clients_is_not_made(client: redis.Redis) -> None:
    body = body_of(LARGE)
    set_raw(client, "r", 0, LARGE, body)
    before = client.config_get("maxmemory-clients")["maxmemory-clients"]
    client.config_set("maxmemory-clients", "1mb")
    try:
        assert get_coded(client, "r", 0) == [body]
    finally:
        client.config_set("maxmemory-clients", before)
    assert decoded(get_coded(client, "r", 0)[0], len(body)) == body
