"""Every limit of the configuration, exceeded: the server stays healthy, other clients are served, memory is freed."""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
import redis
from health import MIB, unharmed
from servers import FRESH, STOP_WITHIN, RunningServer, free_port, start_server
from waiting import PATIENCE, until
from wire import Wire, encode_command

OPTIONS = ("--maxmemory", "512mb", "--client-query-buffer-limit", "80mb", "--proto-max-bulk-len", "70mb")


@pytest.fixture(scope="module")
def limited() -> Iterator[RunningServer]:
    """A server with limits that a test can reach."""
    with start_server(*OPTIONS) as server:
        yield server


@pytest.fixture
def client(limited: RunningServer) -> Iterator[redis.Redis]:
    with limited.client() as client:
        client.flushall()
        maxclients = client.config_get("maxclients")["maxclients"]  # the system may give fewer descriptors than wanted
        yield client
        client.config_set("maxclients", maxclients)
        client.config_set("timeout", 0)


def read_all(sock: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while part := sock.recv(65536):
            received += part
    return received


def is_over(sock: socket.socket, within: float = PATIENCE) -> bool:
    """Whether the peer ended the connection, whatever it had said before."""
    sock.settimeout(within)
    with suppress(ConnectionResetError):
        while sock.recv(MIB):
            pass
    return True


class TestConnections:
    def test_one_too_many_gets_an_error(self, limited: RunningServer, client: redis.Redis) -> None:
        with unharmed(limited), ExitStack() as stack:
            maxclients = client.config_get("maxclients")["maxclients"]
            client.config_set("maxclients", len(client.client_list()) + 5)
            before = client.info("stats")["rejected_connections"]
            wires = [stack.enter_context(Wire(limited.port)) for _ in range(5)]
            assert all(wire.ask(b"PING") == b"+PONG\r\n" for wire in wires)
            for _ in range(20):
                with limited.connect() as sock:
                    assert read_all(sock) == b"-ERR max number of clients reached\r\n"
            assert all(wire.ask(b"PING") == b"+PONG\r\n" for wire in wires)
            assert client.info("stats")["rejected_connections"] == before + 20
            client.config_set("maxclients", maxclients)

    def test_there_are_as_many_as_the_system_allows(self, tmp_path: Path) -> None:
        """With 96 descriptors: fewer clients, a line in the log, and no busy loop when even they run out."""
        port = free_port()
        command = (
            f"ulimit -n 96; exec '{sys.executable}' -m kvpage_server.app --port {port} --dir '{tmp_path}' "
            "--logfile log --store memory"
        )
        with subprocess.Popen(["/bin/sh", "-c", command]) as process, ExitStack() as stack:
            until(lambda: _listens(port))
            first = stack.enter_context(Wire(port))
            maxclients = int(first.ask(b"CONFIG", b"GET", b"maxclients").split(b"\r\n")[4])
            assert maxclients == 96 - 64
            refused = first.ask(b"CONFIG", b"SET", b"maxclients", b"1000")
            assert b"not able to handle the specified number of clients, try with 32" in refused
            assert first.ask(b"CONFIG", b"GET", b"maxclients").split(b"\r\n")[4] == b"32"
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (24, 96))
            for _ in range(80):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            assert first.ask(b"PING") == b"+PONG\r\n"
            line = "no connection can be accepted"
            until(lambda: line in (tmp_path / "log").read_text(encoding="utf-8"))
            before = _cpu_seconds(process.pid)
            time.sleep(1)
            assert _cpu_seconds(process.pid) - before < 0.5
            assert b"rejected_connections:0" not in first.ask(b"INFO", b"stats")
            assert (tmp_path / "log").read_text(encoding="utf-8").count(line) == 1
            stack.close()
            until(lambda: _answers(port))
            process.terminate()
            assert process.wait(STOP_WITHIN) == 0
            assert "maxclients is 32: the system gives 96 file descriptors" in (tmp_path / "log").read_text(
                encoding="utf-8"
            )

    @pytest.mark.parametrize("descriptors", [16, 64])
    def test_too_few_descriptors_for_one_are_refused(self, tmp_path: Path, descriptors: int) -> None:
        start = f"exec '{sys.executable}' -m kvpage_server.app --port {free_port()} --dir '{tmp_path}' --metrics-port 0"
        words = ["/bin/sh", "-c", f"ulimit -n {descriptors}; {start}"]
        result = subprocess.run(words, capture_output=True, timeout=60, encoding="utf-8", check=False)
        reason = f"the system gives {descriptors} file descriptors, and the server needs 64, and one for each client"
        assert (result.returncode, result.stderr) == (1, f"kvpage-server: maxclients: {reason} (ulimit -n)\n")

    def test_idle_ones_end(self, limited: RunningServer, client: redis.Redis) -> None:
        with unharmed(limited), Wire(limited.port) as listener, limited.connect() as idle, limited.connect() as busy:
            listener.ask(b"SUBSCRIBE", b"news")
            client.config_set("timeout", 2)
            idle.setblocking(False)
            until(partial(_has_ended_while_another_asks, idle, busy))
            client.publish("news", "listeners stay")
            assert b"listeners stay" in listener.reply()
            client.config_set("timeout", 0)
            assert client.info("stats")["idle_disconnections"] >= 1


