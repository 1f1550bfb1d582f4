"""The keyspace: pages and plain strings under one set of keys, as the commands use it.

It is put together of parts:

    contents        every key and its value; the only place where a value is put or removed
      catalogue     keys and their entries, blocks by request and page, the order of scans
      evictor       which unit goes next: the policy, and one for each quota
      expirer       when a key is due
      leases        what eviction spares
      ghosts        records of removed pages, with reasons
      lost          records of removed strings, with reasons
    memory          what happens when memory is full
    quotas          what happens when a quota is used up
    protection      what may be leased and pinned
    reader          finding and reading, and what counts as a use, a hit or a miss
    listing         which keys and requests there are
    tier            the disk below memory, if there is one: told what is stored, used and removed, asked to fetch

A TTL ends in `Contents.expire`, which is called by `sweep` and by whoever finds an overdue key before that.

**Many pages at a time.** The core stores and finds all pages of a batch that need no decision in one call, and the
policy is told of their blocks in another. If there is something to decide (somebody listens, a string has the key, the
block was stored whole), plain Python does it, a page at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from kvpage_server.core import NewPages, Slot
from kvpage_server.core.arguments import PageName
from kvpage_server.page import HEADER_SIZE, BlockShape
from kvpage_server.store.contents import Contents
from kvpage_server.store.disk.file.database import Disk
from kvpage_server.store.disk.tier import DiskTier
from kvpage_server.store.eviction.quotas import text_size
from kvpage_server.store.listing import Listing
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, Text
from kvpage_server.store.memory.extent import Extent
from kvpage_server.store.memory.index import Block, rows_of
from kvpage_server.store.memory_limit import MemoryLimit, OutOfMemory
from kvpage_server.store.promise import Promise, Takings
from kvpage_server.store.protection import Protection
from kvpage_server.store.quota_limit import Coming, QuotaLimit, counted
from kvpage_server.store.reading import Reader
from kvpage_server.system.durations import monotonic_ms

__all__ = ["Flushed", "Keyspace", "OutOfMemory"]

LONGEST_TEXT = 511  # longer strings lie in the arena, where longer words are received


class Flushed:
    """What a flush removed. Freeing millions of values takes a while."""

    def __init__(self, *parts: dict[Any, Any]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def free(self, most: int) -> None:
        """Free up to `most` of them."""
        for part in self._parts:
            for _ in range(min(len(part), most)):
                part.popitem()
                most -= 1


class Keyspace:
    """Every key and value. `maxmemory` and `maxdisk` are in bytes, 0 for no limit. See the module."""

    def __init__(
        self, *, maxmemory: int = 0, policy: str = "allkeys-prefix", disk: Disk | None = None, maxdisk: int = 0
    ) -> None:
        contents = self.contents = Contents(policy)
        self.memory = MemoryLimit(contents, maxmemory)
        self.quotas = QuotaLimit(contents)
        self.listing = Listing(contents)
        self.tier = DiskTier(disk, contents, self.memory, maxdisk) if disk is not None else None
        self.protection = Protection(contents, self.memory, self.tier.limit if self.tier is not None else None)
        self.reader = reader = Reader(contents)
        self._catalogue = contents.catalogue

        self.arena, self.index, self.evictor = contents.arena, contents.index, contents.evictor
        self.leases, self.ghosts, self.counters = contents.leases, contents.ghosts, contents.counters
        self.lost = contents.lost
        self.find, self.expires_of, self.set_expiry = contents.find, contents.expires_of, contents.set_expiry
        self.delete, self.delete_all = contents.delete, contents.delete_all
        self.remove_block, self.evict = contents.remove_block, contents.evict
        self.remove_corrupt = contents.remove_corrupt
        self.look, self.read, self.read_all, self.idle = reader.look, reader.read, reader.read_all, reader.idle
        self.read_pages, self.find_pages, self.pages_at = reader.read_pages, reader.find_pages, reader.pages_at
        self.block, self.use_block, self.untouched = reader.block, reader.use_block, reader.untouched

    def __len__(self) -> int:
        return len(self._catalogue)

    # -- before something is stored --------------------------------------------------------------------------------

    @property
    def is_limited(self) -> bool:
        """Whether anything besides maxmemory limits what may be stored."""
        return self.evictor.quotas is not None or (self.tier is not None and self.tier.stored.maxdisk > 0)

    def admit(self, coming: Iterable[Coming]) -> None:
        """Make room for values, in their quotas and on disk. Raises OverLimit if nothing was changed."""
        self._admit([[*coming]])

    def _admit(self, parts: Sequence[list[Coming]]) -> Sequence[Takings]:
        """The same for parts of a batch. Returns what they take of quotas."""
        if self.tier is not None:
            self.tier.limit.admit([*chain.from_iterable(parts)])
        return self.quotas.admit(parts) if self.evictor.quotas is not None else ()

    def admit_pages(self, batches: Iterable[NewPages]) -> Generator[tuple[()], None, Promise]:
        """Make room for pages that will be stored all or none, in steps. Returns what they are promised, a batch a
        part. Raises OverLimit if nothing was changed."""
        if not self.is_limited:
            return Promise(())
        parts: list[list[Coming]] = []
        for pages in batches:
            parts.append(coming := [])
            for block, places in pages.runs(range(len(pages))):
                coming += [Coming(pages.keys[i], HEADER_SIZE + pages.slots[i].size, block) for i in places]
            yield ()
        of_quotas = self._admit(parts)
        if len(parts) == 1 and (self.tier is None or not self.tier.any_cold):
            return Promise(())  # it waits for nothing, and is stored in this step
        on_disk = self.tier.limit.takings(parts) if self.tier is not None else ()
        return Promise(chain(*both) for both in zip_longest(of_quotas, on_disk, fillvalue=()))

    def split_block(self, req_id: bytes, page: int) -> None:
        """Make values of the pages of a block that was stored whole, if it is in memory, before some are replaced."""
        block = self.index.block(req_id, page)
        if block is not None and block.extent is not None and type(block.extent.slot) is not Cold:
            self.contents.split(block)

    def chain(self, blocks: Sequence[Block]) -> None:
        """Note that each of these blocks extends the one before it, without which it is useless to an engine."""
        self.evictor.chain(blocks)
        if self.tier is not None:
            self.tier.limit.follows(blocks)

    # -- pages -----------------------------------------------------------------------------------------------------

    @property
    def stores_together(self) -> bool:
        """Whether a batch of pages is stored and found without a look at each."""
        return self.contents.on_event is None and self.evictor.quotas is None and self._catalogue.has_all_entries

    def set_page(self, name: PageName, header: bytes, slot: Slot, expires: int = 0) -> None:
        """Store a page whose body is in `slot`. `header` is its 64 bytes. `name` is valid, and the page admitted."""
        slot.header[:] = header
        self.set_pages(NewPages.one(name, slot, expires))

    def set_pages(self, pages: NewPages) -> None:
        """Store pages, which were admitted if there are limits."""
        if self.index.resting or self.index.is_scanned:
            for block in pages.blocks():
                self.index.open(*block)
        at = 0
        while at < len(pages):
            at = self._put_run(pages, at) if self.contents.on_event is None else self._put_one(pages, at)
        self.counters.writes += len(pages)
        if self.tier is not None:
            self.tier.stored_pages(pages)

    def _put_run(self, pages: NewPages, at: int) -> int:
        """Store the pages from `at` on that need no decision, or one that does. Returns where to go on."""
        catalogue, index, expirer, fresh = self._catalogue, self.index, self.contents.expirer, self._catalogue.listed
        each = self.evictor.quotas is not None or len(self.leases) > 0  # blocks are accounted for one by one
        put = pages.put(catalogue.entries, index.requests, at, Block, fresh, one_block=each)
        if put.stop == at:
            return self._put_one(pages, at)
        if put.made:
            index.note_made(put.made)
        if fresh:
            catalogue.list_all(fresh)
        if expires := pages.expires(at):
            expirer.keys += put.stop - at
            expirer.note_all(pages.keys[at : put.stop], expires)
        expirer.keys -= put.replaced
        self.evictor.units.used_all(put.blocks)
        for block in put.beside:
            self.evictor.join(block)
        if each:
            self.leases.grew(put.blocks[0], put.grown)
            self.quotas.grew(put.blocks[0], put.stored)
        return put.stop

    def _put_one(self, pages: NewPages, at: int) -> int:
        """Store one page, whatever its key had before. Returns the place of the next."""
        (key, req_id, layer, head, page, kv_type), slot, expires = pages.name(at), pages.slots[at], pages.expires(at)
        block = self.index.open(req_id, page)
        if block.extent is not None:
            self.contents.split(block)
        self._use_written(block)
        old = self._catalogue.entries.get(key)
        had = counted(key, old, as_page=True)
        slot.unit, slot.expires = block, expires
        block.add(layer, head, kv_type)
        if old is not None:
            self.contents.forget(key, old, slot)
        self._catalogue.put(key, slot)
        self.contents.grow(block, slot.footprint)
        if expires:
            block.expires_at(expires)
            self._note_expiry(key, expires)
        self.quotas.grew(block, HEADER_SIZE + slot.size - had)
        self._tell_of_write(key, old, slot)
        return at + 1

    def _use_written(self, block: Block) -> None:
        self.evictor.units.used(block)
        self.evictor.join(block)

    def _note_expiry(self, key: bytes, expires: int) -> None:
        self.contents.expirer.keys += 1
        self.contents.expirer.note(key, expires)

    def _tell_of_write(self, key: bytes, old: Entry | None, new: Entry, event: str = "set") -> None:
        tell = self.contents.on_event
        if tell is None:
            return
        if old is None:
            tell("new", key)
        tell(event, key)
        if new.expires and (old is None or old.expires != new.expires):
            tell("expire", key)

    def set_block(self, req_id: bytes, page: int, extent: Extent) -> None:
        """Store a block whole, in place of all pages that it had. Its slot is full."""
        if self.tier is not None:
            self.tier.limit.admit_block(req_id, page, extent.shape)
        self.quotas.admit_block(req_id, page, extent.shape)
        block = self.index.open(req_id, page)
        for key in self._catalogue.strays_in(req_id, page, extent):
            self.contents.remove(key, "del")
        before = block.extent.shape if block.extent is not None else None
        had = self._drop_pages(block, extent.shape)
        self._catalogue.fill(block, extent)
        self.contents.grow(block, extent.slot.footprint)
        if self.evictor.quotas is not None:
            self.evictor.quotas.resize(block, self.quotas.size_of(block))
        if extent.expires:
            self.contents.expirer.keys += block.pages
            self.contents.expirer.note(next(block.page_keys()), extent.expires)  # one key stands for all
        self.counters.writes += 1
        self._use_written(block)
        if self.contents.on_block is not None:
            keys = list(had if before == extent.shape else block.page_keys())
            gone = list(had.keys() - set(keys))
            events = chain(_events_of_block(keys, had, extent.expires), (("del", key) for key in gone))
            self.contents.on_block([*keys, *gone], events)
        if self.tier is not None:
            self.tier.stored_block(block)

    def _drop_pages(self, block: Block, coming: BlockShape) -> dict[bytes, int]:
        """Remove all pages from a block that will have those of another shape.

        Returns the keys and their expiry if somebody listens to events.
        """
        if not block.pages:
            return {}
        if self.tier is not None:
            self.tier.pages_dropped(block)
        if block.extent is None or block.extent.shape != coming:
            stay = rows_of(coming)
            gone = {row: left for row, heads in block.rows.items() if (left := heads & ~stay.get(row, 0))}
            if gone:
                self.ghosts.remember(block, gone, "overwritten")
        had = self._expiries(block) if self.contents.on_block is not None else {}
        self.contents.expirer.keys -= self._catalogue.take_pages(block)
        self.contents.grow(block, -block.footprint)
        return had

    def _expiries(self, block: Block) -> dict[bytes, int]:
        """When each page of a block expires, by key."""
        if block.extent is not None:
            return dict.fromkeys(block.page_keys(), block.extent.expires)
        return {key: self._catalogue.entries[key].expires for key in block.page_keys()}

    # -- strings ---------------------------------------------------------------------------------------------------

    def set_string(self, key: bytes, value: bytes | Slot, expires: int = 0, event: str = "set") -> None:
        old = self._catalogue.entries.get(key) or self.contents.own(key)
        if old is not None and old.expires:
            old = self.find(key)  # an overdue one expires; it is not overwritten
        if isinstance(value, bytes) and len(value) <= LONGEST_TEXT:
            if type(old) is Text:
                self._rewrite(key, old, value, expires, event)
                return
            entry: Entry = Text(value)
            self.contents.texts += len(key) + len(value) + TEXT_OVERHEAD
        else:
            entry = self.slot_of(value) if isinstance(value, bytes) else value
        entry.expires = expires
        if old is not None:
            self.contents.forget(key, old, entry)
        self._catalogue.put(key, entry)
        if expires:
            self._note_expiry(key, expires)
        self._note_string(key, entry)
        self._tell_of_write(key, old, entry, event)
        self._catalogue.note_stray(key)
        if self.tier is not None:
            self.tier.stored_string(key, entry)

    def _rewrite(self, key: bytes, text: Text, value: bytes, expires: int, event: str) -> None:
        """Replace a short string by another, without undoing what would be done again."""
        self.contents.texts += len(value) - len(text.data)
        text.data = value
        changed = text.expires != expires
        if changed:
            self.contents.expirer.keys += bool(expires) - bool(text.expires)
            text.expires = expires
            if expires:
                self.contents.expirer.note(key, expires)
        self.counters.writes += 1
        self.evictor.units.used(key)
        if self.evictor.quotas is not None:
            self.evictor.quotas.resize(key, text_size(key, len(value)))
        if (tell := self.contents.on_event) is not None:
            tell(event, key)
            if expires and changed:
                tell("expire", key)
        if self.tier is not None:
            self.tier.stored_string(key, text)

    def _note_string(self, key: bytes, entry: Entry) -> None:
        self.counters.writes += 1
        self.evictor.units.used(key)
        if self.evictor.quotas is not None:
            self.evictor.quotas.resize(key, text_size(key, entry.size))

    def slot_of(self, value: bytes) -> Slot:
        slot = self.arena.allocate(len(value))
        slot.body[:] = value
        return slot

    # -- all of it -------------------------------------------------------------------------------------------------

    def flush(self) -> Flushed:
        """Remove everything. The result has what there was, to be freed in steps or when it is dropped."""
        if self.tier is not None:
            self.tier.clear()
        self.contents.tell("flush", b"")
        flushed = Flushed(*self._catalogue.clear(), self.evictor.units.clear())
        self.contents.expirer.clear()
        self.leases.clear()
        self.ghosts.clear()
        self.contents.lost.clear()
        self.contents.texts = 0
        return flushed

    def sweep(self, now: int, most: int, *, expires: bool = True) -> int:
        """Remove up to `most` keys that are overdue at `now` (unix milliseconds) if `expires`, and go on with other
        work that is done in steps. Returns `most` if there is more."""
        if self.tier is not None:
            self.tier.fetching.sweep()
        elapsed = monotonic_ms()
        self.evictor.units.now = elapsed // 1000
        self.leases.settle(elapsed)
        self._catalogue.rest(elapsed)
        self.arena.rest()
        removed = 0
        for key in self.contents.expirer.due(now) if expires else ():
            self.contents.expire(key)
            removed += 1
            if removed == most:
                break
        counts, hands_over = self.quotas.go_on(), self.evictor.hand_over()
        return most if counts or hands_over else removed


def _events_of_block(keys: Iterable[bytes], had: Mapping[bytes, int], expires: int) -> Iterator[tuple[str, bytes]]:
    """The events of a block's keys when it is stored whole. `had`: the keys before, and their expiry."""
    for key in keys:
        if key not in had:
            yield "new", key
        yield "set", key
        if expires and had.get(key) != expires:
            yield "expire", key
