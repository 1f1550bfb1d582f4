"""LMCache, an unmodified client: its native RESP client byte for byte, and LMCache itself if it is installed.

That client compares bytes, has one command outstanding on a connection, sends no handshake, and treats any other reply
as fatal; see `csrc/storage_backends/redis` in LMCache 0.5.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import documents
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


PORT = 9221  # of the documented configurations, which are tested
ADAPTERS = documents.blocks("docs/lmcache.md", "json")
(REMOTE,) = documents.blocks("docs/lmcache.md", "yaml")


def test_documented_configurations_name_plugin_and_clients() -> None:
    assert [json.loads(adapter)["type"] for adapter in ADAPTERS] == ["plugin", "resp", "valkey"]
    assert f'remote_url: "redis://127.0.0.1:{PORT}"' in REMOTE


ROOT = documents.ROOT
PLUGIN = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "connectors")])}  # of LMCache's process
LMCACHE = os.environ.get("LMCACHE") or shutil.which("lmcache")
needs_lmcache = pytest.mark.skipif(
    not LMCACHE, reason="needs LMCache: several GB with torch; LMCACHE=... says where its command is"
)


@needs_lmcache
@pytest.mark.lmcache
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: json.loads(adapter)["type"])
def test_lmcache_by_its_storage_adapters(adapter: str) -> None:
    """Its own benchmark, which stores, looks up, reads and compares."""
    with start_server("--maxmemory", "2gb") as server:
        description = adapter.replace(str(PORT), str(server.port))
        words = ["bench", "l2", "--l2-adapter", description, "--num-keys", "32", "--data-size-kb", "256"]
        options = ["--rounds", "3", "--no-skip-verify", "--lookup-max-hit-rate", "1.0"]
        command = [str(LMCACHE), *words, *options]
        environment = {**os.environ, **PLUGIN}
        result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100, env=environment)
        assert result.returncode == 0, result.stdout + result.stderr
        with server.client() as client:
            assert client.info("stats")["keyspace_hits"] >= 96


@needs_lmcache
@pytest.mark.lmcache
@pytest.mark.parametrize(("faults", "loaded"), [([], 8), ([2, 5], 6)], ids=["plugin", "plugin with faults"])
def test_lmcache_checks_the_plugin(faults: list[int], loaded: int) -> None:
    """Its own check, also through its adapter that makes loads fail."""
    python = Path(str(LMCACHE)).with_name("python")
    with start_server() as server:
        adapter = json.loads(ADAPTERS[0].replace(str(PORT), str(server.port)))
        if faults:
            adapter = {"type": "fault_inject", "gap_indices": faults, "inner": adapter}
        command = [python, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--model", "m"]
        result = subprocess.run(
            [*command, "--num-keys", "8", "--l2-adapter", json.dumps(adapter)],
            capture_output=True,
            encoding="utf-8",
            timeout=100,
            env={**os.environ, **PLUGIN},
        )
    found = [line.strip() for line in result.stdout.splitlines() if "Validation" in line]
    assert found == [
        "Validation: 8/8 correctly absent",
        "Validation: 8/8 found",
        f"Validation (loaded): {loaded}/8",
        f"Validation (content): {loaded}/8",
    ]


@needs_lmcache
@pytest.mark.lmcache
def test_lmcache_by_its_remote_backend(tmp_path: Path) -> None:
    """Its own check of a remote, which goes through redis-py."""
    python = Path(str(LMCACHE)).with_name("python")
    with start_server() as server:
        config = tmp_path / "lmcache.yaml"
        config.write_text(REMOTE.replace(str(PORT), str(server.port)), encoding="utf-8")
        process = subprocess.Popen(
            [python, "-m", "lmcache.v1.basic_check", "--mode", "test_remote"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env={**os.environ, "LMCACHE_CONFIG_FILE": str(config)},
        )
        assert process.stdout
        received = []
        for line in process.stdout:
            received.append(line)
            if "Performance Results" in line:  # its threads keep it from ending, whatever server it talked to
                break
        process.kill()
        process.wait()
        process.stdout.close()
        assert "  Validation (content correct): 5/5 passed (100.0%)\n" in received, "".join(received)


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
