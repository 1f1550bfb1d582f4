"""Orphans, blocks whose predecessor was evicted before they were stored, stop being orphans in steps and when read."""

from __future__ import annotations

from pathlib import Path

from stored_pages import Here
from turns import measured
from wire import encode_command

from kvpage_server.store.contents import _ORPHANS_PER_STEP, Contents
from kvpage_server.store.eviction.queues import BURST, Unit
from kvpage_server.store.memory.index import Block

COUNT = 3 * _ORPHANS_PER_STEP


def orphans() -> tuple[Here, Contents, list[Block]]:
    """A request whose first block was evicted before the others were stored."""
    here = Here()
    contents = here.server.keyspace.contents
    for page in range(COUNT):
        here.call("KVPAGESET", "r", 0, 0, page, 0, 8, 1, 1, 0, b"b")
        if not page:
            contents.evict(contents.index.of(b"r")[0])
    return here, contents, contents.index.of(b"r")


def test_the_end_of_a_chain_of_orphans_takes_several_steps() -> None:
    here, contents, blocks = orphans()
    assert [*contents.orphans()] == blocks[:-257:-1]
    here.call("KVPAGESET", "r", 0, 0, 0, 0, 8, 1, 1, 0, b"b")
    assert len(contents._orphans) == COUNT - _ORPHANS_PER_STEP
    assert [*contents.orphans()] == []
    while contents.reunite():
        pass
    assert not contents._orphans


def test_a_block_stored_behind_a_reunited_chain_is_no_orphan() -> None:
    here, contents, _ = orphans()
    for page in (0, COUNT, COUNT + 1):
        here.call("KVPAGESET", "r", 0, 0, page, 0, 8, 1, 1, 0, b"b")
    while contents.reunite():
        pass
    assert not contents._orphans


def test_an_orphan_that_is_read_on_disk_is_none_any_more() -> None:
    _, contents, blocks = orphans()
    now = contents.eviction_order.units.now
    contents.note_used_on_disk(blocks[-1], now + BURST)
    assert next(contents.orphans()) is blocks[-1]
    contents.note_used_on_disk(blocks[-1], now + BURST + 1)
    assert next(contents.orphans()) is blocks[-2]


def test_orphans_that_wait_for_the_disk_stay(tmp_path: Path) -> None:
    with measured("--maxmemory", "64mb", directory=tmp_path) as turns:
        keyspace = turns.server.keyspace
        contents, tier = keyspace.contents, keyspace.tier
        assert tier is not None
        for page in range(2):
            words = [b"KVPAGESET", b"r", b"0", b"0", b"%d" % page, *b"0 8 1 1 0 b".split()]
            turns.cost(b"", encode_command(words))
            if not page:
                turns.on_loop(lambda: contents.evict(contents.index.of(b"r")[0]))
        key = b"kv:r:0:0:1:0"

        def while_waiting() -> list[Unit]:
            tier.stored_string(key, contents.catalogue.entries[key])
            return [*keyspace.memory.index.ended(), *tier.account.ended()]

        assert turns.on_loop(while_waiting) == []
        turns.cost(b"", encode_command([b"SAVE"]))
        assert turns.on_loop(lambda: [*tier.account.ended()]) == contents.index.of(b"r")
