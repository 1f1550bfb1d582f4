"""Any command through the page clients: each answer has its own reader, and a transaction is whole or not there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from servers import RunningServer

from kvpage_server.client import AsyncPageClient, PageClient, Refused, WrongReply
from kvpage_server.client.raw_commands import RawCommand, array, integer, ok, ok_or_not, scanned, text, texts, up_to


class Blocking:
    """The client for an event loop, used as the other one is."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(_made(url))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *args, **options: self._loop.run_until_complete(method(*args, **options))

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


async def _made(url: str) -> AsyncPageClient:
    return AsyncPageClient(url)


@pytest.fixture(params=[PageClient, Blocking], ids=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    with contextlib.ExitStack() as made:

        def make(url: str) -> Any:
            client = request.param(url)
            made.callback(client.close)
            return client

        yield make


def get(key: str) -> RawCommand:
    return RawCommand(["GET", key], text)


def test_several_questions_have_their_answers_in_order(
    make: Callable[[str], Any], either_server: RunningServer
) -> None:
    asked = [
        RawCommand(["SET", "a", b"\x00\xff"], ok),
        RawCommand(["SET", "b", "b" * 100_000, "NX"], ok_or_not),
        RawCommand(["SET", "b", "no", "NX"], ok_or_not),
        get("a"),
        get("b"),
        get("c"),
        RawCommand(["MGET", "a", "c"], texts(2)),
        RawCommand(["INCRBY", "n", 5], integer),
        RawCommand(["EXISTS", "n"], up_to(1)),
        RawCommand(["SCAN", 0, "MATCH", "n", "COUNT", 1000], scanned),
    ]
    client = make(either_server.url)
    answers = client.ask(asked)
    assert answers == [None, True, False, b"\x00\xff", b"b" * 100_000, None, [b"\x00\xff", None], 5, 1, (b"0", [b"n"])]
    with pytest.raises(Refused, match="not an integer"):
        client.ask([RawCommand(["INCR", "a"], integer), get("a")])
    assert client.ask([get("a")]) == [b"\x00\xff"]


def test_calls_without_commands_or_keys_are_answered(make: Callable[[str], Any], either_server: RunningServer) -> None:
    client = make(either_server.url)
    assert client.ask([]) == []
    assert client.transaction([], get("a"), lambda _: [RawCommand(["SET", "a", 1], ok)]) == [None]
    assert client.transaction([], get("a"), lambda found: [RawCommand(["SET", "a", found + b"2"])]) == [b"OK"]
    with pytest.raises(ValueError, match="a command must have at least one word"):
        client.ask([RawCommand([])])
    nothing_listens = make("redis://127.0.0.1:1,redis://127.0.0.1:2")
    assert nothing_listens.ask([]) == []


def test_a_command_without_a_decoder_returns_its_reply(
    make: Callable[[str], Any], either_server: RunningServer
) -> None:
    asked = [RawCommand(["SET", b"a", "1"]), RawCommand(["GET", "a"]), RawCommand(["INCR", "a"])]
    assert make(either_server.url).ask(asked) == [b"OK", b"1", 2]


def test_a_transaction_is_repeated_after_a_concurrent_change(
    make: Callable[[str], Any], either_server: RunningServer
) -> None:
    with either_server.client() as other:
        seen: list[bytes | None] = []

        def change(before: bytes | None) -> list[RawCommand]:
            seen.append(before)
            if len(seen) < 3:
                other.set("mine", f"theirs {len(seen)}")
            return [RawCommand(["SET", "mine", "ours"], ok), RawCommand(["INCR", "count"], integer)]

        client = make(either_server.url)
        assert client.transaction(["mine"], get("mine"), change) == [None, 1]
        assert seen == [None, b"theirs 1", b"theirs 2"]
        assert (other.get("mine"), other.get("count")) == (b"ours", b"1")
        assert client.transaction(["mine"], get("mine"), lambda _: []) == []


def test_a_failed_transaction_leaves_nothing_watched(make: Callable[[str], Any], either_server: RunningServer) -> None:
    client = make(either_server.url)
    with pytest.raises(Refused):
        client.transaction(["a"], get("a"), lambda _: [RawCommand(["NOSUCHCOMMAND"], ok)])

    def fail(_: bytes | None) -> list[RawCommand]:
        raise LookupError("given up")

    with pytest.raises(LookupError):
        client.transaction(["a"], get("a"), fail)
    with either_server.client() as other:
        other.set("a", "1")
        assert client.transaction(["b"], get("a"), lambda found: [RawCommand(["SET", "b", found], ok)]) == [None]
        assert other.get("b") == b"1"


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[int]]]:
    """Start a server that greets and then sends these replies; yield its URL, and the connection of each request."""
    connections: list[int] = []

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                number = len(set(connections))
                with client, contextlib.suppress(OSError):
                    while asked := client.recv(1 << 16):
                        if b"HELLO" in asked:
                            client.sendall(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                        elif b"SETINFO" in asked:
                            client.sendall(b"+OK\r\n")
                        else:
                            connections.append(number)
                            client.sendall(answers[len(connections) - 1])

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}", connections
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        (b":5\r\n", text),
        (b"+OK\r\n", integer),
        (b":2\r\n", up_to(1)),
        (b":-1\r\n", up_to(1)),
        (b"*1\r\n+a\r\n", texts(2)),
        (b"*1\r\n:1\r\n", texts(1)),
        (b"*2\r\n*0\r\n*0\r\n", scanned),
        (b"_\r\n", array(0)),
        (b"$1\r\na\r\n$6\r\nsecret\r\n", text),  # a reply too many: it may be another caller's
        (b"?\r\n", text),
    ],
)
def test_an_unexpected_reply_replaces_the_connection(
    make: Callable[[str], Any], reply: bytes, read: Callable[[Any], Any]
) -> None:
    with answering(reply, b"$2\r\nok\r\n") as (url, connections):
        client = make(url)
        with pytest.raises(WrongReply):
            client.ask([RawCommand(["GET", "a"], read)])
        assert client.ask([get("a")]) == [b"ok"]
        assert connections == [0, 1]


def test_a_greeting_that_makes_no_sense_is_a_wrong_reply(make: Callable[[str], Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def babble() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listening.accept()[0] as client:
                        client.recv(1000)
                        client.sendall(b"*1\r\n:1\r\n")

        threading.Thread(target=babble, daemon=True).start()
        client = make(f"redis://127.0.0.1:{listening.getsockname()[1]}?protocol=3")
        with pytest.raises(WrongReply, match="the server's greeting makes no sense"):
            client.ask([get("a")])
        assert not isinstance(WrongReply("x"), redis.ConnectionError)
