"""Pages for tests to ask about: stored over a connection, or in this process where a test can reach their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from servers import start_server

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.context import Client, Server
from kvpage_server.commands.dispatch.run import run
from kvpage_server.commands.specs import find
from kvpage_server.configuration.config import Config
from kvpage_server.core.pieces import Piece
from kvpage_server.resp import encode
from kvpage_server.store.keyspace import Keyspace


def set_page(client: redis.Redis, req: str = "r", page: int = 0, *, body: bytes = b"x" * 100, **at: Any) -> None:
    name = (req, at.get("layer", 0), at.get("head", 0), page, at.get("kv_type", 0))
    client.execute_command("KVPAGESET", *name, 3, 1, len(body), at.get("ttl", 0), body)


def set_block(client: redis.Redis, req: str, page: int, size: int = 100, ttl: int = 0) -> None:
    """A block of four pages of `size` bytes: one layer, two heads, K and V."""
    client.execute_command("KVBLOCKSET", req, page, 1, 2, 1, ttl, 2, 0, 3, size, 1, 3, size, bytes(4 * size))


def ask(client: redis.Redis, *words: Any) -> dict[str, Any]:
    reply = client.execute_command(*words)
    return {name.decode(): value.decode() if isinstance(value, bytes) else value for name, value in reply.items()}


def held(client: redis.Redis, req: str) -> list[int]:
    return [block[b"page"] for block in client.execute_command("KVPAGEINDEX", req)]


def prefix(client: redis.Redis, *names: Any, pages: int = 4, lease_ms: int = 0) -> int:
    return int(client.execute_command("KVPAGEPREFIX", pages, lease_ms, len(names) // 2, *names))


@contextmanager
def small_store() -> Iterator[redis.Redis]:
    """Room for some 60 blocks, half of which may be protected."""
    with start_server("--maxmemory", "256kb") as server, server.client() as client:
        yield client


def fill(client: redis.Redis, blocks: int = 100) -> None:
    """Write more than there is room for."""
    for page in range(blocks):
        set_block(client, "filler", page, size=800)


class Here:
    """A server's state and one client of it in this process, so that a test can reach the memory of a page."""

    def __init__(self, **options: Any) -> None:
        self.keyspace = Keyspace(**options)
        self.server = Server(Config(), self.keyspace, lambda: None)
        self.client = Client(self.server, "test", "test", connection=None)  # type: ignore[arg-type]

    def call(self, *given: Any) -> bytes:
        """Return the reply in RESP2."""
        words = [word if isinstance(word, bytes) else str(word).encode() for word in given]
        pieces: list[Piece] = []
        encode(run(self.client, find(words), list(words)), 2, pieces)
        return b"".join(piece if isinstance(piece, bytes) else bytes(piece.view) for piece in pieces)
