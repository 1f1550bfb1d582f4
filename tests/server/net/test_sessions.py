"""Clients that misbehave: none harms the others, none costs memory that stays, and the server always ends in order."""

from __future__ import annotations

import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import quantiles

import pytest
import redis
from health import PROMPT
from servers import STOP_WITHIN, RunningServer, free_port, start_server
from waiting import until
from wire import Wire, encode_command

MIB = 1024 * 1024
BODY = 256 * 1024


@pytest.fixture(scope="module")
def quiet() -> Iterator[RunningServer]:
    """A server that only these tests talk to, so that its memory says something."""
    with start_server("--maxmemory", "1gb") as server:
        with server.client() as client:
            client.set("warm", "up")
        yield server


@pytest.fixture
def honest(quiet: RunningServer) -> Iterator[redis.Redis]:
    with quiet.client() as client:
        client.flushall()
        yield client


def name(page: int) -> list[bytes]:
    return [b"r", b"0", b"0", b"%d" % page, b"0"]


def set_page(page: int, body: bytes) -> bytes:
    return encode_command([b"KVPAGESET", *name(page), b"1", b"1024", b"128", b"0", body])


def get_pages(count: int) -> bytes:
    return encode_command([b"KVPAGEMGET", b"%d" % count, *[word for page in range(count) for word in name(page)]])


def arena_used(client: redis.Redis) -> int:
    return int(client.info("memory")["arena_used"])


