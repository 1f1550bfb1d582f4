"""PageClient's connections: kinds of URLs, and failures, through a faulty proxy."""

from __future__ import annotations

import math
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from page_batches import NO_RETRY, batch, key, room, same
from proxy import Proxy, start_proxy
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from servers import RunningServer, free_port, start_redis, start_server

from kvpage_server.client import (
    AsyncPageClient,
    DeadlineExceeded,
    Disconnected,
    Page,
    PageClient,
    PageClientError,
    Refused,
    WrongReply,
)
from kvpage_server.page import BlockShape, DType, KVType, PageKey, Plane

WIDE = BlockShape(1, 1, 256, (Plane(KVType.K, DType.UINT8, 512),))  # 128 KiB: parts of a batch for each connection


def test_the_last_value_of_a_name_in_a_batch_counts(server: RunningServer) -> None:
    bodies = [np.full(WIDE.nbytes, i, np.uint8) for i in range(32)]
    names, found = [(b"twice", i % 16) for i in range(32)], [np.zeros(WIDE.nbytes, np.uint8) for _ in range(16)]
    keys = [PageKey(b"page", 0, 0, i % 16, 0) for i in range(32)]
    with PageClient(server.url, connections=4, deadline=60) as client:
        for _ in range(4):
            client.mset_blocks(names, WIDE, bodies)
            assert client.mget_blocks_into(names[:16], WIDE, found) == [True] * 16
            assert [int(body[0]) for body in found] == [*range(16, 32)]
            client.mset([Page(key, body, DType.UINT8, 256, 512) for key, body in zip(keys, bodies, strict=True)])
            assert client.mget_into(keys[:16], found) == [True] * 16
            assert [int(body[0]) for body in found] == [*range(16, 32)]


# -- ways in -----------------------------------------------------------------------------------------------------------


def test_a_wrong_password_is_an_error() -> None:
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
def test_both_protocols(either_server: RunningServer, protocol: int) -> None:
    with PageClient(f"{either_server.url}/0?protocol={protocol}&client_name=engine") as pages:
        pages.mset(batch(3))
        into = room(batch(4))
        assert pages.mget_into(list(map(key, range(4))), into) == [True, True, True, False]
        assert [page is not None for page in pages.mget(list(map(key, range(4))))] == [True, True, True, False]
        with either_server.client() as other:
            assert "engine" in [client["name"] for client in other.client_list()]


@pytest.fixture(params=[start_server, start_redis], ids=["kvpage-server", "redis-server"])
def start(request: pytest.FixtureRequest) -> Callable[..., AbstractContextManager[RunningServer]]:
    """Return a function that starts a server with options."""
    found: Callable[..., AbstractContextManager[RunningServer]] = request.param
    return found


def assert_pages_travel(client: PageClient) -> None:
    """Ten megabytes and a hole in them."""
    written = batch(300, rows=512)
    client.mset(written, deadline=60)
    client.delete([key(3)])
    into = room(written)
    found = client.mget_into([page.key for page in written], into, deadline=60)
    assert found == [i != 3 for i in range(300)]
    assert all(same(array, page) for array, page, there in zip(into, written, found, strict=True) if there)
    copy = client.get_page(key(5))
    assert copy
    assert same(copy.body, written[5])


