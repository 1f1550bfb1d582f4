"""PageClient against a kvpage-server and against Debian's redis-server, and through a proxy that treats it badly."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import redis
from proxy import Proxy, start_proxy
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry
from servers import RunningServer, free_port, start_redis, start_server

from kvpage_server.client import (
    BadBuffer,
    DeadlineExceeded,
    Disconnected,
    Page,
    PageClient,
    PageClientError,
    Refused,
    Unsupported,
    WrongReply,
)
from kvpage_server.page import (
    BlockShape,
    DType,
    KVType,
    PageError,
    PageKey,
    Plane,
    checksum,
    decode_page,
    encode_page,
)

NO_RETRY = Retry(NoBackoff(), 0)
SHAPE = BlockShape(3, 2, 16, (Plane(KVType.K, DType.FLOAT16, 64), Plane(KVType.V, DType.FLOAT16, 32)))


@pytest.fixture(params=["kvpage-server", "redis-server"])
def store(request: pytest.FixtureRequest) -> RunningServer:
    """Either server, emptied."""
    name = "server" if request.param == "kvpage-server" else "redis_server"
    store: RunningServer = request.getfixturevalue(name)
    with store.client() as client:
        client.flushall()
    return store


@pytest.fixture(params=[True, False], ids=["verify", "no verify"])
def pages(store: RunningServer, request: pytest.FixtureRequest) -> Iterator[PageClient]:
    """A client of it."""
    with PageClient(store.url, verify=request.param, deadline=30) as pages:
        yield pages


def key(i: int, req_id: bytes = b"req") -> PageKey:
    return PageKey(req_id, i % 7, i % 3, i, i % 2)


def batch(count: int, rows: int = 32, columns: int = 64, seed: int = 0, req_id: bytes = b"req") -> list[Page]:
    """Pages of int8, each with bytes of its own."""
    bodies = np.random.default_rng(seed).integers(-128, 127, (count, rows, columns), np.int8)
    return [Page(key(i, req_id), body, DType.INT8, rows, columns) for i, body in enumerate(bodies)]


def room(pages: list[Page]) -> list[np.ndarray[Any, Any]]:
    return [np.zeros(memoryview(page.body).nbytes, np.uint8) for page in pages]


def same(buffer: Any, page: Page) -> bool:
    return bytes(memoryview(buffer)) == bytes(memoryview(page.body))


# -- pages -------------------------------------------------------------------------------------------------------------


def test_pages_come_back_as_they_were_written_into_the_caller_s_memory(pages: PageClient) -> None:
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
        (mx.arange(512, dtype=mx.float32).reshape(8, 64).astype(mx.bfloat16), DType.BFLOAT16),
        (mx.arange(512, dtype=mx.float32).reshape(8, 64).astype(mx.float16), DType.FLOAT16),
        (memoryview(bytes(range(256)) * 2).cast("B", (8, 64)), DType.UINT8),
        (bytearray(range(256)) * 2, DType.FLOAT8_E4M3),
    ],
    ids=lambda value: value.name if isinstance(value, DType) else type(value).__module__,
)
def test_any_array_can_be_sent_and_one_of_its_kind_received(pages: PageClient, array: Any, dtype: DType) -> None:
    pages.set_page(Page(key(1), array, dtype, 8, 64))
    into: Any = mx.zeros((8, 64), array.dtype) if isinstance(array, mx.array) else bytearray(memoryview(array).nbytes)
    if isinstance(into, mx.array):
        mx.eval(into)
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


def test_what_is_missing_is_a_miss_and_what_is_there_still_arrives(pages: PageClient) -> None:
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


def test_nothing_asked_is_nothing_answered(pages: PageClient) -> None:
    pages.mset([])
    assert pages.mget([]) == pages.mget_into([], []) == pages.mexists([]) == []
    assert pages.delete([]) == 0


def test_a_page_of_another_length_is_a_miss(pages: PageClient) -> None:
    written = [*batch(3), Page(key(3), bytes(100_000), DType.INT8, 100_000, 1), *batch(6)[4:]]
    pages.mset(written)
    into = [bytearray(2048) for _ in written]
    assert pages.mget_into([page.key for page in written], into) == [True, True, True, False, True, True]
    assert pages.misses == {"size": 1}
    assert same(into[5], written[5])
    assert not pages.get_page_into(key(3), into[0])
    assert pages.get_page_into(key(1), into[1])


def test_pages_are_blobs_to_everybody_else(store: RunningServer, pages: PageClient) -> None:
    (page,) = batch(1)
    pages.set_page(page)
    with store.client() as other:
        header, body = decode_page(other.get(bytes(page.key)))
        assert header.names(page.key)
        assert header.checksum == checksum(body)
        assert same(body, page)
        blob = encode_page(key(5), b"12345678", dtype=DType.FLOAT16, page_size=2, head_dim=2)
        other.set(bytes(key(5)), blob)
    into = bytearray(8)
    assert pages.get_page_into(key(5), into)
    assert into == b"12345678"


def test_a_ttl_is_kept(store: RunningServer, pages: PageClient) -> None:
    pages.mset(batch(3), ttl=1000)
    with store.client() as other:
        assert all(990 < other.ttl(bytes(key(i))) <= 1000 for i in range(3))
        assert decode_page(other.get(bytes(key(1))))[0].ttl == 1000


def test_deleted_pages_are_gone(pages: PageClient) -> None:
    pages.mset(batch(5))
    assert pages.delete([key(1), key(2), key(99)]) == 2
    assert pages.mexists([key(i) for i in range(5)]) == [True, False, False, True, True]


def test_a_batch_may_use_several_connections_at_once(store: RunningServer) -> None:
    written = batch(200, rows=512)  # 6.5 MB
    with PageClient(store.url, connections=4, deadline=30) as pages, store.client() as other:
        before = other.info("stats")["total_connections_received"]
        pages.mset(written)
        into = room(written)
        pages.delete([key(7), key(150)])
        found = pages.mget_into([page.key for page in written], into)
        assert other.info("stats")["total_connections_received"] - before == 4
    assert found == [i not in (7, 150) for i in range(200)]
    assert all(same(array, page) for array, page, there in zip(into, written, found, strict=True) if there)
    assert pages.misses == {"absent": 2}


def test_threads_may_share_a_client(store: RunningServer) -> None:
    def work(thread: int, pages: PageClient) -> bool:
        written = batch(20, seed=thread, req_id=b"thread%d" % thread)
        into = room(written)
        for _ in range(10):
            pages.mset(written)
            assert all(pages.mget_into([page.key for page in written], into))
            assert all(map(same, into, written))
        return True

    with PageClient(store.url, connections=2, deadline=30) as pages, ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda thread: work(thread, pages), range(8)))


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
def test_what_is_no_page_of_this_name_is_a_miss(redis_server: RunningServer, verify: bool) -> None:
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


def test_a_page_that_was_written_without_a_checksum_is_not_verified(redis_server: RunningServer) -> None:
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


def read_only(size: int) -> np.ndarray[Any, Any]:
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
def test_memory_that_cannot_be_used_is_refused_before_anything_is_sent(
    nobody: PageClient, ask: Callable[[PageClient], object], why: str
) -> None:
    with pytest.raises(BadBuffer, match=why):
        ask(nobody)


@pytest.mark.parametrize(
    ("ask", "error", "why"),
    [
        (lambda c: c.set_page(Page(key(0), bytes(8), 9, 2, 2)), PageError, "dtype must be one of"),
        (lambda c: c.set_page(Page(key(0), b"", DType.INT8, 0, 2)), PageError, "page_size must be between 1"),
        (lambda c: c.set_page(Page(key(0), bytes(4), DType.INT8, 2, 2), ttl=-1), PageError, "ttl must be between 0"),
        (lambda c: c.set_block((b"r", 0), SHAPE, bytes(SHAPE.nbytes), ttl=-1), PageError, "ttl must be between 0"),
        (lambda c: c.exists(key(0), deadline=0), ValueError, "positive number of seconds"),
        (lambda c: c.exists(key(0), deadline=float("nan")), ValueError, "positive number of seconds"),
        (lambda c: c.set_block((b"a b", 0), SHAPE, bytes(SHAPE.nbytes)), PageError, "req_id"),
        (lambda c: c.get_block_into((b"r", -1), SHAPE, bytearray(SHAPE.nbytes)), PageError, "page_id"),
    ],
)
def test_arguments_out_of_range_are_refused_before_anything_is_sent(
    nobody: PageClient, ask: Callable[[PageClient], object], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        ask(nobody)


@pytest.mark.parametrize("options", [{"connections": 0}, {"deadline": 0}, {"url": "http://127.0.0.1"}])
def test_a_client_that_cannot_work_is_not_made(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"connections|deadline|URL"):
        PageClient(**{"url": "redis://127.0.0.1", **options})


# -- blocks ------------------------------------------------------------------------------------------------------------


def block_body(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, SHAPE.nbytes, np.uint8)


def test_blocks_come_back_whole_or_not_at_all(pages: PageClient) -> None:
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
        assert pages.lease(b"ctx", 5000, [0, 1]) == 2
        assert pages.delete_request(b"ctx", [0]) == SHAPE.pages
        assert pages.delete_request(b"ctx") == 3 * SHAPE.pages - 1


def test_a_plain_redis_says_what_it_cannot_do(redis_server: RunningServer) -> None:
    with PageClient(redis_server.url) as pages:
        for ask in (
            lambda: pages.prefix([(b"r", 0)], pages_per_block=1),
            lambda: pages.lease(b"r", 10),
            lambda: pages.delete_request(b"r"),
        ):
            with pytest.raises(Unsupported, match="only kvpage-server can"):
                ask()


# -- a connection that fails -------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(store: RunningServer) -> Iterator[Proxy]:
    with start_proxy(store.port) as proxy:
        yield proxy


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("cut_after", [0, 1, 5, 11, 12, 80, 2060, 3000, 20_000, 41_119])
def test_an_answer_that_is_cut_off_is_an_error_and_the_next_question_gets_its_own_answer(
    proxy: Proxy, cut_after: int, verify: bool
) -> None:
    written = batch(20)
    keys, into = [page.key for page in written], room(written)
    with PageClient(proxy.url, verify=verify, retry=NO_RETRY) as pages:
        pages.mset(written)
        proxy.cut_after = cut_after
        with pytest.raises(Disconnected):
            pages.mget_into(keys, into)
        proxy.cut_after = None
        other = room(written)
        assert pages.mget_into(keys[::-1], other) == [True] * 20
        assert all(map(same, other, written[::-1]))
        assert not pages.misses


def test_a_lost_connection_is_tried_again_as_redis_py_s_retry_says(proxy: Proxy) -> None:
    written = batch(20)
    keys, into = [page.key for page in written], room(written)
    with PageClient(proxy.url, retry=Retry(ConstantBackoff(0.05), 1), deadline=20) as pages:
        pages.mset(written)
        proxy.cut_after, proxy.mend_after = 3000, 1
        assert pages.mget_into(keys, into) == [True] * 20
        assert all(map(same, into, written))
        assert proxy.connections == 2
    with PageClient(f"redis://127.0.0.1:{free_port()}", retry=Retry(ConstantBackoff(5), 10), deadline=2) as pages:
        started = time.monotonic()
        with pytest.raises(Disconnected):
            pages.exists(key(0))
        assert time.monotonic() - started < 2, "it waited for a retry that the deadline forbids"


def test_a_server_that_was_restarted_is_found_again() -> None:
    port = free_port()
    with start_server(port=port) as server, PageClient(server.url) as pages:
        pages.mset(batch(2))
        server.stop()
        with start_server(port=port):
            assert pages.mget(list(map(key, range(2)))) == [None, None]
            pages.mset(batch(2))
            assert all(pages.mexists(list(map(key, range(2)))))


def test_no_server_is_an_error_of_its_own(nobody: PageClient) -> None:
    with pytest.raises(Disconnected):
        nobody.exists(key(0))
    with pytest.raises(redis.ConnectionError):  # and one of redis-py's
        nobody.exists(key(0))


# -- deadlines ---------------------------------------------------------------------------------------------------------


@contextmanager
def exceeding(seconds: float) -> Iterator[None]:
    """What happens within exceeds a deadline, and takes about as long as that."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"within {seconds:g} s"):
        yield
    assert seconds * 0.9 < time.monotonic() - started < seconds + 2


