"""The map from keys to values, and the order of scans.

Most values are entries of a dictionary. A single page has a bit in its block, too (see `index`). The pages of an extent
have no entries: each lookup creates an `ExtentPage`. When one page of an extent changes, the extent is split: its pages
get entries, which refer to parts of the extent's slot. The pages of an unloaded block have no entries either: the first
lookup of one of them creates all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvpage_server.page import page_named
from kvpage_server.store import records
from kvpage_server.store.memory.entry import Entry
from kvpage_server.store.memory.index import Block, Extent, ExtentPage, PageIndex, ScanOrder
from kvpage_server.system.text import monotonic_ms


@dataclass(frozen=True, slots=True)
class IndexCosts:
    """Approximate bytes of memory of the index, measured with 100,000 and 400,000 small pages and strings.

    An entry costs `entry` bytes and `copies` times the length of its key; a block `block` bytes and `copies` times the
    length of its request id.
    """

    entry: int
    block: int
    copies: int

    def of_key(self, key: bytes) -> int:
        """Return the bytes of memory of an entry with this key."""
        return self.entry + self.copies * len(key)

    def of_block(self, req_id: bytes) -> int:
        """Return the bytes of memory of a block, without the entries of its pages."""
        return self.block + self.copies * len(req_id)

    def of_unit(self, unit: Block | bytes) -> int:
        """Return the bytes of memory in the index of a string, or of a block with the entries of its pages."""
        if isinstance(unit, bytes):
            return self.of_key(unit)
        return self.of_block(unit.req_id) + (0 if unit.extent is not None else self.of_pages(unit))

    def of_pages(self, block: Block) -> int:
        """Return the bytes of the entries of a block's pages, if each page has one."""
        return block.pages * (self.entry + self.copies * (len(block.req_id) + _NUMBERS))


IN_MEMORY = IndexCosts(entry=200, block=350, copies=1)
WITH_TIER = IndexCosts(entry=350, block=500, copies=2)  # the disk tier stores a name and a size for each value, too
_NUMBERS = 12  # bytes of a page's key in addition to its request id
_REQUEST = 250  # bytes of a request, without its blocks
_UNLOADED_PAGE = records.ROW  # bytes of a page in an unloaded block
_NO_KEY = (None,)  # the keys at a place whose value was removed

# An item of the order of scans: a key, the block of an extent, or the request and page id of a block that was unloaded
# when it was added.
Place = bytes | Block | tuple[bytes, int]


