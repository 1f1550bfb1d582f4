"""The load of all keys at the start of a store.

Every value becomes a placeholder, `OnDisk`, except short strings, which are loaded. A block of single pages stays
*unloaded*: the index has only the rows of its sheets, and the entries of its pages are created at the first lookup of
one of them. So the keys of a million pages load in less than a second.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvpage_server.page import unix_ms
from kvpage_server.store import records
from kvpage_server.store.contents import Contents
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import extent_of
from kvpage_server.store.disk.naming import block_name_of, name_of_unit, parse_block
from kvpage_server.store.disk.usage import Stored
from kvpage_server.store.memory.entry import LONGEST_TEXT, Entry, Text
from kvpage_server.store.memory.index import Block, OnDisk
from kvpage_server.store.records import Damaged, Record, footprint, name_of_key
from kvpage_server.system.text import monotonic_ms

_TOGETHER = 14  # uses within 2**14 milliseconds (16 s) count as one, see `_in_order`


class Loader:
    """Loader of all keys at the start, and of an unloaded block at the first lookup of one of its pages."""

    def __init__(self, disk: Disk, contents: Contents, stored: Stored) -> None:
        self._disk = disk
        self._contents = contents
        self._catalogue = contents.catalogue
        self._expirer = contents.expiry_order
        self._stored = stored
        self._start = (0, 0)  # the start of the load, in unix and in monotonic seconds
        contents.index.on_load = self._load_block

    def load(self) -> bool:
        """Load all keys.

        Return whether there are any. Damaged values are omitted; expired ones are removed later, as usual.
        """
        # Parallel lists: names of units, the last use of each in unix milliseconds, and the number of its first piece,
        # 0 if unknown. A block may be in them several times, once for each sheet.
        units: list[bytes] = []
        used: list[int] = []
        pieces: list[int] = []
        now = monotonic_ms() // 1000
        self._start = unix_ms() // 1000, now
        collecting = gc.isenabled()
        gc.disable()  # a collection would visit millions of objects, and free none
        try:
            size = self._load_sheets(units, used, pieces) + self._load_records(units, used, pieces)
        finally:
            self._contents.eviction_order.units.now = now  # `_string_of` has set it to the last uses of strings
            if collecting:
                gc.enable()
        texts = {name_of_key(key) for key, entry in self._catalogue.entries.items() if type(entry) is Text}
        self._stored.usage.found(self._in_order(units, np.array(used, np.int64), pieces), texts, size)
        return bool(used)

    def _in_order(self, units: list[bytes], used: NDArray[np.int64], pieces: list[int]) -> Iterable[bytes]:
        """Yield each unit once in the order of eviction: the least recently used first.

        The links between blocks are not on disk. But a context is usually written in one go, from its start. So among
        units that were used within the same 16 seconds, `allkeys-prefix` evicts the last used unit first, which is
        probably the end of the context; if the uses are equal, the one that was written last. Pieces are numbered in
        the order of writes.
        """
        if self._contents.eviction_order.rules.keeps_chains:
            order = np.lexsort((np.array(pieces), used, -(used >> _TOGETHER)))
        else:
            order = np.argsort(used, kind="stable")[::-1]
        return reversed(dict.fromkeys([units[i] for i in order.tolist()]))

    def _load_sheets(self, units: list[bytes], used: list[int], pieces: list[int]) -> int:
        rows_by_id_size = defaultdict[int, list[bytes]](list)  # rows, by the length of the request id
        add_block, used_at = self._contents.add_unloaded_block, records.used
        for key, found in self._disk.sheets():
            if isinstance(found, Damaged):
                self._stored.counts.corrupt += 1
                continue
            soonest, rows = found
            block, req_id, page = records.block_of(key)
            add_block(req_id, page, rows)
            units.append(block)
            used.append(used_at(rows))
            pieces.append(0)
            rows_by_id_size[len(req_id)].append(rows)
            if soonest:
                self._note_expiring(req_id, page, rows)
        return sum(records.sheet_footprint(id_size, b"".join(rows)) for id_size, rows in rows_by_id_size.items())

    def _note_expiring(self, req_id: bytes, page: int, rows: bytes) -> None:
        """Note the first expiry of an unloaded block. When that is due, its lookup creates the entries of all pages."""
        count, row = records.expiring(rows)
        [(key, _, expires, _)] = records.pages(req_id, page, row)
        self._expirer.keys += count
        self._expirer.note(key, expires)

    def _load_records(self, units: list[bytes], used: list[int], pieces: list[int]) -> int:
        size = 0
        for key, record in self._disk.records():
            if key.startswith(records.PREFIX):
                break
            if isinstance(record, Damaged):
                self._stored.counts.corrupt += 1
                continue
            self._admit(record)
            units.append(record.name)
            used.append(record.used)
            pieces.append(record.body.first)
            size_on_disk = footprint(record.name, record.body.size)
            if block := block_name_of(record.name):
                self._stored.usage.note_stray(record.name, block)
            self._stored.usage.note_found(record.name, record.name, size_on_disk)
            size += size_on_disk
        return size

    def _admit(self, record: Record) -> None:
        """Add a value to the index without validation, because its record was valid when it was written."""
        name = record.name
        if name[:1] == b"b":
            used = self._seconds(record.used)
            self._contents.add_block_on_disk(*parse_block(name), lambda block: extent_of(record, block, used))
        else:
            self._contents.add_string_on_disk(name[1:], self._string_of(name[1:], record))

    def _string_of(self, key: bytes, record: Record) -> Entry:
        if record.body.size > LONGEST_TEXT:  # such a string has a slot when it is loaded, although it may be inline
            return OnDisk(record.name, record.body.size, expires=record.expires, used=self._seconds(record.used))
        text = Text(record.body.inline)
        text.expires = record.expires
        units = self._contents.eviction_order.units
        units.now = self._seconds(record.used)
        units.used(key)
        return text

    def _seconds(self, used: int) -> int:
        """Return the monotonic seconds of a use at `used` unix milliseconds.

        The result is negative for a use before the machine started. A use in the future, after the clock was set back,
        counts as one at the start of the load.
        """
        unix, monotonic = self._start
        return monotonic - max(unix - used // 1000, 0)

    def _load_block(self, block: Block, rows: bytes) -> None:
        """Create the entries of a block's pages from their rows, as values on disk only. O(pages)."""
        add, note_found = self._contents.add_page_on_disk, self._stored.usage.note_found
        pages, unit = records.pages(block.req_id, block.page, rows), name_of_unit(block)
        for header, (key, (kv_type, layer, head), expires, used) in zip(records.headers(rows), pages, strict=True):
            name = name_of_key(key)
            size, last = records.size_of(header), self._seconds(used)
            on_disk = OnDisk(name, size, expires=expires, header=header, unit=block, used=last)
            add(block, key, on_disk, (layer, head, kv_type))
            note_found(name, unit, records.footprint_of(len(block.req_id), on_disk.size))
