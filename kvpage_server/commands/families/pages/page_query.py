"""The page family's questions about single pages: KVPAGEMEXISTS, KVPAGESTAT."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvpage_server.commands.arguments import WRONG_TYPE, check_batch
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.pages.page import page_name, page_names
from kvpage_server.commands.registry import command
from kvpage_server.commands.table.keys import pages
from kvpage_server.commands.table.needs import nothing
from kvpage_server.commands.table.spec import Parts
from kvpage_server.core import Argument
from kvpage_server.core.arguments import NAME_WORDS
from kvpage_server.page import PageHeader, unix_ms
from kvpage_server.resp.reply import Raw, Reply, ReplyError, Stream
from kvpage_server.store.memory.entry import Page, header_of, is_cold, is_page
from kvpage_server.store.memory.extent import ExtentPage
from kvpage_server.system.durations import monotonic_ms

_query = partial(command, flags="readonly", needs=nothing, group="page")


@_query(
    "kvpagemexists N req layer head page type [req layer head page type ...]",
    uses=pages(1, NAME_WORDS),
    parts=Parts(1, NAME_WORDS),
    complexity="O(N) with N pages",
    reply="array of integer",
    summary="Says for each of N pages whether it exists, without reading it.",
)
def kvpagemexists(client: Client, args: list[Argument]) -> Reply:
    """An array of 1 or 0, in order."""
    count = check_batch("KVPAGEMEXISTS", args, NAME_WORDS, "page")

    def steps() -> Iterator[Reply]:
        batches = yield from page_names(client, args, count)
        yield Raw(b"*%d\r\n" % count)
        for names in batches:
            entries = client.keyspace.find_pages(names)
            yield (b":%d\r\n" * len(entries) % (*map(is_page, entries),),)

    return Stream(None, steps())


@_query(
    "kvpagestat req layer head page type",
    flags="readonly fast",
    uses=pages(0),
    reply="map | null",
    summary="Returns a page's header, time to live, protection and tier.",
)
def kvpagestat(client: Client, args: list[Argument]) -> Reply:
    """A map, or null if there is no such page. `tier` is memory or disk. `checksum` is null for a page of a block that
    was stored whole and lies on disk alone: it would have to be computed.
    """
    name, keyspace = page_name(args), client.keyspace
    page = keyspace.find(name.key)
    if page is None:
        return None
    block = keyspace.block(name.req_id, name.page)
    if not is_page(page) or block is None:
        raise ReplyError(WRONG_TYPE)
    (header, checksum), guard, now = _header(page), keyspace.leases.of(block), unix_ms()
    return told_of(header) | {
        "checksum": checksum,
        "ttl_left_ms": page.expires - now if page.expires else -1,
        "lease_left_ms": max(guard.until - monotonic_ms(), 0),
        "pinned": int(guard.pinned),
        "tier": "disk" if is_cold(page) else "memory",
    }


def told_of(header: PageHeader) -> dict[str, Reply]:
    """The part of KVPAGESTAT's reply that is in the header."""
    return {
        "dtype": int(header.dtype),
        "page_size": header.page_size,
        "head_dim": header.head_dim,
        "layer": header.layer,
        "head": header.head,
        "page": header.page,
        "type": header.kv_type,
        "bytes": header.body_size,
        "checksum": f"{header.checksum:016x}",
        "created_ms": header.created_ms,
        "ttl": header.ttl,
    }


def _header(page: Page) -> tuple[PageHeader, str | None]:
    """What a page's header says, and its checksum, None as long as nobody knows that."""
    if type(page) is ExtentPage and not page.extent.has_checksums:
        return PageHeader.parse(page.header_with(0)), None
    header = header_of(page)
    return header, f"{header.checksum:016x}"
