"""Lookups of keys, pages and blocks, which count uses, hits and misses; and lists of keys and requests."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import NamedTuple, cast

from kvpage_server.core import PageNames, look_up
from kvpage_server.page import page_named, unix_ms
from kvpage_server.store.contents import NEVER_STORED, Contents, unit_of
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.catalogue import Place
from kvpage_server.store.memory.entry import Entry, Page, body_on_disk
from kvpage_server.store.memory.index import Block, OnDisk
from kvpage_server.system.text import monotonic_ms

ANY = sys.maxsize  # bytes: a read without a limit
_MOST_KNOWN = 1024  # requests of which `has_pages` knows a block


class Found(NamedTuple):
    """The result of a lookup of pages, from index `first` of a list of names on.

    `entries` has the value of each looked up name, or None. `units` are the units of the values; consecutive values of
    one unit have one item. `missing` are the indexes of names without a value, `others` those of values that are not
    single pages in memory; both are indexes of the list of names, not of `entries`.
    """

    entries: list[Entry | None]
    units: list[Unit]
    missing: list[int]
    others: list[int]


class Reader:
    """Lookups of values. A lookup that finds an expired value removes it, and counts as a miss."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._catalogue = contents.catalogue
        self._counters = contents.counters
        self._touching = True  # whether lookups count as uses

    def look(self, key: bytes) -> Entry | None:
        """Return a key's value, or None. Count a hit or a miss, but no use."""
        entry = self._contents.find(key)
        if entry is None:
            self._missed(key)
        else:
            self._counters.hits += 1
        return entry

    def read(self, key: bytes) -> Entry | None:
        """Return a key's value, or None. Count a hit and a use, or a miss."""
        entry = self._catalogue.entries.get(key) or self._catalogue.get(key)
        if entry is None or (entry.expires and self._contents.find(key) is None):
            self._missed(key)
            return None
        self._counters.hits += 1
        unit = entry.unit if type(entry.unit) is Block else key  # as in `unit_of`, without the cost of a call
        if self._touching:
            self._contents.eviction_order.units.used(unit)
        return entry

    def read_all(self, keys: list[bytes]) -> list[Entry | None]:
        """Read the value of each key as `read` does. Consecutive pages of one block count as one use of it."""
        found, blocks, absent, others = look_up(self._catalogue.entries, keys, 0, len(keys), ANY, unix_ms())
        values, units = cast("list[Entry | None]", found), cast("list[Unit]", blocks)
        self._counters.hits += len(keys) - len(absent) - len(others)
        if self._touching:
            self._contents.eviction_order.units.used_all(units)
        for i in absent + others:
            values[i] = self.read(keys[i])
        return values

    def _missed(self, key: bytes) -> None:
        self._counters.misses += 1
        self._count_reason(key)
        self._contents.notify("keymiss", key)

    def _count_reason(self, key: bytes) -> None:
        """Count the reason why a key has no value, as a miss of a page if the key names one, or of a string."""
        page = page_named(key) if key[:3] == b"kv:" else None
        if page is None:
            loss = self._contents.lost.of(key)
            self._counters.string_misses[loss.reason if loss is not None else NEVER_STORED] += 1
        else:
            ghost = self._contents.ghosts.of_page(page.req_id, page.layer, page.head, page.page, page.kv_type)
            self._counters.page_misses[ghost.reason if ghost is not None else NEVER_STORED] += 1

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Return a context manager; within it, lookups do not count as uses."""
        self._touching = False
        try:
            yield
        finally:
            self._touching = True

    def find_pages(self, names: PageNames) -> Sequence[Entry | None]:
        """Return the value of each page's key, or None. Count no use, hit or miss."""
        return self._look_up(names, 0, len(names), ANY).entries

    def read_pages(self, names: PageNames, first: int, stop: int, most: int = ANY) -> Found:
        """Read the pages from index `first` to before `stop`. End early after the page that reaches `most` bytes in
        total.

        Count as `read` does. Consecutive pages of one block count as one use of it.
        """
        found = self._look_up(names, first, stop, most)
        self._counters.hits += len(found.entries) - len(found.missing)
        self._counters.misses += len(found.missing)
        if self._contents.on_event is not None:
            for i in found.missing:
                self._contents.notify("keymiss", names.keys[i])
        if self._touching:
            self._contents.eviction_order.units.used_all(found.units)
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
            block = self._contents.index.block(*block_name)  # this gives its pages their entries
            if block is not None and block.extent is not None:
                block = self._contents.unexpired(block)
            for i in places:
                self._add(found, i, first, names.keys[i], self._page_in(block, names, i))
        return found

    def _page_in(self, block: Block | None, names: PageNames, i: int) -> Entry | None:
        """Return a page of a block, after the core has found no entry for it; None if it does not exist."""
        if block is None:
            return None
        if block.extent is None:
            key = names.keys[i]
            return self._contents.find(key) if key in self._catalogue.entries else None
        _, _, layer, head, page, kv_type = names.name(i)
        return block.extent.page(block, page, layer, head, kv_type)

    def _add(self, found: Found, i: int, first: int, key: bytes, entry: Entry | None) -> None:
        """Add the value of the name with index `i` to a result.

        A value on disk only is no use: its reply borrows it.
        """
        if entry is None:
            found.missing.append(i)
            return
        found.entries[i - first] = entry
        found.others.append(i)
        unit = unit_of(key, entry)
        if type(entry) is not OnDisk and not (found.units and found.units[-1] is unit):
            found.units.append(unit)

    def idle(self, key: bytes) -> int:
        """Return the seconds since the unit of an existing key was last used, as far as this is known."""
        entry = self._catalogue.get(key)
        assert entry is not None
        units, on_disk = self._contents.eviction_order.units, body_on_disk(entry)
        if on_disk is None or on_disk.code is not None:
            return units.idle(unit_of(key, entry))
        return max(units.now - on_disk.used, 0)

    def block(self, req_id: bytes, page: int) -> Block | None:
        """Remove the expired pages of a block, and return it; None if it does not exist then."""
        block = self._contents.index.block(req_id, page)
        return None if block is None else self._contents.unexpired(block)

    def pages_at(self, keys: Iterable[bytes]) -> list[Page]:
        """Return the pages with these keys, which must exist. The caller has removed expired ones with `block`."""
        return [cast(Page, self._catalogue.get(key)) for key in keys]

    def use_block(self, block: Block) -> None:
        """Count a hit and a use of a block that was read as a whole."""
        self._counters.hits += 1
        if block.extent is not None and type(block.extent.slot) is OnDisk and block.code is None:
            return  # the reply borrows its bytes from disk
        if self._touching:
            self._contents.eviction_order.units.used(block)


