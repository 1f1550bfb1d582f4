"""Closed connections leave no memory, although the garbage collector rarely runs."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator

import pytest
from turns import Turns, measured
from waiting import until
from wire import encode_command

LAST = {
    "calls": encode_command([b"SET", b"key", b"value"]) + encode_command([b"GET", b"key"]),
    "half": encode_command([b"NOSUCH"]) + b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$100000\r\n" + bytes(50_000),
    "malformed": b"*x\r\n",
    "quit": encode_command([b"QUIT"]),
    "listens": encode_command([b"SUBSCRIBE", b"news"]),
    "queues": encode_command([b"MULTI"]) + encode_command([b"SET", b"key", b"value"]),
    "tracks": encode_command([b"HELLO", b"3"])
    + encode_command([b"CLIENT", b"TRACKING", b"ON"])
    + encode_command([b"GET", b"key"]),
    "monitors": encode_command([b"MONITOR"]) + encode_command([b"PING"]),
}


@pytest.fixture(params=[("memory",), ("tiered", "--appendfsync", "always")], ids=["memory", "always"])
def turns(request: pytest.FixtureRequest) -> Iterator[Turns]:
    with measured("--store", *request.param) as turns:
        yield turns


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
def test_a_closed_connection_is_freed_without_garbage_collection(turns: Turns, last: bytes) -> None:
    with socket.create_connection(("127.0.0.1", turns.server.port), timeout=60) as sock:
        until(lambda: len(turns.sessions()) == 1, "the connection")
        (session,) = turns.sessions()
        sock.sendall(last)
        assert sock.recv(1) in (b"+", b"-", b"*", b"%")
    until(lambda: session() is None, "the end of what it held", within=20)
