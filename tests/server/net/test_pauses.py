"""CLIENT PAUSE: the waiting clients, and clients that disconnect meanwhile."""

from __future__ import annotations

import gc
import socket

import pytest
from servers import start_server
from turns import measured
from waiting import until
from wire import Wire, encode_command


def test_a_client_waiting_for_a_shortened_pause_leaves_nothing() -> None:
    with measured("--store", "memory") as turns:
        address = ("127.0.0.1", turns.server.port)
        with socket.create_connection(address, timeout=60) as first:
            first.sendall(encode_command([b"CLIENT", b"PAUSE", b"3600000", b"WRITE"]))
            assert first.recv(100) == b"+OK\r\n"
            known = turns.sessions()
            with socket.create_connection(address, timeout=60) as second:
                second.sendall(encode_command([b"SET", b"key", b"value"]))
                until(lambda: len(turns.sessions()) == 2, "the second connection")
                (waiting,) = [one for one in turns.sessions() if one not in known]
                until(lambda: waiting() is not None and waiting().paused, "its pause")
                first.sendall(encode_command([b"CLIENT", b"UNPAUSE"]))
                assert second.recv(100) == b"+OK\r\n"
            until(lambda: gc.collect() >= 0 and waiting() is None, "the end of what it held", within=20)


def test_an_ended_pause_does_not_strengthen_the_next_one() -> None:
    with start_server("--store", "memory") as server, Wire(server.port) as first, Wire(server.port) as second:
        for _ in range(5):
            assert first.ask(b"CLIENT", b"PAUSE", b"1", b"ALL") == b"+OK\r\n"
            assert first.ask(b"CLIENT", b"PAUSE", b"60000", b"WRITE") == b"+OK\r\n"
            assert second.ask(b"GET", b"key") == b"$-1\r\n"
            assert first.ask(b"CLIENT", b"UNPAUSE") == b"+OK\r\n"


@pytest.mark.parametrize("ends", ["CLIENT UNPAUSE", ""])
def test_writes_of_a_client_that_left_in_a_pause_are_dropped(ends: str) -> None:
    with start_server("--store", "memory") as server, Wire(server.port) as first:
        assert first.ask(b"SET", b"key", b"new") == b"+OK\r\n"
        assert first.ask(b"CLIENT", b"PAUSE", b"60000" if ends else b"1000", b"WRITE") == b"+OK\r\n"
        with Wire(server.port) as second, Wire(server.port) as third, server.client() as client:
            second.send(encode_command([b"SET", b"key", b"of a client that left"]) * 100)
            third.send(encode_command([b"SET", b"other", b"of a client that waits"]))
            until(lambda: client.info("clients")["blocked_clients"] == 2, "their pause")
            second.close()
            if ends:
                assert first.ask(*ends.encode().split()) == b"+OK\r\n"
            assert third.reply() == b"+OK\r\n"
            assert first.ask(b"GET", b"key") == b"$3\r\nnew\r\n"