# -- Lists of keys and requests: all of them, in the order of scans, or at random --------------------------------------


class Scanned(NamedTuple):
    """A part of the order of scans: the next cursor, 0 at the end, the places, and the number of their keys."""

    cursor: int
    places: list[Place]
    keys: int  # including expired ones


class Listing:
    """Lists of keys and requests, which do not count as uses."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._catalogue = contents.catalogue
        # By request: a block in which `has_pages` has found a page that had not expired, behind others without one. The
        # next call begins with it, and does not pass over the expired pages before it again.
        self._unexpired: dict[bytes, int] = {}

    def keys(self) -> list[bytes]:
        """Return every key that has not expired."""
        return self.existing_keys(self.places())

    def names(self) -> list[bytes]:
        """Return every key, including expired ones that were not removed yet."""
        existing_at = self._catalogue.existing_at
        return [name for place in self.places() for name in existing_at(place, 0) if name is not None]

    def places(self) -> list[Place]:
        """Return the places of all keys, see `Catalogue.places`."""
        return self._catalogue.places()

    def existing_keys(self, places: Iterable[Place]) -> list[bytes]:
        """Return the keys at some places that have not expired."""
        return [*chain.from_iterable(self.groups(places))]

    def groups(self, places: Iterable[Place], most: int = 1000) -> Iterator[list[bytes]]:
        """Yield the keys at some places that have not expired, in groups of at most `most` keys, one group for each
        step.

        A group may be empty. Keys that change between two steps may be listed or not.
        """
        now, existing_at = unix_ms(), self._catalogue.existing_at
        names = (name for place in places for name in existing_at(place, now))
        while group := [*islice(names, most)]:
            yield [name for name in group if name is not None]
            now = unix_ms()  # for the next places

    def scan(self, cursor: int, count: int) -> Scanned:
        """Return the next `count` places of the order of scans, and the strays of their blocks.

        It returns fewer places if these have `count` keys or more: an extent is one place with many keys.
        """
        found, keys = list[Place](), 0
        for _ in range(count):
            cursor, places = self._catalogue.scan(cursor, 1)
            places += [stray for place in places for stray in self._catalogue.strays_at(place)]
            found += places
            keys += sum(map(self._catalogue.count_at, places))
            if not cursor or keys >= count:
                break
        return Scanned(cursor, found, keys)

    def random_key(self) -> bytes | None:
        """Return a random key that has not expired; None if there is none."""
        while len(self._catalogue):
            key = self._catalogue.draw()
            if key is not None and self._contents.find(key) is not None:
                return key
        return None

    def blocks_of(self, req_id: bytes) -> list[Block]:
        """Remove the expired pages of a request, and return its blocks in the order of their page ids."""
        return [block for block in self._contents.index.of(req_id) if self._contents.unexpired(block)]

    def scan_requests(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor, 0 at the end, and the requests in the next `count` places of the order of scans."""
        cursor, req_ids = self._contents.index.scan(cursor, count, monotonic_ms())
        return cursor, list(filter(self.has_pages, req_ids))

    def has_pages(self, req_id: bytes) -> bool:
        """Return whether a request has a page that has not expired."""
        index = self._contents.index
        request = index.requests.get(req_id)
        if not request:
            return False
        known = self._unexpired.get(req_id, next(iter(request)))
        for page in chain([known], request):  # usually the first one is enough, and there may be very many
            block = index.block(req_id, page)
            if block is not None and self._contents.has_unexpired(block):
                if len(self._unexpired) >= _MOST_KNOWN:
                    self._unexpired.clear()
                if page != next(iter(request)):
                    self._unexpired[req_id] = page
                return True
        self._unexpired.pop(req_id, None)
        return False
