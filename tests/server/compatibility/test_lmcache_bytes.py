"""LMCache, an unmodified client: its native RESP client byte for byte. `make test-connectors` runs LMCache itself.

That client compares bytes, has one command outstanding on a connection, sends no handshake, and treats any other reply
as fatal; see `csrc/storage_backends/redis` in LMCache 0.5.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import RunningServer, start_server
from wire import encode_command

MIB = 1024 * 1024
KEY = b"vllm@meta-llama/Llama-3.1-8B%2Dinstruct@1@0@4d5f8e6a7b9c0d1e2f3a4b5c6d7e8f90aabbccdd@bfloat16@kv-chunk-0000"


class Native:
    """One connection of LMCache's C++ client: it reads exactly as many bytes as the reply it expects has."""

    def __init__(self, server: RunningServer) -> None:
        self.sock = server.connect()
        self.incoming = self.sock.makefile("rb")

    def expect(self, reply: bytes, *words: bytes) -> None:
        self.sock.sendall(encode_command(words))
        assert self.incoming.read(len(reply)) == reply

    def close(self) -> None:
        self.sock.setblocking(False)
        with pytest.raises(BlockingIOError):  # no unexpected bytes
            self.sock.recv(1)
        self.incoming.close()
        self.sock.close()


@pytest.fixture
def native(server: RunningServer) -> Iterator[Native]:
    with server.client() as client:
        client.flushall()
    native = Native(server)
    yield native
    native.close()


def test_the_four_commands_byte_for_byte(native: Native) -> None:
    assert len(KEY) > 100
    value = random.Random(10).randbytes(256 * 1024)
    native.expect(b":0\r\n", b"EXISTS", KEY)
    native.expect(b"$-1\r\n", b"GET", KEY)
    native.expect(b"+OK\r\n", b"SET", KEY, value)
    native.expect(b":1\r\n", b"EXISTS", KEY)
    native.expect(b"$262144\r\n" + value + b"\r\n", b"GET", KEY)
    native.expect(b"+OK\r\n", b"SET", KEY, value[::-1])
    native.expect(b"$262144\r\n" + value[::-1] + b"\r\n", b"GET", KEY)
    native.expect(b":1\r\n", b"DEL", KEY)
    native.expect(b":0\r\n", b"DEL", KEY)
    native.expect(b":0\r\n", b"EXISTS", KEY)


def test_values_of_64_mib(native: Native) -> None:
    value = random.Random(11).randbytes(64 * MIB)
    native.expect(b"+OK\r\n", b"SET", KEY, value)
    native.expect(b"$67108864\r\n" + value + b"\r\n", b"GET", KEY)
    native.expect(b":1\r\n", b"DEL", KEY)


def test_lower_case_commands_and_every_size(native: Native) -> None:
    noise = random.Random(12)
    for size in (0, 1, 1023, 1024, 1025, 4096, 65536, 1_000_000):
        value = noise.randbytes(size)
        native.expect(b"+OK\r\n", b"set", KEY, value)
        native.expect(b"$%d\r\n%b\r\n" % (size, value), b"get", KEY)


def test_eight_connections_at_once(server: RunningServer) -> None:
    def work(worker: int) -> None:
        native, noise = Native(server), random.Random(worker)
        for chunk in range(20):
            key, value = b"%b-%d-%d" % (KEY, worker, chunk), noise.randbytes(256 * 1024)
            native.expect(b":0\r\n", b"EXISTS", key)
            native.expect(b"+OK\r\n", b"SET", key, value)
            native.expect(b":1\r\n", b"EXISTS", key)
            native.expect(b"$262144\r\n" + value + b"\r\n", b"GET", key)
            native.expect(b":1\r\n", b"DEL", key)
        native.close()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_a_password_is_answered_with_ok() -> None:
    with start_server("--requirepass", "secret") as server:
        native = Native(server)
        native.expect(b"+OK\r\n", b"AUTH", b"secret")
        native.expect(b"+OK\r\n", b"SET", KEY, b"value")
        native.close()


def test_a_full_server_evicts_and_never_refuses() -> None:
    """An error where +OK is expected would desynchronise the connection for ever."""
    with start_server("--maxmemory", "16mb") as server:
        native, value = Native(server), bytes(MIB)
        for chunk in range(64):
            native.expect(b"+OK\r\n", b"SET", b"%b-%d" % (KEY, chunk), value)
        native.expect(b"$1048576\r\n" + value + b"\r\n", b"GET", b"%b-63" % KEY)
        native.close()


def test_existing_keys_are_still_readable() -> None:
    """A GET that misses wedges the worker that asked EXISTS before; so a hit by EXISTS is protected for a while."""
    with start_server("--maxmemory", "32mb") as server:
        asking, writing, value = Native(server), Native(server), bytes(MIB)
        for chunk in range(8):
            asking.expect(b"+OK\r\n", b"SET", b"%b-%d" % (KEY, chunk), value)
        for chunk in range(8):
            asking.expect(b":1\r\n", b"EXISTS", b"%b-%d" % (KEY, chunk))
        for chunk in range(100):
            writing.expect(b"+OK\r\n", b"SET", b"other-%d" % chunk, value)
        for chunk in range(8):
            asking.expect(b"$1048576\r\n" + value + b"\r\n", b"GET", b"%b-%d" % (KEY, chunk))
        asking.close()
        writing.close()


def test_asking_for_everything_does_not_protect_everything() -> None:
    """The protection of EXISTS is bounded: new values still fit."""
    with start_server("--maxmemory", "16mb") as server:
        native, value = Native(server), bytes(MIB)
        for chunk in range(60):
            native.expect(b"+OK\r\n", b"SET", b"%b-%d" % (KEY, chunk), value)
            native.expect(b":1\r\n", b"EXISTS", b"%b-%d" % (KEY, chunk))
        with server.client() as client:
            assert client.info("memory")["used_memory"] <= 17 * MIB
        native.close()


def test_a_reply_is_never_split_by_another(server: RunningServer) -> None:
    """Two commands in one segment, as a proxy in between may send them: two replies, one after the other."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        value = bytes(300_000)
        sock.sendall(
            encode_command([b"SET", KEY, value]) + encode_command([b"GET", KEY]) + encode_command([b"EXISTS", KEY])
        )
        expected = b"+OK\r\n$300000\r\n" + value + b"\r\n:1\r\n"
        with sock.makefile("rb") as incoming:
            assert incoming.read(len(expected)) == expected
