"""Every key with its value, and the removal, split and expiry of values.

A removal has to be reported to every part of the store: the eviction policy, quotas, leases, the order of expiry, the
records of removed values, listeners, and the tier below memory, if there is one. Only this module does so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, cast

from xxhash import xxh3_128_hexdigest

from kvpage_server.core import Arena, NewPages, Slot
from kvpage_server.core.arguments import PageName
from kvpage_server.core.pieces import bit_of, row_of
from kvpage_server.page import HEADER_SIZE, MAX_BLOCK_PAGES, MAX_SINGLE_PAGES, BlockShape, PageKey, unix_ms
from kvpage_server.store.eviction.ghosts import Ghosts
from kvpage_server.store.eviction.leases import Leases
from kvpage_server.store.eviction.order import EvictionOrder
from kvpage_server.store.eviction.queues import BURST, OrderedMap, Unit
from kvpage_server.store.eviction.quotas import counted, text_size
from kvpage_server.store.expire import ExpiryOrder
from kvpage_server.store.memory.catalogue import Catalogue
from kvpage_server.store.memory.entry import LONGEST_TEXT, TEXT_OVERHEAD, Entry, Page, Text, is_page, stored_size_of
from kvpage_server.store.memory.index import Block, BlockKeys, Extent, ExtentPage, OnDisk, rows_of
from kvpage_server.system.text import monotonic_ms

# -- lost strings ------------------------------------------------------------------------------------------------------
#
# Records of removed strings: the reason, the time, the policy or quota, and the limit.
#
# A key has at most one record, of its last removal. All records together take at most `most_bytes`. When they exceed
# that, the oldest records are dropped, and `since` becomes the time of the newest dropped one. To add, find or drop a
# record costs O(1).

MOST_BYTES = 16 << 20
LONGEST_KEY = 512  # bytes; a longer key is kept as a digest, so `latest` does not list it
_RECORD = 320  # bytes of a record without its key


class Loss(NamedTuple):
    """The last removal of a string: the reason, the time in unix milliseconds, the policy or quota, and the limit."""

    reason: str  # expired, evicted, over quota, deleted, overwritten or corrupt
    at: int
    by: str = ""  # a policy, or the pattern of a quota; empty for other reasons
    limit: str = ""  # "maxmemory", "maxdisk" or "filesystem" if that was used up; empty for other reasons


class LostStrings:
    """Records of removed strings. Every removal after `since`, in unix milliseconds, is recorded."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.since = unix_ms()
        self.bytes = 0
        self._most_bytes = most_bytes
        # By key (bytes) or, for a long key, its digest (str); the oldest removal first.
        self._losses: OrderedMap[bytes | str, Loss] = OrderedMap()

    def __len__(self) -> int:
        return len(self._losses)

    def remember(self, key: bytes, reason: str, by: str = "", limit: str = "") -> None:
        """Record the removal of a string."""
        name = _name(key)
        if name not in self._losses:
            self.bytes += _RECORD + len(name)
        self._losses.append(name, Loss(reason, unix_ms(), by, limit))
        while self.bytes > self._most_bytes:
            name, oldest = self._losses.popitem()
            self.bytes -= _RECORD + len(name)
            self.since = max(self.since, oldest.at)

    def of(self, key: bytes) -> Loss | None:
        """Return the record of a key's last removal, or None. The key may have been stored again since."""
        return self._losses.get(_name(key)) if self._losses else None

    def latest(self) -> Iterator[bytes]:
        """Return the removed keys of at most LONGEST_KEY bytes, the last removed first.

        The iterator has a copy of the keys, so records may be added meanwhile. O(records).
        """
        return iter([name for name in reversed(self._losses) if isinstance(name, bytes)])

    def clear(self) -> None:
        """Drop all records, and set `since` to now."""
        self._losses.clear()
        self.bytes = 0
        self.since = unix_ms()


def _name(key: bytes) -> bytes | str:
    return key if len(key) <= LONGEST_KEY else xxh3_128_hexdigest(key)


_LARGE = MAX_SINGLE_PAGES - 1024  # pages of a block above which each step of a write is checked
_MOST_ORPHANS = 256  # that one call offers for eviction
_BLOCKS_PER_FREE = 4096  # blocks of a batch that are forgotten in one step
_FLUSHED_PER_STEP = 1000  # entries that are freed in one step
_ORPHANS_PER_STEP = 256  # blocks that stop being orphans in one step
NEVER_STORED = "never stored"
OVER_QUOTA = "over quota"
BlockListener = Callable[[BlockKeys, Iterator[tuple[str, bytes]]], None]  # changed keys; (event, key) pairs, lazily
_LIMITS = {"memory": "maxmemory", "disk": "maxdisk", "filesystem": "filesystem"}  # by the `room` of an eviction
_REASONS = {"del": "deleted", "set": "overwritten", "evicted": "evicted", "expired": "expired"}


class Source(NamedTuple):
    """Units in the order of eviction, and the function that evicts one. It returns False if the unit has to stay.

    With `is_protected`, leases and pins do not spare the units: `leave` only drops them from memory.
    """

    units: Iterator[Unit]
    leave: Callable[[Unit], object]
    is_protected: bool = False


