"""PageClient against a kvpage-server and against Debian's redis-server: writes, reads, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
import redis
from keyspaces import cache
from page_batches import SHAPE, Array, batch, block_body, key, room, same
from servers import RunningServer, free_port

from kvpage_server.client import BadBuffer, Disconnected, Page, PageClient, RawCommand, Unsupported
from kvpage_server.client.page import BlockPages, KeysOfBlocks, PageLayout, pages_of_block
from kvpage_server.client.wire.connection import page_pool
from kvpage_server.page import BlockShape, DType, KVType, PageError, PageKey, Plane, checksum, decode_page, encode_page


@pytest.fixture(params=[True, False], ids=["verify", "no verify"])
def pages(either_server: RunningServer, request: pytest.FixtureRequest) -> Iterator[PageClient]:
    with PageClient(either_server.url, verify=request.param, deadline=30) as pages:
        yield pages


# -- pages -------------------------------------------------------------------------------------------------------------


def test_pages_are_read_into_the_callers_memory(pages: PageClient) -> None:
    written = batch(100)
    pages.mset(written)
    into = room(written)
    assert pages.mget_into([page.key for page in written], into) == [True] * 100
    assert all(map(same, into, written))
    assert not pages.misses


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.arange(512, dtype=np.float16).reshape(8, 64), DType.FLOAT16),
        (np.arange(512, dtype=np.float32).reshape(8, 64), DType.FLOAT32),
        (np.arange(512, dtype=np.uint32).reshape(8, 64), DType.UINT32),
        (memoryview(bytes(range(256)) * 2).cast("B", (8, 64)), DType.UINT8),
        (bytearray(range(256)) * 2, DType.FLOAT8_E4M3),
    ],
    ids=lambda value: value.name if isinstance(value, DType) else type(value).__module__,
)
def test_any_array_can_be_sent_and_one_of_its_kind_received(pages: PageClient, array: Any, dtype: DType) -> None:
    comes_back(pages, array, bytearray(memoryview(array).nbytes), dtype)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.name)
def test_mlx_s_arrays_can_be_sent_and_received(pages: PageClient, dtype: DType) -> None:
    mx = pytest.importorskip("mlx.core")
    array = mx.arange(512, dtype=mx.float32).reshape(8, 64).astype(getattr(mx, dtype.name.lower()))
    into = mx.zeros((8, 64), array.dtype)
    mx.eval(array, into)
    comes_back(pages, array, into, dtype)


def comes_back(pages: PageClient, array: Any, into: Any, dtype: DType) -> None:
    """Check that an array can be read into another one, and as bytes."""
    pages.set_page(Page(key(1), array, dtype, 8, 64))
    assert pages.get_page_into(key(1), into)
    assert bytes(memoryview(into)) == bytes(memoryview(array))
    found = pages.get_page(key(1))
    assert found
    assert (found.key, found.dtype, found.page_size, found.head_dim) == (key(1), dtype, 8, 64)
    assert bytes(found.body) == bytes(memoryview(array))


@pytest.mark.parametrize("size", [0, 1, 2, 63, 4095, 4096, 1 << 20, 5_000_001])
def test_pages_of_any_size_alone_and_together(pages: PageClient, size: int) -> None:
    body = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    if size:
        pages.mset([Page(key(i), body, DType.UINT8, size, 1) for i in range(3)])
    into = [np.zeros(size, np.uint8) for _ in range(4)]
    assert pages.mget_into([key(i) for i in range(4)], into) == [size > 0] * 3 + [False]
    assert pages.get_page_into(key(0), into[3]) == (size > 0)
    assert all((array == body).all() for array in into)


def test_a_missing_page_is_a_miss_and_the_others_arrive(pages: PageClient) -> None:
    written = batch(64)
    pages.mset([page for i, page in enumerate(written) if i % 5])
    into = room(written)
    keys = [page.key for page in written]
    there = [i % 5 != 0 for i in range(64)]
    assert pages.mget_into(keys, into) == there
    assert pages.mexists(keys) == there
    assert [page is not None for page in pages.mget(keys)] == there
    assert all(same(array, page) for array, page, found in zip(into, written, there, strict=True) if found)
    assert pages.misses == {"absent": 26}
    assert pages.get_page(keys[0]) is None
    assert not pages.get_page_into(keys[0], into[0])
    assert not pages.exists(keys[0])
    assert pages.exists(keys[1])


def test_truncated_and_short_replies_are_not_waited_for(pages: PageClient) -> None:
    written = batch(100, rows=512)
    pages.mset(written[:60])
    keys, into = [page.key for page in written], room(written)
    for _ in range(2):
        assert pages.mget_into(keys, into, deadline=5) == [True] * 60 + [False] * 40
        assert all(map(same, into[:60], written[:60]))
        assert pages.mexists(keys[58:62], deadline=5) == [True, True, False, False]
        assert pages.mget_into(keys[:60], into[:60], deadline=5) == [True] * 60
        assert pages.exists(keys[0], deadline=5)


def test_nothing_asked_is_nothing_answered(pages: PageClient) -> None:
    pages.mset([])
    assert pages.mget([]) == pages.mget_into([], []) == pages.mexists([]) == []
    assert pages.delete([]) == 0


def test_pages_of_blocks_are_moved_without_objects(pages: PageClient) -> None:
    layout = PageLayout([(layer, 3, plane, DType.FLOAT16, 4, 8) for layer in (0, 7) for plane in (0, 1)])
    rng = np.random.default_rng(1)
    bodies = [rng.integers(0, 9, (4, 8)).astype(np.float16) for _ in range(20)]
    names = [(b"block-%d" % i, i) for i in range(5)]
    written = BlockPages(names, layout, bodies)
    pages.mset(written)
    single = pages.mget([*written.keys])
    assert [page and page[2:] for page in single] == [(DType.FLOAT16, 4, 8)] * 20
    assert [page and bytes(page.body) for page in single] == [body.tobytes() for body in bodies]
    assert single[5] == pages.get_page(PageKey(b"block-1", 0, 3, 1, 1))
    pages.delete([written.keys[6]])
    into = [np.zeros((4, 8), np.float16) for _ in bodies]
    assert pages.mget_into(KeysOfBlocks(names, layout), into) == [i != 6 for i in range(20)]
    assert [np.array_equal(one, other) for one, other in zip(bodies, into, strict=True)] == [i != 6 for i in range(20)]
    assert pages.mexists(written.keys) == [i != 6 for i in range(20)]
    assert pages.delete(written.keys) == 19
    assert pages.misses == {"absent": 1}


def test_a_batch_of_blocks_reads_as_a_list_of_pages() -> None:
    layout = PageLayout([(0, 0, plane, DType.UINT8, 2, 3 + plane) for plane in (0, 1)])
    bodies = [bytes([i]) * (6 + i % 2 * 2) for i in range(4)]
    found = BlockPages([(b"a", 1), (b"b", 2)], layout, bodies)
    assert [*found] == [
        Page(PageKey(b"a", 0, 0, 1, 0), bodies[0], DType.UINT8, 2, 3),
        Page(PageKey(b"a", 0, 0, 1, 1), bodies[1], DType.UINT8, 2, 4),
        Page(PageKey(b"b", 0, 0, 2, 0), bodies[2], DType.UINT8, 2, 3),
        Page(PageKey(b"b", 0, 0, 2, 1), bodies[3], DType.UINT8, 2, 4),
    ]
    assert [page.key for page in found] == [*found.keys]
    assert (found[-1], found[1:3]) == ([*found][-1], [*found][1:3])
    assert found.keys[2:] == [*found.keys][2:]
    with pytest.raises(IndexError):
        found[4]
    with pytest.raises(BadBuffer, match="2 blocks of 2 pages need 4 bodies, got 3"):
        BlockPages([(b"a", 1), (b"b", 2)], layout, bodies[:3])


def test_a_wrong_batch_of_blocks_is_refused(pages: PageClient) -> None:
    layout = PageLayout([(0, 0, 0, DType.UINT8, 1, 3)])
    with pytest.raises(BadBuffer, match="page 1: page_size x head_dim x itemsize is 3 bytes, its body has 4"):
        pages.mset(BlockPages([(b"a", 0), (b"b", 0)], layout, [bytes(3), bytes(4)]))
    with pytest.raises(BadBuffer, match="page 1: int gives no access"):
        pages.mset(BlockPages([(b"a", 0), (b"b", 0)], layout, [bytes(3), 7]))  # type: ignore[list-item]
    for names, error in (([(b"a:", 0)], PageError), (["a"], TypeError), ([("a", 0)], TypeError)):
        with pytest.raises(error, match=r"req_id|a block's name is a tuple"):
            pages.mset(BlockPages(names, layout, [bytes(3)]))
        with pytest.raises(error, match=r"req_id|a block's name is a tuple"):
            pages.mget_into(KeysOfBlocks(names, layout), [bytearray(3)])
    for wrong in ((-1, 0, 0, 1, 1, 1), (0, 0, 6, 1, 1, 1), (0, 0, 0, 99, 1, 1), (0, 0, 0, 1, 0, 1)):
        with pytest.raises(PageError):
            PageLayout([wrong])  # type: ignore[list-item]


def test_a_page_of_another_length_is_a_miss(pages: PageClient) -> None:
    written = [*batch(3), Page(key(3), bytes(100_000), DType.INT8, 100_000, 1), *batch(6)[4:]]
    pages.mset(written)
    into = [bytearray(2048) for _ in written]
    assert pages.mget_into([page.key for page in written], into) == [True, True, True, False, True, True]
    assert pages.misses == {"size": 1}
    assert same(into[5], written[5])
    assert not pages.get_page_into(key(3), into[0])
    assert pages.get_page_into(key(1), into[1])


def test_pages_are_blobs_for_other_clients(either_server: RunningServer, pages: PageClient) -> None:
    (page,) = batch(1)
    pages.set_page(page)
    with either_server.client() as other:
        header, body = decode_page(other.get(bytes(page.key)))
        assert header.names(page.key)
        assert header.checksum == checksum(body)
        assert same(body, page)
        blob = encode_page(key(5), b"12345678", dtype=DType.FLOAT16, page_size=2, head_dim=2)
        other.set(bytes(key(5)), blob)
    into = bytearray(8)
    assert pages.get_page_into(key(5), into)
    assert into == b"12345678"


def test_a_ttl_is_kept(either_server: RunningServer, pages: PageClient) -> None:
    pages.mset(batch(3), ttl=1000)
    with either_server.client() as other:
        assert all(990 < other.ttl(bytes(key(i))) <= 1000 for i in range(3))
        assert decode_page(other.get(bytes(key(1))))[0].ttl == 1000


def test_deleted_pages_are_absent(pages: PageClient) -> None:
    pages.mset(batch(5))
    assert pages.delete([key(1), key(2), key(99), key(1)]) == 2
    assert pages.mexists([key(i) for i in range(5)]) == [True, False, False, True, True]


def test_a_string_under_a_page_s_key_is_no_page(pages: PageClient) -> None:
    pages.mset(batch(3))
    pages.ask([RawCommand(["SET", bytes(key(number)), b"no page"]) for number in (1, 7)])
    names = [key(number) for number in (0, 1, 2, 7, 9)]
    assert pages.mexists(names) == [True, False, True, False, False]
    assert [pages.exists(name) for name in names] == [True, False, True, False, False]
    assert [page is not None for page in pages.mget(names)] == [True, False, True, False, False]
    assert pages.misses["absent"] == 1
    assert pages.misses["header"] + pages.misses["size"] == 2
    assert pages.delete([key(7)]) == 0
    assert pages.delete([*names, *names]) == 2
    assert pages.ask([RawCommand(["EXISTS", bytes(name)]) for name in names]) == [0] * 5


def test_pages_under_keys_of_other_types_do_not_exist(redis_server: RunningServer) -> None:
    with PageClient(redis_server.url) as pages:
        pages.mset(batch(1))
        pages.ask([RawCommand(["HSET", bytes(key(1)), "field", "value"])])
        assert pages.mexists([key(0), key(1)]) == [True, False]
        assert pages.delete([key(0), key(1)]) == 1


def test_a_batch_may_use_several_connections_at_once(either_server: RunningServer) -> None:
    written = batch(200, rows=512)  # 6.5 MB
    with PageClient(either_server.url, connections=4, deadline=30) as pages, either_server.client() as other:
        before = other.info("stats")["total_connections_received"]
        pages.mset(written)
        into = room(written)
        pages.delete([key(7), key(150)])
        found = pages.mget_into([page.key for page in written], into)
        assert 1 < other.info("stats")["total_connections_received"] - before <= 4
    assert found == [i not in (7, 150) for i in range(200)]
    assert all(same(array, page) for array, page, there in zip(into, written, found, strict=True) if there)
    assert pages.misses == {"absent": 2}


def test_threads_may_share_a_client(either_server: RunningServer) -> None:
    def work(thread: int, pages: PageClient) -> bool:
        written = batch(20, seed=thread, req_id=b"thread%d" % thread)
        into = room(written)
        for _ in range(10):
            pages.mset(written)
            assert all(pages.mget_into([page.key for page in written], into))
            assert all(map(same, into, written))
        return True

    with PageClient(either_server.url, connections=2, deadline=30) as pages, ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda thread: work(thread, pages), range(8)))


def test_as_many_connections_as_calls(server: RunningServer) -> None:
    with ExitStack() as lent:
        pool = page_pool(server.url, {})
        lent.callback(pool.close)
        for _ in range(130):  # redis-py has a limit of 100
            lent.enter_context(pool.lent())


def test_a_limit_of_connections_is_named(server: RunningServer) -> None:
    pool = page_pool(f"{server.url}?max_connections=1", {})
    with closing(pool), pool.lent(), pytest.raises(Disconnected, match="max_connections is 1"):
        pool.lend()


def test_the_number_of_a_dtype_makes_a_shape(server: RunningServer) -> None:
    shape = BlockShape(1, 1, 1, (Plane(0, 4, 1),))  # type: ignore[arg-type]
    assert shape == BlockShape(1, 1, 1, (Plane(KVType.K, DType(4), 1),))
    with PageClient(server.url) as pages:
        pages.set_block((b"number", 1), shape, bytes(shape.nbytes))
        assert pages.get_block_into((b"number", 1), shape, bytearray(shape.nbytes))


# -- wrong bytes -------------------------------------------------------------------------------------------------------


def test_damaged_bytes_are_a_miss_where_pages_are_verified(redis_server: RunningServer) -> None:
    written = batch(4)
    with PageClient(redis_server.url) as pages, redis_server.client() as other:
        pages.mset(written)
        other.setrange(bytes(key(2)), 100, bytes([memoryview(written[2].body).cast("B")[36] ^ 1]))
        into = room(written)
        keys = [page.key for page in written]
        assert pages.mget_into(keys, into) == [True, True, False, True]
        assert [page is not None for page in pages.mget(keys)] == [True, True, False, True]
        assert pages.get_page(key(2)) is None
        assert pages.misses == {"checksum": 3}
    with PageClient(redis_server.url, verify=False) as trusting:
        assert all(trusting.mget_into(keys, into))


@pytest.mark.parametrize("verify", [True, False])
def test_a_value_that_is_not_the_named_page_is_a_miss(redis_server: RunningServer, verify: bool) -> None:
    written = batch(4)
    with PageClient(redis_server.url, verify=verify) as pages, redis_server.client() as other:
        pages.mset(written)
        other.set(bytes(key(0)), bytes(64 + 2048))  # no header
        other.set(bytes(key(1)), other.get(bytes(key(2))))  # another page's
        other.setrange(bytes(key(3)), 7, b"\x80")  # a flag that nobody knows
        into = room(written)
        keys = [page.key for page in written]
        assert pages.mget_into(keys, into) == [False, False, True, False]
        other.set(bytes(key(0)), b"short")
        assert [page is not None for page in pages.mget(keys)] == [False, False, True, False]
        assert pages.misses == {"header": 6}


def test_a_page_without_a_checksum_is_not_verified(redis_server: RunningServer) -> None:
    with PageClient(redis_server.url) as pages, redis_server.client() as other:
        other.set(
            bytes(key(0)),
            encode_page(key(0), b"abcd", dtype=DType.INT8, page_size=2, head_dim=2, with_checksum=False),
        )
        assert pages.get_page_into(key(0), bytearray(4))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def nobody() -> Iterator[PageClient]:
    """A client of a port where nobody listens: it can send nothing without being noticed."""
    with PageClient(f"redis://127.0.0.1:{free_port()}") as pages:
        yield pages


def read_only(size: int) -> Array:
    array = np.zeros(size, np.uint8)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda c: c.mget_into([key(0)], [bytes(8)]), "buffer 0.*read-only"),
        (lambda c: c.mget_into([key(0), key(1)], [bytearray(8), read_only(8)]), "buffer 1.*read-only"),
        (lambda c: c.mget_into([key(0)], [np.zeros((8, 8))[:, 2]]), "C-contiguous"),
        (lambda c: c.mget_into([key(0)], []), "1 values need 1 buffers, got 0"),
        (lambda c: c.mget_into([key(0)], ["text"]), "no access to its memory"),
        (lambda c: c.get_page_into(key(0), None), "no access to its memory"),
        (lambda c: c.set_page(Page(key(0), bytes(7), DType.FLOAT16, 2, 2)), "page 0.* is 8 bytes, its body has 7"),
        (lambda c: c.set_page(Page(key(0), np.zeros((4, 4))[1:, 1:], DType.FLOAT32, 3, 3)), "C-contiguous"),
        (lambda c: c.set_block((b"r", 0), SHAPE, bytes(SHAPE.nbytes - 1)), "block 0"),
        (lambda c: c.mset_blocks([(b"r", 0)], SHAPE, []), "1 blocks need 1 bodies, got 0"),
        (lambda c: c.get_block_into((b"r", 0), SHAPE, bytearray(SHAPE.nbytes + 1)), "block 0"),
        (lambda c: c.get_block_into((b"r", 0), SHAPE, bytes(SHAPE.nbytes)), "read-only"),
    ],
)
def test_unusable_memory_is_refused_before_sending(
    nobody: PageClient, ask: Callable[[PageClient], object], why: str
) -> None:
    with pytest.raises(BadBuffer, match=why):
        ask(nobody)


@pytest.mark.parametrize(
    ("ask", "error", "why"),
    [
        (lambda c: c.set_page(Page(key(0), bytes(8), 16, 2, 2)), PageError, "dtype must be one of"),
        (lambda c: c.set_page(Page(key(0), b"", DType.INT8, 0, 2)), PageError, "page_size must be between 1"),
        (lambda c: c.set_page(Page(key(0), bytes(4), DType.INT8, 2, 2), ttl=-1), PageError, "ttl must be between 0"),
        (lambda c: c.set_block((b"r", 0), SHAPE, bytes(SHAPE.nbytes), ttl=-1), PageError, "ttl must be between 0"),
        (lambda c: c.exists(key(0), deadline=0), ValueError, "positive number of seconds"),
        (lambda c: c.exists(key(0), deadline=float("nan")), ValueError, "positive number of seconds"),
        (lambda c: c.set_block((b"a b", 0), SHAPE, bytes(SHAPE.nbytes)), PageError, "req_id"),
        (lambda c: c.get_block_into((b"r", -1), SHAPE, bytearray(SHAPE.nbytes)), PageError, "page_id"),
    ],
)
def test_out_of_range_arguments_are_refused_before_sending(
    nobody: PageClient, ask: Callable[[PageClient], object], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        ask(nobody)


@pytest.mark.parametrize("options", [{"connections": 0}, {"deadline": 0}, {"url": "http://127.0.0.1"}])
def test_a_client_that_cannot_work_is_not_made(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"connections|deadline|URL"):
        PageClient(**{"url": "redis://127.0.0.1", **options})


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_blocks_are_read_as_a_whole_or_not_at_all(pages: PageClient) -> None:
    names = [(b"agent", i) for i in range(5)]
    bodies = [block_body(i) for i in range(5)]
    pages.mset_blocks(names, SHAPE, bodies)
    into = [np.zeros(SHAPE.nbytes, np.uint8) for _ in range(6)]
    assert pages.delete([PageKey(b"agent", 1, 1, 3, KVType.V)]) == 1
    found = pages.mget_blocks_into([*names, (b"agent", 77)], SHAPE, into)
    assert found == [True, True, True, False, True, False]
    assert all((into[i] == bodies[i]).all() for i in (0, 1, 2, 4))
    assert pages.misses == {"absent": 2}
    assert not pages.get_block_into(names[3], SHAPE, into[3])
    assert pages.get_block_into(names[2], SHAPE, into[3])


def rooms(shape: BlockShape) -> list[bytearray]:
    """Memory for two blocks."""
    return [bytearray(shape.nbytes) for _ in range(2)]


def test_a_block_of_another_shape_may_have_the_same_length(server: RunningServer, redis_server: RunningServer) -> None:
    """It is a miss, however the block travels."""
    name, body = (b"shapes", 0), cache(0, 16, DType.BFLOAT16, 64)
    shape = BlockShape(8, 4, 16, tuple(Plane(kind, DType.BFLOAT16, 64) for kind in (KVType.K, KVType.V)))
    other = BlockShape(8, 4, 16, (Plane(KVType.K, DType.BFLOAT16, 128),))
    for url, code, why in (
        (server.url, "never", "shape"),
        (server.url, "always", "shape"),
        (redis_server.url, "never", "size"),
    ):
        with PageClient(url, code=code, deadline=30) as pages:  # type: ignore[arg-type]
            pages.set_block(name, shape, body)
            assert pages.fetch_blocks_into([name], other, [bytearray(other.nbytes)]) == [why]
            assert pages.misses == {why: 1}
            assert pages.fetch_blocks_into([name, (b"none", 0)], other, rooms(other)) == [why, "absent"]
            assert pages.fetch_blocks_into([name, (b"none", 0)], shape, rooms(shape)) == [None, "absent"]
            pages.delete([key for key, *_ in pages_of_block(name, shape)])


def test_a_block_in_several_pieces_arrives_as_one(pages: PageClient) -> None:
    body = block_body()
    whole = memoryview(body).cast("B")
    pieces = [whole[:7], np.frombuffer(whole[7:4096], np.uint8), b"", bytes(whole[4096:])]
    pages.mset_blocks([(b"pieces", 0), (b"pieces", 1)], SHAPE, [pieces, body])
    into = [bytearray(SHAPE.nbytes) for _ in range(2)]
    assert pages.mget_blocks_into([(b"pieces", 0), (b"pieces", 1)], SHAPE, into) == [True, True]
    assert into == [whole, whole]
    with pytest.raises(BadBuffer, match=f"has {SHAPE.nbytes} bytes, its memory has 7"):
        pages.set_block((b"pieces", 0), SHAPE, pieces[:1])


def test_a_block_and_its_pages_are_the_same_data(pages: PageClient) -> None:
    body = block_body()
    pages.set_block((b"whole", 3), SHAPE, body)
    into = bytearray(16 * 32 * 2)
    assert pages.get_page_into(PageKey(b"whole", 2, 1, 3, KVType.V), into)
    assert into == body[SHAPE.page_span(2, 1, KVType.V)].tobytes()
    found = pages.get_page(PageKey(b"whole", 0, 1, 3, KVType.K))
    assert found
    assert (found.dtype, found.page_size, found.head_dim) == (DType.FLOAT16, 16, 64)

    pages.mset(
        [
            Page(
                PageKey(b"single", layer, head, 9, plane.kv_type),
                body[SHAPE.page_span(layer, head, plane.kv_type)],
                plane.dtype,
                SHAPE.page_size,
                plane.head_dim,
            )
            for layer in range(SHAPE.layers)
            for head in range(SHAPE.heads)
            for plane in SHAPE.planes
        ]
    )
    whole = np.zeros(SHAPE.nbytes, np.uint8)
    assert pages.get_block_into((b"single", 9), SHAPE, whole)
    assert (whole == body).all()


def test_a_prefix_is_counted_and_leased(server: RunningServer, client: redis.Redis) -> None:
    names = [(b"ctx", i) for i in range(4)]
    with PageClient(server.url) as pages:
        pages.mset_blocks(names, SHAPE, [block_body(i) for i in range(4)])
        pages.delete([PageKey(b"ctx", 0, 0, 2, KVType.K)])
        assert pages.prefix(names, pages_per_block=SHAPE.pages, lease_ms=5000) == 2
        assert pages.prefix(names[2:], pages_per_block=SHAPE.pages) == 0
        assert pages.prefix([], pages_per_block=SHAPE.pages) == 0
        states = [(*names[0], 1), (*names[1], 2), (b"nobody's", 0, 2), (*names[0], 3)]
        assert pages.lengths(names, states, pages_per_block=SHAPE.pages, lease_ms=5000) == [1]
        assert pages.lengths(names, states[:2], pages_per_block=SHAPE.pages) == [1, 2]
        assert pages.lengths(names, [], pages_per_block=SHAPE.pages) == []
        assert pages.lease(b"ctx", 5000, [0, 1]) == 2
        assert pages.delete_request(b"ctx", [0]) == SHAPE.pages
        assert pages.delete_request(b"ctx") == 3 * SHAPE.pages - 1


def test_unsupported_commands_on_a_plain_redis_are_named(redis_server: RunningServer) -> None:
    with PageClient(redis_server.url) as pages:
        for ask in (
            lambda: pages.prefix([(b"r", 0)], pages_per_block=1),
            lambda: pages.lease(b"r", 10),
            lambda: pages.delete_request(b"r"),
        ):
            with pytest.raises(Unsupported, match="only kvpage-server can"):
                ask()
