"""Blocks: all pages of a run of tokens as one value, the same data as its pages one by one."""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from servers import RunningServer, start_server
from waiting import until
from wire import Wire, encode_command

from kvpage_server.page import BlockShape, DType, PageKey, Plane, decode_page

SHAPE = BlockShape(layers=3, heads=2, page_size=5, planes=(Plane(0, DType.FLOAT16, 4), Plane(1, DType.FLOAT16, 4)))
QUANTISED = BlockShape(
    layers=2,
    heads=3,
    page_size=8,
    planes=(
        Plane(0, DType.UINT32, 2),
        Plane(1, DType.UINT32, 2),
        Plane(2, DType.BFLOAT16, 1),
        Plane(3, DType.BFLOAT16, 1),
        Plane(4, DType.BFLOAT16, 1),
        Plane(5, DType.BFLOAT16, 1),
    ),
)


def both(dtype: DType, head_dim: int) -> tuple[Plane, Plane]:
    """K and V alike."""
    return Plane(0, dtype, head_dim), Plane(1, dtype, head_dim)


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def places(shape: BlockShape) -> Iterator[tuple[int, Plane, int]]:
    """Layer, plane and head of each page, in the order of the body."""
    return itertools.product(range(shape.layers), shape.planes, range(shape.heads))


def set_block(client: redis.Redis, req: str, page: int, shape: BlockShape, body: bytes, ttl: int = 0) -> bytes:
    planes = [word for plane in shape.planes for word in (plane.kv_type, int(plane.dtype), plane.head_dim)]
    words = (req, page, shape.layers, shape.heads, shape.page_size, ttl, len(shape.planes), *planes, body)
    return client.execute_command("KVBLOCKSET", *words)


def set_page(
    client: redis.Redis, req: str, page: int, shape: BlockShape, layer: int, plane: Plane, head: int, body: bytes
) -> None:
    name = (req, layer, head, page, plane.kv_type)
    client.execute_command("KVPAGESET", *name, int(plane.dtype), shape.page_size, plane.head_dim, 0, body)


def get_block(client: redis.Redis, req: str, page: int) -> bytes | None:
    """The block; whether it exists must agree."""
    body = client.execute_command("KVBLOCKGET", req, page)
    assert client.execute_command("KVBLOCKEXISTS", req, page) == (body is not None)
    return body


@pytest.mark.parametrize("shape", [SHAPE, QUANTISED], ids=["float16", "quantised"])
def test_a_block_set_whole_is_read_page_by_page(client: redis.Redis, shape: BlockShape) -> None:
    body = noise(shape.nbytes)
    assert set_block(client, "r", 7, shape, body, ttl=100) == b"OK"
    for layer, plane, head in places(shape):
        expected = body[shape.page_span(layer, head, plane.kv_type)]
        assert client.execute_command("KVPAGEGET", "r", layer, head, 7, plane.kv_type) == expected
        key = PageKey(b"r", layer, head, 7, plane.kv_type)
        header, stored = decode_page(client.get(bytes(key)))
        assert stored == expected
        assert header.names(key)
        assert (header.dtype, header.page_size, header.head_dim) == (plane.dtype, shape.page_size, plane.head_dim)
        assert header.checksum
        assert header.ttl == 100
        assert 0 < client.ttl(bytes(key)) <= 100
    assert get_block(client, "r", 7) == body


def test_each_page_of_a_block_is_a_key(client: redis.Redis) -> None:
    set_block(client, "r", 7, SHAPE, noise(SHAPE.nbytes))
    keys = {bytes(PageKey(b"r", layer, head, 7, plane.kv_type)) for layer, plane, head in places(SHAPE)}
    assert set(client.scan_iter()) == keys
    assert client.dbsize() == SHAPE.pages


