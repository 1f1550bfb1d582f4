"""`kvpage dump` and `kvpage restore` of a block with more pages than a client can watch keys."""

from __future__ import annotations

from pathlib import Path

import redis
from keyspaces import block, set_block
from servers import RunningServer

from kvpage_server.commands.families.connections.transaction import MOST_WATCHED
from kvpage_server.page import DType
from kvpage_server.snapshot.dump import Selection, dump
from kvpage_server.snapshot.restore import restore
from kvpage_server.snapshot.store import RunningStore

SHAPE = block([(0, DType.UINT8, 3), (1, DType.BFLOAT16, 2)], layers=90, heads=50, page_size=1)


def held(client: redis.Redis) -> dict[bytes, bytes]:
    """The body of each page, by its key."""
    keys = list(client.scan_iter(count=1000))
    return {key: value[64:] for key, value in zip(keys, client.mget(keys), strict=True)}


def test_a_block_with_more_pages_than_watchable_is_restored(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    set_block(client, "large", 7, SHAPE)
    before = held(client)
    assert len(before) == SHAPE.pages > MOST_WATCHED
    with RunningStore(server.url) as store:
        dumped = dump(store, tmp_path, Selection())
        assert (dumped.amount.pages, dumped.amount.strings, dumped.corrupt.texts) == (len(before), 0, [])
        client.flushall()
        restored = restore(store, tmp_path)
    assert (restored.amount.pages, restored.corrupt.texts, restored.no_room.texts) == (len(before), [], [])
    assert held(client) == before
