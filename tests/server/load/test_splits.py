"""Blocks that were stored whole are split within the limits of the index, and few pages in one turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from keyspaces import block, set_block
from servers import start_server, with_constants

from kvpage_server.page import MAX_BLOCK_PAGES, DType, PageKey, encode_page

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


def test_few_blocks_are_split_by_one_command() -> None:
    with start_server() as server, server.client() as client:
        for page in range(2):
            set_block(client, "r", page, LARGE)
        keys = [PageKey(b"r", 0, 0, page, 0) for page in range(2)]
        values = {bytes(key): encode_page(key, b"a", dtype=DType.UINT8, page_size=1, head_dim=1) for key in keys}
        message = f"blocks of {2 * MAX_BLOCK_PAGES} pages, of which at most {MAX_BLOCK_PAGES} can be split at once"
        for write in (lambda: client.delete(*values), lambda: client.unlink(*values), lambda: client.mset(values)):
            with pytest.raises(redis.ResponseError, match=message):
                write()
        assert client.dbsize() == 2 * MAX_BLOCK_PAGES
        assert client.delete(next(iter(values)), "absent") == 1


def test_a_batch_for_several_whole_blocks_runs_in_steps() -> None:
    with start_server() as server, server.client() as client:
        for page in range(3):
            set_block(client, "r", page, LARGE)
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