class Tier:
    """The tier below memory. It is notified of changes of values, and decides how units leave memory.

    `DiskTier` overrides the methods. A store without a tier uses this class: it ignores the notifications, and units
    that leave memory are evicted.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    @property
    def held(self) -> int:
        """Bytes loaded for commands that have not run yet. They do not count against maxmemory."""
        return 0

    def holds(self, _: Unit) -> bool:
        """Return whether a waiting command needs a unit in memory."""
        return False

    def waits(self, _: Unit) -> bool:
        """Return whether a part of a unit waits to be written to the tier. O(pages)."""
        return False

    def units_below(self) -> Iterator[Unit]:
        """Yield the units that are in the tier only, the least recently used first. Between two of them, others may be
        removed.
        """
        return iter(())

    def values_to_evict(self) -> Iterator[Source]:
        """Yield the units that may leave memory because values take too much of it."""
        yield Source(self._contents.victims(), self._contents.evict)

    def keys_to_evict(self) -> Iterator[Source]:
        """Yield the units that may be evicted because the index takes too much memory."""
        return self.values_to_evict()

    def removed(self, key: bytes) -> None:
        """Process the removal of a key. Its block may have other pages."""

    def pages_removed(self, keys: Sequence[bytes]) -> None:
        """Process the removal of single pages of a block that has others."""

    def unit_removed(self, unit: Unit) -> None:
        """Process the removal of a string, or of a block's last page. Another value may have replaced it."""

    def block_removed(self, block: Block) -> None:
        """Process the removal of a block with all its pages."""

    def splits(self, block: Block) -> None:
        """Prepare the split of an extent."""

    def was_split(self, block: Block, pages: Mapping[bytes, ExtentPage]) -> None:
        """Process the split of an extent: `pages` has the block's new entries by key."""

    def expiry_changes(self, key: bytes, entry: Entry) -> None:
        """Prepare a change of a value's expiry."""

    def expiry_changed(self, key: bytes) -> None:
        """Process a change of a key's expiry."""

    def stored_pages(self, keys: Sequence[bytes], pages: Sequence[Slot]) -> None:
        """Process new pages. A disk tier queues their writes: here write-behind begins."""

    def stored_string(self, key: bytes, entry: Entry) -> None:
        """Process a new or changed string, as `stored_pages`."""

    def stored_block(self, block: Block) -> None:
        """Process a new extent, as `stored_pages`."""

    def pages_dropped(self, block: Block) -> None:
        """Process the replacement of a block's pages by an extent."""

    def clear(self) -> tuple[dict[bytes, Any] | OrderedMap[bytes, Any], ...]:
        """Process the removal of all keys. Return the tables of the tier, which the caller frees in steps."""
        return ()

    def follows(self, blocks: Sequence[Block]) -> None:
        """Note that each of these blocks extends the one before it."""

    def sweep(self) -> None:
        """Do a step of the work that is done periodically."""


@dataclass(slots=True)
class Counters:
    """Counters of events since the start."""

    hits: int = 0
    misses: int = 0
    expired: int = 0
    evicted: int = 0
    writes: int = 0
    evictions: dict[tuple[str, str], int] = field(default_factory=dict)  # keys, by policy and exceeded limit
    page_misses: Counter[str] = field(default_factory=Counter)  # by reason
    string_misses: Counter[str] = field(default_factory=Counter)  # by reason

    def reset(self) -> None:
        self.hits = self.misses = self.expired = self.evicted = self.writes = 0
        self.evictions.clear()
        self.page_misses.clear()
        self.string_misses.clear()


class TooManyPages(Exception):
    """Error: a block would get too many pages that are stored one by one. The text is the reply."""