def _listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def _answers(port: int) -> bool:
    with suppress(OSError, EOFError), Wire(port) as wire:
        return wire.ask(b"PING") == b"+PONG\r\n"
    return False


def _has_ended_while_another_asks(idle: socket.socket, busy: socket.socket) -> bool:
    busy.sendall(b"PING\r\n")
    assert busy.recv(7) == b"+PONG\r\n"
    return not _is_open(idle)


def _cpu_seconds(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        return sum(map(int, stat.read_text(encoding="utf-8").rpartition(")")[2].split()[11:13])) / os.sysconf(
            "SC_CLK_TCK"
        )
    received = subprocess.run(
        ["ps", "-o", "cputime=", "-p", str(pid)], capture_output=True, encoding="utf-8", check=True
    ).stdout
    hours, minutes, seconds = received.strip().rsplit("-", 1)[-1].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


class TestWhatIsSent:
    def test_a_string_too_long(self, limited: RunningServer) -> None:
        for length in (70 * MIB + 1, 2**40, 2**63, 10**30):
            with unharmed(limited), limited.connect() as sock:
                sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % length)
                assert read_all(sock) == b"-ERR Protocol error: invalid bulk length\r\n"

    def test_the_longest_string_passes(self, limited: RunningServer, client: redis.Redis) -> None:
        value = os.urandom(64 * MIB)
        client.set("k", value)
        assert client.get("k") == value
        client.execute_command("KVPAGESET", "r", 0, 0, 0, 0, 8, 64 * MIB, 1, 0, value)
        assert client.execute_command("KVPAGEGET", "r", 0, 0, 0, 0) == value
        client.flushall()

    def test_a_command_too_long(self, limited: RunningServer) -> None:
        """Long strings, each of which is allowed; and very many short ones."""
        for words in ([bytes(30 * MIB)] * 3, [b"ab"] * 2_000_000):
            with unharmed(limited, slack=32 * MIB), limited.connect() as sock:
                received = _send_until_refused(sock, encode_command([b"MSET", *words]))
                assert received in (b"", b"-ERR Protocol error: command exceeds client-query-buffer-limit\r\n")
        with limited.client() as client:
            assert client.dbsize() == 0

    def test_the_sum_of_all_clients_is_limited(self, limited: RunningServer, client: redis.Redis) -> None:
        """40 hostile clients each announce 60 MiB and send a little; an honest one stores large pages meanwhile."""
        body = os.urandom(20 * MIB)
        with unharmed(limited), ExitStack() as stack:
            before = client.info("stats")["evicted_clients"]
            socks = []
            for _ in range(40):
                sock = stack.enter_context(limited.connect())
                sock.sendall(b"*3\r\n$3\r\nSET\r\n$5\r\nlarge\r\n$%d\r\nabc" % (60 * MIB))
                socks.append(sock)
                client.execute_command("KVPAGESET", "r", 0, 0, 0, 0, 8, len(body), 1, 0, body)
                assert int(client.info("memory")["mem_clients_normal"]) <= 128 * MIB
            assert client.execute_command("KVPAGEGET", "r", 0, 0, 0, 0) == body
            assert client.info("stats")["evicted_clients"] - before >= 37
            assert sum(_is_open(sock) for sock in socks) <= 3
            client.flushall()

    def test_a_spared_client_stays(self, limited: RunningServer, client: redis.Redis) -> None:
        with unharmed(limited), Wire(limited.port) as spared, ExitStack() as stack:
            spared.ask(b"CLIENT", b"NO-EVICT", b"ON")
            announced = b"*3\r\n$3\r\nSET\r\n$5\r\nlarge\r\n$%d\r\nabc" % (60 * MIB)
            spared.send(announced)
            for _ in range(3):
                stack.enter_context(limited.connect()).sendall(announced)
            until(lambda: client.info("stats")["evicted_clients"])
            spared.send(bytes(60 * MIB - 3) + b"\r\n")
            assert spared.reply() == b"+OK\r\n"
            client.flushall()

    def test_a_byte_now_and_then(self, limited: RunningServer) -> None:
        with unharmed(limited), ExitStack() as stack:
            socks = [stack.enter_context(limited.connect()) for _ in range(30)]
            for byte in encode_command([b"SET", b"slow", b"and steady"]):
                for sock in socks:
                    sock.sendall(bytes([byte]))
                time.sleep(0.01)
            assert all(sock.recv(5) == b"+OK\r\n" for sock in socks)


