"""Blocks stored whole: one piece of memory however many pages, and no page of a damaged one passes for the page."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
import redis

from kvpage_server.page import MAX_BLOCK_PAGES, BlockShape, DType, PageError, Plane, checksum, decode_page, unix_ms
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.entry import is_page
from kvpage_server.store.memory.index import Extent, ExtentPage

SHAPE = BlockShape(layers=8, heads=8, page_size=4, planes=(Plane(0, DType.FLOAT16, 8), Plane(1, DType.FLOAT16, 8)))
BODY = random.Random(7).randbytes(SHAPE.nbytes)


def store(keys: Keyspace, page: int, body: bytes = BODY, digest: int | None = None) -> Extent:
    found = checksum(body) if digest is None else digest
    extent = Extent(SHAPE, keys.contents.slot_of(body), found, unix_ms(), 0)
    keys.set_block(b"r", page, extent)
    return extent


def test_a_blocks_overhead_per_page_is_small() -> None:
    shape = BlockShape(32, 8, 16, (Plane(0, DType.UINT8, 1), Plane(1, DType.UINT8, 1)))  # 512 pages
    keys, body = Keyspace(), bytes(shape.nbytes)
    keys.set_block(b"warm up", 0, Extent(shape, keys.contents.slot_of(body), 1, 1, 0))
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(500):
            keys.set_block(b"%064x" % number, 0, Extent(shape, keys.contents.slot_of(body), 1, 1, 0))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] / (500 * shape.pages) < 8
    finally:
        tracemalloc.stop()
    assert len(keys) == 501 * shape.pages


def test_a_page_that_changes_splits_its_block_without_a_copy() -> None:
    keys = Keyspace()
    extent = store(keys, 0)
    before = keys.arena.used
    assert keys.contents.delete(b"kv:r:0:0:0:0")
    assert keys.arena.used == before
    block = keys.reader.block(b"r", 0)
    assert block is not None
    assert block.pages == SHAPE.pages - 1
    assert all(
        isinstance(page, ExtentPage) and page.extent is extent for page in keys.reader.pages_at(block.page_keys())
    )
    del block, extent
    for key in keys.listing.names():
        keys.contents.delete(key)
    assert keys.arena.used == 0


def test_every_page_of_an_intact_block_matches_its_header() -> None:
    keys = Keyspace()
    store(keys, 3)
    for name, span in zip(keys.listing.names(), SHAPE.page_spans(), strict=True):
        page = keys.contents.find(name)
        assert is_page(page)
        header, body = decode_page(bytes(page.header) + bytes(page.body))
        assert (bytes(body), b"kv:r:%d:%d:3:%d" % (header.layer, header.head, header.kv_type)) == (BODY[span], name)


def test_no_page_of_a_damaged_block_passes_for_the_page() -> None:
    keys = Keyspace()
    extent = store(keys, 0)
    extent.slot.body[100] ^= 1
    for name in keys.listing.names():
        page = keys.contents.find(name)
        assert is_page(page)
        with pytest.raises(PageError, match="checksum"):
            decode_page(bytes(page.header) + bytes(page.body))


def test_verify_counts_the_pages_of_whole_blocks(client: redis.Redis) -> None:
    planes = (0, 2, 8, 1, 2, 8)
    for page in (0, 1):
        client.execute_command("KVBLOCKSET", "r", page, 8, 8, 4, 0, 2, *planes, BODY * 2)
    found = client.execute_command("KVPAGEVERIFY", "r")
    assert found[b"checked"] == 2 * SHAPE.pages
    assert found[b"corrupt"] == []


def test_a_block_has_only_so_many_pages(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match=f"at most {MAX_BLOCK_PAGES} pages, got {2 * 65536}0"):
        client.execute_command("KVBLOCKSET", "r", 0, 65536, 20, 1, 0, 1, 0, 8, 1, bytes(65536 * 20))
    assert client.ping()