@pytest.mark.parametrize("shape", [SHAPE, QUANTISED], ids=["float16", "quantised"])
def test_pages_set_one_by_one_are_a_block_once_it_is_complete(client: redis.Redis, shape: BlockShape) -> None:
    body = noise(shape.nbytes)
    pages = list(places(shape))
    last = pages[-1]  # the last layer, plane and head: without it the block could be a smaller one
    random.Random(2).shuffle(pages)
    pages.remove(last)
    for layer, plane, head in [last, *pages]:
        assert get_block(client, "r", 0) is None
        set_page(client, "r", 0, shape, layer, plane, head, body[shape.page_span(layer, head, plane.kv_type)])
    assert get_block(client, "r", 0) == body
    assert client.execute_command("KVBLOCKMGET", 1, "r", 0) == [body]


SHAPES = st.builds(
    BlockShape,
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 7, 64, 65, 130]),
    page_size=st.integers(1, 3),
    planes=st.lists(
        st.builds(Plane, st.integers(0, 5), st.sampled_from(DType), st.integers(1, 9)),
        min_size=1,
        max_size=3,
        unique_by=lambda plane: plane.kv_type,
    ).map(lambda planes: tuple(sorted(planes, key=lambda plane: plane.kv_type))),
)


# Failures before a cluster, which are expected, need no smaller example.
@settings(max_examples=15, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=SHAPES, seed=st.integers(0, 1000))
def test_any_shape_is_written_and_read(client: redis.Redis, shape: BlockShape, seed: int) -> None:
    body = noise(shape.nbytes, seed)
    client.flushall()
    set_block(client, "whole", 0, shape, body)
    names = [word for layer, plane, head in places(shape) for word in ("whole", layer, head, 0, plane.kv_type)]
    pages = client.execute_command("KVPAGEMGET", shape.pages, *names)
    assert b"".join(pages) == body
    words = []
    for (layer, plane, head), page in zip(places(shape), pages, strict=True):
        words += ["pages", layer, head, 0, plane.kv_type]
        words += [int(plane.dtype), shape.page_size, plane.head_dim, 0, page]
    client.execute_command("KVPAGEMSET", shape.pages, *words)
    assert get_block(client, "pages", 0) == body


def test_many_blocks_are_read_at_once_with_nulls_in_their_places(client: redis.Redis) -> None:
    bodies = [noise(SHAPE.nbytes, seed) for seed in range(3)]
    for page, body in enumerate(bodies):
        set_block(client, "r", page, SHAPE, body)
    names = ["r", 2, "r", 9, "other", 0, "r", 0, "r", 1, "r", 0]
    expected = [bodies[2], None, None, bodies[0], bodies[1], bodies[0]]
    assert client.execute_command("KVBLOCKMGET", 6, *names) == expected


def test_a_block_of_many_megabytes_survives(client: redis.Redis) -> None:
    shape = BlockShape(layers=30, heads=3, page_size=256, planes=both(DType.BFLOAT16, 64))
    bodies = [noise(shape.nbytes, seed) for seed in range(2)]
    for page, body in enumerate(bodies):
        set_block(client, "r", page, shape, body)
    assert client.execute_command("KVBLOCKMGET", 2, "r", 1, "r", 0) == bodies[::-1]


# -- a block that changes ------------------------------------------------------------------------------------------


def test_overwriting_one_page_changes_the_block(client: redis.Redis) -> None:
    body = bytearray(noise(SHAPE.nbytes))
    set_block(client, "r", 0, SHAPE, bytes(body))
    body[SHAPE.page_span(1, 1, 0)] = fresh = noise(40, seed=9)
    set_page(client, "r", 0, SHAPE, 1, SHAPE.planes[0], 1, fresh)
    assert get_block(client, "r", 0) == body


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 6, "size": 48},
        {"page_size": 4, "size": 32},
        {"head_dim": 8, "size": 80},
        {"dtype": DType.BFLOAT16},
        {"size": 39},
    ],
    ids=["more rows", "fewer rows", "wider", "another dtype", "too short a body"],
)
def test_a_page_of_another_shape_makes_the_block_incomplete(client: redis.Redis, change: dict[str, int]) -> None:
    body = noise(SHAPE.nbytes)
    set_block(client, "r", 0, SHAPE, body)
    shape = {"dtype": DType.FLOAT16, "page_size": 5, "head_dim": 4, "size": 40} | change
    words = (int(shape["dtype"]), shape["page_size"], shape["head_dim"], 0, bytes(shape["size"]))
    client.execute_command("KVPAGESET", "r", 1, 1, 0, 0, *words)
    assert get_block(client, "r", 0) is None
    set_page(client, "r", 0, SHAPE, 1, SHAPE.planes[0], 1, body[SHAPE.page_span(1, 1, 0)])
    assert get_block(client, "r", 0) == body