def _send_until_refused(sock: socket.socket, data: bytes) -> bytes:
    """Return the server's error; empty if it only closes the connection."""
    with suppress(ConnectionError):
        sock.sendall(data)
    return read_all(sock)


def _is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) not in (b"", b"-")  # the end, or an error before it
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


class TestWhatIsNotRead:
    def test_messages_that_pile_up(self, limited: RunningServer, client: redis.Redis) -> None:
        """Beyond the hard limit of subscribers, immediately."""
        with unharmed(limited, slack=40 * MIB), Wire(limited.port) as deaf, Wire(limited.port) as listening:
            deaf.ask(b"SUBSCRIBE", b"news")
            listening.ask(b"SUBSCRIBE", b"news")
            events = 0
            for _ in range(45):
                client.publish("news", bytes(MIB))
                events += len(listening.reply()) > MIB
            assert events == 45
            until(lambda: client.info("stats")["client_output_buffer_limit_disconnections"] == 1)
            assert [entry["sub"] for entry in client.client_list() if entry["sub"] != "0"] == ["1"]

    def test_a_monitor_that_does_not_read_is_limited(self, limited: RunningServer, client: redis.Redis) -> None:
        before = client.info("stats")["client_output_buffer_limit_disconnections"]
        client.config_set("client-output-buffer-limit", "pubsub 1mb 0 0")
        with unharmed(limited), Wire(limited.port) as blind:
            blind.ask(b"MONITOR")
            for _ in range(200):  # the kernel may keep ten megabytes, or more, for who does not read
                pipeline = client.pipeline(transaction=False)
                for _ in range(1000):
                    pipeline.echo("x" * 500)
                pipeline.execute()
                if client.info("stats")["client_output_buffer_limit_disconnections"] > before:
                    break
            until(lambda: client.info("stats")["client_output_buffer_limit_disconnections"] == before + 1)
        client.config_set("client-output-buffer-limit", "pubsub 32mb 8mb 60")

    def test_a_soft_limit_for_too_long(self, limited: RunningServer, client: redis.Redis) -> None:
        """A great value that nobody fetches: for two seconds it may wait."""
        client.set("great", bytes(60 * MIB))
        client.config_set("client-output-buffer-limit", "normal 0 1mb 2")
        with unharmed(limited), limited.connect() as sock:
            sock.sendall(encode_command([b"GET", b"great"]))
            until(lambda: _waits_for(client) > 30 * MIB)
            until(lambda: _waits_for(client) == 0)
            client.config_set("client-output-buffer-limit", "normal 0 64mb 60")
        client.flushall()

    def test_a_reader_in_time_gets_everything(self, limited: RunningServer, client: redis.Redis) -> None:
        client.set("great", bytes(60 * MIB))
        client.config_set("client-output-buffer-limit", "normal 0 1mb 30")
        with unharmed(limited), Wire(limited.port) as wire:
            wire.send(encode_command([b"GET", b"great"]))
            time.sleep(0.5)
            assert len(wire.reply()) > 60 * MIB
        client.config_set("client-output-buffer-limit", "normal 0 64mb 60")
        client.flushall()

    def test_transactions_count_too(self, limited: RunningServer, client: redis.Redis) -> None:
        """Queued commands count: with more and more of them, the first client is closed."""
        with unharmed(limited, slack=48 * MIB), ExitStack() as stack:
            before = client.info("stats")["evicted_clients"]
            for _ in range(8):
                wire = stack.enter_context(Wire(limited.port))
                wire.ask(b"MULTI")
                wire.ask(b"SET", b"k", bytes(20 * MIB))
            assert int(client.info("memory")["mem_clients_normal"]) <= 128 * MIB
            assert client.info("stats")["evicted_clients"] > before


