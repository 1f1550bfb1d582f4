"""The values that a command needs in memory before it reads or writes, and holds, which keep them there.

A command that needs values from disk waits until all of them are in memory, while other commands run. All units that it
needs are *held*, including units that were in memory before: they are not demoted until the command has run. Values
that are loaded for a hold do not count against maxmemory until it ends, so they have a limit of their own. After the
wait, the command checks again that all values are in memory. So a hold may end before the command runs: if the client
is paused, or does not receive its replies, the hold ends after `LONGEST_HOLD`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import TypeAlias, cast
from weakref import WeakSet

from kvpage_server.core import Slot
from kvpage_server.page import page_named
from kvpage_server.store.contents import Contents, unit_of
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.entry import Text, are_on_disk, is_page
from kvpage_server.store.memory.index import ExtentPage, OnDisk

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


# -- Holds -------------------------------------------------------------------------------------------------------------

LONGEST_HOLD = 10.0  # seconds of a hold


class TooMuch(Exception):
    """Error: a command needs more bytes at a time than may be loaded."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes would have to come to memory at once")
        self.size = size


class Hold:
    """Units that are held for one command. The hold ends with its last reference, or after `LONGEST_HOLD`."""

    __slots__ = ("__weakref__", "_holds", "since", "size", "stays", "units")

    def __init__(self, holds: HeldUnits, units: Iterable[Unit]) -> None:
        self._holds = holds
        self.units: frozenset[Unit] = frozenset(units)
        self.size = 0  # bytes that were loaded for it
        self.stays = True  # whether these bytes stay in memory after the hold, and not only temporarily
        self.since = monotonic()  # seconds

    def __del__(self) -> None:
        self._holds.end(self)


class HeldUnits:
    """All holds. `on_end` is called after a hold for which values were loaded has ended."""

    def __init__(self) -> None:
        self.bytes = 0  # size of the values that were loaded for all holds
        self.bytes_to_stay = 0  # size of the values that were loaded for all holds, except temporarily
        self.on_end: Callable[[], object] | None = None
        self._counts: dict[Unit, int] = {}  # number of holds of each held unit
        self._holds: WeakSet[Hold] = WeakSet()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._counts

    def begin(self, units: Iterable[Unit]) -> Hold:
        hold = Hold(self, units)
        self._holds.add(hold)
        for unit in hold.units:
            self._counts[unit] = self._counts.get(unit, 0) + 1
        return hold

    def grow(self, hold: Hold, size: int, *, stays: bool) -> None:
        """Count `size` bytes that are loaded for a hold. `stays` is False for temporary loads."""
        hold.size += size
        hold.stays = stays
        self.bytes += size
        self.bytes_to_stay += size * stays

    def end(self, hold: Hold) -> None:
        """End a hold: memory may demote its units again, unless other holds have them."""
        for unit in hold.units:
            left = self._counts.pop(unit) - 1
            if left:
                self._counts[unit] = left
        size, hold.size, hold.units = hold.size, 0, frozenset()
        self.bytes -= size
        self.bytes_to_stay -= size * hold.stays
        if size and self.on_end is not None:
            self.on_end()

    def end_old(self) -> None:
        """End holds that are older than `LONGEST_HOLD`, because other clients may need the memory."""
        since = monotonic() - LONGEST_HOLD
        for hold in [hold for hold in self._holds if hold.since < since]:
            self.end(hold)