def test_a_deadline_is_for_the_whole_call_however_much_still_comes(proxy: Proxy) -> None:
    """Each byte comes in time, all of them do not; and connecting counts."""
    written = batch(4)
    keys, into = [page.key for page in written], room(written)
    with PageClient(proxy.url, retry=NO_RETRY) as pages:
        pages.mset(written)
        proxy.drip = 0.02
        with exceeding(0.4):
            pages.mget_into(keys, into, deadline=0.4)
        with exceeding(0.4):
            pages.mget(keys, deadline=0.4)  # on a new connection: in its handshake
        proxy.drip = 0
        assert pages.mget_into(keys, into) == [True] * 4
        assert all(map(same, into, written))


def test_an_answer_that_stops_half_way_ends_at_the_deadline_and_its_rest_is_never_taken_for_another(
    proxy: Proxy,
) -> None:
    written = batch(20)
    keys = [page.key for page in written]
    with PageClient(proxy.url, connections=2, retry=NO_RETRY) as pages:
        pages.mset(written)
        proxy.stall_after = 5000
        with exceeding(0.3):
            pages.mget_into(keys, room(written), deadline=0.3)
        proxy.stall_after = None
        into = room(written)
        assert pages.mget_into(keys[::-1], into) == [True] * 20
        assert all(map(same, into, written[::-1]))


