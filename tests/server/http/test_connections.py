"""Clients that send half a request, or nonsense, to a real server: others are answered, and the log stays empty."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvpage_server import http
from kvpage_server.http import ConnectionLimiter, HttpServer, RefusalReplies

CONNECTIONS = 8  # of which 7 may have a request
Ask = Callable[[bytes], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
SHORT = 40  # events of 1000 bytes
HALF = b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()


def serve(story: Callable[[Ask, asyncio.Event], Awaitable[None]], closed: Callable[[str], object] = str) -> None:
    """Run a story with a server that answers /held after a signal, /body after its body, /events with SHORT events
    before a signal, and others immediately.
    """

    async def run() -> None:
        may_go = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/held":
                await may_go.wait()
            if scope["path"] == "/events":
                await StreamingResponse(events())(scope, receive, send)
                return
            if scope["path"] == "/body":
                try:
                    await Request(scope, receive).body()
                except ClientDisconnect:
                    return
            await PlainTextResponse("done")(scope, receive, send)

        async def events() -> AsyncIterator[bytes]:
            for _ in range(SHORT):
                yield bytes(1000)
            await may_go.wait()

        def refused(request: object, refusal: object) -> PlainTextResponse:
            return PlainTextResponse("", 503)

        limiter = ConnectionLimiter(CONNECTIONS, CONNECTIONS, closed=closed, always=["/health"])
        server = HttpServer(RefusalReplies(app, refused), limiter, grace=1)
        with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # as little as the system allows
            serving = asyncio.create_task(server.serve([listening]))

            async def ask(data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                stack.callback(writer.close)
                writer.write(data)
                await writer.drain()
                return reader, writer

            try:
                await asyncio.wait_for(story(ask, may_go), 60)
            finally:
                may_go.set()
                server.should_exit = True
                await serving

    asyncio.run(run())


async def status(ask: Ask, data: bytes) -> int:
    reader, _ = await ask(data)
    return int((await reader.readline()).split()[1])


def test_unfinished_requests_block_no_client() -> None:
    async def story(ask: Ask, may_go: asyncio.Event) -> None:
        for _ in range(3 * CONNECTIONS):
            await ask(HALF)
            assert await status(ask, get("/")) == 200
        reader, writer = await ask(HALF)
        writer.write(b"whole")
        assert b"200" in await reader.readline()

    serve(story)


def test_whole_requests_keep_their_places_and_more_are_refused() -> None:
    async def story(ask: Ask, may_go: asyncio.Event) -> None:
        held = [await ask(get("/held")) for _ in range(CONNECTIONS - 1)]
        while await status(ask, get("/")) != 503:  # until all of them were received
            pass
        for _ in range(CONNECTIONS):
            await ask(HALF)
            assert await status(ask, get("/health")) == 200
        may_go.set()
        for reader, _ in held:
            assert b"200" in await reader.readline()
        while await status(ask, get("/")) == 503:
            pass

    serve(story)


@pytest.mark.parametrize("path", ["/", "/body"])
def test_a_chunk_that_makes_no_sense_is_not_logged(
    path: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(ask: Ask, may_go: asyncio.Event) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await ask(head.encode())
        if path == "/":
            assert b"200" in await reader.readline()  # it is answered before the chunk arrives
        writer.write(b"zz\r\n")
        received = await reader.read()
        assert b" 400 " in received or path == "/"
        assert await status(ask, get("/")) == 200

    serve(story)
    assert (capfd.readouterr().err, caplog.records) == ("", [])


@pytest.mark.parametrize("method", ["HEAD", "CONNECT", "TRACE", "PUT"])
def test_malformed_bodies_of_any_method_are_not_logged(
    method: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(ask: Ask, may_go: asyncio.Event) -> None:
        reader, _ = await ask(f"{method} / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode())
        received = await reader.read()
        assert received.startswith(b"HTTP/1.1 400 ")
        assert (b"Invalid" in received) == (method != "HEAD")
        assert await status(ask, get("/")) == 200

    serve(story)
    assert (capfd.readouterr().err, caplog.records) == ("", [])


def test_an_unread_stream_of_few_bytes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "UNREAD_SECONDS", 0.1)
    closed = asyncio.Queue[str]()

    async def story(ask: Ask, may_go: asyncio.Event) -> None:
        _, writer = await ask(b"")
        port = writer.get_extra_info("peername")[1]
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            unread.connect(("127.0.0.1", port))
            unread.sendall(get("/events"))
            assert await closed.get() == "unread"
        assert await status(ask, get("/")) == 200

    serve(story, closed.put_nowait)
