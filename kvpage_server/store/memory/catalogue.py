"""Map from keys to values, and the order of scans.

Most values are entries of a dictionary. Pages are also in the index, by request and block. A block that was stored
whole is an `Extent`: one slot, without an entry for each page. Its pages are made as `ExtentPage`s when they are asked
for. When one of them changes by itself, the block is split: its pages get entries, and stay in the extent's slot. A
block that is resting (see `index`) has no entries either; all of them are made when somebody asks for one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from kvpage_server.store import records
from kvpage_server.store.memory.entry import Entry, page_named
from kvpage_server.store.memory.index import Block, Extent, ExtentPage, PageIndex, ScanOrder
from kvpage_server.system.text import monotonic_ms

Place = bytes | Block | tuple[bytes, int]  # in the order of scans; a block that was resting is known by its name


class Catalogue:
    """Every key, including overdue ones that nobody has removed yet."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.index = PageIndex()
        self._in_extents = 0  # pages without an entry
        self._scans: ScanOrder[Place] = ScanOrder(self.places, self.__len__)
        self._strays: dict[tuple[bytes, int], set[bytes]] = {}  # plain strings under keys of pages, by block

    def __len__(self) -> int:
        return len(self.entries) + self._in_extents + self.index.resting

    # -- finding ---------------------------------------------------------------------------------------------------

    @property
    def get(self) -> Callable[[bytes], Entry | None]:
        """The function that finds a key's value, as long as nothing is written."""
        return self._get if self._in_extents or self.index.resting else self.entries.get

    @property
    def has_all_entries(self) -> bool:
        """Whether every key has an entry: no page is in an extent or resting."""
        return not (self._in_extents or self.index.resting)

    def _get(self, key: bytes) -> Entry | None:
        entry = self.entries.get(key)
        if entry is None and (block := self._block_of(key)):
            return self.entries.get(key) if block.extent is None else self.page_in_extent(key)
        return entry

    def _block_of(self, key: bytes) -> Block | None:
        """Return the block that a page would belong to. It is woken if it rests."""
        name = page_named(key)
        return self.index.block(name.req_id, name.page) if name else None

    def page_in_extent(self, key: bytes) -> ExtentPage | None:
        """Return a page without an entry."""
        name = page_named(key) if self._in_extents else None
        block = self.index.block(name.req_id, name.page) if name else None
        if name is None or block is None or block.extent is None:
            return None
        return block.extent.page(block, name.page, name.layer, name.head, name.kv_type)

    def places(self) -> list[Place]:
        """Return every entry's key, and every block whose pages have none. `names_at` lists the keys of each."""
        return [*self.entries, *(block for block in self.index if block.extent), *self.index.blocks_on_disk()]

    def names_at(self, place: Place) -> Iterable[bytes]:
        """Yield the keys at a place, including overdue ones; none if something else is there now."""
        return self.living_at(place, 0)  # before everything expires

    def living_at(self, place: Place, now: int) -> Iterable[bytes]:
        """Return the keys that are not overdue at `now`, in unix milliseconds. O(keys at the place)."""
        if isinstance(place, bytes):
            entry = self.entries.get(place) or self.page_in_extent(place)  # since it was listed
            return (place,) if entry is not None and not 0 < entry.expires <= now else ()
        if isinstance(place, tuple):
            rows = self.index.rows(*place)
            if rows is not None:  # each is looked at once: to look up one of them is O(rows)
                return (key for key, _, expires, _ in records.pages(*place, rows) if not 0 < expires <= now)
            block = self.index.block(*place)
        else:
            block = place if self.index.still_has(place) else None
        if block is None:
            return ()
        if not 0 < block.soonest <= now:
            return block.page_keys()
        return (key for key in block.page_keys() if not 0 < self.expires_of(key) <= now)

    def strays_at(self, place: Place) -> Iterable[bytes]:
        """Strings under keys of a block's pages. They have no place of their own in the order of scans."""
        if isinstance(place, bytes):
            return ()
        return self._strays.get(place if isinstance(place, tuple) else (place.req_id, place.page), ())

    def scan(self, cursor: int, count: int) -> tuple[int, list[Place]]:
        """Return the next cursor, 0 at the end, and the next `count` places, including dead ones."""
        return self._scans.visit(cursor, count, monotonic_ms())

    def draw(self) -> bytes | None:
        """Return a random name, about half of which exist. None if nothing exists where it was drawn."""
        place = self._scans.draw(monotonic_ms())
        names = [*self.names_at(place), *self.strays_at(place)] if place is not None else []
        return random.choice(names) if names else None

    def rest(self, now: int) -> None:
        """Drop the order of scans if nobody has scanned for a while; `now` is in monotonic milliseconds."""
        self._scans.rest(now)
        self.index.rest(now)

    def expires_of(self, key: bytes) -> int:
        """Return a key's expiry in unix milliseconds; 0 if it has none or does not exist. Wakes no block."""
        if self.index.resting and key not in self.entries and (page := page_named(key)):
            rows = self.index.rows(page.req_id, page.page)
            if rows is not None:
                return records.expires_of(rows, (page.kv_type, page.layer, page.head))
        entry = self.get(key)
        return entry.expires if entry is not None else 0

    # -- changing --------------------------------------------------------------------------------------------------

    def put(self, key: bytes, entry: Entry) -> None:
        if key not in self.entries:
            self._list(key)
        self.entries[key] = entry

    @property
    def listed(self) -> list[bytes] | None:
        """A list for the keys that get entries by other ways than `put`; None if nobody scans. See `list_all`."""
        return [] if self._scans.current is not None else None

    def list_all(self, keys: Iterable[bytes]) -> None:
        """Note keys that have new entries."""
        for key in keys:
            self._list(key)

    def _list(self, place: Place) -> None:
        if self._scans.current is not None:
            self._scans.add(place)

    def fill(self, block: Block, extent: Extent) -> None:
        """Let an extent have a block's pages."""
        block.fill(extent)
        self._in_extents += block.pages
        self._list(block)

    def split(self, block: Block) -> dict[bytes, ExtentPage]:
        """Give the pages of an extent entries. Returns these."""
        extent = block.extent
        assert extent is not None
        spans = extent.shape.page_spans()
        pages = {
            key: ExtentPage(extent, span, block, block.page, spot)
            for (key, *spot), span in zip(block.page_names(), spans, strict=True)
        }
        self.entries.update(pages)
        if self._scans.current is not None:
            self.list_all(pages)
        self._in_extents -= len(pages)
        block.split()
        return pages

    def take_pages(self, block: Block) -> int:
        """Remove a block's pages. Returns how many had an expiry."""
        extent = block.extent
        if extent is None:
            return sum(bool(self.entries.pop(key).expires) for key in block.page_keys())
        self._in_extents -= block.pages
        return block.pages if extent.expires else 0

    def note_stray(self, key: bytes) -> None:
        """Note a stored string whose key names a page."""
        if key[:3] == b"kv:" and (name := page_named(key)):
            self._strays.setdefault((name.req_id, name.page), set()).add(key)

    def forget_stray(self, key: bytes) -> None:
        """Forget a removed string, if it was noted."""
        name = page_named(key) if self._strays else None
        strays = self._strays.get((name.req_id, name.page)) if name else None
        if name and strays:
            strays.discard(key)
            if not strays:
                del self._strays[name.req_id, name.page]

    def strays_in(self, req_id: bytes, page: int, extent: Extent) -> list[bytes]:
        """Return the plain strings under keys of an extent's pages."""
        names = ((key, page_named(key)) for key in self._strays.get((req_id, page), ()))
        return [key for key, name in names if name and extent.page(None, page, name.layer, name.head, name.kv_type)]

    def clear(self) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Forget everything. Return the former contents."""
        old, self.entries = self.entries, {}
        self._in_extents = 0
        self._scans.clear()
        self._strays.clear()
        return old, self.index.clear()