def test_a_server_that_does_not_read_cannot_hold_a_writer_for_longer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"redis://127.0.0.1:{deaf.getsockname()[1]}"
        with PageClient(url, protocol=2, driver_info=None) as pages, exceeding(0.3):
            pages.exists(key(0), deadline=0.3)


def test_a_write_that_does_not_get_through_ends_at_the_deadline(store: RunningServer) -> None:
    """The server is stopped as by a debugger: the kernel takes what it can hold, no more."""
    with PageClient(store.url, retry=NO_RETRY) as pages:
        assert not pages.exists(key(0))
        store.process.send_signal(19)  # SIGSTOP
        try:
            with exceeding(0.5):
                pages.mset(batch(64, rows=16384), deadline=0.5)  # 64 MiB
        finally:
            store.process.send_signal(18)  # SIGCONT
        assert not pages.exists(key(0), deadline=20)


# -- a server that answers wrongly or not at all -----------------------------------------------------------------------


@contextmanager
def server_that_says(*answers: bytes) -> Iterator[str]:
    """Something that gives these answers in turn, one for each read, and then closes. Its URL."""

    def serve() -> None:
        sock, _ = listening.accept()
        with sock:
            for answer in answers:
                if sock.recv(65536):
                    sock.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}?protocol=2"
        thread.join(10)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], WrongReply),
        ([b"+OK\r\n"], WrongReply),
        ([b"*2\r\n*-1\r\n*-1\r\n", b":7\r\n"], WrongReply),
        ([b"*2\r\n*-1\r\n*-1\r\n", b"$4\r\nabcd\r\n$4\r\nabcd\r\n"], WrongReply),
        ([b"*2\r\n*-1\r\n*-1\r\n", b"-OOM command not allowed\r\n"], Refused),
        ([b"-ERR max number of clients reached\r\n"], Refused),
        ([b""], Disconnected),
    ],
)
def test_answers_that_are_none_have_errors_of_their_own(answers: list[bytes], error: type[PageClientError]) -> None:
    with server_that_says(*answers) as url:
        pages = PageClient(url, verify=False, retry=NO_RETRY, driver_info=None)
        with pages, pytest.raises(error):
            pages.get_page_into(key(0), bytearray(4))


