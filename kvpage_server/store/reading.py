"""Lookup of keys, pages and blocks; it counts uses, hits and misses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from kvpage_server.core import PageNames, look_up
from kvpage_server.page import unix_ms
from kvpage_server.store.contents import NEVER_STORED, Contents, unit_of
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.catalogue import Place
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.entry import Entry, Page, cold_body, page_named
from kvpage_server.store.memory.index import Block
from kvpage_server.system.text import monotonic_ms

ANY = sys.maxsize  # bytes


class Found(NamedTuple):
    """The result of a search for some names: living values, their units, and the places of names without a value.

    `others` are the places of values other than pages in slots of their own.
    """

    entries: list[Entry | None]
    units: list[Unit]
    missing: list[int]
    others: list[int]


class Reader:
    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._catalogue = contents.catalogue
        self._counters = contents.counters
        self._touching = True  # whether reading counts as a use

    def look(self, key: bytes) -> Entry | None:
        """Return a key's living value. Counts as a hit or a miss, not as a use."""
        entry = self._contents.find(key)
        if entry is None:
            self._missed(key)
        else:
            self._counters.hits += 1
        return entry

    def read(self, key: bytes) -> Entry | None:
        """Return a key's living value. Counts as a use, and as a hit or a miss."""
        entry = self._catalogue.entries.get(key) or self._catalogue.get(key)
        if entry is None or (entry.expires and self._contents.find(key) is None):
            self._missed(key)
            return None
        self._counters.hits += 1
        unit = entry.unit if type(entry.unit) is Block else key  # as in `unit_of`, without the cost of a call
        if self._touching:
            self._contents.evictor.units.used(unit)
        return entry

    def read_all(self, keys: list[bytes]) -> list[Entry | None]:
        """`read` of many keys. Pages of one block in a row are one use of it."""
        found, blocks, absent, others = look_up(self._catalogue.entries, keys, 0, len(keys), ANY, unix_ms())
        entries, units = cast("list[Entry | None]", found), cast("list[Unit]", blocks)
        self._counters.hits += len(keys) - len(absent) - len(others)
        self._used(units)
        for i in absent + others:
            entries[i] = self.read(keys[i])
        return entries

    def _used(self, units: list[Unit]) -> None:
        if self._touching:
            self._contents.evictor.units.used_all(units)

    def _missed(self, key: bytes) -> None:
        self._counters.misses += 1
        self._count_reason(key)
        self._contents.tell("keymiss", key)

    def _count_reason(self, key: bytes) -> None:
        """Count why a key has no value: as a page's if it is the key of one, or as a string's."""
        page = page_named(key) if key[:3] == b"kv:" else None
        if page is None:
            loss = self._contents.lost.of(key)
            self._counters.string_misses[loss.reason if loss is not None else NEVER_STORED] += 1
        else:
            ghost = self._contents.ghosts.of_page(page.req_id, page.layer, page.head, page.page, page.kv_type)
            self._counters.page_misses[ghost.reason if ghost is not None else NEVER_STORED] += 1

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """While this lasts, reading does not count as a use."""
        self._touching = False
        try:
            yield
        finally:
            self._touching = True

    def find_pages(self, names: PageNames) -> Sequence[Entry | None]:
        """Return the living values of pages' keys, without counting them as uses."""
        return self._look_up(names, 0, len(names), ANY).entries

    def read_pages(self, names: PageNames, first: int, stop: int, most: int = ANY) -> Found:
        """`read` of pages from `first` to before `stop`, or until they are `most` bytes; None for those without a
        value.

        Pages of one block in a row are one use of it.
        """
        found = self._look_up(names, first, stop, most)
        self._counters.hits += len(found.entries) - len(found.missing)
        self._counters.misses += len(found.missing)
        if self._contents.on_event is not None:
            for i in found.missing:
                self._contents.tell("keymiss", names.keys[i])
        self._used(found.units)
        return found

    def _look_up(self, names: PageNames, first: int, stop: int, most: int) -> Found:
        entries, blocks, absent, others = look_up(self._catalogue.entries, names.keys, first, stop, most, unix_ms())
        found = Found(cast("list[Entry | None]", entries), cast("list[Unit]", blocks), [], [])
        for i in others:
            self._add(found, i, first, names.keys[i], self._contents.find(names.keys[i]))
        if self._catalogue.has_all_entries:
            found.missing.extend(absent)
            return found
        for block_name, places in names.runs(absent):
            block = self._contents.index.block(*block_name)  # this wakes it, if it exists
            if block is not None and block.extent is not None:
                block = self._contents.living(block)
            for i in places:
                self._add(found, i, first, names.keys[i], self._page_in(block, names, i))
        return found

    def _page_in(self, block: Block | None, names: PageNames, i: int) -> Entry | None:
        """Return a page that had no entry when it was looked up, in its block."""
        if block is None:
            return None
        if block.extent is None:
            key = names.keys[i]
            return self._contents.find(key) if key in self._catalogue.entries else None
        _, _, layer, head, page, kv_type = names.name(i)
        return block.extent.page(block, page, layer, head, kv_type)

    def _add(self, found: Found, i: int, first: int, key: bytes, entry: Entry | None) -> None:
        """Add the value with the name `i`. A borrowed value on disk does not count as used."""
        if entry is None:
            found.missing.append(i)
            return
        found.entries[i - first] = entry
        found.others.append(i)
        unit = unit_of(key, entry)
        if type(entry) is not Cold and not (found.units and found.units[-1] is unit):
            found.units.append(unit)

    def idle(self, key: bytes) -> int:
        """Return seconds since a living key, or its block, was used, as far as this is known."""
        entry = self._catalogue.get(key)
        assert entry is not None
        units, cold = self._contents.evictor.units, cold_body(entry)
        return units.idle(unit_of(key, entry)) if cold is None else max(units.now - cold.used, 0)

    def block(self, req_id: bytes, page: int) -> Block | None:
        """Return one block of a request with its living pages; None when it has none."""
        block = self._contents.index.block(req_id, page)
        return None if block is None else self._contents.living(block)

    def pages_at(self, keys: Iterable[bytes]) -> list[Page]:
        """Return the pages that exist. Overdue ones must have been removed: see `block`."""
        return [cast(Page, self._catalogue.get(key)) for key in keys]

    def use_block(self, block: Block) -> None:
        """Count a block that is read whole as a use, and a hit."""
        self._counters.hits += 1
        if block.extent is not None and type(block.extent.slot) is Cold:  # its bytes are lent
            return
        if self._touching:
            self._contents.evictor.units.used(block)


