"""Memory of clients that read values from disk and do not read their replies: counted, bounded and freed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest
import redis
from health import MIB
from servers import FRESH, RunningServer, start_server
from waiting import until
from wire import Wire, encode_command

PAGE = 64 * 1024  # bytes
BLOCK = 64  # pages
BLOCKS = 32  # 128 MiB together
MAXMEMORY, CLIENTS = 32 * MIB, 16 * MIB


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    options = ("--store", "tiered", "--maxmemory", str(MAXMEMORY), "--maxmemory-clients", str(CLIENTS))
    with start_server(*options, directory=tmp_path, program=FRESH) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[redis.Redis]:
    """A client of a store with BLOCKS blocks of single pages, most of which are on disk only."""
    with server.client() as client:
        for block in range(BLOCKS):
            pages = [("p", layer, 0, block, 0, 1, 64, 512, 0, bytes([block]) * PAGE) for layer in range(BLOCK)]
            client.execute_command("KVPAGEMSET", BLOCK, *chain.from_iterable(pages))
        client.execute_command("SAVE")
        yield client


def own_memory(server: RunningServer) -> int:
    """Bytes of the process's memory without mapped files."""
    status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def memory(client: redis.Redis) -> dict[str, int]:
    return {name: int(client.info("memory")[name]) for name in ("used_memory", "mem_clients_normal")}


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process, from /proc")
def test_unread_values_from_disk_are_bounded(server: RunningServer, client: redis.Redis) -> None:
    before = own_memory(server)
    with ExitStack() as stack:
        for i in range(80):
            wire = stack.enter_context(Wire(server.port))
            wire.send(reading([(i + j) % BLOCKS for j in range(BLOCKS)]))
        until(lambda: client.info("stats")["evicted_clients"] > 20)
        assert own_memory(server) < before + 4 * CLIENTS
        until(lambda: CLIENTS // 2 < memory(client)["mem_clients_normal"] <= CLIENTS)
    until(lambda: memory(client)["mem_clients_normal"] == 0)
    until(lambda: memory(client)["used_memory"] <= MAXMEMORY)


def reading(blocks: list[int]) -> bytes:
    """KVPAGEMGET of all pages of some blocks."""
    names = [b"p %d 0 %d 0" % (layer, block) for block in blocks for layer in range(BLOCK)]
    return encode_command([b"KVPAGEMGET", b"%d" % len(names), *b" ".join(names).split()])
