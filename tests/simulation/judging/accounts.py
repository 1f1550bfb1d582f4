"""Comparison of the server's counters with its values, one by one, when it is idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import cast

from kvpage_server.commands.context import Server
from kvpage_server.core import Slot
from kvpage_server.store import records
from kvpage_server.store.contents import footprint_of
from kvpage_server.store.disk.tier import DiskTier
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Page, Text
from kvpage_server.store.memory.index import Block, ExtentPage

ROOM = 1 << 16  # bytes: tolerance of a limit for the last stored value


def mistakes(server: Server, just_stored: int) -> Iterator[str]:
    """Yield wrong counters. `just_stored` bytes may have been stored since the last eviction."""
    keyspace = server.keyspace
    memory, contents, quotas = keyspace.memory, keyspace.contents, keyspace.eviction_order.quotas.all
    entries = contents.catalogue.entries
    texts = sum(len(key) + entry.size + TEXT_OVERHEAD for key, entry in entries.items() if type(entry) is Text)
    if contents.texts != texts:
        yield f"{contents.texts} bytes of short strings are counted, there are {texts}"
    key_bytes, name_bytes = sum(map(len, entries)), sum(_lengths_of_names(keyspace))
    if (contents.catalogue.key_bytes, contents.index.name_bytes) != (key_bytes, name_bytes):
        counted = f"{contents.catalogue.key_bytes} and {contents.index.name_bytes}"
        yield f"keys and names of blocks have {key_bytes} and {name_bytes} bytes, counted are {counted}"
    if not memory.receiving and not server.in_flight:
        held = sum(slot.footprint for slot in _slots(server))
        if keyspace.arena.used < held:  # it may be more: a removed value may still be referenced
            yield f"{keyspace.arena.used} bytes of slots are counted, values have {held}"
    for quota in quotas:
        sizes = {unit: keyspace.contents.size_for_quota(unit) for unit in quota.sizes}
        if quota.sizes != sizes or quota.bytes != sum(sizes.values()):
            yield f"the quota of {quota.pattern!r} counts {quota.bytes}, its keys have {sum(sizes.values())}"
    yield from _mistaken_expiry(keyspace)
    yield from _mistaken_blocks(keyspace)
    yield from _mistaken_leases(keyspace)
    yield from _missed_by_scans(keyspace)
    yield from _mistaken_usage(server.tiered, keyspace) if server.tiered is not None else ()
    if excess := excess_of_memory(server, just_stored):
        yield excess


def excess_of_memory(server: Server, just_stored: int) -> str:
    """Return a mistake if memory exceeds its limit. The server evicts within SWEEP_EVERY after replies were read whose
    bytes had raised the limit.
    """
    keyspace = server.keyspace
    memory, order = keyspace.memory, keyspace.eviction_order
    if not memory.limit or keyspace.tier is not None or len(keyspace.leases) or order.quotas.all:
        return ""
    most = memory.limit + just_stored * 5 // 4 + ROOM  # slots are larger than values by a fourth at the most
    if memory.used <= most or not order.rules.evicts_any:
        return ""
    return f"{memory.used} bytes are used of a maxmemory of {memory.limit}, {just_stored} were just stored"


def _lengths_of_names(keyspace: Keyspace) -> Iterator[int]:
    """The length of the request id of each block."""
    for req_id, blocks in keyspace.index.requests.items():
        yield from (len(req_id) for _ in blocks)


def _mistaken_expiry(keyspace: Keyspace) -> Iterator[str]:
    """Keys that expire."""
    contents = keyspace.contents
    found = sum(bool(entry.expires) for entry in contents.catalogue.entries.values())
    found += sum(block.pages for block in keyspace.index if block.extent is not None and block.extent.expires)
    for _, rows in _resting(keyspace):
        found += sum(bool(expires) for _, _, expires, _ in records.pages(b"", 0, rows))
    if contents.expiry_order.keys != found:
        yield f"{contents.expiry_order.keys} keys are counted that expire, there are {found}"


def _mistaken_blocks(keyspace: Keyspace) -> Iterator[str]:
    """Yield wrong sizes of blocks in memory."""
    entries = keyspace.contents.catalogue.entries
    for block in keyspace.index:
        if block.extent is not None:
            held = block.extent.slot.footprint
        else:
            held = sum(cast(Page, entries[key]).footprint for key in block.page_keys())
        if block.footprint < held:  # or more: a split block keeps the overhead of its extent
            yield f"block {block.page} of {block.req_id!r} counts {block.footprint} bytes, its pages have {held}"


def _mistaken_leases(keyspace: Keyspace) -> Iterator[str]:
    """Yield wrong sizes of leases and pins, and wrong shares of them."""
    leases, entries = keyspace.leases, keyspace.contents.catalogue.entries
    protected, on_disk = Counter[object](), Counter[object]()
    for unit, lease in leases.by_unit.items():
        name = (unit.req_id, unit.page) if isinstance(unit, Block) else unit
        if not (keyspace.index.still_has(unit) if isinstance(unit, Block) else unit in entries):
            yield f"what protects {name!r} has outlived it"
            continue
        size = unit.footprint if isinstance(unit, Block) else footprint_of(unit, entries[unit])
        if lease.size != size:
            yield f"{lease.size} bytes of {name!r} are protected, it has {size}"
        if lease.account is not keyspace.eviction_order.limit_of(unit):
            yield f"what protects {name!r} counts for another quota"
        protected[lease.account] += lease.size
        on_disk[lease.account] += lease.on_disk
    if amiss := sum(abs(size.disk - on_disk[account]) for account, size in leases._bytes.items()):
        yield f"{amiss} bytes on disk are counted as protected that are not"
    if counted := sum(abs(size.memory - protected[account]) for account, size in leases._bytes.items()):
        yield f"{leases.bytes} bytes are counted that are protected, there are {protected.total()}: {counted} are amiss"


def _missed_by_scans(keyspace: Keyspace) -> Iterator[str]:
    """Yield blocks that a scan of their request would miss."""
    req_id, pages = keyspace.index._order or (b"", [])
    if missed := set(keyspace.index.page_ids(req_id)).difference(pages):
        yield f"a scan of {req_id!r} would not come to its blocks {sorted(missed)}"


def _mistaken_usage(tiered: DiskTier, keyspace: Keyspace) -> Iterator[str]:
    """Yield wrong sizes on disk, when nothing waits to be written."""
    usage = tiered.stored.usage
    found = sum(usage._sizes.values()) + sum(
        records.sheet_footprint(len(req_id), rows) for req_id, rows in _resting(keyspace)
    )
    if usage.used != found or usage.expected != found:
        yield f"{usage.used} bytes of the disk are counted, {usage.expected} are expected, values take {found}"
    if usage.replaced:
        yield f"{usage.replaced} bytes of the disk are to be replaced, and nothing waits to be written"
    yield from _mistaken_chains(tiered, keyspace)


def _mistaken_chains(tiered: DiskTier, keyspace: Keyspace) -> Iterator[str]:
    """Links to blocks that do not exist, and wrong counts of extensions."""
    chains = tiered.account.chains
    counts = Counter(before for before in chains._before.values() if keyspace.index.still_has(before))
    if counts != chains._extensions:
        yield f"{sum(chains._extensions.values())} extensions of blocks are counted, there are {counts.total()}"
    if gone := [block for block in chains._before if not keyspace.index.still_has(block)]:
        yield f"{len(gone)} blocks are gone, and extend others"


def _resting(keyspace: Keyspace) -> Iterator[tuple[bytes, bytes]]:
    """The request and the rows of every block that rests."""
    index = keyspace.index
    for name in index.blocks_on_disk():
        rows = index.rows(*name)
        assert rows is not None
        yield name[0], rows


def _slots(server: Server) -> Iterator[Slot]:
    """The memory of every value."""
    keyspace = server.keyspace
    extents = {id(block.extent): block.extent for block in keyspace.index if block.extent is not None}
    for entry in keyspace.contents.catalogue.entries.values():
        if isinstance(entry, ExtentPage):
            extents[id(entry.extent)] = entry.extent  # all of it is there as long as one of its pages is
        elif isinstance(entry, Slot):
            yield entry
    yield from (extent.slot for extent in extents.values() if isinstance(extent.slot, Slot))


def left(server: Server) -> dict[str, int]:
    """Return the remains of clients and values; nothing, after all have disconnected and everything was removed."""
    keyspace, tiered = server.keyspace, server.tiered
    events, settled = server.events, tiered is None or tiered.behind.settled
    return {
        "clients": len(server.clients),
        "bytes held by clients": server.in_flight,
        "bytes being received": keyspace.memory.receiving,
        "keys": len(keyspace),
        "bytes of values": keyspace.memory.used if settled else 0,
        "bytes of slots": keyspace.arena.used if settled else 0,
        "leases and pins": len(keyspace.leases),
        "bytes leased": sum(map(sum, keyspace.leases._bytes.values())),
        "keys tracked": events.tracking.keys,
        "clients that track": len(events.tracking.clients),
        "bytes held to be read": 0 if tiered is None else tiered.held,
        "bytes of quotas": sum(quota.bytes for quota in keyspace.eviction_order.quotas.all),
        "keys that expire": keyspace.contents.expiry_order.keys,
        "links between blocks": 0 if tiered is None else len(tiered.account.chains._before),
    }
