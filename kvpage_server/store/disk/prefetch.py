"""The values that must be in memory before a read or a write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias, cast

from kvpage_server.core import Slot
from kvpage_server.store.contents import Contents, unit_of
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.entry import Text, are_on_disk, is_page, page_named
from kvpage_server.store.memory.index import ExtentPage
from kvpage_server.store.memory.on_disk import OnDisk

Body: TypeAlias = "Slot | OnDisk"
Needed = tuple[Unit, Body]  # a unit, and the bytes of it that must be in memory


class Prefetcher:
    """Lookup of the values that a command needs. It reads only the index, never the disk."""

    def __init__(self, contents: Contents) -> None:
        self._catalogue = contents.catalogue
        self.index = contents.index

    def values_to_load(self, keys: Iterable[bytes]) -> list[OnDisk]:
        """Return the values on disk only that must be loaded before these keys can be read, each once."""
        entries = [*map(self._catalogue.get, keys)]
        if are_on_disk(entries):
            return [*dict.fromkeys(entries)]
        if {OnDisk, ExtentPage}.isdisjoint(map(type, entries)):
            return []
        slots = (entry.extent.slot if type(entry) is ExtentPage else entry for entry in entries)
        return [*dict.fromkeys(slot for slot in slots if type(slot) is OnDisk)]

    def values_to_load_for_block(self, req_id: bytes, page: int) -> list[OnDisk]:
        """Return the values on disk only that must be loaded before a whole block can be read."""
        block = self.index.block(req_id, page)
        if block is None:
            return []
        if block.extent is not None:
            return [block.extent.slot] if type(block.extent.slot) is OnDisk else []
        return self.values_to_load(block.page_keys())

    def values_of(self, keys: Iterable[bytes]) -> Iterator[Needed]:
        """Yield the units and bodies that must be in memory to read these keys. Short strings always are."""
        get = self._catalogue.get
        for key in keys:
            entry = get(key)
            if entry is not None and type(entry) is not Text:
                yield unit_of(key, entry), entry.extent.slot if type(entry) is ExtentPage else cast(Body, entry)

    def extents_of(self, keys: Iterable[bytes]) -> Iterator[Needed]:
        """Yield the extents that must be in memory to write these keys.

        A write of a page splits the extent of its block, even if the page does not exist yet.
        """
        entries = self._catalogue.entries
        names = (page_named(key) for key in keys if key[:3] == b"kv:" and not is_page(entries.get(key)))
        return self.extents_at((name.req_id, name.page) for name in names if name)

    def extents_at(self, names: Iterable[tuple[bytes, int]]) -> Iterator[Needed]:
        """Yield the extents that must be in memory to write pages of these blocks. `names` are request and page ids."""
        for req_id, page in names:
            block = self.index.block(req_id, page)
            if block is not None and block.extent is not None:
                yield block, block.extent.slot

    def blocks_at(self, names: Iterable[tuple[bytes, int]]) -> Iterator[Needed]:
        """Yield the units and bodies that must be in memory to read these whole blocks."""
        for req_id, page in names:
            block = self.index.block(req_id, page)
            if block is not None and block.extent is not None:
                yield block, block.extent.slot
            elif block is not None:
                yield from self.values_of(block.page_keys())
