"""Who connects and says nothing, or too much at a time, takes no place and no time from the others."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from api_engines import RunningEngine, start_engine, write_tiny
from test_api_bounds import MOST_WAIT, Heart
from waiting import eventually

CONNECTIONS, FROM_ADDRESS = 40, 24
SITE = "https://chat.example"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[RunningEngine]:
    options = ["--max-connections", str(CONNECTIONS), "--max-from-address", str(FROM_ADDRESS), "--max-body", "64kb"]
    options += ["--allow-origin", SITE]
    with start_engine(tiny, *options) as engine:
        yield engine


def connect(engine: RunningEngine, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", engine.port), timeout=60, source_address=(source, 0))
    sock.sendall(data)
    return sock


def reply_on(sock: socket.socket) -> bytes:
    """Return all bytes until the peer closes."""
    received = b""
    with suppress(ConnectionResetError):
        while more := sock.recv(65536):
            received += more
    return received


def closed(sock: socket.socket) -> bool:
    sock.settimeout(0.05)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def posting(body: bytes = b"", length: int | None = None, path: str = "/v1/chat/completions", more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body) if length is None else length}\r\n{more}"
    return head.encode() + b"\r\n" + body


def answered(engine: RunningEngine) -> int:
    return httpx.post(f"{engine.url}/v1/chat/completions", json=CHAT).status_code


def healthy(engine: RunningEngine, source: str = "127.0.0.1") -> bool:
    with connect(engine, b"GET /health/live HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n", source) as sock:
        return reply_on(sock).startswith(b"HTTP/1.1 200")


def test_an_unfinished_request_is_not_waited_for(engine: RunningEngine) -> None:
    """Who says nothing, who stops within its headers, who drips them, who drips a body that nobody wants."""
    unwanted = posting(length=60_000, path="/nowhere")
    beginnings = [b"", b"GET /health HTTP/1.1\r\nHost: he", b"GET / HTTP/1.1\r\n", unwanted]
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(engine, beginning)) for beginning in beginnings]
        began = time.monotonic()
        while not all(map(closed, socks)):
            assert time.monotonic() - began < 100
            for dripping in socks[2:]:
                with suppress(OSError):
                    dripping.sendall(b"a")
            time.sleep(0.2)
        assert time.monotonic() - began > 5, "slow is not silent"
    assert engine.metric("connections_closed_total") >= 4


def test_silent_connections_block_no_client(engine: RunningEngine) -> None:
    """A new connection replaces the one that has been silent for longest."""
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(engine)) for _ in range(3 * FROM_ADDRESS)]
        assert answered(engine) == 200
        assert healthy(engine)
        assert eventually(lambda: all(map(closed, silent[: 2 * FROM_ADDRESS])))
        assert not closed(silent[-1])


def test_unfinished_bodies_block_no_client(engine: RunningEngine) -> None:
    with ExitStack() as stack:
        for _ in range(3 * FROM_ADDRESS):
            stack.enter_context(connect(engine, posting(length=1000)))
        assert answered(engine) == 200
        assert healthy(engine)


def test_too_many_concurrent_requests_return_an_error(engine: RunningEngine) -> None:
    """The error has the format of OpenAI's clients, and a Retry-After header."""
    with ExitStack() as stack:
        for _ in range(FROM_ADDRESS - 1):
            watching = stack.enter_context(connect(engine, b"GET /page/events HTTP/1.1\r\nHost: here\r\n\r\n"))
            assert watching.recv(1000).startswith(b"HTTP/1.1 200")
        refused = httpx.get(f"{engine.url}/v1/models", headers={"Origin": SITE})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        error = refused.json()["error"]
        assert (error["code"], error["message"]) == ("too_many_connections", "too many connections")
        assert refused.headers["access-control-allow-origin"] == SITE
        assert refused.headers["x-request-id"].startswith("req_")
        refused = httpx.get(f"{engine.url}/v1/messages")  # a POST counts when its body has arrived
        assert (refused.status_code, refused.json()["type"]) == (503, "error")
        assert refused.headers["request-id"].startswith("req_")
        assert healthy(engine)
    assert eventually_answered(engine)