def test_a_block_without_one_of_its_pages_is_not_there(client: redis.Redis) -> None:
    body = noise(SHAPE.nbytes)
    set_block(client, "r", 0, SHAPE, body)
    for layer, plane, head in places(SHAPE):
        key = bytes(PageKey(b"r", layer, head, 0, plane.kv_type))
        span = SHAPE.page_span(layer, head, plane.kv_type)
        assert client.delete(key) == 1
        assert get_block(client, "r", 0) is None
        set_page(client, "r", 0, SHAPE, layer, plane, head, body[span])
    assert get_block(client, "r", 0) == body


def test_a_plain_string_under_a_page_key_is_no_page_of_the_block(client: redis.Redis) -> None:
    set_block(client, "r", 0, SHAPE, noise(SHAPE.nbytes))
    client.set("kv:r:0:0:0:0", "plain")
    assert get_block(client, "r", 0) is None
    assert set_block(client, "r", 0, SHAPE, noise(SHAPE.nbytes)) == b"OK"
    assert get_block(client, "r", 0) == noise(SHAPE.nbytes)


def test_a_block_takes_the_place_of_a_larger_one(client: redis.Redis) -> None:
    set_block(client, "r", 0, QUANTISED, noise(QUANTISED.nbytes))
    small = BlockShape(layers=1, heads=2, page_size=8, planes=(Plane(1, DType.FLOAT32, 3),))
    body = noise(small.nbytes)
    set_block(client, "r", 0, small, body)
    assert get_block(client, "r", 0) == body
    assert client.dbsize() == small.pages == client.scard("kv:r:index")


def test_a_block_expires_as_one(client: redis.Redis) -> None:
    with client.pipeline() as pipe:  # at one time
        set_block(pipe, "r", 0, SHAPE, noise(SHAPE.nbytes), ttl=1)
        pipe.execute_command("KVBLOCKGET", "r", 0)
        assert pipe.execute()[-1] is not None
    set_block(client, "r", 1, SHAPE, noise(SHAPE.nbytes))
    time.sleep(1.01)
    assert get_block(client, "r", 0) is None
    assert get_block(client, "r", 1) is not None
    assert client.scard("kv:r:index") == SHAPE.pages


def test_when_one_page_expires_the_block_is_not_there(client: redis.Redis) -> None:
    set_block(client, "r", 0, SHAPE, noise(SHAPE.nbytes))
    assert get_block(client, "r", 0) is not None
    client.pexpire("kv:r:1:1:0:1", 10)
    time.sleep(0.02)
    assert get_block(client, "r", 0) is None
    assert client.dbsize() == SHAPE.pages - 1


def test_blocks_are_evicted_whole_the_longest_unused_first() -> None:
    shape = BlockShape(layers=4, heads=4, page_size=16, planes=both(DType.FLOAT16, 64))
    with start_server("--maxmemory", "1mb", "--maxmemory-policy", "allkeys-lru") as server, server.client() as client:
        for page in range(30):
            set_block(client, "r", page, shape, noise(shape.nbytes, page))
            assert get_block(client, "r", 0) == noise(shape.nbytes, 0)  # it is used, so it stays
        blocks = client.execute_command("KVPAGEINDEX", "r")
        held = {block[b"page"] for block in blocks}
        assert len(held) < 30
        assert held == {0, *range(31 - len(held), 30)}
        assert client.dbsize() == len(held) * shape.pages
        for page in held:
            assert get_block(client, "r", page) == noise(shape.nbytes, page)