def test_memory_stays_within_the_documented_limit() -> None:
    """A third more than `maxmemory`, and 200 MB: whatever the sizes of values, which change again and again."""
    maxmemory, chance, most, count = 96, random.Random(1), 0, 0
    sizes = ((1, 600), (600, 20_000), (20_000, 400_000), (400_000, 4 * MIB), (4 * MIB, 20 * MIB))
    with start_server("--maxmemory", f"{maxmemory}mb", program=FRESH) as server, server.client() as client:
        for phase in range(15):
            low, high = sizes[phase % len(sizes)]
            left = maxmemory * MIB
            while left > 0 and count < 500 * (phase + 1):
                with client.pipeline(transaction=False) as pipe:
                    for _ in range(20):
                        size, count = chance.randint(low, high), count + 1
                        pipe.set(f"k{chance.randrange(5000)}", bytes(size))
                        left -= size
                    pipe.execute()
                most = max(most, server.rss())
            client.delete(*(f"k{i}" for i in range(0, 5000, 3)))
        assert int(client.info("memory")["used_memory"]) > maxmemory * MIB // 4
    assert most < maxmemory * MIB * 4 // 3 + 200 * MIB


def _waits_for(client: redis.Redis) -> int:
    return sum(int(entry["omem"]) for entry in client.client_list())


def test_closed_connections_leave_nothing(limited: RunningServer, client: redis.Redis) -> None:
    """Each in the middle of a command: its memory is freed with it, without a garbage collection."""

    def come_and_go(times: int) -> None:
        for i in range(times):
            with limited.connect() as sock:
                sock.sendall(beginnings[i % len(beginnings)])

    beginnings = [
        *(
            b"PING\r\n",
            b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100000\r\n" + bytes(50_000),
            encode_command([b"SUBSCRIBE", b"a"]),
        ),
        *(
            encode_command([b"MULTI"]) + encode_command([b"SET", b"k", bytes(5000)]),
            encode_command([b"MONITOR"]),
            b"*1000\r\n$1\r\na\r\n",
        ),
    ]
    come_and_go(600)
    with unharmed(limited, slack=2 * MIB):
        threads = [threading.Thread(target=come_and_go, args=(1500,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: len(client.client_list()) <= 2)


def test_many_small_commands_stay_within_the_limit() -> None:
    """Connections are closed in groups, because each search for them passes over all connections."""
    with start_server("--maxmemory-clients", "2mb") as server, server.client() as client, ExitStack() as stack:
        for _ in range(400):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$11000\r\n")
        until(lambda: client.info("stats")["evicted_clients"] >= 209)
        assert client.info("memory")["mem_clients_normal"] <= 2 << 20
        assert client.info("clients")["connected_clients"] > 170
