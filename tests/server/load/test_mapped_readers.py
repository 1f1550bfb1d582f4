"""Readers of mapped memory while other clients write, delete and evict: blocks are whole, and nothing stays held."""

from __future__ import annotations

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import redis
from servers import RunningServer, start_server
from waiting import until

from kvpage_server.client import PageClient
from kvpage_server.page import BlockShape, DType, KVType, Plane

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs sealed shared memory of Linux")

SHAPES = [  # of 64 KiB to 1 MiB, so that slots of other sizes take the memory of evicted blocks
    BlockShape(layers, 4, 64, (Plane(KVType.K, DType.FLOAT16, 64), Plane(KVType.V, DType.FLOAT16, 64)))
    for layers in (1, 3, 7, 16)
]
NAMES = 160  # more than fit into memory
BATCH = 8


def body_of(number: int, generation: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return a body that differs for each block and each generation: the first word says which one it is."""
    nbytes = SHAPES[number % len(SHAPES)].nbytes
    body = np.arange(nbytes // 4, dtype=np.uint32) * np.uint32(2 * number + 1) + np.uint32(generation)
    body[0] = generation
    return body


def write(url: str, rounds: int, seed: int) -> None:
    """Write and delete blocks."""
    chance = random.Random(seed)
    with PageClient(url, deadline=60) as client:
        for generation in range(rounds):
            number = chance.randrange(NAMES)
            shape = SHAPES[number % len(SHAPES)]
            client.set_block((b"b%d" % number, 0), shape, body_of(number, seed * rounds + generation))
            if generation % 7 == 0:
                client.delete_request(b"b%d" % chance.randrange(NAMES))


def read(url: str, rounds: int, seed: int) -> int:
    """Read blocks, copied or in place, and check their bytes. Return the number of read blocks."""
    chance, found = random.Random(seed), 0
    with PageClient(url, deadline=60) as client:
        for _ in range(rounds):
            kind = chance.randrange(len(SHAPES))
            numbers = [chance.randrange(NAMES // len(SHAPES)) * len(SHAPES) + kind for _ in range(BATCH)]
            names = [(b"b%d" % number, 0) for number in numbers]
            memory = [np.zeros(SHAPES[kind].nbytes // 4, np.uint32) for _ in numbers]
            if chance.random() < 0.5:
                missed = client.fetch_blocks_into(names, SHAPES[kind], memory)
                bodies = [None if why else body for why, body in zip(missed, memory, strict=True)]
                check(numbers, bodies)
            else:
                with client.blocks_in_place(names, SHAPES[kind]) as views:
                    bodies = [None if view is None else np.frombuffer(view, np.uint32) for view in views]
                    check(numbers, bodies)
            found += sum(body is not None for body in bodies)
            del bodies
        assert set(client.misses) <= {"absent"}
        assert client.mapped_bytes
    return found


def check(numbers: list[int], bodies: list[np.ndarray[tuple[int], np.dtype[np.uint32]] | None]) -> None:
    for number, body in zip(numbers, bodies, strict=True):
        if body is not None:
            assert np.array_equal(body, body_of(number, int(body[0])))


def read_until_killed(url: str) -> BaseProcess:
    """Start a process that reads for ever. It is forked from one without threads: this one may have those of MLX."""
    processes = get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    process = processes.Process(target=read, args=(url, 1 << 30, 5), daemon=True)
    process.start()
    return process


def held(client: redis.Redis) -> int:
    return int(client.info("memory")["mem_clients_normal"])


def shared_memory(server: RunningServer) -> int:
    """Number of descriptors of shared memory of the server."""
    links = []
    for entry in Path(f"/proc/{server.pid}/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(entry))
    return sum("memfd:kvpage" in link for link in links)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("store", ["memory", "tiered"])
@pytest.mark.parametrize("rounds", [150, pytest.param(5000, marks=pytest.mark.soak)])
def test_readers_get_whole_blocks(tmp_path: Path, rounds: int, store: str) -> None:
    path = tmp_path / "socket"
    options = ("--store", store, "--maxmemory", "24mb", "--maxmemory-clients", "32mb", "--unixsocket", str(path))
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        url = f"unix://{path}"
        for number in range(NAMES):
            with PageClient(url) as writer:
                writer.set_block((b"b%d" % number, 0), SHAPES[number % len(SHAPES)], body_of(number, 1))
        killed = [read_until_killed(url) for _ in range(2)]
        try:
            with ThreadPoolExecutor(4) as threads:
                writers = [threads.submit(write, url, rounds, seed) for seed in (1, 2)]
                readers = [threads.submit(read, url, rounds, seed) for seed in (3, 4)]
                for process in killed:
                    assert process.is_alive()  # it reads on
                    process.kill()
                for writer_done in writers:
                    writer_done.result()
                assert all(reader.result() for reader in readers)
        finally:
            for process in killed:
                process.kill()
                process.join()
        if store == "memory":
            assert client.info("stats")["evicted_keys"] > 0
        until(lambda: held(client) < 1 << 16, "the end of the tickets")
        client.flushall()
        assert shared_memory(server) < 10
        until(lambda: int(client.info("memory")["used_memory"]) < 4 << 20, "the memory being free")