def latencies(client: redis.Redis, count: int = 60) -> list[float]:
    """Seconds that PINGs take, sorted."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        client.ping()
        found.append(time.perf_counter() - start)
        time.sleep(0.005)
    return sorted(found)


def p95(seconds: list[float]) -> float:
    return quantiles(seconds, n=20)[-1]


class TestMalformedFrames:
    def test_an_error_and_the_end_of_the_connection(self, quiet: RunningServer, honest: redis.Redis) -> None:
        with quiet.connect() as sock:
            sock.sendall(
                encode_command([b"SET", b"before", b"1"]) + b"*x\r\n" + encode_command([b"SET", b"after", b"1"])
            )
            answer = b""
            while piece := sock.recv(4096):
                answer += piece
        assert answer == b"+OK\r\n-ERR Protocol error: invalid multibulk length\r\n"
        assert honest.exists("before") == 1
        assert honest.exists("after") == 0

    def test_a_bad_end_of_a_page_stores_nothing(self, quiet: RunningServer, honest: redis.Redis) -> None:
        honest.execute_command("KVPAGESET", *name(0), 1, 1, 1, 0, b"good")
        with Wire(quiet.port) as wire:
            wire.send(set_page(0, bytes(BODY))[:-2] + b"xx" + encode_command([b"PING"]))
            assert wire.reply().startswith(b"-ERR Protocol error: ")
            with pytest.raises(EOFError):
                wire.reply()
        assert honest.execute_command("KVPAGEGET", *name(0)) == b"good"

    def test_other_errors_leave_the_connection_open(self, quiet: RunningServer) -> None:
        with Wire(quiet.port) as wire:
            for words in ([b"NOSUCH"], [b"GET"], [b"KVPAGEGET", b"a"], [b"CLIENT", b"NOSUCH"], [b""]):
                assert wire.ask(*words).startswith(b"-ERR ")
            assert wire.ask(b"PING") == b"+PONG\r\n"


class TestLastWords:
    """A client that receives a reply, and then the end of the connection, receives both: also if the first waits for
    the disk.
    """

    @pytest.mark.parametrize(
        ("last", "received"),
        [
            (b"QUIT\r\n", b"+OK\r\n"),
            (b"*x\r\n", b"-ERR Protocol error: invalid multibulk length\r\n"),
        ],
    )
    def test_promised_replies_precede_the_end(self, last: bytes, received: bytes) -> None:
        with start_server("--store", "tiered", "--appendfsync", "always") as server:
            for i in range(20):
                with server.connect() as sock:
                    sock.sendall(encode_command([b"SET", b"key:%d" % i, bytes(2000)]) + last)
                    answer = b""
                    while piece := sock.recv(4096):
                        answer += piece
                assert answer == b"+OK\r\n" + received


class TestPieces:
    def test_a_byte_at_a_time(self, quiet: RunningServer) -> None:
        with Wire(quiet.port) as wire:
            for byte in set_page(1, b"slow body") + encode_command([b"KVPAGEGET", *name(1)]) + b"PING\r\n":
                wire.send(bytes([byte]))
                time.sleep(0.0005)
            assert [wire.reply() for _ in range(3)] == [b"+OK\r\n", b"$9\r\nslow body\r\n", b"+PONG\r\n"]

    @pytest.mark.parametrize("size", [1000, 8192, 65000, 65536, 131072, 262144, 1_500_000])
    def test_bodies_in_pieces_of_any_size(self, quiet: RunningServer, size: int) -> None:
        noise = random.Random(size)
        with Wire(quiet.port) as wire:
            for _ in range(5):
                body = noise.randbytes(size + noise.randrange(-50, 50))
                data = set_page(1, body) + encode_command([b"KVPAGEGET", *name(1)])
                while data:
                    count = noise.choice((1, 100, 1000, 8190, 8192, 65536, 131072, size))
                    wire.send(data[:count])
                    data = data[count:]
                    time.sleep(noise.choice((0, 0, 0.001)))
                assert wire.reply() == b"+OK\r\n"
                assert wire.reply() == b"$%d\r\n%b\r\n" % (len(body), body)

    def test_thousands_of_commands_in_one_go_are_answered_in_order(self, quiet: RunningServer) -> None:
        count = 20_000
        commands = b"".join(encode_command([b"ECHO", b"%d" % i]) for i in range(count))
        with quiet.connect() as sock, sock.makefile("rb") as incoming:
            sender = threading.Thread(target=sock.sendall, args=(commands,))
            sender.start()
            for i in range(count):
                digits = b"%d" % i
                assert incoming.readline() == b"$%d\r\n" % len(digits)
                assert incoming.readline() == digits + b"\r\n"
            sender.join()

    def test_pages_in_a_long_pipeline(self, quiet: RunningServer) -> None:
        noise = random.Random(7)
        bodies = [noise.randbytes(noise.choice((10, 5000, 70_000))) for _ in range(600)]
        writes = b"".join(set_page(page, body) for page, body in enumerate(bodies))
        reads = b"".join(encode_command([b"KVPAGEGET", *name(page)]) for page in range(len(bodies)))
        with Wire(quiet.port) as wire:
            sender = threading.Thread(target=wire.send, args=(writes + reads,))
            sender.start()
            assert {wire.reply() for _ in bodies} == {b"+OK\r\n"}
            for body in bodies:
                assert wire.reply() == b"$%d\r\n%b\r\n" % (len(body), body)
            sender.join()


class TestVanishing:
    @pytest.mark.parametrize("rudely", [False, True], ids=["closed", "reset"])
    def test_a_client_that_disconnects_within_a_body(
        self, quiet: RunningServer, honest: redis.Redis, rudely: bool
    ) -> None:
        honest.execute_command("KVPAGESET", *name(0), 1, 1, 1, 0, b"what was there")
        before, clients = arena_used(honest), honest.info("clients")["connected_clients"]
        socks = [quiet.connect() for _ in range(10)]
        for sock in socks:
            sock.sendall(set_page(0, bytes(4 * MIB))[: 2 * MIB])
        until(lambda: arena_used(honest) > before + 40 * MIB)
        for sock in socks:
            if rudely:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        until(lambda: arena_used(honest) == before)
        assert honest.info("clients")["connected_clients"] == clients
        assert honest.execute_command("KVPAGEGET", *name(0)) == b"what was there"

    def test_a_client_that_disconnects_during_a_reply(self, quiet: RunningServer, honest: redis.Redis) -> None:
        for page in range(64):
            honest.execute_command("KVPAGESET", *name(page), 1, 1024, 128, 0, bytes(BODY))
        before, clients = arena_used(honest), honest.info("clients")["connected_clients"]
        for _ in range(10):
            with quiet.connect() as sock:
                sock.sendall(get_pages(64))
                sock.recv(100_000)
        until(lambda: honest.info("clients")["connected_clients"] == clients)
        assert arena_used(honest) == before
        honest.flushall()
        assert arena_used(honest) == 0

    def test_short_connections_leave_nothing_open(self, quiet: RunningServer, honest: redis.Redis) -> None:
        descriptors = Path(f"/proc/{quiet.pid}/fd")
        clients = honest.info("clients")["connected_clients"]
        for _ in range(3):
            for sock in [quiet.connect() for _ in range(100)]:
                sock.close()
        until(lambda: honest.info("clients")["connected_clients"] == clients)
        if descriptors.exists():
            until(lambda: len(list(descriptors.iterdir())) < 40)


class TestSlowReaders:
    PAGES = 64  # 16 MiB

    @pytest.fixture
    def stored(self, honest: redis.Redis) -> list[bytes]:
        noise = random.Random(8)
        bodies = [noise.randbytes(BODY) for _ in range(self.PAGES)]
        for page, body in enumerate(bodies):
            honest.execute_command("KVPAGESET", *name(page), 1, 1024, 128, 0, body)
        return bodies

    def test_cost_no_memory_delay_no_client_and_lose_nothing(
        self, quiet: RunningServer, honest: redis.Redis, stored: list[bytes]
    ) -> None:
        """Ten clients that ask for 160 MiB each and read nothing; then one of them reads it all."""
        before, used = quiet.rss(), arena_used(honest)
        wires = [Wire(quiet.port) for _ in range(10)]
        for wire in wires:
            wire.send(get_pages(self.PAGES) * 10)
        assert p95(latencies(honest)) < PROMPT
        assert quiet.rss() < before + 24 * MIB
        assert arena_used(honest) == used
        for wire in wires[1:]:
            wire.close()
        expected = b"*%d\r\n" % self.PAGES + b"".join(b"$%d\r\n%b\r\n" % (len(body), body) for body in stored)
        assert all(wires[0].reply() == expected for _ in range(10))
        wires[0].close()
        assert quiet.rss() < before + 24 * MIB

    def test_pipelined_small_reads_without_reading_the_answers(self, quiet: RunningServer, honest: redis.Redis) -> None:
        """50 MB of answers asked for by a client that does not read: its requests wait in the kernel, not here."""
        honest.set("value", bytes(1000))
        before = quiet.rss()
        command = encode_command([b"GET", b"value"])
        with Wire(quiet.port) as wire:
            sender = threading.Thread(target=wire.send, args=(command * 50_000,))
            sender.start()
            time.sleep(1)
            assert p95(latencies(honest)) < PROMPT
            assert quiet.rss() < before + 24 * MIB
            expected = b"$1000\r\n" + bytes(1000) + b"\r\n"
            assert all(wire.reply() == expected for _ in range(50_000))
            sender.join()

    def test_a_value_overwritten_during_its_reply_arrives_whole(
        self, quiet: RunningServer, honest: redis.Redis
    ) -> None:
        """Every page of the answer is of one version or of another, never a mixture."""

        def write(version: int) -> None:
            body = bytes([version]) * BODY
            for page in range(self.PAGES):
                honest.execute_command("KVPAGESET", *name(page), 1, 1024, 128, 0, body)

        write(1)
        with quiet.connect() as sock, sock.makefile("rb") as incoming:
            sock.sendall(get_pages(self.PAGES))
            assert incoming.readline() == b"*%d\r\n" % self.PAGES
            for page in range(self.PAGES):
                if page % 16 == 0:
                    write(2 + page // 16)
                assert incoming.readline() == b"$%d\r\n" % BODY
                body = incoming.read(BODY + 2)
                assert len(set(body[:-2])) == 1, f"page {page} is torn"
        honest.flushall()
        until(lambda: arena_used(honest) == 0)

    def test_pipelines_are_answered_completely_under_shared_limits(self) -> None:
        """The limit that stopped a reply may be free again by the next check."""
        body, rounds, commands = bytes(300_000), 2, 150

        def read(server: RunningServer, seed: int, answered: list[int]) -> None:
            noise = random.Random(seed)
            with Wire(server.port) as wire:
                for _ in range(rounds):
                    wire.send(encode_command([b"GET", b"value"]) * commands)
                    time.sleep(noise.choice((0, 0.1)))
                    for _ in range(commands):
                        assert len(wire.reply()) == len(body) + 11
                        answered.append(seed)

        with start_server("--maxmemory", "512mb") as server, server.client() as client:
            client.set("value", body)
            answered: list[int] = []
            readers = [threading.Thread(target=read, args=(server, seed, answered)) for seed in range(8)]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            assert len(answered) == 8 * rounds * commands

    def test_a_deleted_page_that_is_being_sent_arrives(
        self, quiet: RunningServer, honest: redis.Redis, stored: list[bytes]
    ) -> None:
        with Wire(quiet.port) as wire:
            wire.send(encode_command([b"KVPAGEGET", *name(0)]) * 400)  # 100 MiB: more than the kernel and a turn take
            replies = [wire.reply()]
            honest.flushall()
            replies += [wire.reply() for _ in range(399)]
        whole = b"$%d\r\n%b\r\n" % (BODY, stored[0])
        assert set(replies) == {whole, b"$-1\r\n"}
        assert replies == sorted(replies, key=lambda reply: reply == b"$-1\r\n")  # pages, then nulls
        until(lambda: arena_used(honest) == 0)


class TestFairness:
    def test_half_open_connections_delay_no_client(self, quiet: RunningServer, honest: redis.Redis) -> None:
        beginnings = (b"", b"*", b"*3\r\n", b"*3\r\n$3\r\nSET\r\n$100000\r\nabc", b"PIN", b"*1\r\n$4\r\nPIN")
        socks = [quiet.connect() for _ in range(60)]
        for i, sock in enumerate(socks):
            sock.sendall(beginnings[i % len(beginnings)])
        assert p95(latencies(honest)) < PROMPT
        for sock in socks:
            sock.close()

    def test_a_client_that_never_pauses_does_not_stop_others(self, quiet: RunningServer, honest: redis.Redis) -> None:
        for page in range(1000):
            honest.execute_command("KVPAGESET", *name(page), 1, 8, 128, 0, bytes(2048))

        def ask(sock: socket.socket) -> None:
            try:
                while True:
                    sock.sendall(get_pages(1000) * 20 + encode_command([b"PING"]) * 2000)
            except OSError:
                return

        def drain(sock: socket.socket) -> None:
            with suppress(ConnectionResetError):
                while sock.recv(MIB):
                    pass

        with quiet.connect() as sock:
            threads = [threading.Thread(target=work, args=(sock,)) for work in (ask, drain)]
            for thread in threads:
                thread.start()
            waited = latencies(honest, 40)
            sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
        assert p95(waited) < PROMPT

    def test_memory_that_was_announced_but_never_sent_evicts_nothing(self) -> None:
        """A client that announces more than all clients may hold is closed before a page is evicted for it."""
        options = ("--maxmemory", "32mb", "--maxmemory-clients", "25%")
        with start_server(*options) as server, server.client() as client:
            for page in range(200):
                client.execute_command("KVPAGESET", *name(page), 1, 512, 128, 0, bytes(65536))
            socks = [server.connect() for _ in range(4)]
            for sock in socks:
                sock.sendall(b"*3\r\n$3\r\nSET\r\n$3\r\nbig\r\n$400000000\r\nabc")
            time.sleep(0.2)
            client.execute_command("KVPAGESET", *name(200), 1, 512, 128, 0, bytes(65536))
            assert all(client.execute_command("KVPAGEEXISTS", *name(page)) for page in range(201))
            for sock in socks:
                with sock:
                    assert sock.recv(100).startswith(b"-OOM connections hold more than maxmemory-clients, ")


class TestEnding:
    """Whatever the clients are doing, the server ends at once and in order."""

    @contextmanager
    def busy(self, server: RunningServer) -> Iterator[list[socket.socket]]:
        with server.client() as client:
            for page in range(64):
                client.execute_command("KVPAGESET", *name(page), 1, 1024, 128, 0, bytes(BODY))
        idle, uploading, downloading = (server.connect() for _ in range(3))
        uploading.sendall(set_page(0, bytes(8 * MIB))[:MIB])
        downloading.sendall(get_pages(64) * 4)  # and never reads it
        time.sleep(0.1)
        yield [idle, uploading, downloading]
        for sock in (idle, uploading, downloading):
            sock.close()

    @pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
    def test_a_signal_ends_it(self, how: signal.Signals) -> None:
        with start_server() as server, self.busy(server) as clients:
            assert server.stop(how) == 0
            for client in clients[:2]:
                assert client.recv(100) == b""
            assert "bye" in server.log

    @pytest.mark.parametrize("words", [[b"SHUTDOWN"], [b"SHUTDOWN", b"NOSAVE"]])
    def test_shutdown_ends_it(self, words: list[bytes]) -> None:
        with start_server() as server, self.busy(server), Wire(server.port) as wire:
            wire.send(encode_command(words))
            with pytest.raises(EOFError):
                wire.reply()
            assert server.process.wait(STOP_WITHIN) == 0

    def test_a_second_signal_is_harmless(self) -> None:
        with start_server() as server:
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(STOP_WITHIN) == 0

    def test_signals_are_harmless_to_the_very_end(self) -> None:
        with start_server() as server:
            while server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.0005)
            assert server.process.returncode == 0

    def test_its_port_is_free_again_at_once(self) -> None:
        with start_server() as server, server.client() as client:
            client.ping()
            server.stop()
            with start_server(port=server.port) as successor, successor.client() as other:
                assert other.ping()


def refused(*options: str) -> subprocess.CompletedProcess[str]:
    """Return the error of a server that cannot bind its address."""
    command = [sys.executable, "-m", "kvpage_server.app", "--store", "memory", *options]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100)


def test_a_port_in_use_is_named(quiet: RunningServer) -> None:
    result = refused("--bind", "127.0.0.1", "--port", str(quiet.port))
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{quiet.port}: Address already in use: stop the program that" in result.stderr
    assert "in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_address_of_another_machine_is_named() -> None:
    result = refused("--bind", "192.0.2.1", "--port", str(free_port()))
    assert result.returncode == 1
    assert "cannot listen on 192.0.2.1:" in result.stderr