class Catalogue:
    """All keys and their values, including expired ones that were not removed yet."""

    def __init__(self) -> None:
        # Values by key. Pages of extents and of unloaded blocks have no entry. So every key is in exactly one of:
        # `entries`, an extent of the index, the rows of an unloaded block.
        self.entries: dict[bytes, Entry] = {}
        self.key_bytes = 0  # sum of the lengths of the keys in `entries`
        self.costs = IN_MEMORY  # the costs of the index, for `index_size`
        self.index = PageIndex()
        self.in_extents = 0  # number of pages in extents
        self.scans: ScanOrder[Place] = ScanOrder(self.places, self.__len__)
        # Strays: strings whose keys name pages, by the request and page id in the key. An extent replaces the strays
        # that have the keys of its pages.
        self._strays: dict[tuple[bytes, int], set[bytes]] = {}

    def __len__(self) -> int:
        return len(self.entries) + self.in_extents + self.index.unloaded_pages

    def index_size(self) -> int:
        """Return the approximate bytes of memory of the index. O(1)."""
        costs, index = self.costs, self.index
        size = costs.entry * len(self.entries) + costs.copies * (self.key_bytes + index.name_bytes)
        size += costs.block * index.blocks + _REQUEST * len(index.requests)
        return size + _UNLOADED_PAGE * index.unloaded_pages if index.unloaded_pages else size

    # -- finding ---------------------------------------------------------------------------------------------------

    @property
    def get(self) -> Callable[[bytes], Entry | None]:
        """The function that finds a key's value, or None.

        Valid until the next write: it is `dict.get` if that is enough.
        """
        return self._get if self.in_extents or self.index.unloaded_pages else self.entries.get

    @property
    def has_all_entries(self) -> bool:
        """Whether every key has an entry: no page is in an extent or in an unloaded block."""
        return not (self.in_extents or self.index.unloaded_pages)

    def _get(self, key: bytes) -> Entry | None:
        entry = self.entries.get(key)
        if entry is None and (block := self._block_of(key)):
            return self.entries.get(key) if block.extent is None else self.page_in_extent(key)
        return entry

    def _block_of(self, key: bytes) -> Block | None:
        """Return the block of the page with this key, and load it if it is unloaded; None if there is no such block."""
        name = page_named(key)
        return self.index.block(name.req_id, name.page) if name else None

    def page_in_extent(self, key: bytes) -> ExtentPage | None:
        """Return a page of an extent; None if the key has no page in an extent."""
        name = page_named(key) if self.in_extents else None
        block = self.index.block(name.req_id, name.page) if name else None
        if name is None or block is None or block.extent is None:
            return None
        return block.extent.page(block, name.page, name.layer, name.head, name.kv_type)

    def places(self) -> list[Place]:
        """Return every entry's key, every extent's block, and every unloaded block. `existing_at` lists their keys."""
        return [*self.entries, *(block for block in self.index if block.extent), *self.index.blocks_on_disk()]

    def existing_at(self, place: Place, now: int) -> Iterable[bytes | None]:
        """Return the keys at a place that exist at `now`, in unix milliseconds; with 0, expired ones, too.

        The result has None for each expired or deleted key. It may be a generator, because a block may have 131,072
        keys, so a caller can list them in steps. Changes after the call may be included or not.
        """
        if isinstance(place, bytes):
            entry = self.entries.get(place) or self.page_in_extent(place)  # its block may have been stored whole since
            return (place,) if entry is not None and not 0 < entry.expires <= now else _NO_KEY
        if isinstance(place, tuple):
            rows = self.index.rows(*place)
            if rows is not None:  # read all rows in one pass, because `expires_of` for each page would be O(rows)
                pages = records.pages(*place, rows)
                return (key if not 0 < expires <= now else None for key, _, expires, _ in pages)
        block = self._block_at(place)
        if block is None or (block.extent is not None and 0 < block.soonest <= now):  # its pages expire together
            return _NO_KEY
        if not 0 < block.soonest <= now:
            return block.page_keys()
        return (key if not 0 < self.expires_of(key) <= now else None for key in block.page_keys())

    def _block_at(self, place: Block | tuple[bytes, int]) -> Block | None:
        if isinstance(place, tuple):
            return self.index.block(*place)
        return place if self.index.still_has(place) else None

    def count_at(self, place: Place) -> int:
        """Return the number of keys at a place, including expired ones. O(1)."""
        if isinstance(place, bytes):
            return place in self.entries or self.page_in_extent(place) is not None
        if isinstance(place, tuple) and (rows := self.index.rows(*place)) is not None:
            return len(rows) // records.ROW
        block = self._block_at(place)
        return block.pages if block is not None else 0

    def strays_at(self, place: Place) -> Collection[bytes]:
        """Return the strays of the block at a place: strings that replaced pages have no place of their own."""
        if isinstance(place, bytes):
            return ()
        return self._strays.get(place if isinstance(place, tuple) else (place.req_id, place.page), ())

    def scan(self, cursor: int, count: int) -> tuple[int, list[Place]]:
        """Return the next cursor, 0 at the end, and up to `count` places after `cursor`, 0 for the beginning.

        Places of deleted keys are included: `existing_at` returns the keys of a place that still exist.
        """
        return self.scans.visit(cursor, count, monotonic_ms())

    def draw(self) -> bytes | None:
        """Return a random key, which still exists in at least about half of the calls; None if the drawn place has no
        keys.
        """
        place = self.scans.draw(monotonic_ms())
        if place is None or isinstance(place, bytes):
            return place
        strays, pages = self.strays_at(place), self.count_at(place)
        number = random.randrange(pages + len(strays)) if pages or strays else 0
        if number >= pages:
            return next(islice(strays, number - pages, None), None)
        name = place if isinstance(place, tuple) else (place.req_id, place.page)
        if (rows := self.index.rows(*name)) is not None:
            [(key, *_)] = records.pages(*name, rows[number * records.ROW : (number + 1) * records.ROW])
            return key
        block = self._block_at(place)
        return block.random_key() if block is not None else None

    def drop_idle_scans(self, now: int) -> None:
        """Drop the orders of scans if no client has scanned for REST_AFTER; `now` is in monotonic milliseconds."""
        self.scans.drop_idle_scans(now)
        self.index.scans.drop_idle_scans(now)

    def expires_of(self, key: bytes) -> int:
        """Return a key's expiry in unix milliseconds; 0 if it has none or does not exist. Loads no block."""
        if self.index.unloaded_pages and key not in self.entries and (page := page_named(key)):
            rows = self.index.rows(page.req_id, page.page)
            if rows is not None:
                return records.expires_of(rows, (page.kv_type, page.layer, page.head))
        entry = self.get(key)
        return entry.expires if entry is not None else 0

    # -- changing --------------------------------------------------------------------------------------------------

    def put(self, key: bytes, entry: Entry) -> None:
        """Set the entry of a key, and add a new key to the order of scans."""
        if key not in self.entries:
            self.key_bytes += len(key)
            self._list(key)
        self.entries[key] = entry

    def pop(self, key: bytes) -> Entry:
        """Remove the entry of a key, which must exist, and return it."""
        self.key_bytes -= len(key)
        return self.entries.pop(key)

    def list_all(self, keys: Iterable[bytes]) -> None:
        """Add keys with new entries to the order of scans. While a client scans, code that sets entries without `put`
        calls this.
        """
        for key in keys:
            self._list(key)

    def _list(self, place: Place) -> None:
        if self.scans.current is not None:
            self.scans.add(place)

    def fill(self, block: Block, extent: Extent) -> None:
        """Store an extent in a block that has no pages."""
        block.fill(extent)
        self.in_extents += block.pages
        self._list(block)

    def split(self, block: Block) -> dict[bytes, ExtentPage]:
        """Replace an extent by single pages, which share its slot. Return their entries by key."""
        extent = block.extent
        assert extent is not None
        spans = extent.shape.page_spans()
        pages = {
            key: ExtentPage(extent, span, block, block.page, (layer, head, kv_type))
            for (key, layer, head, kv_type), span in zip(block.page_names(), spans, strict=True)
        }
        self.entries.update(pages)
        self.key_bytes += sum(map(len, pages))
        if self.scans.current is not None:
            self.list_all(pages)
        self.in_extents -= len(pages)
        block.split()
        return pages

    def take_pages(self, block: Block) -> int:
        """Remove the entries of a block's pages, and return the number of pages with an expiry.

        The block does not change.
        """
        extent = block.extent
        if extent is None:
            keys = [*block.page_keys()]
            self.key_bytes -= sum(map(len, keys))
            return sum(1 for entry in map(self.entries.pop, keys) if entry.expires)
        self.in_extents -= block.pages
        return block.pages if extent.expires else 0

    def note_stray(self, key: bytes) -> None:
        """Add the key of a stored string to the strays if it names a page."""
        if key[:3] == b"kv:" and (name := page_named(key)):
            self._strays.setdefault((name.req_id, name.page), set()).add(key)

    def forget_stray(self, key: bytes) -> None:
        """Remove a key from the strays, if it is one."""
        name = page_named(key) if self._strays else None
        strays = self._strays.get((name.req_id, name.page)) if name else None
        if name and strays:
            strays.discard(key)
            if not strays:
                del self._strays[name.req_id, name.page]

    def strays_in(self, req_id: bytes, page: int, extent: Extent) -> list[bytes]:
        """Return the strays that have keys of an extent's pages."""
        names = ((key, page_named(key)) for key in self._strays.get((req_id, page), ()))
        return [key for key, name in names if name and extent.page(None, page, name.layer, name.head, name.kv_type)]

    def clear(self) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Remove all keys. Return the former entries and the former requests of the index."""
        old, self.entries = self.entries, {}
        self.in_extents = self.key_bytes = 0
        self.scans.clear()
        self._strays.clear()
        return old, self.index.clear()
