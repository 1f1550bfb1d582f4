"""Eight clients write, read, delete and expire the same pages: all that is read was written whole by one of them.

A version is a number, and every eight bytes of a page say it: a page torn between two of them, or made of another's
memory, gives itself away. `make soak` lets it last a minute.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import redis
from servers import RunningServer, start_server

from kvpage_server.client import Page, PageClient
from kvpage_server.page import BlockShape, DType, PageKey, Plane, decode_page

CLIENTS = 8
REQUESTS = [b"shared", b"other"]
SHAPE = BlockShape(layers=2, heads=4, page_size=32, planes=(Plane(0, DType.FLOAT16, 64), Plane(1, DType.FLOAT16, 64)))
KEYS = [
    PageKey(req_id, layer, head, page, kv_type)
    for req_id in REQUESTS
    for page in range(3)
    for layer in range(SHAPE.layers)
    for kv_type in (0, 1)
    for head in range(SHAPE.heads)
]
ROWS = [8, 32, 128]  # of a page: 1, 4 and 16 KiB


class Client:
    """A client of the shared pages. Versions of client n are n, n + 8, n + 16 ..."""

    def __init__(self, number: int, server: RunningServer, issued: list[int]) -> None:
        self.number = number
        self.issued = issued  # the last version of each client
        self.rng = random.Random(number)
        self.pages = PageClient(server.url)
        self.redis: Any = redis.Redis(port=server.port)
        self.done = 0

    def new_version(self) -> int:
        self.issued[self.number] += CLIENTS
        return self.issued[self.number]

    def body(self, nbytes: int) -> Any:
        return np.full(nbytes // 8, self.new_version(), np.uint64)

    def some_keys(self) -> list[PageKey]:
        return self.rng.sample(KEYS, self.rng.choice([1, 5, 40]))

    def check(self, body: Any) -> None:
        """It is one version throughout, that somebody has issued."""
        words = np.frombuffer(body, np.uint64)
        version = int(words[0])
        assert (words == version).all(), f"torn: {np.unique(words)}"
        assert 0 < version <= self.issued[version % CLIENTS]

    def write_pages(self) -> None:
        rows = self.rng.choice(ROWS)
        pages = [Page(key, self.body(rows * 128), DType.FLOAT16, rows, 64) for key in self.some_keys()]
        self.pages.mset(pages, ttl=self.rng.choice([0, 0, 1]))

    def write_a_block(self) -> None:
        name = (self.rng.choice(REQUESTS), self.rng.randrange(3))
        self.pages.set_block(name, SHAPE, self.body(SHAPE.nbytes), ttl=self.rng.choice([0, 1]))

    def read_pages(self) -> None:
        for page in self.pages.mget(self.some_keys()):
            if page is not None:
                self.check(page.body)

    def read_blobs(self) -> None:
        for blob in self.redis.mget([bytes(key) for key in self.some_keys()]):
            if blob is not None:
                self.check(decode_page(blob)[1])  # which compares the checksum, too

    def read_a_block(self) -> None:
        """Its pages may be of different versions, each of one. One that lost a layer or a head has fewer."""
        req_id, page = self.rng.choice(REQUESTS), self.rng.randrange(3)
        with self.redis.pipeline(transaction=True) as asked:
            for command in (("KVPAGEINDEX", req_id), ("KVBLOCKGET", req_id, page), ("KVPAGEINDEX", req_id)):
                asked.execute_command(*command)
            before, body, after = asked.execute()
        if body is None or before != after:  # some expired meanwhile
            return
        (pages,) = (block[b"pages"] for block in after if block[b"page"] == page)
        for piece in np.frombuffer(body, np.uint64).reshape(pages, -1):
            self.check(np.ascontiguousarray(piece))

    def delete_some(self) -> None:
        self.redis.delete(*map(bytes, self.some_keys()))

    def delete_blocks(self) -> None:
        self.redis.execute_command("KVPAGEDEL", self.rng.choice(REQUESTS), self.rng.randrange(3))

    def let_some_expire(self) -> None:
        for key in self.some_keys()[:5]:
            self.redis.pexpire(bytes(key), self.rng.choice([1, 20, 500]))

    def fight(self, until: float, over: threading.Event) -> None:
        reads = [self.read_pages, self.read_blobs, self.read_a_block] * 3
        writes = [self.write_pages, self.write_pages, self.write_a_block]
        deeds: list[Callable[[], None]] = [*reads, *writes, self.delete_some, self.delete_blocks, self.let_some_expire]
        try:
            while time.monotonic() < until and not over.is_set():
                self.rng.choice(deeds)()
                self.done += 1
        except BaseException:
            over.set()
            raise
        finally:
            self.pages.close()
            self.redis.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("memory", ["0", "600kb"])
def test_every_byte_read_is_of_a_version_that_was_written_whole(seconds: float, memory: str) -> None:
    with start_server("--maxmemory", memory) as server:
        issued = list(range(CLIENTS))
        clients = [Client(number, server, issued) for number in range(CLIENTS)]
        until, over = time.monotonic() + seconds, threading.Event()
        with ThreadPoolExecutor(CLIENTS) as threads:
            for fight in [threads.submit(client.fight, until, over) for client in clients]:
                fight.result()
        assert sum(client.done for client in clients) > 10 * seconds
        with server.client() as client:
            checked = [client.execute_command("KVPAGEVERIFY", req_id) for req_id in REQUESTS]
            assert list(itertools.chain(*(found[b"corrupt"] for found in checked))) == []
            client.flushall()
            assert int(client.info("memory")["arena_used"]) == 0