def test_a_reader_gets_one_version_during_concurrent_writes(server: RunningServer, client: redis.Redis) -> None:
    shape = BlockShape(layers=8, heads=8, page_size=256, planes=both(DType.FLOAT32, 128))
    old, new = noise(shape.nbytes, 1), noise(shape.nbytes, 2)
    set_block(client, "r", 0, shape, old)
    with server.connect() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        slow.sendall(b"KVBLOCKGET r 0\r\n")
        first = slow.recv(1024)
        set_block(client, "r", 0, shape, new)
        client.execute_command("KVPAGEDEL", "r", 0)
        set_block(client, "s", 0, shape, new)  # into the memory that is free again, were it not still borrowed
        expected = b"$%d\r\n%b\r\n" % (len(old), old)
        received = bytearray(first)
        while len(received) < len(expected):
            received += slow.recv(1024 * 1024)
    assert received == expected


# -- bad input -----------------------------------------------------------------------------------------------------

GOOD = ("r", 0, 1, 2, 3, 0, 1, 0, 3, 4, bytes(24))


BAD_BLOCKS = (
    ("place", "value", "message"),
    [
        (0, "a:b", "req_id must be 1 to 256 bytes"),
        (0, "", "req_id must be 1 to 256 bytes"),
        (1, 2**32, "page_id must be an integer between 0 and 4294967295, got '4294967296'"),
        (2, 0, "layers must be an integer between 1 and 65536, got '0'"),
        (3, 65537, "heads must be an integer between 1 and 65536, got '65537'"),
        (4, 0, "page_size must be an integer between 1 and 4294967295"),
        (5, -1, "ttl must be an integer between 0 and"),
        (6, 0, "P must be an integer between 1 and 6, got '0'"),
        (6, 2, "KVBLOCKSET with P = 2 takes 6 arguments between P and the body, 3 a plane, got 3"),
        (7, 6, "kv_type must be an integer between 0 and 5, got '6'"),
        (8, 16, "dtype must be one of 1 float16"),
        (9, 0, "head_dim must be an integer between 1 and 4294967295"),
        (10, bytes(23), "body must be 24 bytes for this shape, got 23"),
        (10, bytes(25), "body must be 24 bytes for this shape, got 25"),
        (10, bytes(5000), "body must be 24 bytes for this shape, got 5000"),
    ],
)


@pytest.mark.parametrize(*BAD_BLOCKS)
def test_a_bad_block_is_refused_by_name_and_changes_nothing(
    client: redis.Redis, place: int, value: object, message: str
) -> None:
    client.execute_command("KVBLOCKSET", *GOOD)
    words = list(GOOD)
    words[place] = value
    with pytest.raises(redis.ResponseError, match=message):
        client.execute_command("KVBLOCKSET", *words)
    assert get_block(client, "r", 0) == bytes(24)


def test_bad_blocks_leave_no_keys(client: redis.Redis) -> None:
    for place, value, message in BAD_BLOCKS[1]:
        with pytest.raises(redis.ResponseError, match=message):
            client.execute_command("KVBLOCKSET", *GOOD[:place], value, *GOOD[place + 1 :])
    assert client.dbsize() == 0