@pytest.mark.parametrize("verify", [True, False])
def test_a_unix_socket(start: Any, verify: bool, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with start("--unixsocket", str(path)), PageClient(f"unix://{path}", verify=verify) as pages:
        assert_pages_travel(pages)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a key and a certificate for localhost, signed by itself."""
    if not shutil.which("openssl"):
        pytest.skip("openssl, which makes the certificate, is not installed")
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
def test_tls(start: Any, verify: bool, certificate: Path) -> None:
    port, pem = free_port(), str(certificate / "cert.pem")
    files = ["--tls-cert-file", pem, "--tls-key-file", str(certificate / "key.pem"), "--tls-ca-cert-file", pem]
    url = f"rediss://localhost:{port}"
    with start("--tls-port", str(port), "--tls-auth-clients", "no", *files):
        with PageClient(f"{url}?ssl_ca_certs={pem}", verify=verify) as pages:
            assert_pages_travel(pages)
        with PageClient(url) as stranger, pytest.raises(Disconnected, match=r"(?i)certificate"):
            stranger.exists(key(0))


async def test_tls_in_an_event_loop(start: Any, certificate: Path) -> None:
    port, pem = free_port(), str(certificate / "cert.pem")
    files = ["--tls-cert-file", pem, "--tls-key-file", str(certificate / "key.pem"), "--tls-ca-cert-file", pem]
    with start("--tls-port", str(port), "--tls-auth-clients", "no", *files):
        async with AsyncPageClient(f"rediss://localhost:{port}?ssl_ca_certs={pem}", deadline=60) as pages:
            written = batch(300, rows=512)
            await pages.mset(written)
            into = room(written)
            assert all(await pages.mget_into([page.key for page in written], into))
            assert all(map(same, into, written))


# -- a connection that fails -------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(either_server: RunningServer) -> Iterator[Proxy]:
    with start_proxy(either_server.port) as proxy:
        yield proxy


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("cut_after", [0, 1, 5, 11, 12, 80, 2060, 3000, 20_000, 41_119])
def test_a_truncated_reply_is_an_error_and_the_next_one_is_right(proxy: Proxy, cut_after: int, verify: bool) -> None:
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


def test_a_lost_connection_is_retried_as_configured(proxy: Proxy) -> None:
    written = batch(20)
    keys, into = [page.key for page in written], room(written)
    with PageClient(proxy.url, retry=Retry(ConstantBackoff(0.05), 1), deadline=20) as pages:
        pages.mset(written)
        proxy.cut_after, proxy.mend_after = 3000, 1
        assert pages.mget_into(keys, into) == [True] * 20
        assert all(map(same, into, written))
        assert proxy.connections == 2
    with PageClient(f"redis://127.0.0.1:{free_port()}", retry=Retry(ConstantBackoff(50), 10), deadline=20) as pages:
        started = time.monotonic()
        with pytest.raises(Disconnected):
            pages.exists(key(0))
        assert time.monotonic() - started < 10, "it waited for a retry that the deadline forbids"


def test_a_server_that_was_restarted_is_found_again() -> None:
    port = free_port()
    with start_server(port=port) as server, PageClient(server.url) as pages:
        pages.mset(batch(2))
        server.stop()
        with start_server(port=port):
            assert pages.mget(list(map(key, range(2)))) == [None, None]
            pages.mset(batch(2))
            assert all(pages.mexists(list(map(key, range(2)))))


def test_no_server_is_an_error_of_its_own_and_one_of_redis_py_s() -> None:
    with PageClient(f"redis://127.0.0.1:{free_port()}") as pages:
        with pytest.raises(Disconnected):
            pages.exists(key(0))
        with pytest.raises(redis.ConnectionError):
            pages.exists(key(0))


# -- deadlines ---------------------------------------------------------------------------------------------------------


@contextmanager
def exceeding(seconds: float) -> Iterator[None]:
    """Check that the body exceeds a deadline, and takes about as long; without a deadline it would take minutes."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"within {seconds:g} s"):
        yield
    assert seconds * 0.9 < time.monotonic() - started < seconds + 30


def test_a_deadline_limits_the_whole_call(proxy: Proxy) -> None:
    """Each byte arrives in time, all of them do not; connecting counts."""
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


def test_a_deadline_may_be_infinite(either_server: RunningServer) -> None:
    written = batch(2)
    with PageClient(either_server.url, deadline=1e12) as pages:
        pages.mset(written)
        into = room(written)
        assert pages.mget_into([page.key for page in written], into, deadline=math.inf) == [True] * 2


def test_a_stalled_reply_ends_at_the_deadline_and_is_discarded(
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


def test_a_truncated_long_reply_is_not_waited_for(proxy: Proxy) -> None:
    written = batch(100, rows=512)
    keys, into = [page.key for page in written], room(written)
    with PageClient(proxy.url, retry=NO_RETRY) as pages:
        pages.mset(written)
        proxy.cut_after = 1_500_000
        with pytest.raises(Disconnected):
            pages.mget_into(keys, into)
        proxy.cut_after, proxy.stall_after = None, 1_500_000
        with exceeding(0.3):
            pages.mget_into(keys, into, deadline=0.3)
        proxy.stall_after = None
        assert pages.mget_into(keys, into) == [True] * 100
        assert all(map(same, into, written))


def test_a_server_that_does_not_read_blocks_no_writer_longer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"redis://127.0.0.1:{deaf.getsockname()[1]}"
        with PageClient(url) as pages, exceeding(0.3):
            pages.exists(key(0), deadline=0.3)


def test_a_write_that_does_not_get_through_ends_at_the_deadline(either_server: RunningServer) -> None:
    """The server is stopped as by a debugger: the kernel buffers a limited number of bytes."""
    with PageClient(either_server.url, retry=NO_RETRY) as pages:
        assert not pages.exists(key(0))
        either_server.process.send_signal(signal.SIGSTOP)
        try:
            with exceeding(0.5):
                pages.mset(batch(64, rows=16384), deadline=0.5)  # 64 MiB
        finally:
            either_server.process.send_signal(signal.SIGCONT)
        assert not pages.exists(key(0), deadline=20)


# -- a server that answers wrongly or not at all -----------------------------------------------------------------------


@contextmanager
def server_that_says(*answers: bytes) -> Iterator[str]:
    """Something that says OK to a handshake, gives these answers in turn, and then closes. Its URL."""

    def serve() -> None:
        sock, _ = listening.accept()
        with sock:
            for answer in answers:
                while b"SETINFO" in (question := sock.recv(65536)):
                    sock.sendall(b"+OK\r\n")
                if question:
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
        ([b"*3\r\n*-1\r\n*-1\r\n*-1\r\n", b":7\r\n"], WrongReply),
        ([b"*3\r\n*-1\r\n*-1\r\n*-1\r\n", b"$4\r\nabcd\r\n$4\r\nabcd\r\n"], WrongReply),
        ([b"*3\r\n*-1\r\n*-1\r\n*-1\r\n", b"-OOM command not allowed\r\n"], Refused),
        ([b"-ERR max number of clients reached\r\n"], Refused),
        ([b""], Disconnected),
    ],
)
def test_answers_that_are_none_have_errors_of_their_own(answers: list[bytes], error: type[PageClientError]) -> None:
    with server_that_says(*answers) as url:
        pages = PageClient(url, verify=False, retry=NO_RETRY)
        with pages, pytest.raises(error):
            pages.get_page_into(key(0), bytearray(4))


@pytest.mark.parametrize("found", [memoryview(b"abc" * 1000), [memoryview(b"abc"), 1], b"abc"])
def test_an_unexpected_reply_is_shown_by_its_bytes(found: object) -> None:
    error = str(WrongReply.instead_of("OK", found))
    assert "memory" not in error
    assert "abc" in error
    assert len(error) < 120


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


async def test_a_batch_beyond_maxmemory_clients_is_refused(server: RunningServer, client: redis.Redis) -> None:
    many = batch(32, 1024, 1024)
    try:
        client.config_set("maxmemory-clients", "2mb")
        with (
            PageClient(server.url) as pages,
            pytest.raises(Refused, match="OOM connections hold more than maxmemory-clients, 2097152"),
        ):
            pages.mset(many)
        async with AsyncPageClient(server.url) as others:
            with pytest.raises(Refused, match="OOM connections hold more than maxmemory-clients, 2097152"):
                await others.mset(many)
    finally:
        client.config_set("maxmemory-clients", "25%")
    assert not client.dbsize()