class BlockGrowth:
    """The pages of a batch that do not exist yet, by block: no block may get more than MAX_SINGLE_PAGES single pages,
    because it is split, evicted and removed in one step.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._new = defaultdict[tuple[bytes, int], set[bytes]](set)  # keys by request and page id

    def add(self, pages: NewPages) -> None:
        """Add pages of the batch. Raise TooManyPages if their block would get too many pages."""
        catalogue = self._contents.catalogue
        for name, places in pages.runs(range(len(pages))):
            new = self._new[name]
            new.update(key for key in map(pages.keys.__getitem__, places) if catalogue.get(key) is None)
            block = self._contents.index.block(*name)
            if new and len(new) + (block.pages if block is not None else 0) > MAX_SINGLE_PAGES:
                raise TooManyPages(
                    f"a block has at most {MAX_SINGLE_PAGES} pages that are stored one by one: use several page ids, "
                    f"or KVBLOCKSET, which stores up to {MAX_BLOCK_PAGES} pages as a whole"
                )

    def freed(self) -> Iterator[tuple[()]]:
        """Forget all pages, in steps: a batch may have 100,000 blocks."""
        while self._new:
            for _ in range(min(len(self._new), _BLOCKS_PER_FREE)):
                self._new.popitem()
            yield ()


class Contents:
    """Every key and value, with the parts that a removal is reported to."""

    def __init__(self, policy: str, *, shared: bool = False) -> None:
        self.arena = Arena(shared=shared)
        self.catalogue = Catalogue()
        self.index = self.catalogue.index
        self.eviction_order = EvictionOrder(policy, self.index)
        self.expiry_order = ExpiryOrder(self.expires_of)
        self.leases = Leases(self.eviction_order.limit_of)
        self.ghosts = Ghosts()
        self.lost = LostStrings()
        self.counters = Counters()
        self.tier = Tier(self)
        self.any_on_disk = False  # whether any value may be on disk only
        self.admit_split: Callable[[Block], None] = lambda _: None  # evicts until disk and index have space for a split
        self.on_event: Callable[[str, bytes], None] | None = None  # called with each event and key
        self.on_block: BlockListener | None = None  # called with all keys of a block at a time; set if `on_event` is
        self.texts = 0  # bytes of short strings, with their keys and TEXT_OVERHEAD
        # Blocks that were stored after the block before them was evicted, with the second of it: no context can use
        # them. The last stored block is evicted first.
        self._orphans: dict[Block, int] = {}
        self._reunited: list[Block] = []  # blocks that are no orphans; those after them are none either, see `reunite`
        self._any_evicted = False  # whether a unit was evicted, so that there may be orphans
        self._flushed: list[dict[Any, Any] | OrderedMap[Any, Any]] = []  # tables of keys that `flush` has removed
        self.has_large_blocks = False  # whether a block may have so many pages that a step may exceed the limit

    def find(self, key: bytes) -> Entry | None:
        """Return a key's value; None if there is none. An expired value is removed. Does not count as a use."""
        entry = self.catalogue.get(key)
        if entry is not None and entry.expires and entry.expires <= unix_ms():
            self.expire(key)
            return None
        return entry

    def expires_of(self, key: bytes) -> int:
        """Return a key's expiry in unix milliseconds; 0 if it has none or does not exist. Loads no block."""
        return self.catalogue.expires_of(key)

    def unexpired(self, block: Block) -> Block | None:
        """Remove a block's expired pages. Return the block, or None if it has no other pages.

        O(1) if no page of the block has expired, O(pages) otherwise.
        """
        now = unix_ms()
        if not block.soonest or block.soonest > now:
            return block
        entries, expired = self.catalogue.entries, list[tuple[bytes, int, int, int]]()
        if block.extent is None:
            expired = [name for name in block.page_names() if 0 < entries[name[0]].expires <= now]
        if block.extent is not None or len(expired) == block.pages:
            self.counters.expired += self.remove_block(block, "expired")
            return None
        if expired:
            self._expire_pages(block, expired)
        block.soonest = min(filter(None, (entries[key].expires for key in block.page_keys())), default=0)
        return block

    def _expire_pages(self, block: Block, names: Sequence[tuple[bytes, int, int, int]]) -> None:
        """Remove expired single pages of a block that has others. A name is a key, a layer, a head and a kv_type."""
        rows, footprint, size = defaultdict[int, int](int), 0, 0
        for key, layer, head, kv_type in names:
            page = cast(Page, self.catalogue.pop(key))
            footprint += page.footprint
            size += HEADER_SIZE + stored_size_of(page)
            block.discard(layer, head, kv_type)
            rows[row_of(layer, head, kv_type)] |= bit_of(head)
        self.grow(block, -footprint)
        self.eviction_order.quotas.grew(block, -size)
        self.expiry_order.keys -= len(names)
        self.ghosts.remember(block, rows, "expired")
        self.tier.pages_removed([name[0] for name in names])
        self.counters.expired += len(names)
        for name in names:
            self.notify("expired", name[0])

    def has_unexpired(self, block: Block) -> bool:
        """Return whether a block has a page that has not expired. No page is removed. O(1) if the first page is one."""
        now = unix_ms()
        if not block.soonest or block.soonest > now:
            return True
        return block.extent is None and not all(0 < self.expires_of(key) <= now for key in block.page_keys())

    def notify(self, event: str, key: bytes) -> None:
        """Notify listeners of an event."""
        if self.on_event is not None:
            self.on_event(event, key)

    # -- changing --------------------------------------------------------------------------------------------------

    def entry_for_write(self, key: bytes) -> Entry | None:
        """Return the entry of a key that is about to change. A page of an extent gets an entry: the extent is split.

        Return None if the key does not exist. Raise OverLimit if disk or index lack space for the pages of the split,
        TooManyPages if these are too many.
        """
        if self.index.unloaded_pages:
            self.catalogue.get(key)  # this gives its block's pages their entries
        entry = self.catalogue.entries.get(key)
        if entry is None and (page := self.catalogue.page_in_extent(key)):
            block = cast(Block, page.unit)
            check_split(block)
            self.admit_split(block)
            self.split(block)
            return self.catalogue.entries[key]
        return entry

    def split(self, block: Block) -> None:
        """Replace an extent by single pages, with an entry for each. Raise TooManyPages if it has too many."""
        check_split(block)
        self.tier.splits(block)
        self.note_size(block)
        pages = self.catalogue.split(block)
        if block.soonest:
            self.expiry_order.note_all([*pages], block.soonest)
        self.eviction_order.quotas.grew(block, 0)  # the entries of its pages take memory of the index
        self.tier.was_split(block, pages)

    def grow(self, unit: Unit, size: int) -> None:
        """Add `size` bytes of memory, which may be negative, to a unit's accounts."""
        if isinstance(unit, Block):
            unit.footprint += size
        self.leases.grew(unit, size)

    def set_expiry(self, key: bytes, expires: int) -> None:
        """Set an existing key's expiry in unix milliseconds, 0 for none. An expiry in the past removes the key."""
        if 0 < expires <= unix_ms():
            self.delete(key)
            return
        entry = self.entry_for_write(key)
        assert entry is not None
        self.tier.expiry_changes(key, entry)
        if entry.expires:
            self.expiry_order.keys -= 1
        entry.expires = expires
        if not expires:
            self.notify("persist", key)
        else:
            self.expiry_order.keys += 1
            unit = unit_of(key, entry)
            if isinstance(unit, Block):
                unit.expires_at(expires)
            self.expiry_order.note(key, expires)
            self.notify("expire", key)
        self.tier.expiry_changed(key)

    # -- storing ---------------------------------------------------------------------------------------------------

    def set_page(self, name: PageName, header: bytes, slot: Slot, expires: int = 0) -> None:
        """Store a page whose body is in `slot`, with its 64-byte `header`. `name` is valid, and the page admitted."""
        slot.header[:] = header
        self.set_pages(NewPages.one(name, slot, expires))

    def set_pages(self, pages: NewPages) -> None:
        """Store pages. If limits apply, the pages were admitted before.

        Raise MemoryError if the system has no memory for the index. Pages that `put` has stored before stay.
        """
        must_open = self.index.unloaded_pages or self.index.scans.current is not None
        if self.expiry_order.keys or must_open:
            for name in pages.blocks():
                self._remove_expired(*name)
                if must_open:
                    self.index.open(*name)
        at, count = 0, len(pages)
        try:
            while at < count:
                at = self._put_run(pages, at) if self.on_event is None else self._put_one(pages, at)
        except MemoryError:
            get = self.catalogue.entries.get
            kept = {key: slot for key, slot in zip(pages.keys, pages.slots, strict=True) if get(key) is slot}
            self.tier.stored_pages([*kept], [*kept.values()])  # otherwise they would be lost when they leave memory
            raise
        self.counters.writes += count
        self.tier.stored_pages(pages.keys, pages.slots)

    def _remove_expired(self, req_id: bytes, page: int) -> None:
        """Remove the expired pages of a block that is written now. They count as expired, not as overwritten."""
        block = self.index.block(req_id, page)
        if block is not None:
            self.unexpired(block)

    def _put_run(self, pages: NewPages, at: int) -> int:
        """Store the pages from index `at` to the first that needs a decision, or only that one if it is the page `at`.

        Return the index of the next page.
        """
        catalogue, index, expiry_order = self.catalogue, self.index, self.expiry_order
        fresh: list[bytes] | None = [] if catalogue.scans.current is not None else None
        each = self.eviction_order.has_quotas or bool(self.leases.by_unit)  # blocks are accounted for one by one
        # `Put` of core/python/pages.py describes the result.
        stop, blocks, made, beside, grown, stored, replaced, key_bytes, name_bytes = pages.put(
            catalogue.entries, index.requests, at, Block, fresh, one_block=each
        )
        if stop == at:
            return self._put_one(pages, at)
        catalogue.key_bytes += key_bytes
        if made:
            index.note_made(blocks, made, name_bytes)
        if fresh:
            catalogue.list_all(fresh)
        if expires := pages.expires(at):
            expiry_order.keys += stop - at
            expiry_order.note_all(pages.keys[at:stop], expires)
        if replaced:
            expiry_order.keys -= replaced
        self.eviction_order.units.used_all(blocks)
        for block in blocks if key_bytes else ():  # without a new key, no block has more pages than before
            if block.pages > _LARGE:  # as `note_size`, without the cost of a call
                self.has_large_blocks = True
        for block in beside:
            self.eviction_order.join(block)
        if self._any_evicted:
            for block in blocks:
                self._note_orphan(block)
        if each:
            self.leases.grew(blocks[0], grown)
            self._grow_quota(blocks[0], stored)
        return stop

    def _put_one(self, pages: NewPages, at: int) -> int:
        """Store the page at index `at`, whatever its key had before. Return the index of the next page."""
        (key, req_id, layer, head, page, kv_type), slot, expires = pages.name(at), pages.slots[at], pages.expires(at)
        block = self.index.open(req_id, page)
        if block.extent is not None:
            self.split(block)
        self._use_written(block)
        old = self.catalogue.entries.get(key)
        had = counted(key, old, as_page=True)
        slot.unit, slot.expires = block, expires
        block.add(layer, head, kv_type)
        if old is not None:
            self.forget(key, old, slot)
        self.catalogue.put(key, slot)
        self.grow(block, slot.footprint)
        if expires:
            block.expires_at(expires)
            self._note_expiry(key, expires)
        self._grow_quota(block, HEADER_SIZE + slot.size - had)
        self.note_size(block)
        self._notify_write(key, old, slot)
        return at + 1

    def may_outgrow(self, count: int) -> bool:
        """Return whether `count` new pages may let a block exceed MAX_SINGLE_PAGES. O(1)."""
        are_known = not (self.catalogue.in_extents or self.index.unloaded_pages)  # the sizes of all blocks
        return self.has_large_blocks or not are_known or count > MAX_SINGLE_PAGES - _LARGE

    def note_size(self, block: Block) -> None:
        """Note whether a block of single pages is so large that the next steps of writes have to be checked."""
        if block.pages > _LARGE:
            self.has_large_blocks = True

    def _grow_quota(self, block: Block, size: int) -> None:
        """Count the growth of a block's pages, in bytes, for its quota."""
        quota = self.eviction_order.quotas.of(block)
        if quota is not None:
            known = block in quota.sizes
            quota.resize(block, quota.sizes[block] + size if known else self.size_for_quota(block))

    def size_for_quota(self, unit: Unit) -> int:
        """Return the size of a unit for its quota. O(1) for strings and extents, O(pages) for other blocks."""
        entries = self.catalogue.entries
        if not isinstance(unit, Block):
            return counted(unit, entries[unit], as_page=False)
        if unit.extent is not None:
            return HEADER_SIZE * unit.pages + _stored_in(unit.extent.slot)
        return sum(HEADER_SIZE + stored_size_of(entries[key]) for key in unit.page_keys())

    def _use_written(self, block: Block) -> None:
        self.eviction_order.units.used(block)
        self.eviction_order.join(block)
        if self._any_evicted:
            self._note_orphan(block)

    def _note_orphan(self, block: Block) -> None:
        """Note whether a written block is an orphan: the block before it was evicted, or is an orphan itself."""
        request, orphans = self.index.requests[block.req_id], self._orphans
        before = request.get(block.page - 1)
        if before is not None:
            is_orphan = before in orphans
        else:
            ghost = self.ghosts.of_block(block.req_id, block.page - 1)
            is_orphan = ghost is not None and ghost.reason in (_REASONS["evicted"], OVER_QUOTA)
        if is_orphan:
            orphans[block] = self.eviction_order.units.now
        elif orphans:
            self._reunited.append(block)
            self.reunite()

    def reunite(self) -> bool:
        """Note that some blocks that follow a block of a context are no orphans. Return whether more of them are left
        for another step: a context may have 100,000 blocks.
        """
        for _ in range(_ORPHANS_PER_STEP):
            if not self._reunited:
                return False
            block = self._reunited.pop()
            self._orphans.pop(block, None)
            after = self.index.requests.get(block.req_id, {}).get(block.page + 1)
            if isinstance(after, Block) and after in self._orphans:
                self._reunited.append(after)
        return bool(self._reunited)

    def note_used_on_disk(self, block: Block, used: int) -> None:
        """Note the last use, in monotonic seconds, of a block on disk only. If it was an orphan, it is none any more,
        unless that was the write.
        """
        written = self._orphans.get(block)
        if written is not None and used > written + BURST:
            del self._orphans[block]

    def _note_expiry(self, key: bytes, expires: int) -> None:
        self.expiry_order.keys += 1
        self.expiry_order.note(key, expires)

    def _notify_write(self, key: bytes, old: Entry | None, new: Entry, event: str = "set") -> None:
        tell = self.on_event
        if tell is None:
            return
        if old is None:
            tell("new", key)
        tell(event, key)
        if new.expires and (old is None or old.expires != new.expires):
            tell("expire", key)

    def set_block(self, req_id: bytes, page: int, extent: Extent) -> None:
        """Store an admitted block as an extent, whose slot is filled. It replaces all pages that the block had."""
        if self.expiry_order.keys:
            self._remove_expired(req_id, page)
        block = self.index.open(req_id, page)
        for key in self.catalogue.strays_in(req_id, page, extent):
            self.remove(key, "del")
        dropped = self._drop_pages(block, extent.shape)
        self.catalogue.fill(block, extent)
        self.grow(block, extent.slot.footprint)
        self.eviction_order.quotas.resize(block, self.size_for_quota(block))
        if extent.expires:
            self.expiry_order.keys += block.pages
            self.expiry_order.note(next(block.page_keys()), extent.expires)  # one key stands for all
        self.counters.writes += 1
        self._use_written(block)
        if self.on_block is not None:
            keys = BlockKeys.of(block)
            self.on_block(keys, _events_of_block(keys, dropped, extent.expires))
            if gone := dropped.gone:
                self.on_block(gone, (("del", key) for key in gone))
        self.tier.stored_block(block)

    def _drop_pages(self, block: Block, coming: BlockShape) -> _Dropped:
        """Remove all pages of a block that gets an extent of shape `coming`.

        Pages that are not in that shape are recorded as overwritten. The result is complete if there is a listener.
        """
        dropped = _Dropped()
        if not block.pages:
            return dropped
        self.tier.pages_dropped(block)
        if block.extent is None or block.extent.shape != coming:
            stay = rows_of(coming)
            gone = {row: left for row, heads in block.rows.items() if (left := heads & ~stay.get(row, 0))}
            if gone:
                self.ghosts.remember(block, gone, "overwritten")
                pages = sum(map(int.bit_count, gone.values()))
                dropped.gone = BlockKeys(block.req_id, block.page, pages, None, gone)
        if self.on_block is not None:
            dropped.keys = BlockKeys.of(block)
            if block.extent is not None:
                dropped.expires = block.extent.expires
            else:
                dropped.expiries = {key: self.catalogue.entries[key].expires for key in block.page_keys()}
        self.expiry_order.keys -= self.catalogue.take_pages(block)
        self.grow(block, -block.footprint)
        return dropped

    # -- strings ---------------------------------------------------------------------------------------------------

    def set_string(self, key: bytes, value: bytes | Slot, expires: int = 0, event: str = "set") -> None:
        old = self.catalogue.entries.get(key) or self.entry_for_write(key)
        if old is not None and old.expires:
            old = self.find(key)  # an expired value counts as expired, not as overwritten
        if isinstance(value, bytes) and len(value) <= LONGEST_TEXT:
            if type(old) is Text:
                self._rewrite(key, old, value, expires, event)
                return
            entry: Entry = Text(value)
            self.texts += len(key) + len(value) + TEXT_OVERHEAD
        else:
            entry = self.slot_of(value) if isinstance(value, bytes) else value
        entry.expires = expires
        if old is not None:
            self.forget(key, old, entry)
        self.catalogue.put(key, entry)
        if expires:
            self._note_expiry(key, expires)
        self._note_string(key, entry)
        self._notify_write(key, old, entry, event)
        self.catalogue.note_stray(key)
        self.tier.stored_string(key, entry)

    def _rewrite(self, key: bytes, text: Text, value: bytes, expires: int, event: str) -> None:
        """Replace a short string by another one, and update only the accounts that change."""
        self.texts += len(value) - len(text.data)
        if key in self.leases.by_unit:  # without the cost of a call
            self.leases.replaced(key, text_size(key, len(value)))
        text.data = value
        changed = text.expires != expires
        if changed:
            self.expiry_order.keys += bool(expires) - bool(text.expires)
            text.expires = expires
            if expires:
                self.expiry_order.note(key, expires)
        self.counters.writes += 1
        self.eviction_order.units.used(key)
        if self.eviction_order.has_quotas:
            self.eviction_order.quotas.resize(key, text_size(key, len(value)))
        if (tell := self.on_event) is not None:
            tell(event, key)
            if expires and changed:
                tell("expire", key)
        self.tier.stored_string(key, text)

    def _note_string(self, key: bytes, entry: Entry) -> None:
        self.counters.writes += 1
        self.eviction_order.units.used(key)
        if self.eviction_order.has_quotas:
            self.eviction_order.quotas.resize(key, text_size(key, entry.size))

    def slot_of(self, value: bytes) -> Slot:
        slot = self.arena.allocate(len(value))
        slot.body[:] = value
        return slot

    # -- values on disk --------------------------------------------------------------------------------------------

    def move_body(self, place: bytes | Extent, body: Slot | OnDisk) -> None:
        """Set the body of an existing value, by its key or in its extent, after it was loaded, coded in memory, or
        dropped from there.

        The value is the same, so listeners are not notified. The caller updates the accounts of memory, see `grow`.
        """
        if isinstance(place, Extent):
            old, place.slot = place.slot, body
        else:
            old, self.catalogue.entries[place] = cast(Slot | OnDisk, self.catalogue.entries[place]), body
        if self.eviction_order.has_quotas and (grown := _stored_in(body) - _stored_in(old)):
            self.eviction_order.quotas.grew(
                unit_on_disk(body if isinstance(body, OnDisk) else cast(OnDisk, old)), grown
            )

    def set_stored(self, value: OnDisk, size: int) -> None:
        """Set the bytes that a value takes for its quota, after it was dropped from memory, or decoded on disk."""
        self.eviction_order.quotas.grew(unit_on_disk(value), size - value.stored)
        value.stored = size

    def add_string_on_disk(self, key: bytes, entry: Entry) -> None:
        """Add a string that was found on disk at the start."""
        if type(entry) is Text:
            self.texts += len(key) + entry.size + TEXT_OVERHEAD
        self.catalogue.note_stray(key)
        self.catalogue.put(key, entry)
        if entry.expires:
            self._note_expiry(key, entry.expires)

    def add_block_on_disk(self, req_id: bytes, page: int, extent_of: Callable[[Block], Extent]) -> None:
        """Add a block that was found on disk at the start. `extent_of` returns its extent, whose slot is on disk."""
        block = self.index.open(req_id, page)
        extent = extent_of(block)
        self.catalogue.fill(block, extent)
        if extent.expires:
            self.expiry_order.keys += block.pages
            self.expiry_order.note(next(block.page_keys()), extent.expires)

    def add_page_on_disk(self, block: Block, key: bytes, page: OnDisk, spot: tuple[int, int, int]) -> None:
        """Add the entry of a page of an unloaded block. `spot` is its layer, head and kv_type. Its expiry counts
        already."""
        self.catalogue.entries[key] = page
        self.catalogue.key_bytes += len(key)
        block.add(*spot)
        if page.expires:
            block.expires_at(page.expires)
            self.expiry_order.note(key, page.expires)

    # -- removal ---------------------------------------------------------------------------------------------------

    def delete(self, key: bytes, event: str = "del") -> bool:
        """Remove a key. Return whether it existed. Raise OverLimit as `entry_for_write` does."""
        if self.find(key) is None:
            return False
        if (block := self._block_of_one(key)) is not None:
            self.remove_block(block, event)
            return True
        self.entry_for_write(key)
        self.remove(key, event)
        return True

    def delete_all(self, keys: Sequence[bytes]) -> int:
        """Remove some keys. Return the number of keys that existed. Raise OverLimit before anything is removed."""
        if len(keys) > 1:
            for key in keys:
                if self.find(key) is not None and self._block_of_one(key) is None:
                    self.entry_for_write(key)
        return sum(map(self.delete, keys))

    def _block_of_one(self, key: bytes) -> Block | None:
        """Return the block of a key if it is an extent of one page, which can be removed without a split."""
        page = self.catalogue.page_in_extent(key) if key not in self.catalogue.entries else None
        block = cast(Block, page.unit) if page is not None else None
        return block if block is not None and block.pages == 1 else None

    def remove(self, key: bytes, event: str, reason: str = "", by: str = "", limit: str = "") -> None:
        """Remove an existing key.

        A string's record has `reason`, or the reason that belongs to `event`, `by`, the policy or quota, and `limit`,
        the limit that was reached.
        """
        self._take(key, event, reason, by, limit)
        self.notify(event, key)

    def remove_corrupt(self, key: bytes) -> None:
        """Remove a key whose value does not match its checksum."""
        self.entry_for_write(key)
        self._take(key, "corrupt")
        self.notify("del", key)

    def _take(self, key: bytes, event: str, reason: str = "", by: str = "", limit: str = "") -> None:
        entry = self.catalogue.pop(key)
        self.forget(key, entry, None, event)
        if not is_page(entry):
            self.lost.remember(key, reason or _REASONS.get(event, event), by, limit)
        self.tier.removed(key)

    def forget(self, key: bytes, old: Entry, new: Entry | None, event: str = "set") -> None:
        """Remove a key's entry `old` from the index and the accounts. `new` is the entry that replaces it, if any."""
        if old.expires:
            self.expiry_order.keys -= 1
        if is_page(old):
            self._forget_page(key, old, new, event)
            return
        self.catalogue.forget_stray(key)
        if type(old) is Text:
            self.texts -= len(key) + old.size + TEXT_OVERHEAD
        if new is None or is_page(new):
            self.leases.removed(key)
            self._unit_removed(key)
        else:
            self.leases.replaced(key, footprint_of(key, new))
        if new is not None and is_page(new):
            self.lost.remember(key, _REASONS["set"])

    def _forget_page(self, key: bytes, old: Page, new: Entry | None, event: str) -> None:
        block = cast(Block, old.unit)
        self.grow(block, -old.footprint)
        if new is not None and new.unit is block:
            return
        name = PageKey.parse(key)
        row = row_of(name.layer, name.head, name.kv_type)
        self.ghosts.remember(block, {row: bit_of(name.head)}, _REASONS.get(event, event))
        block.discard(name.layer, name.head, name.kv_type)
        self.eviction_order.quotas.grew(block, -HEADER_SIZE - stored_size_of(old))
        if not block.pages:
            self.index.remove(block)
            self.leases.removed(block)
            self._orphans.pop(block, None)
            self._unit_removed(block)

    def _unit_removed(self, unit: Unit) -> None:
        self.eviction_order.units.removed(unit)
        self.tier.unit_removed(unit)

    def remove_block(self, block: Block, event: str, reason: str = "", limit: str = "") -> int:
        """Remove a block and all its pages. Return the number of pages.

        The ghost has `reason`, or the reason that belongs to `event`, and `limit`, the limit that was reached.
        """
        self.tier.block_removed(block)
        self._orphans.pop(block, None)
        self.index.remove(block)
        self.eviction_order.units.removed(block)
        self.leases.removed(block)
        self.ghosts.remember(block, block.rows, reason or _REASONS[event], self._who(block, event, reason), limit)
        keys = BlockKeys.of(block) if self.on_block is not None else None
        self.expiry_order.keys -= self.catalogue.take_pages(block)
        block.extent = None  # so that a command that still refers to the block does not keep its memory
        if self.on_block is not None and keys is not None:
            self.on_block(keys, ((event, key) for key in keys))
        return block.pages

    def _who(self, unit: Unit, event: str, reason: str) -> str:
        """Return the policy, or the pattern of the quota, that evicted a unit; empty for other removals."""
        quota = self.eviction_order.quotas.of(unit) if reason == OVER_QUOTA else None
        if quota is not None:
            return quota.pattern.decode("utf-8", "surrogateescape")
        return self.eviction_order.policy if event == "evicted" else ""

    def flush(self) -> None:
        """Remove all keys. Their values stay in memory until `free_flushed` is called often enough."""
        of_tier = self.tier.clear()
        self.notify("flush", b"")
        self._flushed += [*self.catalogue.clear(), self.eviction_order.units.clear(), *of_tier]
        self.expiry_order.clear()
        self.leases.clear()
        self.ghosts.clear()
        self.lost.clear()
        self._orphans.clear()
        self._reunited.clear()
        self.has_large_blocks = False
        self.texts = 0

    @property
    def flushed(self) -> int:
        """Number of removed entries of `flush` that are still in memory."""
        return sum(map(len, self._flushed))

    def free_flushed(self) -> bool:
        """Free some entries that `flush` has removed, because freeing millions of them takes seconds. Return whether
        there are more.
        """
        left = _FLUSHED_PER_STEP
        while self._flushed and left:
            part = self._flushed[-1]
            for _ in range(min(len(part), left)):
                part.popitem()
                left -= 1
            if not part:
                self._flushed.pop()
        return bool(self._flushed)

    def expire(self, key: bytes) -> None:
        """Remove an expired key. If the key is a page of an extent, the whole block is removed."""
        if self.index.unloaded_pages:
            self.catalogue.get(key)  # this gives its block's pages their entries
        page = self.catalogue.page_in_extent(key)
        if page is not None and key not in self.catalogue.entries:
            self.counters.expired += self.remove_block(cast(Block, page.unit), "expired")
        else:
            self.counters.expired += 1
            self.remove(key, "expired")

    # -- eviction --------------------------------------------------------------------------------------------------

    def victims(self) -> Iterator[Unit]:
        """Yield the units that the policy may evict, in its order."""
        rules = self.eviction_order.rules
        if rules.evicts_any:
            return self.eviction_order.units.victims()
        return self._soonest() if rules.evicts_expiring else iter(())

    def _soonest(self) -> Iterator[Unit]:
        """Yield the units that have an expiry, the next due first."""
        get = self.catalogue.get
        return (unit_of(key, cast(Entry, get(key))) for key in self.expiry_order.nearest(monotonic_ms()))

    def may_expire(self, unit: Unit) -> bool:
        """Return whether a value of a unit has an expiry. O(pages)."""
        if not isinstance(unit, Block):
            return bool(self.expires_of(unit))
        # `soonest` alone is not enough: the page that it stands for may have been kept with PERSIST.
        return bool(unit.soonest) and any(map(self.expires_of, unit.page_keys()))

    def ended(self) -> Iterator[Unit]:
        """Yield units to evict before all others: their lifetime has ended, and they were not used since."""
        units = self.eviction_order.units
        for unit, end in self.leases.ended() if self.eviction_order.rules.evicts_any else ():
            if unit in units and units.now - units.idle(unit) > end // 1000:
                self.leases.forget_end(unit)
            else:
                yield unit

    def orphans(self) -> Iterator[Unit]:
        """Yield units to evict before others: orphans that were not used since they were written."""
        if self.reunite():
            return
        units = self.eviction_order.units
        latest = islice(reversed(self._orphans.items()), _MOST_ORPHANS)
        for block, written in [*latest] if self.eviction_order.rules.keeps_chains else ():
            if block in units and units.now - units.idle(block) > written + BURST:
                del self._orphans[block]
            else:
                yield block

    def spares(self, unit: Unit, now: int) -> bool:
        """Return whether a unit is protected at `now`, in monotonic milliseconds, or a waiting command needs it."""
        return self.leases.spares(unit, now) or self.tier.holds(unit)

    def evict(self, unit: Unit, *, room: str = "memory") -> None:
        """Evict a unit because the limit of `room` is reached: "memory", "disk" or "quota"; always "quota" if that is
        exceeded. For "filesystem" it is no limit of the store: the file system is full.
        """
        quota = self.eviction_order.quotas.of(unit)
        if quota is not None and quota.is_over:
            room = "quota"
        self._any_evicted = True
        self.eviction_order.units.evicted(unit)
        keys, reason, limit = 1, OVER_QUOTA if room == "quota" else "", _LIMITS.get(room, "")
        if isinstance(unit, Block):
            keys = self.remove_block(unit, "evicted", reason, limit)
        else:
            self.remove(unit, "evicted", reason, self._who(unit, "evicted", reason), limit)
        self.counters.evicted += keys
        cause = self.eviction_order.policy, room
        self.counters.evictions[cause] = self.counters.evictions.get(cause, 0) + keys
        if quota is not None and room == "quota":
            quota.evicted += keys