@pytest.mark.parametrize("types", [(0, 0), (1, 0)])
def test_planes_are_unique_and_ordered(client: redis.Redis, types: tuple[int, int]) -> None:
    planes = [word for kv_type in types for word in (kv_type, 3, 4)]
    with pytest.raises(redis.ResponseError, match="planes must be given once each, in the order of their kv_type"):
        client.execute_command("KVBLOCKSET", "r", 0, 1, 1, 3, 0, 2, *planes, bytes(24))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("KVBLOCKGET", "a b", 0), "req_id must be"),
        (("KVBLOCKGET", "r", -1), "page_id must be an integer between 0 and 4294967295, got '-1'"),
        (("KVBLOCKGET", "r"), "wrong number of arguments for 'kvblockget' command"),
        (("KVBLOCKEXISTS", "r", "x"), "page_id must be an integer"),
        (("KVBLOCKMGET", 2, "r", 0), "KVBLOCKMGET with N = 2 takes 4 arguments after N, 2 a block, got 2"),
        (("KVBLOCKMGET", 0, "r", 0), "N must be an integer between 1 and 4294967295, got '0'"),
        (("KVBLOCKMGET", 2, "r", 0, "r", "x"), "page_id must be an integer"),
    ],
)
def test_bad_questions_are_refused_by_name(client: redis.Redis, words: tuple[object, ...], message: str) -> None:
    with pytest.raises(redis.ResponseError, match=message):
        client.execute_command(*words)


def test_a_full_store_without_eviction_refuses_blocks() -> None:
    shape = BlockShape(layers=4, heads=4, page_size=64, planes=SHAPE.planes)
    body = noise(shape.nbytes)
    stored = 0
    with start_server("--maxmemory", "200kb", "--maxmemory-policy", "noeviction") as server, server.client() as client:
        while stored < 1000:
            try:
                set_block(client, "r", stored, shape, body)
            except redis.OutOfMemoryError:
                break
            stored += 1
        assert 0 < stored < 1000
        assert client.dbsize() == stored * shape.pages
        assert get_block(client, "r", 0) == body


def test_a_deletion_in_steps_ends_when_its_block_is_removed() -> None:
    """FLUSHALL removes the blocks meanwhile, and the block that is stored next stays."""
    shape, body = (64, 128, 1, 0, 1, 0, 3, 1), bytes(64 * 128)
    with start_server() as server, server.client() as client, Wire(server.port) as other:
        for page in range(4):
            client.execute_command("KVBLOCKSET", "large", page, *shape, body)
            client.execute_command("KVPAGESET", "large", 0, 0, page, 0, 3, 1, 1, 0, b"x")  # splits it
        other.send(encode_command([b"KVPAGEDEL", b"large"]))
        until(lambda: client.dbsize() < 4 * 64 * 128)
        client.flushall()
        client.execute_command("KVBLOCKSET", "large", 0, *shape, body)
        assert 0 < int(other.reply()[1:]) < 4 * 64 * 128
        assert client.dbsize() == 64 * 128


# -- the shape that a reader expects -----------------------------------------------------------------------------------


def text_of(shape: BlockShape) -> str:
    """A shape as in the option SHAPE."""
    planes = [number for plane in shape.planes for number in (plane.kv_type, int(plane.dtype), plane.head_dim)]
    return ":".join(map(str, (shape.layers, shape.heads, shape.page_size, *planes)))