# -- Which keys and requests there are: in the order of scans, at random, all of them ----------------------------------


class Listing:
    """Lists of keys and requests, which do not count as a use."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._catalogue = contents.catalogue

    def keys(self) -> list[bytes]:
        return self.living(self.places())

    def names(self) -> list[bytes]:
        """Return every key, including overdue ones."""
        return [name for place in self.places() for name in self._catalogue.names_at(place)]

    def places(self) -> list[Place]:
        """Return where keys are: see `living`."""
        return self._catalogue.places()

    def living(self, places: Iterable[Place]) -> list[bytes]:
        """Return the keys at some places that exist."""
        now, living_at = unix_ms(), self._catalogue.living_at
        return [name for place in places for name in living_at(place, now)]

    def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor, 0 at the end, and the living keys in the next places of the order of scans.

        There are `count` places, or fewer if they have many keys: a block stored whole is one place.
        """
        found: list[bytes] = []
        for _ in range(count):
            cursor, places = self._catalogue.scan(cursor, 1)
            found += self.living(places)
            found += self.living(stray for place in places for stray in self._catalogue.strays_at(place))
            if not cursor or len(found) >= count:
                break
        return cursor, found

    def random_key(self) -> bytes | None:
        """Return a living key; None if there is none."""
        while len(self._catalogue):
            key = self._catalogue.draw()
            if key is not None and self._contents.find(key) is not None:
                return key
        return None

    def blocks_of(self, req_id: bytes) -> list[Block]:
        """Return the blocks of a request with their living pages, by page id."""
        return [block for block in self._contents.index.of(req_id) if self._contents.living(block)]

    def scan_requests(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor, 0 at the end, and the requests in the next `count` places of the order of scans."""
        cursor, req_ids = self._contents.index.scan(cursor, count, monotonic_ms())
        return cursor, list(filter(self.has_pages, req_ids))

    def has_pages(self, req_id: bytes) -> bool:
        """Return whether a request has a living page."""
        index = self._contents.index
        blocks = (index.block(req_id, page) for page in index.page_ids(req_id))
        return any(block is not None and self._contents.living(block) for block in blocks)
