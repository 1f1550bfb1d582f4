"""Why reads of pages and blocks miss, counted by reason for INFO."""

from __future__ import annotations

from kvpage_server.commands.context import Client
from kvpage_server.core import PageNames
from kvpage_server.core.arguments import PageName
from kvpage_server.store.contents import NEVER_STORED, OVER_QUOTA
from kvpage_server.store.eviction.ghosts import Ghost

INCOMPLETE = "incomplete"  # the block has some of its pages
HOLE = "hole"  # the block is there, but one before it is not
OF_STRINGS = (NEVER_STORED, "expired", "evicted", OVER_QUOTA, "deleted", "overwritten", "corrupt")
REASONS = (NEVER_STORED, INCOMPLETE, HOLE, *OF_STRINGS[1:])


def count_miss(client: Client, reason: str, times: int = 1) -> None:
    """Count missed reads."""
    client.keyspace.counters.page_misses[reason] += times


def _page_missed(client: Client, name: PageName) -> None:
    """Count a missed page."""
    ghost = client.keyspace.ghosts.of_page(name.req_id, name.layer, name.head, name.page, name.kv_type)
    count_miss(client, reason_of(ghost, NEVER_STORED))


def pages_missed(client: Client, names: PageNames, places: list[int]) -> None:
    """Count the missed pages of a batch."""
    for block, some in names.runs(places):
        if client.keyspace.ghosts.has_block(*block):
            for i in some:
                _page_missed(client, names.name(i))
        else:
            count_miss(client, NEVER_STORED, len(some))


def block_missed(client: Client, req_id: bytes, page: int) -> None:
    """Count a block that is missing or incomplete."""
    block = client.keyspace.index.block(req_id, page)
    ghost = client.keyspace.ghosts.of_block(req_id, page, block)
    count_miss(client, reason_of(ghost, NEVER_STORED if block is None else INCOMPLETE))


def reason_of(ghost: Ghost | None, otherwise: str) -> str:
    """Why something is gone; `otherwise` if nothing is remembered about it."""
    return ghost.reason if ghost is not None else otherwise
