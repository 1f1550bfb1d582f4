"""Blocks that were stored whole are split within the limits of the index, and few pages in one turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from keyspaces import block, set_block
from servers import start_server, with_constants
from stored_pages import Here

from kvpage_server.commands.dispatch.checks import Postponed
from kvpage_server.page import MAX_BLOCK_PAGES, MAX_SINGLE_PAGES, DType, PageKey, encode_page

SHAPE = block([(0, DType.UINT8, 1)], layers=64, heads=64, page_size=1)  # 4,096 pages
LARGE = block([(0, DType.UINT8, 1)], layers=512, heads=256, page_size=1)
INDEX = 4 << 20  # bytes: of four such blocks that are split
ONE_MORE = 1_200_000  # bytes of the index of a split block


@pytest.mark.parametrize("store", ["memory", "tiered"])
@pytest.mark.parametrize("policy", ["allkeys-prefix", "noeviction"])
def test_splits_stay_within_the_limit_of_the_index(tmp_path: Path, store: str, policy: str) -> None:
    options = ("--store", store, "--maxmemory", f"{INDEX}", "--maxmemory-policy", policy)
    program = with_constants("kvpage_server.store.evict", LEAST_INDEX=0)
    with start_server(*options, directory=tmp_path, program=program) as server, server.client() as client:
        for page in range(30):
            set_block(client, "r", page, SHAPE)
        refused = 0
        for page in range(30):
            try:
                client.delete(f"kv:r:0:0:{page}:0")
            except redis.OutOfMemoryError:
                refused += 1
            assert client.info("memory")["used_memory_index"] < INDEX + ONE_MORE
        assert bool(refused) == (policy == "noeviction")
        if refused:
            with pytest.raises(redis.OutOfMemoryError, match="the index takes more than"):
                client.delete("kv:r:0:0:29:0")
        assert bool(client.info("stats")["evicted_keys"]) == (policy != "noeviction")


@pytest.mark.parametrize("command", ["DEL", "MSET", "MSETNX"])
def test_blocks_of_one_command_are_split_one_after_another(command: str) -> None:
    """Each step splits one block while more than 8,192 pages are left to split."""
    here, steps = Here(), 0
    for page in range(5):
        here.call("KVBLOCKSET", "r", page, 64, 64, 1, 0, 1, 0, int(DType.UINT8), 1, bytes(4096))
    names = [f"kv:r:0:{64 * (command == 'MSETNX')}:{page}:0" for page in range(5)]
    words = names if command == "DEL" else [word for name in names for word in (name, "string")]
    while True:
        try:
            assert here.call(command, *words) in (b":5\r\n", b":1\r\n", b"+OK\r\n")
            break
        except Postponed:
            steps += 1
    assert steps == 3
    assert len(here.keyspace) == 5 * 4096 - 5 * (command == "DEL") + 5 * (command == "MSETNX")


def test_a_transaction_splits_all_of_its_blocks() -> None:
    with start_server() as server, server.client() as client:
        for page in range(5):
            set_block(client, "r", page, SHAPE)
        with client.pipeline(transaction=True) as transaction:
            transaction.delete(*(f"kv:r:0:0:{page}:0" for page in range(5)))
            assert transaction.execute() == [5]
        assert client.dbsize() == 5 * 4095


def pages(first: int, count: int, page: int = 0) -> list[object]:
    return [word for at in range(first, first + count) for word in ("r", at // 64, at % 64, page, 0, 8, 1, 1, 0, b"a")]


def test_pages_beside_a_block_stored_whole_are_counted() -> None:
    with start_server() as server, server.client() as client:
        set_block(client, "r", 0, block([(0, DType.UINT8, 1)], layers=128, heads=64, page_size=1))
        for count in (100, 600):  # a batch of one step, and one of several
            with pytest.raises(redis.ResponseError, match="a block has at most 8192 pages that are stored one by one"):
                client.execute_command("KVPAGEMSET", count, *pages(MAX_SINGLE_PAGES, count))
        assert client.dbsize() == MAX_SINGLE_PAGES


def test_a_block_has_few_pages_that_are_stored_one_by_one() -> None:
    name = PageKey(b"r", 500, 0, 0, 0)
    blob = encode_page(name, b"a", dtype=DType.UINT8, page_size=1, head_dim=1)
    with start_server() as server, server.client() as client:
        client.execute_command("KVPAGEMSET", MAX_SINGLE_PAGES - 90, *pages(90, MAX_SINGLE_PAGES - 90))
        more = [
            ("KVPAGEMSET", 91, *pages(MAX_SINGLE_PAGES, 91)),
            ("KVPAGEMSET", 1000, *pages(MAX_SINGLE_PAGES, 1000)),
        ]
        for words in more:
            with pytest.raises(redis.ResponseError, match="a block has at most 8192 pages that are stored one by one"):
                client.execute_command(*words)
        client.execute_command("KVPAGEMSET", 1000, *pages(0, 1000))  # 910 of them replace others
        assert client.dbsize() == MAX_SINGLE_PAGES
        for words in (*more, ("KVPAGESET", *pages(MAX_SINGLE_PAGES, 1)), ("SET", bytes(name), blob)):
            with pytest.raises(redis.ResponseError, match="use several page ids, or KVBLOCKSET"):
                client.execute_command(*words)
        with pytest.raises(redis.ResponseError, match="a block has at most 8192 pages"):
            client.mset({bytes(name): blob, "other": "value"})
        assert client.dbsize() == MAX_SINGLE_PAGES
        client.execute_command("KVPAGEMSET", 200, *pages(MAX_SINGLE_PAGES, 200, page=1))
        client.delete("kv:r:0:0:0:0")
        client.set(bytes(name), blob)
        assert client.dbsize() == MAX_SINGLE_PAGES + 200


@pytest.mark.parametrize("store", ["memory", "tiered"])
def test_a_large_whole_block_changes_only_as_a_whole(tmp_path: Path, store: str) -> None:
    key = "kv:r:0:0:0:0"
    with start_server("--store", store, directory=tmp_path) as server, server.client() as client:
        body = set_block(client, "r", 0, LARGE)
        for words in (
            ("DEL", key),
            ("DEL", key, "kv:r:1:0:0:0"),
            ("SET", key, "string"),
            ("MSET", "other", "value", key, "string"),
            ("EXPIRE", key, 100),
            ("GETDEL", key),
            ("KVPAGESET", *pages(0, 1)),
            ("KVPAGEMSET", 200, *pages(0, 200)),
        ):
            with pytest.raises(
                redis.ResponseError, match="the block has 131072 pages and was stored as a whole: one of"
            ):
                client.execute_command(*words)
        assert client.dbsize() == MAX_BLOCK_PAGES
        assert client.execute_command("KVBLOCKGET", "r", 0) == body
        set_block(client, "r", 0, SHAPE)
        assert client.delete(key) == 1
        set_block(client, "r", 0, LARGE)
        assert client.execute_command("KVPAGEDEL", "r") == MAX_BLOCK_PAGES


def test_a_batch_for_several_whole_blocks_runs_in_steps() -> None:
    with start_server() as server, server.client() as client:
        for page in range(3):
            set_block(client, "r", page, SHAPE)
        pages = [word for page in range(3) for word in ("r", 0, 0, page, 0, 8, 1, 1, 0, b"a")]
        assert client.execute_command("KVPAGEMSET", 3, *pages) == b"OK"
        assert [client.execute_command("KVPAGEGET", "r", 0, 0, page, 0) for page in range(3)] == [b"a"] * 3


def test_many_names_of_an_index_are_looked_up_at_once() -> None:
    with start_server() as server, server.client() as client:
        pages = [word for page in range(20_000) for word in ("r", 0, 0, page, 0, 8, 1, 1, 0, b"a")]
        for start in range(0, len(pages), 10_000):
            some = pages[start : start + 10_000]
            client.execute_command("KVPAGEMSET", len(some) // 10, *some)
        for command in ("EXISTS", "TOUCH"):
            assert client.execute_command(command, *["kv:r:index"] * 1000) == 1000
        stats = client.info("commandstats")
        assert all(stats[f"cmdstat_{name}"]["usec"] < 200_000 for name in ("exists", "touch"))
