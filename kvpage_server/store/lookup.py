"""Finding and reading: keys, pages, blocks; what counts as a use, a hit or a miss."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from kvpage_server.core import PageNames, look_up
from kvpage_server.page import unix_ms
from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.memory.catalogue import Place
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.entry import Entry, Page
from kvpage_server.store.memory.index import Block
from kvpage_server.store.ration import Ration

ANY = sys.maxsize  # bytes


class Found(NamedTuple):
    """What was found for some names: living values, the units that they belong to, and the names without a value.

    `others`: the names of some of the values that are something else than a page in a slot of its own.
    """

    entries: list[Entry | None]
    units: list[Unit]
    missing: list[int]
    others: list[int]


class Lookup(Ration):
    """Answers what is there."""

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
            unit = entry.unit
            self._units.used(unit if type(unit) is Block else key)
        return entry

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Let what is read meanwhile not count as a use."""
        self._touching = False
        try:
            yield
        finally:
            self._touching = True

    def find_pages(self, names: PageNames) -> Sequence[Entry | None]:
        """The living values of pages' keys, without counting them as uses."""
        return self._look_up(names, 0, len(names), ANY).entries

    def read_pages(self, names: PageNames, first: int, stop: int, most: int = ANY) -> Found:
        """`read` of pages from `first` to before `stop`, or until they are `most` bytes; those without a value, too.

        Those of one block in a row are one use of it.
        """
        found = self._look_up(names, first, stop, most)
        self.counters.hits += len(found.entries) - len(found.missing)
        self.counters.misses += len(found.missing)
        if self.on_event is not None:
            for i in found.missing:
                self.tell("keymiss", names.keys[i])
        if self._touching:
            self._units.used_all(found.units)
        return found

    def _look_up(self, names: PageNames, first: int, stop: int, most: int) -> Found:
        entries, blocks, absent, others = look_up(self._catalogue.entries, names, first, stop, most, unix_ms())
        found = Found(cast("list[Entry | None]", entries), cast("list[Unit]", blocks), [], [])
        for i in others:
            self._add(found, i, first, names.keys[i], self.find(names.keys[i]))
        if self._catalogue.has_all_entries:
            found.missing.extend(absent)
            return found
        for block_name, places in names.runs(absent):
            block = self.index.block(*block_name)  # it is awake now, if it is there
            if block is not None and block.extent is not None:
                block = self._living(block)
            for i in places:
                self._add(found, i, first, names.keys[i], self._page_in(block, names, i))
        return found

    def _page_in(self, block: Block | None, names: PageNames, i: int) -> Entry | None:
        """A page that had no entry when that was looked for, in its block."""
        if block is None:
            return None
        if block.extent is None:
            key = names.keys[i]
            return self.find(key) if key in self._catalogue.entries else None
        _, _, layer, head, page, kv_type = names.name(i)
        return block.extent.page(block, page, layer, head, kv_type)

    def _add(self, found: Found, i: int, first: int, key: bytes, entry: Entry | None) -> None:
        """Note what was found for the name `i`. What is cold is not used: it has been lent, memory has it not."""
        if entry is None:
            found.missing.append(i)
            return
        found.entries[i - first] = entry
        found.others.append(i)
        unit = self._unit(key, entry)
        if type(entry) is not Cold and not (found.units and found.units[-1] is unit):
            found.units.append(unit)

    def idle(self, key: bytes) -> int:
        """Seconds since a living key, or its block, was last used."""
        entry = self._catalogue.get(key)
        assert entry is not None
        return self._units.idle(self._unit(key, entry))

    # -- keys ------------------------------------------------------------------------------------------------------

    def keys(self) -> list[bytes]:
        """Every living key."""
        return self.living(self.places())

    def names(self) -> list[bytes]:
        """Every key, those that are overdue too."""
        return [name for place in self.places() for name in self._catalogue.names_at(place)]

    def places(self) -> list[Place]:
        """Where keys are: see `living`."""
        return self._catalogue.places()

    def living(self, places: Iterable[Place]) -> list[bytes]:
        """The keys at some places that exist."""
        now, entries, found = unix_ms(), self._catalogue.entries, list[bytes]()
        for place in places:
            if isinstance(place, bytes):
                entry = entries.get(place)
                if entry is not None and (not entry.expires or entry.expires > now):
                    found.append(place)
            elif isinstance(place, Block) and (not place.soonest or place.soonest > now):
                found += self._catalogue.names_at(place)
            else:
                names = self._catalogue.names_at(place)
                found += [name for name in names if not (expires := self.expires_of(name)) or expires > now]
        return found

    def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The next cursor, 0 at the end, and the living keys in the next places of the order of scans.

        Those are `count` places, or fewer if there are many keys at them: a block stored whole is one place.
        """
        found: list[bytes] = []
        for _ in range(count):
            cursor, places = self._catalogue.scan(cursor, 1)
            found += self.living(places)
            if not cursor or len(found) >= count:
                break
        return cursor, found

    def random_key(self) -> bytes | None:
        """A living key; None when there is none."""
        while len(self):
            key = self._catalogue.draw()
            if key is not None and self.find(key) is not None:
                return key
        return None

    # -- blocks ----------------------------------------------------------------------------------------------------

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
        return cursor, list(filter(self.has_pages, req_ids))

    def has_pages(self, req_id: bytes) -> bool:
        """Whether a request has a living page."""
        return any(self.block(req_id, page) is not None for page in self.index.page_ids(req_id))

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

    def pages_at(self, keys: Iterable[bytes]) -> list[Page]:
        """Pages that are there. What is overdue must have been swept: see `block`."""
        return [cast(Page, self._catalogue.get(key)) for key in keys]

    def use_block(self, block: Block) -> None:
        """A block is read whole: a use of it, and a hit."""
        self.counters.hits += 1
        if self._touching:
            self._units.used(block)