def test_a_refusal_leaves_the_connection_as_it_was(server: RunningServer, client: redis.Redis) -> None:
    with PageClient(server.url) as pages:
        assert not pages.exists(key(0))
        client.set("kv:req:index:not", "x")
        before = client.info("stats")["total_connections_received"]
        for _ in range(3):
            with pytest.raises(Refused, match="ERR"):
                pages.lease(b"req", -1)
        assert not pages.exists(key(0))
        assert client.info("stats")["total_connections_received"] == before


# -- ways in -----------------------------------------------------------------------------------------------------------


def test_who_may_not_come_in_is_told_so() -> None:
    with start_redis("--requirepass", "secret") as redis_server:
        host = f"127.0.0.1:{redis_server.port}"
        with redis_server.client(password="secret") as other:
            other.acl_setuser("reader", enabled=True, passwords=["+pass"], keys=["kv:*"], commands=["+@all", "-mset"])
        with PageClient(f"redis://:secret@{host}") as pages:
            pages.mset(batch(2))
        for url in (f"redis://:wrong@{host}", f"redis://:wrong@{host}?protocol=2"):
            with PageClient(url) as pages, pytest.raises(Refused, match="WRONGPASS"):
                pages.exists(key(0))
        with PageClient(f"redis://{host}?protocol=2") as pages, pytest.raises(Refused, match="NOAUTH"):
            pages.exists(key(0))
        with PageClient(f"redis://reader:pass@{host}") as pages:
            assert pages.exists(key(0))
            with pytest.raises(Refused, match="NOPERM") as refused:
                pages.mset(batch(2))
            assert refused.value.code == "NOPERM"


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_protocols(store: RunningServer, protocol: int) -> None:
    with PageClient(f"{store.url}/0?protocol={protocol}&client_name=engine") as pages:
        pages.mset(batch(3))
        into = room(batch(4))
        assert pages.mget_into(list(map(key, range(4))), into) == [True, True, True, False]
        assert [page is not None for page in pages.mget(list(map(key, range(4))))] == [True, True, True, False]
        with store.client() as other:
            assert "engine" in [client["name"] for client in other.client_list()]


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with start_redis("--unixsocket", str(path)), PageClient(f"unix://{path}") as pages:
        written = batch(100)
        pages.mset(written)
        into = room(written)
        assert all(pages.mget_into([page.key for page in written], into))
        assert all(map(same, into, written))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a key and a certificate for localhost, signed by itself."""
    where = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(where / "key.pem"), "-out", str(where / "cert.pem")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files],
        check=True,
        capture_output=True,
    )
    return where


@pytest.mark.parametrize("verify", [True, False])
def test_tls(certificate: Path, verify: bool) -> None:
    port = free_port()
    tls = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    tls += ["--tls-cert-file", str(certificate / "cert.pem"), "--tls-key-file", str(certificate / "key.pem")]
    tls += ["--tls-ca-cert-file", str(certificate / "cert.pem")]
    with start_redis(*tls):
        url = f"rediss://localhost:{port}"
        with PageClient(f"{url}?ssl_ca_certs={certificate / 'cert.pem'}", verify=verify) as pages:
            written = batch(300, rows=512)
            pages.mset(written, deadline=30)
            pages.delete([key(3)])
            into = room(written)
            found = pages.mget_into([page.key for page in written], into, deadline=30)
            assert found == [i != 3 for i in range(300)]
            assert all(same(array, page) for array, page, there in zip(into, written, found, strict=True) if there)
            assert pages.get_page(key(5))
        with PageClient(url) as stranger, pytest.raises(Disconnected, match=r"(?i)certificate"):
            stranger.exists(key(0))
