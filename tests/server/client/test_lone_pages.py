"""Where pages lie that were written alone: with the block that they would belong to, whatever the request's name."""

from __future__ import annotations

import pytest
from page_batches import SHAPE

from kvpage_server.client.cluster.block_value import block_key
from kvpage_server.client.cluster.commands import set_block
from kvpage_server.client.cluster.lone_page import lone_key, lone_page
from kvpage_server.client.cluster.topology import SLOTS, slot_of
from kvpage_server.page import PageKey

ODD = [b"agent", b"{agent}7", b"a}b", b"a{b", b"}{", b"{}agent", b"{}{agent}", b"a{}", b"@", b"x" * 256]


@pytest.mark.parametrize("req_id", ODD)
def test_a_page_is_in_the_slot_of_its_block_and_its_key_names_it(req_id: bytes) -> None:
    for page in (0, 1, 7, 2**32 - 1):
        name = PageKey(req_id, 3, 1, page, 1)
        assert slot_of(lone_key(name)) == slot_of(block_key((req_id, page)))
        assert lone_page(lone_key(name)) == name


def test_a_block_is_written_when_its_lone_pages_are_gone() -> None:
    """Whoever dies in between leaves nothing that could come back."""
    body = [memoryview(bytes(SHAPE.nbytes))]
    *deleted, written = [b"".join(one.pieces())[:20] for one in set_block((b"agent", 0), SHAPE, body, 0, 0)]
    assert len(deleted) == 1
    assert b"UNLINK" in deleted[0]
    assert b"SET" in written


def test_every_slot_has_its_letters() -> None:
    pages = [PageKey(b"agent", 0, 0, page, 0) for page in range(12 * SLOTS)]
    by_slot = {slot_of(block_key((page.req_id, page.page))): page for page in pages}
    assert len(by_slot) > 0.99 * SLOTS
    assert all(slot_of(lone_key(page)) == slot for slot, page in by_slot.items())


@pytest.mark.parametrize(
    "key", [b"kv:agent:0:0:0:0", b"kv:{:AAAA}agent:0:0:0:0", b"kv:{:@BI@}agent:block:0", b"kv:{:}agent:0:0:0:0", b"kv:"]
)
def test_no_other_key_names_a_page(key: bytes) -> None:
    assert lone_page(key) is None