def check_split(block: Block) -> None:
    """Raise TooManyPages if an extent has too many pages to be split."""
    if block.pages > MAX_SINGLE_PAGES:
        raise TooManyPages(
            f"the block has {block.pages} pages and was stored as a whole: one of more than {MAX_SINGLE_PAGES} pages "
            "can be replaced or removed only as a whole (KVBLOCKSET, KVPAGEDEL)"
        )


def _stored_in(body: Slot | OnDisk) -> int:
    return body.stored if isinstance(body, OnDisk) else body.size


def unit_on_disk(value: OnDisk) -> Unit:
    """Return the unit of a value on disk only: its block, or the key of a string."""
    return value.unit if type(value.unit) is Block else value.name[1:]


def footprint_of(key: bytes, entry: Entry) -> int:
    """Return the bytes of memory of a string or a page."""
    return text_size(key, entry.size) if type(entry) is Text else cast(Page, entry).footprint


def unit_of(key: bytes, entry: Entry) -> Unit:
    """Return the unit with which a value is evicted."""
    unit = entry.unit
    return unit if type(unit) is Block else key


@dataclass(slots=True)
class _Dropped:
    """The pages that a block had before it was stored whole, as listeners have to know them."""

    keys: BlockKeys | None = None
    gone: BlockKeys | None = None  # pages that it does not have any more
    expires: int = 0  # of each page if they were an extent
    expiries: Mapping[bytes, int] | None = None  # of single pages, by key


def _events_of_block(keys: BlockKeys, dropped: _Dropped, expires: int) -> Iterator[tuple[str, bytes]]:
    """Yield the events of a block's keys when it is stored whole."""
    for key in keys:
        if dropped.keys is None or key not in dropped.keys:
            yield "new", key
            had = 0
        else:
            had = dropped.expiries[key] if dropped.expiries is not None else dropped.expires
        yield "set", key
        if expires and had != expires:
            yield "expire", key