OTHERS = [  # of as many bytes as SHAPE
    BlockShape(2, 3, 5, SHAPE.planes),
    BlockShape(3, 2, 5, both(DType.BFLOAT16, 4)),
    BlockShape(3, 2, 5, (Plane(0, DType.FLOAT16, 8),)),
    BlockShape(3, 2, 10, both(DType.FLOAT16, 2)),
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_block_in_another_shape_is_an_empty_string(client: redis.Redis, other: BlockShape) -> None:
    body = noise(SHAPE.nbytes)
    assert other.nbytes == SHAPE.nbytes
    set_block(client, "r", 0, SHAPE, body)
    right, wrong = ("SHAPE", text_of(SHAPE)), ("shape", text_of(other))
    assert client.execute_command("KVBLOCKGET", "r", 0, *wrong) == b""
    assert client.execute_command("KVBLOCKMGET", 2, "r", 0, "r", 1, *wrong) == [b"", None]
    assert client.execute_command("KVBLOCKGET", "r", 0, *right) == body
    assert client.execute_command("KVBLOCKMGET", 2, "r", 0, "r", 1, *right) == [body, None]


@pytest.mark.parametrize("single", [False, True])
def test_a_block_in_another_shape_is_a_counted_miss(client: redis.Redis, single: bool) -> None:
    body, coded = noise(SHAPE.nbytes), ("KVBLOCKMGETCODED", 1, "r", 0)
    set_block(client, "r", 0, SHAPE, body)
    if single:
        for (layer, plane, head), span in zip(places(SHAPE), SHAPE.page_spans(), strict=True):
            set_page(client, "r", 0, SHAPE, layer, plane, head, body[span])
    client.config_resetstat()
    for other in OTHERS:
        assert client.execute_command("KVBLOCKMGET", 2, "r", 0, "r", 1, "SHAPE", text_of(other)) == [b"", None]
        assert client.execute_command(*coded, "SHAPE", text_of(other)) == [b""]
    counted = client.info()
    assert (counted["keyspace_hits"], counted["keyspace_misses"]) == (0, 12)
    assert (counted["page_misses_shape"], counted["page_misses_never_stored"]) == (8, 4)
    assert client.execute_command(*coded, "SHAPE", text_of(SHAPE)) == [body]
    assert client.info("kvpage")["page_misses_shape"] == 8


def test_the_shape_option_names_no_keys(client: redis.Redis) -> None:
    """A user may read exactly the named requests, and options behind these are checked."""
    body, shape = noise(SHAPE.nbytes), ("SHAPE", text_of(SHAPE))
    set_block(client, "mine", 0, SHAPE, body)
    words = ("KVBLOCKMGET", 1, "mine", 0, *shape)
    assert client.command_getkeys(*words) == ["kv:mine:"]
    client.execute_command("ACL", "SETUSER", "tenant", "on", ">secret", "~kv:mine:*", "+@all")
    port = client.connection_pool.connection_kwargs["port"]
    try:
        with redis.Redis(port=port, username="tenant", password="secret", protocol=2) as tenant:
            assert tenant.execute_command(*words) == [body]
            assert tenant.execute_command("KVBLOCKMGET", 1000, *("mine", 0) * 1000, *shape) == [body] * 1000
            for refused in (
                ("KVBLOCKMGET", 2, "mine", 0, "other", 0, *shape),
                ("KVBLOCKMGET", 2, "mine", 0, "other", 0),
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    tenant.execute_command(*refused)
            with pytest.raises(redis.ResponseError, match="N = 1 takes 2 arguments"):
                tenant.execute_command("KVBLOCKMGET", 1, "mine", 0, "other", 0)
    finally:
        client.execute_command("ACL", "DELUSER", "tenant")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("SHAPE", ""), "shape must be layers:heads:page_size"),
        (("SHAPE", "1:1:1"), "shape must be layers:heads:page_size"),
        (("SHAPE", "1:1:1:0:1"), "shape must be layers:heads:page_size"),
        (("SHAPE", "1:1:1:0:1:1:" * 100), "shape must be layers:heads:page_size"),
        (("SHAPE", "1:1:1:" + ":".join(["0:1:1"] * 9)), "P must be an integer between 1 and"),
        (("SHAPE", "0:1:1:0:1:1"), "layers must be an integer between 1 and"),
        (("SHAPE", "1:1:1:0:99:1"), "dtype"),
        (("SHAPE", "1:1:1:1:1:1:0:1:1"), "order of their kv_type"),
    ],
)
def test_a_wrong_shape_option_is_refused(client: redis.Redis, words: tuple[str, str], why: str) -> None:
    for command in (("KVBLOCKGET", "r", 0), ("KVBLOCKMGET", 1, "r", 0)):
        with pytest.raises(redis.ResponseError, match=why):
            client.execute_command(*command, *words)
        with pytest.raises(
            redis.ResponseError, match=r"syntax error|N = 1 takes 2 arguments after N, 2 a block, got 4"
        ):
            client.execute_command(*command, "FORM", "1:1:1:0:1:1")
        for number in (1, 3):
            with pytest.raises(redis.ResponseError, match=r"syntax error|N = 1 takes 2 arguments after N"):
                client.execute_command(*command, *["SHAPE"] * number)
