"""Every key of a store on disk, as a start finds it.

What lies on disk alone is `Cold`. Blocks whose pages were stored one by one are resting: they are known by the rows of
their pages, and the entries of a block are made when somebody asks for it. So the index of a million pages is there in
less than a second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import TypeAlias, cast

import numpy as np

from kvpage_server.core import Slot
from kvpage_server.store.disk import sheet
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import extent_of
from kvpage_server.store.disk.record import Damaged, Record, footprint, name_of_block, name_of_key
from kvpage_server.store.disk.usage import OnDisk
from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, Text, are_cold, is_page, page_named
from kvpage_server.store.memory.extent import Extent, ExtentPage
from kvpage_server.store.memory.index import Block

Body: TypeAlias = "Slot | Cold"
Needed = tuple[Unit, Body]  # what has to be in memory, and what it goes from there with


class DiskCounters:
    """What happened between memory and disk since the start."""

    fetched = 0
    dropped = 0  # values whose bytes memory has no more
    evicted = 0  # values that had to leave the disk
    corrupt = 0
    repaired = 0  # found damaged on disk, and written again from memory
    skipped = 0  # values that memory keeps to itself, since the disk could not keep up


class Known(Keyspace):
    """See the module."""

    def __init__(self, disk: Disk, *, maxmemory: int = 0, policy: str = "allkeys-prefix") -> None:
        super().__init__(maxmemory=maxmemory, policy=policy)
        self.disk = disk
        self.counts = DiskCounters()
        self.any_cold = False  # whether there may be a cold value
        self._on_disk = OnDisk()
        self.index.on_waking = self._wake

    def load(self) -> None:
        """Know every value that is on disk. What cannot be read is passed over; what is overdue expires as ever."""
        units: list[bytes] = []  # with each, when it was last used
        used: list[int] = []
        collecting = gc.isenabled()
        gc.disable()  # nothing here is garbage, and there may be millions
        try:
            size = self._load_sheets(units, used) + self._load_records(units, used)
        finally:
            if collecting:
                gc.enable()
        latest = np.argsort(np.array(used, np.uint64), kind="stable")[::-1]
        texts = {name_of_key(key) for key, entry in self._catalogue.entries.items() if type(entry) is Text}
        self._on_disk.found(reversed(dict.fromkeys([units[i] for i in latest.tolist()])), texts, size)
        self.any_cold = bool(used)

    def _load_sheets(self, units: list[bytes], used: list[int]) -> int:
        every: list[bytes] = []
        rest, used_at = self.index.note_resting, sheet.used
        for key, found in self.disk.sheets():
            if isinstance(found, Damaged):
                self.counts.corrupt += 1
                continue
            soonest, rows = found
            block, req_id, page = sheet.block_of(key)
            rest(req_id, page, rows)
            units.append(block)
            used.append(used_at(rows))
            every.append(rows)
            if soonest:
                self._note_expiring(req_id, page, rows)
        return sheet.footprint(b"".join(every))

    def _note_expiring(self, req_id: bytes, page: int, rows: bytes) -> None:
        """One page stands for all until it is due: then the block is woken."""
        count, row = sheet.expiring(rows)
        [(key, _, expires, _)] = sheet.pages(req_id, page, row)
        self._expiry.keys += count
        self._expiry.note(key, expires)

    def _load_records(self, units: list[bytes], used: list[int]) -> int:
        size = 0
        for key, record in self.disk.records():
            if key.startswith(sheet.PREFIX):
                break
            if isinstance(record, Damaged):
                self.counts.corrupt += 1
                continue
            self._admit(record)
            units.append(record.name)
            used.append(record.used)
            takes = footprint(record.name, record.size)
            self._on_disk.know(record.name, takes)
            size += takes
        return size

    def _admit(self, record: Record) -> None:
        """Know a value. Its record is what was written, and what was written was valid."""
        name, expires = record.name, record.expires
        if name[:1] == b"b":
            req_id, _, page = name[1:].rpartition(b":")
            block = self.index.open(req_id, int(page))
            self._catalogue.fill(block, extent_of(record, block))
            key, keys = next(block.page_keys()), block.pages
        else:
            key, keys = name[1:], 1
            self._catalogue.put(key, self._string_of(key, record))
        if expires:
            self._expiry.keys += keys
            self._expiry.note(key, expires)

    def _string_of(self, key: bytes, record: Record) -> Entry:
        self._catalogue.note_stray(key)
        if record.first:
            return Cold(record.name, record.size, expires=record.expires, used=record.used // 1000)
        text = Text(record.inline)
        text.expires = record.expires
        self._texts += len(key) + record.size + TEXT_OVERHEAD
        self._units.used(key)
        return text

    # -- what is resting -------------------------------------------------------------------------------------------

    def _wake(self, block: Block, rows: bytes) -> None:
        """Give a block the pages that have those rows; all of them are cold."""
        entries, know, note = self._catalogue.entries, self._on_disk.know, self._expiry.note
        pages = sheet.pages(block.req_id, block.page, rows)
        for header, (key, (kv_type, layer, head), expires, used) in zip(sheet.headers(rows), pages, strict=True):
            name = name_of_key(key)
            cold = Cold(name, sheet.size_of(header), expires=expires, header=header, unit=block, used=used // 1000)
            entries[key] = cold
            block.add(layer, head, kv_type)
            know(name, sheet.footprint_of(cold.size))
            if expires:
                block.expires_at(expires)
                note(key, expires)

    def expires_of(self, key: bytes) -> int:
        """A key's expiry in unix milliseconds; 0 when it has none or does not exist. Wakes nobody."""
        if self.index.resting and key not in self._catalogue.entries and (page := page_named(key)):
            rows = self.index.rows(page.req_id, page.page)
            if rows is not None:
                return sheet.expires_of(rows, (page.kv_type, page.layer, page.head))
        return super().expires_of(key)

    def _own(self, key: bytes) -> Entry | None:
        if self.index.resting:
            self._catalogue.get(key)  # it is awake
        return super()._own(key)

    def _expire(self, key: bytes) -> None:
        self._catalogue.get(key)
        super()._expire(key)

    # -- names -----------------------------------------------------------------------------------------------------

    @property
    def values_on_disk(self) -> int:
        """How many values there are on disk."""
        return len(self._on_disk) + self.index.resting

    @property
    def used_disk(self) -> int:
        """Bytes that values take there, nearly."""
        return self._on_disk.used

    def _names_of(self, unit: Unit) -> Iterable[bytes]:
        """What the values of a unit are stored as."""
        if isinstance(unit, bytes):
            return (name_of_key(unit),)
        if unit.extent is not None:
            return (name_of_block(unit.req_id, unit.page),)
        return list(map(name_of_key, unit.page_keys()))

    def _value_of(self, name: bytes) -> Entry | Extent:
        if name[:1] == b"k":
            return self._catalogue.entries[name[1:]]
        block = self._block_named(name)
        assert block is not None
        assert block.extent is not None
        return block.extent

    def _block_named(self, name: bytes) -> Block | None:
        req_id, _, page = name[1:].rpartition(b":")
        return self.index.block(req_id, int(page))

    # -- what is cold ----------------------------------------------------------------------------------------------

    def idle(self, key: bytes) -> int:
        """Seconds since a living key, or its block, was last used, as far as that is known of what lies on disk."""
        cold = self.cold_of([key])
        return max(self._units.now - cold[0].used, 0) if cold else super().idle(key)

    def cold_of(self, keys: Iterable[bytes]) -> list[Cold]:
        """The values that have to be fetched before those keys can be read."""
        entries = [*map(self._catalogue.get, keys)]
        if are_cold(entries):
            return [*dict.fromkeys(entries)]
        if {Cold, ExtentPage}.isdisjoint(map(type, entries)):
            return []
        slots = (entry.extent.slot if type(entry) is ExtentPage else entry for entry in entries)
        return [*dict.fromkeys(slot for slot in slots if type(slot) is Cold)]

    def cold_of_block(self, req_id: bytes, page: int) -> list[Cold]:
        """The values that have to be fetched before a block can be read whole."""
        block = self.index.block(req_id, page)
        if block is None:
            return []
        if block.extent is not None:
            return [block.extent.slot] if type(block.extent.slot) is Cold else []
        return self.cold_of(block.page_keys())

    # -- what has to be in memory ----------------------------------------------------------------------------------

    def values_of(self, keys: Iterable[bytes]) -> Iterator[Needed]:
        """What has to be in memory for keys to be read."""
        get = self._catalogue.get
        for key in keys:
            entry = get(key)
            if entry is not None and type(entry) is not Text:
                yield self._unit(key, entry), entry.extent.slot if type(entry) is ExtentPage else cast(Body, entry)

    def extents_of(self, keys: Iterable[bytes]) -> Iterator[Needed]:
        """What has to be in memory for keys to be written: the blocks stored whole that they name pages of.

        There need not be such a page yet. It would be written into the block, which is split for that.
        """
        entries = self._catalogue.entries
        names = (page_named(key) for key in keys if key[:3] == b"kv:" and not is_page(entries.get(key)))
        return self.extents_at((name.req_id, name.page) for name in names if name)

    def extents_at(self, names: Iterable[tuple[bytes, int]]) -> Iterator[Needed]:
        """What has to be in memory for pages of some blocks to be written: the blocks, where they were stored whole."""
        for req_id, page in names:
            block = self.index.block(req_id, page)
            if block is not None and block.extent is not None:
                yield block, block.extent.slot

    def blocks_at(self, names: Iterable[tuple[bytes, int]]) -> Iterator[Needed]:
        """What has to be in memory for blocks to be read whole."""
        for req_id, page in names:
            block = self.index.block(req_id, page)
            if block is not None and block.extent is not None:
                yield block, block.extent.slot
            elif block is not None:
                yield from self.values_of(block.page_keys())


def unit_of(value: Cold) -> Unit:
    """What a value goes from memory with."""
    return value.unit if type(value.unit) is Block else value.name[1:]


def unit_named(unit: Unit) -> bytes:
    """What a unit is called on disk."""
    return name_of_key(unit) if isinstance(unit, bytes) else name_of_block(unit.req_id, unit.page)
