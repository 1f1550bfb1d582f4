"""Blocks that grow page by page stay within `maxmemory`, their quota, and the limit of protected values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from servers import start_server

MB = 1 << 20
OTHERS = [f"other{number}" for number in range(8)]
LEASE = ("KVPAGELEASE", "own.r", "60000")
PROTECTIONS = [LEASE, ("KVPAGEPIN", "own.r"), ("KVPAGEKEEP", "own", "1", "60", "kv:own.r:0:0:0:0")]
PROTECTED = "leased, pinned and kept values take more than"


@contextmanager
def server_with(directory: Path, store: str, *options: str) -> Iterator[redis.Redis]:
    """A store of 24 MB, with strings of other tenants and the first page of a block."""
    options = ("--store", store, "--maxmemory", "24mb", *options)
    with start_server(*options, directory=directory) as server, server.client() as client:
        for name in OTHERS:
            client.set(name, bytes(MB))
        client.execute_command("KVPAGESET", *page(0, 1))
        yield client


def page(head: int, size: int = MB) -> tuple[object, ...]:
    return "own.r", 0, head, 0, 0, 8, 1, size, 0, bytes(size)


def grow(client: redis.Redis, heads: int, refusal: str) -> int:
    """Add pages of 1 MB to the block until one is refused. Return the number of pages that were stored."""
    for head in range(1, heads):
        try:
            client.execute_command("KVPAGESET", *page(head))
        except redis.ResponseError:
            with pytest.raises(redis.ResponseError, match=refusal):
                client.execute_command("KVPAGESET", *page(head))
            return head - 1
    return heads


def test_a_look_by_exists_does_not_limit_a_block(tmp_path: Path) -> None:
    with server_with(tmp_path, "memory", "--quota", "kv:own.* 8mb") as client:
        assert client.exists("kv:own.r:0:0:0:0")
        assert grow(client, 6, "never") == 6


@pytest.mark.parametrize("store", ["memory", "tiered"])
@pytest.mark.parametrize("protect", PROTECTIONS, ids=["lease", "pin", "lifetime"])
@pytest.mark.parametrize(("options", "most"), [(("--quota", "kv:own.* 8mb"), 4), ((), 12)], ids=["quota", "all"])
def test_a_protected_block_does_not_grow_above_its_limit(
    tmp_path: Path, store: str, protect: tuple[str, ...], options: tuple[str, ...], most: int
) -> None:
    with server_with(tmp_path, store, *options) as client:
        client.execute_command(*protect)
        assert grow(client, 40, PROTECTED) == most - 1  # a page takes a bit more than 1 MB
        assert client.info("kvpage")["leased_or_pinned_bytes"] <= most * MB
        assert client.exists(*OTHERS) == len(OTHERS)
        client.execute_command("KVPAGESET", *page(1))  # a page of the same size may be stored again
        with pytest.raises(redis.ResponseError, match=PROTECTED):
            client.execute_command("KVPAGEMSET", 2, *page(1, MB + 20_000), *page(2, 2 * MB))
        with pytest.raises(redis.ResponseError, match=PROTECTED):
            client.execute_command("KVBLOCKSET", "own.r", 0, 1, 1, 1, 0, 1, 0, 8, 13 * MB, bytes(13 * MB))
        client.execute_command("KVBLOCKSET", "own.r", 0, 1, 1, 1, 0, 1, 0, 8, MB, bytes(MB))


def test_a_page_blob_for_a_protected_block_is_refused_as_well(tmp_path: Path) -> None:
    with server_with(tmp_path, "memory", "--quota", "kv:own.* 4mb") as client:
        client.execute_command("KVPAGESET", "own.r", 0, 1, 0, 0, 8, 1, 3 * MB, 0, bytes(3 * MB))
        blob = client.get("kv:own.r:0:1:0:0")
        client.delete("kv:own.r:0:1:0:0")
        client.execute_command(*LEASE)
        for words in ("SET", "kv:own.r:0:1:0:0", blob), ("MSET", "kv:own.r:0:1:0:0", blob):
            with pytest.raises(redis.ResponseError, match=PROTECTED):
                client.execute_command(*words)


@pytest.mark.parametrize("store", ["memory", "tiered"])
def test_a_block_does_not_grow_above_its_quota(tmp_path: Path, store: str) -> None:
    with server_with(tmp_path, store, "--quota", "kv:own.* 8mb") as client:
        assert grow(client, 40, "the quota of .*, 8388608 bytes, is used up") == 7
        assert client.info("quotas")["quota0"]["bytes"] <= 8 * MB
        assert client.exists(*OTHERS) == len(OTHERS)


def test_writers_wait_until_a_large_block_can_leave_memory(tmp_path: Path) -> None:
    with server_with(tmp_path, "tiered") as client:
        for head in range(1, 100):
            client.execute_command("KVPAGESET", *page(head))
            assert client.info("memory")["used_memory"] <= 32 * MB  # maxmemory and the write-behind queue
        assert client.execute_command("KVPAGEGET", "own.r", 0, 1, 0, 0) == bytes(MB)
        assert client.exists(*OTHERS) == len(OTHERS)
