"""The keyspace in memory: pages and plain strings under one set of keys, with expiry and eviction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from kvpage_server.page import PageKey, unix_ms
from kvpage_server.store.arena import Arena, Slab, Slot
from kvpage_server.store.catalogue import Catalogue
from kvpage_server.store.entry import TEXT_OVERHEAD, Entry, NewPage, Page, PageName, Text
from kvpage_server.store.eviction import Unit
from kvpage_server.store.expiry import Expiry
from kvpage_server.store.extent import Extent
from kvpage_server.store.ghost import Ghosts
from kvpage_server.store.index import Block, rows_of
from kvpage_server.store.lease import SHARE, Guards
from kvpage_server.store.policies import NO_EVICTION, POLICIES, VOLATILE_TTL

LONGEST_TEXT = 1024  # longer strings lie in the arena
PROMISE = 10_000  # milliseconds


_REASONS = {"del": "deleted", "set": "overwritten", "evicted": "evicted", "expired": "expired"}


class OutOfMemory(Exception):
    """Memory is full, and there is nothing that the policy may evict."""


@dataclass(slots=True)
class Counters:
    """What happened to keys since the start."""

    hits: int = 0
    misses: int = 0
    expired: int = 0
    evicted: int = 0
    writes: int = 0


class Fallen:
    """What a flush removed. To free millions of values takes a while."""

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
    """Every key and value. `maxmemory` is in bytes, 0 for no limit."""

    def __init__(self, *, maxmemory: int = 0, policy: str = "allkeys-prefix") -> None:
        self.maxmemory = maxmemory
        self._policy = policy
        self.arena = Arena()
        self._catalogue = Catalogue()
        self.index = self._catalogue.index
        self.guards = Guards()
        self.ghosts = Ghosts()
        self.counters = Counters()
        self.on_event: Callable[[str, bytes], None] | None = None  # told what happened to which key
        self._expiry = Expiry(self.expires_of)
        self._units = POLICIES[policy]()
        self._touching = True  # whether reading counts as a use
        self._texts = 0  # bytes of short strings

    def __len__(self) -> int:
        return len(self._catalogue)

    @property
    def used_memory(self) -> int:
        """Bytes that count against maxmemory: slots in use, those being received too, and short strings."""
        return self.arena.used + self._texts

    @property
    def policy(self) -> str:
        """What decides which unit goes when memory is full."""
        return self._policy

    @policy.setter
    def policy(self, name: str) -> None:
        """Let another policy decide. It learns what there is, and when that was used last. O(n log n)."""
        old, new = self._units, POLICIES[name]()
        self._policy = name
        if type(new) is type(old):
            return
        for unit in sorted(old, key=old.idle, reverse=True):
            new.now = old.now - old.idle(unit)
            new.used(unit)
        new.now = old.now
        self._units = new
        for block in self.index:
            self._join(block)

    @property
    def volatile(self) -> int:
        """Keys that have an expiry."""
        return self._expiry.keys

    # -- reading ---------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Entry | None:
        """The living value of a key, without counting it as a use."""
        entry = self._catalogue.get(key)
        if entry is not None and entry.expires and entry.expires <= unix_ms():
            self._expire(key)
            return None
        return entry

    def look(self, key: bytes) -> Entry | None:
        """The living value of a key; a hit or a miss, but no use of it."""
        entry = self.find(key)
        if entry is None:
            self.counters.misses += 1
            self.tell("keymiss", key)
        else:
            self.counters.hits += 1
        return entry

    def read(self, key: bytes) -> Entry | None:
        """The living value of a key; a use of it, and a hit or a miss."""
        entry = self._catalogue.get(key)
        if entry is None or (entry.expires and self.find(key) is None):
            self.counters.misses += 1
            self.tell("keymiss", key)
            return None
        self.counters.hits += 1
        if self._touching:
            self._units.used(self._unit(key, entry))
        return entry

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Let what is read meanwhile not count as a use."""
        self._touching = False
        try:
            yield
        finally:
            self._touching = True

    def read_all(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """`read` of many keys; those of one block in a row are one use of it."""
        now, get, touching = unix_ms(), self._catalogue.get, self._touching
        found: list[Entry | None] = []
        missed = 0
        last: object = None
        for key in keys:
            entry = get(key)
            if entry is None or (entry.expires and entry.expires <= now and self.find(key) is None):
                missed += 1
                self.tell("keymiss", key)
                found.append(None)
                continue
            found.append(entry)
            if type(entry) is Slot and entry.unit is last and last is not None:
                continue
            last = unit = self._unit(key, entry)
            if touching:
                self._units.used(unit)
        self.counters.hits += len(found) - missed
        self.counters.misses += missed
        return found

    def without_entry(self, keys: Sequence[bytes]) -> list[int]:
        """The places of those keys that have no value, or that are pages of blocks which were stored whole."""
        entries = self._catalogue.entries
        return [i for i, key in enumerate(keys) if key not in entries]

    def expires_of(self, key: bytes) -> int:
        """A key's expiry in unix milliseconds; 0 when it has none or does not exist."""
        entry = self._catalogue.get(key)
        return entry.expires if entry is not None else 0

    def keys(self) -> list[bytes]:
        """Every living key."""
        return self.living(self.names())

    def names(self) -> list[bytes]:
        """Every key, those that are overdue too."""
        return self._catalogue.names()

    def living(self, names: Iterable[bytes]) -> list[bytes]:
        """Those of some keys that exist."""
        now, get = unix_ms(), self._catalogue.get
        found = [(name, entry) for name in names if (entry := get(name)) is not None]
        return [name for name, entry in found if not entry.expires or entry.expires > now]

    def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The next cursor, 0 at the end, and the living keys in the next `count` places of the order of scans."""
        cursor, names = self._catalogue.scan(cursor, count)
        return cursor, [name for name in names if self.find(name) is not None]

    def random_key(self) -> bytes | None:
        """A living key; None when there is none."""
        while len(self):
            key = self._catalogue.draw()
            if key is not None and self.find(key) is not None:
                return key
        return None

    def idle(self, key: bytes) -> int:
        """Seconds since a living key, or its block, was last used."""
        entry = self._catalogue.get(key)
        assert entry is not None
        return self._units.idle(self._unit(key, entry))

    @staticmethod
    def _unit(key: bytes, entry: Entry) -> Unit:
        unit = None if type(entry) is Text else cast(Page, entry).unit
        return unit if type(unit) is Block else key

    # -- writing ---------------------------------------------------------------------------------------------------

    def set_page(self, name: PageName, header: bytes, slot: Slot, expires: int = 0) -> None:
        """Store a page whose body is in `slot`. `header` is its 64 bytes; `name` has been validated."""
        slot.header[:] = header
        self.set_pages([(name, slot, expires)])

    def set_pages(self, pages: Iterable[NewPage]) -> None:
        """Store pages, whose slots have their headers; the names have been validated."""
        catalogue, entries = self._catalogue, self._catalogue.entries
        block: Block | None = None
        grown = 0
        for name, slot, expires in pages:
            key, req_id, layer, head, page, kv_type = name
            if block is None or page != block.page or req_id != block.req_id:
                if block is not None:
                    self._grow(block, grown)
                block, grown = self._open(req_id, page), 0
            slot.seal()
            slot.unit = block
            if type(slot.chunk) is Slab:
                slot.chunk.keys.append(key)
            old = entries.get(key)
            if old is None:
                block.add(layer, head, kv_type)
                grown += slot.footprint
                catalogue.put(key, slot)
            elif type(old) is Slot and old.unit is block:
                grown += slot.footprint - old.footprint
                block.shape_known = False
                self._expiry.keys -= bool(old.expires)
                entries[key] = slot
            else:
                block.add(layer, head, kv_type)
                grown += slot.footprint
                self._forget(key, old, slot)
                entries[key] = slot
            if expires:
                slot.expires = expires
                block.expires_at(expires)
                self._expiry.keys += 1
                self._expiry.note(key, expires)
            self.counters.writes += 1
            if self.on_event is not None:
                self._tell_of_write(key, old, slot)
        if block is not None:
            self._grow(block, grown)

    def _open(self, req_id: bytes, page: int) -> Block:
        """The block that pages are about to be written to, one by one: a use of it."""
        block = self.index.open(req_id, page)
        if block.extent is not None:
            self._split(block)
        self._units.used(block)
        self._join(block)
        return block

    def _join(self, block: Block) -> None:
        """Say that the pages of a request follow each other."""
        around = (self.index.block(block.req_id, page) for page in range(block.page - 1, block.page + 2))
        self.chain([block for block in around if block is not None])

    def chain(self, blocks: Sequence[Block]) -> None:
        """Each of these extends the one before it, and is worth nothing to an engine without that."""
        if len(blocks) > 1:
            self._units.follows(blocks)

    def _tell_of_write(self, key: bytes, old: Entry | None, new: Entry, event: str = "set") -> None:
        if old is None:
            self.tell("new", key)
        self.tell(event, key)
        if new.expires and (old is None or old.expires != new.expires):
            self.tell("expire", key)

    def set_block(self, req_id: bytes, page: int, extent: Extent) -> None:
        """Store a block whole, in place of whatever pages it had. Its slot is full."""
        block = self.index.open(req_id, page)
        for key in self._catalogue.strays_in(req_id, page, extent):
            self._remove(key, "del")
        had = self._drop_pages(block, rows_of(extent.shape))
        extent.slot.seal()
        self._catalogue.fill(block, extent)
        self._grow(block, extent.slot.footprint)
        if extent.expires:
            self._expiry.keys += block.pages
            self._expiry.note(next(block.page_keys()), extent.expires)  # one stands for all
        self.counters.writes += 1
        self._units.used(block)
        self._join(block)
        if self.on_event is not None:
            for key in block.page_keys():
                if key not in had:
                    self.on_event("new", key)
                self.on_event("set", key)
                if extent.expires and had.get(key) != extent.expires:
                    self.on_event("expire", key)

    def _drop_pages(self, block: Block, stay: Mapping[int, int]) -> dict[bytes, int]:
        """Take all pages from a block that gets others, which are those in the rows `stay`.

        When somebody listens to events: the keys there were, and when each was to expire.
        """
        if not block.pages:
            return {}
        gone = {row: left for row, heads in block.rows.items() if (left := heads & ~stay.get(row, 0))}
        if gone:
            self.ghosts.pages_went(block, gone, "overwritten")
        told = self.on_event is not None
        had = {key: self.expires_of(key) for key in block.page_keys()} if told else {}
        self._expiry.keys -= self._catalogue.take_pages(block)
        self._grow(block, -block.footprint)
        return had

    def _split(self, block: Block) -> None:
        for key in self._catalogue.split(block):
            if expires := self.expires_of(key):
                self._expiry.note(key, expires)

    def _own(self, key: bytes) -> Entry | None:
        """The entry of a key that is about to change by itself."""
        entry = self._catalogue.entries.get(key)
        if entry is None and (page := self._catalogue.page_in_extent(key)):
            self._split(cast(Block, page.unit))
            return self._catalogue.entries[key]
        return entry

    def set_string(self, key: bytes, value: bytes | Slot, expires: int = 0, event: str = "set") -> None:
        """Store a plain string."""
        old = self._own(key)
        if old is not None and old.expires:
            old = self.find(key)  # one that is overdue expires, it is not overwritten
        if isinstance(value, bytes) and len(value) <= LONGEST_TEXT:
            if type(old) is Text:
                self._rewrite(key, old, value, expires, event)
                return
            entry: Entry = Text(value)
            self._texts += len(key) + len(value) + TEXT_OVERHEAD
        else:
            entry = self.slot_of(value) if isinstance(value, bytes) else value
            entry.seal()
            if type(entry.chunk) is Slab:
                entry.chunk.keys.append(key)
        entry.expires = expires
        self._put(key, entry, event)
        self._catalogue.note_stray(key)

    def _rewrite(self, key: bytes, text: Text, value: bytes, expires: int, event: str) -> None:
        """Store a short string where another was, without what `_put` would undo and do again."""
        self._texts += len(value) - len(text.data)
        text.data = value
        changed = text.expires != expires
        if changed:
            self._expiry.keys += bool(expires) - bool(text.expires)
            text.expires = expires
            if expires:
                self._expiry.note(key, expires)
        self.counters.writes += 1
        self._units.used(key)
        if self.on_event is not None:
            self.on_event(event, key)
            if expires and changed:
                self.on_event("expire", key)

    def slot_of(self, value: bytes) -> Slot:
        """A slot that holds `value`."""
        slot = self.arena.allocate(len(value))
        slot.body[:] = value
        return slot

    def _put(self, key: bytes, entry: Entry, event: str = "set") -> None:
        old = self._catalogue.entries.get(key)
        if old is not None:
            self._forget(key, old, entry)
        self._catalogue.put(key, entry)
        if entry.expires:
            self._expiry.keys += 1
            self._expiry.note(key, entry.expires)
        self.counters.writes += 1
        self._units.used(self._unit(key, entry))
        if self.on_event is not None:
            self._tell_of_write(key, old, entry, event)

    def _grow(self, block: Block, size: int) -> None:
        block.footprint += size
        self.guards.grew(block, size)

    def _forget(self, key: bytes, old: Entry, new: Entry | None, event: str = "set") -> None:
        """Undo what the index and the accounts know of `old`; `new` takes its place, if anything does."""
        if old.expires:
            self._expiry.keys -= 1
        self._catalogue.forget_stray(key, old)
        if isinstance(old, Text):
            self._texts -= len(key) + old.size + TEXT_OVERHEAD
            stays = new is not None and self._unit(key, new) == key
            if not stays:
                self._units.removed(key)
            return
        unit = self._unit(key, old)
        if isinstance(unit, Block):
            self._grow(unit, -old.footprint)
        else:
            self.guards.removed(key)  # the new value was used a moment ago: it needs no promise yet
        if new is not None and self._unit(key, new) is unit:
            return
        if isinstance(unit, Block):
            name = PageKey.parse(key)
            self.ghosts.page_went(unit, name.layer, name.head, name.kv_type, _REASONS.get(event, event))
            unit.discard(name.layer, name.head, name.kv_type)
            if not unit.pages:
                self.index.remove(unit)
                self._units.removed(unit)
                self.guards.removed(unit)
        elif new is None or self._unit(key, new) != key:
            self._units.removed(key)

    def delete(self, key: bytes, event: str = "del") -> bool:
        """Remove a key; whether it was there and alive."""
        if self.find(key) is None:
            return False
        self._own(key)
        self._remove(key, event)
        return True

    def _remove(self, key: bytes, event: str) -> None:
        self._forget(key, self._catalogue.entries.pop(key), None, event)
        self.tell(event, key)

    def set_expiry(self, key: bytes, expires: int) -> None:
        """Give a living key an expiry in unix milliseconds, 0 to take it away. One in the past removes the key."""
        entry = self._own(key)
        assert entry is not None
        if entry.expires:
            self._expiry.keys -= 1
        entry.expires = expires
        if not expires:
            self.tell("persist", key)
            return
        self._expiry.keys += 1
        if expires <= unix_ms():
            self._remove(key, "del")
            return
        unit = self._unit(key, entry)
        if isinstance(unit, Block):
            unit.expires_at(expires)
        self._expiry.note(key, expires)
        self.tell("expire", key)

    def flush(self) -> Fallen:
        """Remove everything. What there was is freed with the result: piece by piece, or at once when it is dropped."""
        self.tell("flush", b"")
        fallen = Fallen(*self._catalogue.clear(), self._units.clear())
        self._expiry.clear()
        self.guards.clear()
        self.ghosts.clear()
        self._texts = 0
        return fallen

    def tell(self, event: str, key: bytes) -> None:
        """Say what happened to a key, to whoever listens."""
        if self.on_event is not None:
            self.on_event(event, key)

    # -- going ----------------------------------------------------------------------------------------------------

    def _expire(self, key: bytes) -> None:
        """Remove an overdue key; of a block that was stored whole, all of it."""
        page = self._catalogue.page_in_extent(key)
        if page is not None and key not in self._catalogue.entries:
            self.counters.expired += self.remove_block(cast(Block, page.unit), "expired")
        else:
            self.counters.expired += 1
            self._remove(key, "expired")

    def sweep(self, now: int, most: int) -> int:
        """Remove up to `most` keys that are due; how many it removed."""
        self._units.now = now // 1000
        self.guards.settle(now)
        self._catalogue.rest(now)
        self.gather()
        self.arena.rest()
        removed = 0
        for key in self._expiry.due(now):
            self._expire(key)
            removed += 1
            if removed == most:
                break
        return removed

    def promise(self, key: bytes, entry: Entry) -> None:
        """Somebody was told that `key` is there and will come to read it: eviction spares it for a while.

        The client of LMCache that asks EXISTS and then misses with GET waits for ever.
        """
        if self.maxmemory and not isinstance(entry, Text):
            unit = self._unit(key, entry)
            size = unit.footprint if isinstance(unit, Block) else entry.footprint
            self.guards.lease(unit, size, unix_ms() + PROMISE, self.guardable)

    def make_room(self, *, may_evict: bool = True) -> None:
        """Evict until memory is within its limit. Raises OutOfMemory when the policy forbids it."""
        if not self.maxmemory or self.used_memory <= self.maxmemory:
            return
        if self.policy == NO_EVICTION:
            raise OutOfMemory
        now = unix_ms()
        self.guards.settle(now)
        for unit in self._victims():
            if self.guards.spares(unit, now):
                continue
            self.evict(unit)
            if self.arena.sparse:
                self.gather()
            if self.used_memory <= self.maxmemory:
                return
        if self.policy == VOLATILE_TTL:
            raise OutOfMemory

    def _victims(self) -> Iterator[Unit]:
        if self.policy != VOLATILE_TTL:
            return self._units.victims()
        get = self._catalogue.get
        return (self._unit(key, cast(Entry, get(key))) for key in self._expiry.nearest())

    def gather(self) -> None:
        """Move what is left in sparse slabs to slots of its own, so that their memory is free again."""
        for slab in list(self.arena.sparse):
            self.arena.sparse.discard(slab)
            for key in slab.keys:
                old = self._catalogue.entries.get(key)
                if type(old) is Slot and old.chunk is slab:
                    self._move(key, old)

    def _move(self, key: bytes, old: Slot) -> None:
        new = self.arena.allocate(old.size)
        new.body[:] = old.body
        new.seal()
        new.expires, new.unit = old.expires, old.unit
        self._catalogue.entries[key] = new
        if isinstance(new.unit, Block):
            new.header[:] = old.header
            self._grow(new.unit, new.footprint - old.footprint)

    def evict(self, unit: Block | bytes) -> None:
        """Remove a unit whole."""
        self._units.evicted(unit)
        if isinstance(unit, Block):
            self.counters.evicted += self.remove_block(unit, "evicted")
        else:
            self.counters.evicted += 1
            self._remove(unit, "evicted")

    # -- pages ----------------------------------------------------------------------------------------------------

    def block(self, req_id: bytes, page: int) -> Block | None:
        """One block of a request with its living pages; None when it has none."""
        block = self.index.block(req_id, page)
        return None if block is None else self._living(block)

    def blocks_of(self, req_id: bytes) -> list[Block]:
        """The blocks of a request with their living pages, by page id."""
        return [block for block in self.index.of(req_id) if self._living(block)]

    def scan_requests(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The next cursor, 0 at the end, and the requests in the next `count` places of the order of scans."""
        cursor, req_ids = self.index.scan(cursor, count, unix_ms())
        return cursor, [req_id for req_id in req_ids if self.blocks_of(req_id)]

    def _living(self, block: Block) -> Block | None:
        now = unix_ms()
        if not block.soonest or block.soonest > now:
            return block
        if block.extent is not None:
            self.counters.expired += self.remove_block(block, "expired")
            return None
        block.soonest = 0
        for key in list(block.page_keys()):
            if 0 < self.expires_of(key) <= now:
                self._expire(key)
            else:
                block.expires_at(self.expires_of(key))
        return block if block.pages else None

    def pages_of(self, block: Block) -> list[Page]:
        """The pages of a block, in the order of its body. What is overdue must have been swept: see `block`."""
        return [cast(Page, self._catalogue.get(key)) for key in block.page_keys()]

    def use_block(self, block: Block) -> None:
        """A block is read whole: a use of it, and a hit."""
        self.counters.hits += 1
        if self._touching:
            self._units.used(block)

    def remove_corrupt(self, key: bytes) -> None:
        """Remove a page that is not what was stored."""
        self._own(key)
        self._forget(key, self._catalogue.entries.pop(key), None, "corrupt")
        self.tell("del", key)

    def remove_block(self, block: Block, event: str, reason: str = "") -> int:
        """Remove every page of a block; how many it had. `reason`: what is remembered, if the event does not tell."""
        self.index.remove(block)
        self._units.removed(block)
        self.guards.removed(block)
        self.ghosts.block_went(block, reason or _REASONS[event], self.policy if event == "evicted" else "")
        keys = list(block.page_keys()) if self.on_event is not None else []
        self._expiry.keys -= self._catalogue.take_pages(block)
        block.extent = None  # whoever still looks at the block does not keep its memory
        for key in keys:
            self.tell(event, key)
        return block.pages

    @property
    def guardable(self) -> int:
        """Bytes that leases and pins may take together."""
        return int(self.maxmemory * SHARE) if self.maxmemory else sys.maxsize
