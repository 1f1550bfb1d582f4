"""The keyspace in memory: pages and plain strings under one set of keys, with expiry and eviction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from kvpage_server.core import Slot
from kvpage_server.page import HEADER_SIZE
from kvpage_server.store.entry import TEXT_OVERHEAD, Entry, NewPage, PageName, Text
from kvpage_server.store.extent import Extent
from kvpage_server.store.index import Block, rows_of
from kvpage_server.store.lookup import Lookup
from kvpage_server.store.quota import text_size
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

    def set_page(self, name: PageName, header: bytes, slot: Slot, expires: int = 0) -> None:
        """Store a page whose body is in `slot`. `header` is its 64 bytes; `name` has been validated."""
        slot.header[:] = header
        self.set_pages([(name, slot, expires)])

    def set_pages(self, pages: Iterable[NewPage]) -> None:
        """Store pages, whose slots have their headers; the names have been validated."""
        if self.rationed:
            self._set_within_quotas(list(pages))
        else:
            self._set_pages(pages)

    def _set_within_quotas(self, pages: Sequence[NewPage]) -> None:
        values = (Coming(name.key, HEADER_SIZE + slot.size, (name.req_id, name.page)) for name, slot, _ in pages)
        growth = self.admit(values)
        self._set_pages(pages)
        grown: dict[Block, int] = {}
        for name, slot, _ in pages:
            block = cast(Block, slot.unit)
            grown[block] = grown.get(block, 0) + growth.pop(name.key, 0)
        for block, size in grown.items():
            self._grew(block, size)

    def _set_pages(self, pages: Iterable[NewPage]) -> None:
        catalogue, entries = self._catalogue, self._catalogue.entries
        block: Block | None = None
        grown = written = 0
        told = self.on_event is not None
        for name, slot, expires in pages:
            key, req_id, layer, head, page, kv_type = name
            if block is None or page != block.page or req_id != block.req_id:
                if block is not None:
                    self._grow(block, grown)
                block, grown = self._open(req_id, page), 0
            slot.unit = block
            written += 1
            old = entries.get(key)
            if old is None:
                block.add(layer, head, kv_type)
                grown += slot.footprint
                catalogue.put(key, slot)
            elif type(old) is Slot and old.unit is block:
                if old.size != slot.size:
                    grown += slot.footprint - old.footprint
                if old.expires:
                    self._expiry.keys -= 1
                block.shape_known = False
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
            if told:
                self._tell_of_write(key, old, slot)
        self.counters.writes += written
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
