"""CLIENT PAUSE: the waiting clients, and clients that disconnect meanwhile."""

from __future__ import annotations

import gc
import socket

from turns import measured
from waiting import until
from wire import encode_command


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