def eventually_answered(engine: RunningEngine) -> bool:
    return eventually(lambda: answered(engine) == 200)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the loopback is one address")
def test_one_address_takes_nothing_from_another(engine: RunningEngine) -> None:
    with ExitStack() as stack:
        for _ in range(FROM_ADDRESS):
            stack.enter_context(connect(engine, posting(length=1000), "127.0.0.9"))
        time.sleep(0.3)
        assert answered(engine) == 200
        assert healthy(engine, "127.0.0.9")
    assert eventually_answered(engine)


def test_two_lengths_are_refused_and_the_connection_with_them(engine: RunningEngine) -> None:
    """The body for one of them is a request for a server that uses the other."""
    body = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    for more in ("Transfer-Encoding: chunked\r\n", "transfer-encoding: Chunked\r\nConnection: keep-alive\r\n"):
        with connect(engine, posting(body, more=more)) as sock:
            reply = reply_on(sock)
        assert reply.startswith(b"HTTP/1.1 400")
        assert reply.count(b"HTTP/1.1") == 1
        assert b"Content-Length or Transfer-Encoding" in reply


def test_expect_continue_is_refused_for_too_large_a_body(engine: RunningEngine) -> None:
    with connect(engine, posting(length=70_000, more="Expect: 100-continue\r\n")) as sock:
        reply = reply_on(sock)
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in reply


def test_expect_continue_is_confirmed(engine: RunningEngine) -> None:
    body = json.dumps(CHAT).encode()
    with connect(engine, posting(length=len(body), more="Expect: 100-continue\r\nConnection: close\r\n")) as sock:
        assert sock.recv(1000).startswith(b"HTTP/1.1 100")
        sock.sendall(body)
        assert reply_on(sock).startswith(b"HTTP/1.1 200")


def chunked(engine: RunningEngine, chunks: bytes) -> bytes:
    """Return the reply to a body in chunks, during other answers."""
    head = posting().replace(b"Content-Length: 0", b"Connection: close\r\nTransfer-Encoding: chunked")
    with Heart(engine) as heart, connect(engine, head) as sock:
        with suppress(OSError):
            sock.sendall(chunks)
        reply = reply_on(sock)
    assert heart.longest < MOST_WAIT
    return reply


def test_a_body_in_tiny_chunks_delays_no_client(engine: RunningEngine) -> None:
    """Some are read, for a client may have its reasons; too many cost more than they say."""
    body = json.dumps(CHAT).encode()
    letters = b"".join(b"1\r\n%c\r\n" % letter for letter in body)
    assert chunked(engine, letters + b"0\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert chunked(engine, b"1\r\n \r\n" * 60_000 + letters + b"0\r\n\r\n") == b""


def test_headers_have_an_end(engine: RunningEngine) -> None:
    for headers in (b"a: b\r\n" * 50_000, b"a: " + b"b" * 300_000, b"a: b\r\n" * 1000):
        with Heart(engine) as heart, connect(engine) as sock:
            with suppress(OSError):
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n" + headers + b"\r\n\r\n")
            assert not reply_on(sock).startswith(b"HTTP/1.1 2")
        assert heart.longest < MOST_WAIT


def test_pipelined_requests_are_answered_in_order(engine: RunningEngine) -> None:
    """Many in one packet, and then one more, each whole."""
    asked = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n" + posting(json.dumps(CHAT).encode())
    with connect(engine, asked * 5 + b"GET /v1/models HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n") as sock:
        replies = reply_on(sock).split(b"HTTP/1.1 200")[1:]
    assert len(replies) == 11
    assert all(b'"status":"ok"' in reply for reply in replies[:10:2])
    assert all(b'"chat.completion"' in reply for reply in replies[1:10:2])
    assert b'"object":"list"' in replies[10]


def test_a_client_that_does_not_read_is_not_waited_for(engine: RunningEngine) -> None:
    before = engine.metric("connections_closed_total")
    with connect(engine) as sock:
        sock.settimeout(0.5)
        began = time.monotonic()
        with suppress(TimeoutError, OSError):
            while time.monotonic() - began < 5:
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n" * 100)
        while engine.metric("connections_closed_total") == before:
            assert time.monotonic() - began < 100
            time.sleep(0.2)
