"""The keyspace in memory: pages and plain strings under one set of keys, with expiry and eviction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvpage_server.core import NewPages, Slot
from kvpage_server.core.arguments import PageName
from kvpage_server.page import HEADER_SIZE
from kvpage_server.store.eviction.quotas import text_size
from kvpage_server.store.lookup import Lookup
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, Text
from kvpage_server.store.memory.extent import Extent
from kvpage_server.store.memory.index import Block, rows_of
from kvpage_server.store.ration import Coming
from kvpage_server.store.room import OutOfMemory

__all__ = ["Fallen", "Keyspace", "OutOfMemory"]

LONGEST_TEXT = 511  # longer strings lie in the arena, where longer words are received


def _events_of_block(keys: Iterable[bytes], had: Mapping[bytes, int], expires: int) -> Iterator[tuple[str, bytes]]:
    """What happens to the keys of a block that is stored whole, where some were there before with some expiry."""
    for key in keys:
        if key not in had:
            yield "new", key
        yield "set", key
        if expires and had.get(key) != expires:
            yield "expire", key


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


class Keyspace(Lookup):
    """Every key and value, as the commands use it. `maxmemory` is in bytes, 0 for no limit."""

    # -- pages -----------------------------------------------------------------------------------------------------

    @property
    def stores_together(self) -> bool:
        """Whether pages of a batch are stored and found without a look at each."""
        return self.on_event is None and self._quotas is None and self._catalogue.has_all_entries

    def set_page(self, name: PageName, header: bytes, slot: Slot, expires: int = 0) -> None:
        """Store a page whose body is in `slot`. `header` is its 64 bytes; `name` has been validated."""
        slot.header[:] = header
        if self.rationed:
            self.admit([Coming(name.key, HEADER_SIZE + slot.size, (name.req_id, name.page))])
        self.set_pages(NewPages.one(name, slot, expires))

    def set_pages(self, pages: NewPages) -> None:
        """Store pages. Where that may be refused, they were admitted."""
        if self.index.is_scanned:
            for block in pages.blocks():
                self.index.open(*block)
        at = 0
        while at < len(pages):
            at = self._put_run(pages, at) if self.on_event is None else self._put_one(pages, at)
        self.counters.writes += len(pages)

    def _put_run(self, pages: NewPages, at: int) -> int:
        """Store pages from `at` on, as many as need no decision, or one; where they end."""
        entries, index, fresh = self._catalogue.entries, self.index, self._catalogue.listed
        each = self._quotas is not None or len(self.guards) > 0  # blocks are counted one by one
        put = pages.put(entries, index.requests, at, Block, fresh, one_block=each)
        if put.stop == at:
            return self._put_one(pages, at)
        if put.made:
            index.note_made(put.made)
        if fresh:
            self._catalogue.list_all(fresh)
        if expires := pages.expires(at):
            self._expiry.keys += put.stop - at
            self._expiry.note_all(pages.keys[at : put.stop], expires)
        self._expiry.keys -= put.replaced
        self._units.used_all(put.blocks)
        for block in put.beside:
            self._join(block)
        if each:
            self.guards.grew(put.blocks[0], put.grown)
            self._grew(put.blocks[0], put.stored)
        return put.stop

    def _put_one(self, pages: NewPages, at: int) -> int:
        """Store one page, whatever its key had before; the place of the next."""
        (key, req_id, layer, head, page, kv_type), slot, expires = pages.name(at), pages.slots[at], pages.expires(at)
        block = self._open(req_id, page)
        old = self._catalogue.entries.get(key)
        counted = self._counted(key, old, as_page=True)
        slot.unit, slot.expires = block, expires
        block.add(layer, head, kv_type)
        if old is not None:
            self._forget(key, old, slot)
        self._catalogue.put(key, slot)
        self._grow(block, slot.footprint)
        if expires:
            block.expires_at(expires)
            self._expiry.keys += 1
            self._expiry.note(key, expires)
        if self._quotas is not None:
            self._grew(block, HEADER_SIZE + slot.size - counted)
        if self.on_event is not None:
            self._tell_of_write(key, old, slot)
        return at + 1

    def _open(self, req_id: bytes, page: int) -> Block:
        """The block that pages are about to be written to, one by one: a use of it."""
        block = self.index.open(req_id, page)
        if block.extent is not None:
            self._split(block)
        self._units.used(block)
        self._join(block)
        return block

    def _tell_of_write(self, key: bytes, old: Entry | None, new: Entry, event: str = "set") -> None:
        if old is None:
            self.tell("new", key)
        self.tell(event, key)
        if new.expires and (old is None or old.expires != new.expires):
            self.tell("expire", key)

    def set_block(self, req_id: bytes, page: int, extent: Extent) -> None:
        """Store a block whole, in place of whatever pages it had. Its slot is full."""
        self.admit_block(req_id, page, extent.shape)
        block = self.index.open(req_id, page)
        for key in self._catalogue.strays_in(req_id, page, extent):
            self._remove(key, "del")
        had = self._drop_pages(block, rows_of(extent.shape))
        self._catalogue.fill(block, extent)
        self._grow(block, extent.slot.footprint)
        if self._quotas is not None:
            self._quotas.resize(block, self._size_of(block))
        if extent.expires:
            self._expiry.keys += block.pages
            self._expiry.note(next(block.page_keys()), extent.expires)  # one stands for all
        self.counters.writes += 1
        self._units.used(block)
        self._join(block)
        if self.on_block is not None:
            keys = list(block.page_keys())
            self.on_block(keys, _events_of_block(keys, had, extent.expires))

    def _drop_pages(self, block: Block, stay: Mapping[int, int]) -> dict[bytes, int]:
        """Take all pages from a block that gets others, which are those in the rows `stay`.

        When somebody listens to events: the keys there were, and when each was to expire.
        """
        if not block.pages:
            return {}
        gone = {row: left for row, heads in block.rows.items() if (left := heads & ~stay.get(row, 0))}
        if gone:
            self.ghosts.pages_went(block, gone, "overwritten")
        had = self._expiries(block) if self.on_block is not None else {}
        self._expiry.keys -= self._catalogue.take_pages(block)
        self._grow(block, -block.footprint)
        return had

    def _expiries(self, block: Block) -> dict[bytes, int]:
        """When each page of a block expires, by key."""
        if block.extent is not None:
            return dict.fromkeys(block.page_keys(), block.extent.expires)
        return {key: self._catalogue.entries[key].expires for key in block.page_keys()}

    # -- strings ---------------------------------------------------------------------------------------------------

    def set_string(self, key: bytes, value: bytes | Slot, expires: int = 0, event: str = "set") -> None:
        """Store a plain string."""
        old = self._own(key)
        if old is not None and old.expires:
            old = self.find(key)  # one that is overdue expires, it is not overwritten
        if self.rationed:
            self.admit([Coming(key, text_size(key, value.size if isinstance(value, Slot) else len(value)))])
        if isinstance(value, bytes) and len(value) <= LONGEST_TEXT:
            if type(old) is Text:
                self._rewrite(key, old, value, expires, event)
                return
            entry: Entry = Text(value)
            self._texts += len(key) + len(value) + TEXT_OVERHEAD
        else:
            entry = self.slot_of(value) if isinstance(value, bytes) else value
        entry.expires = expires
        self._put(key, entry, old, event)
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
        if self._quotas is not None:
            self._quotas.resize(key, text_size(key, len(value)))
        if self.on_event is not None:
            self.on_event(event, key)
            if expires and changed:
                self.on_event("expire", key)

    def slot_of(self, value: bytes) -> Slot:
        """A slot that holds `value`."""
        slot = self.arena.allocate(len(value))
        slot.body[:] = value
        return slot

    def _put(self, key: bytes, entry: Entry, old: Entry | None, event: str) -> None:
        """Store a plain string where `old` was."""
        if old is not None:
            self._forget(key, old, entry)
        self._catalogue.put(key, entry)
        if entry.expires:
            self._expiry.keys += 1
            self._expiry.note(key, entry.expires)
        self.counters.writes += 1
        self._units.used(key)
        if self._quotas is not None:
            self._quotas.resize(key, text_size(key, entry.size))
        if self.on_event is not None:
            self._tell_of_write(key, old, entry, event)

    # -- all of it -------------------------------------------------------------------------------------------------

    def flush(self) -> Fallen:
        """Remove everything. What there was is freed with the result: piece by piece, or at once when it is dropped."""
        self.tell("flush", b"")
        fallen = Fallen(*self._catalogue.clear(), self._units.clear())
        self._expiry.clear()
        self.guards.clear()
        self.ghosts.clear()
        self._texts = 0
        return fallen

    def sweep(self, now: int, most: int) -> int:
        """Remove up to `most` keys that are due, and go on with what is done in steps; `most` when there is more."""
        self._units.now = now // 1000
        self.guards.settle(now)
        self._catalogue.rest(now)
        self.arena.rest()
        removed = 0
        for key in self._expiry.due(now):
            self._expire(key)
            removed += 1
            if removed == most:
                break
        return most if self._go_on() else removed
