"""The disk tier. Values that do not fit in memory are dropped from memory, and loaded on access.

Memory has every key. A value is in memory, too, or it is `OnDisk`: its bytes are on disk only. The tier is notified of
every change, and queues it for write-behind. A value may be dropped from memory when its last change is on disk.

Every value is written to disk, and writers wait if the disk is slower than they are.

The parts are `stored` (values on disk and queued changes), `account` (eviction when the disk is full), `fetching`
(loads from disk), a loader for the start, and a scrubber.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvpage_server.core import Slot
from kvpage_server.page import unix_ms
from kvpage_server.store import records
from kvpage_server.store.contents import Contents, Source, Tier
from kvpage_server.store.disk import fetching
from kvpage_server.store.disk.database import Decoded, Disk
from kvpage_server.store.disk.disk_full import DiskAccount
from kvpage_server.store.disk.encoding import (
    LIFETIME,
    Change,
    Corrupt,
    Delete,
    Lifetime,
    SetExpiry,
    Value,
    Write,
    change_of,
    extent_of,
)
from kvpage_server.store.disk.fetching import Coder, Fetching
from kvpage_server.store.disk.lmdb_file import DiskError, DiskFull
from kvpage_server.store.disk.naming import (
    block_name_of,
    described,
    each_name_in,
    is_key_removed,
    is_on_disk_named,
    is_removed,
    name_of_unit,
    names_in,
    parse_block,
    unit_named,
    value_named,
)
from kvpage_server.store.disk.readers import DiskReader, Scrubber
from kvpage_server.store.disk.usage import Stored, size_on_disk
from kvpage_server.store.disk.write_behind import CHANGE, Batch, WriteBehind
from kvpage_server.store.evict import MemoryAccount
from kvpage_server.store.eviction.leases import SHARE, Lease
from kvpage_server.store.eviction.queues import OrderedMap, Unit
from kvpage_server.store.memory.catalogue import WITH_TIER
from kvpage_server.store.memory.entry import LONGEST_TEXT, Entry, Page, Text
from kvpage_server.store.memory.index import Block, Extent, ExtentPage, NotLoaded, OnDisk
from kvpage_server.store.records import Damaged, Record, footprint, name_of_block, name_of_key
from kvpage_server.system.text import Durations, LogRateLimit, monotonic_ms, plural

# -- The load of all keys at the start ---------------------------------------------------------------------------------
#
# Every value becomes a placeholder, `OnDisk`, except short strings, which are loaded. A block of single pages stays
# *unloaded*: the index has only the rows of its sheets, and the entries of its pages are created at the first lookup of
# one of them. So the keys of a million pages load in less than a second.

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
        add_block, used_at = self._contents.index.note_on_disk, records.used
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
            size_on_disk = footprint(record.name, record.body.stored)
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
        found = zip(records.headers(rows), pages, records.stored_sizes(rows), strict=True)
        for header, (key, (kv_type, layer, head), expires, used), stored in found:
            name = name_of_key(key)
            size, last = records.size_of(header), self._seconds(used)
            on_disk = OnDisk(name, size, expires=expires, header=header, unit=block, used=last, stored=stored)
            add(block, key, on_disk, (layer, head, kv_type))
            note_found(name, unit, records.footprint_of(len(block.req_id), stored))
        self._contents.note_size(block)


# -- The owner of the values in the write-behind queue -----------------------------------------------------------------

_VALUES_PER_STEP = 256  # values that are noted in one step
_LEAST_FREED = 4096  # bytes: the disk has more space than when it was full, if so many were freed since
_MOST_REFUSED = 256  # values that are dropped in one step, or a unit
_WITHOUT_BODY = OnDisk, SetExpiry, Lifetime  # types of queued values that leave the size on disk as it is


class Changes:
    """The store as the `Owner` of queued values."""

    def __init__(
        self, contents: Contents, stored: Stored, account: DiskAccount, coder: Coder, space: Callable[[], int]
    ) -> None:
        self._contents = contents
        self._stored = stored
        self._account = account
        self._coder = coder
        self._space = space  # returns the bytes for new pages of the file
        # Bytes of values on disk, and for new pages, when the disk was full.
        self._full_at: tuple[int, int] | None = None
        self._refused: list[bytes] = []  # names of units to drop
        self._seldom = LogRateLimit(log)

    def change_of(self, name: bytes, value: Value) -> Change:
        """Return the change that stores a value. Called in the thread that commits."""
        return change_of(name, value)

    def evict_for_full_disk(self, error: DiskFull, size: int) -> Iterator[None]:
        """Evict, because the disk is full and `size` bytes wait. Yields after each unit."""
        return self._account.evict_for_full_disk(error, size, self._space())

    def find_refused(self) -> Iterator[None]:
        """Find the largest units in the queue, without which the others fit in the space that was freed since the disk
        was full; at least one. Units of which a part is on disk, or was, are not dropped. Yields after each step.
        """
        usage, behind, self._refused = self._stored.usage, self._stored.behind, []
        used, space = usage.used, self._space()
        if self._full_at is None or not behind.refuses:
            self._full_at = used, space
            return
        freed = max(self._full_at[0] - used, 0) + max(space - self._full_at[1], 0)
        if freed < _LEAST_FREED:
            return
        sizes, stay = dict[bytes, int](), set[bytes]()  # bytes of memory by unit, and units that have to stay
        for number, name in enumerate([*behind.queued], start=1):
            if not number % _VALUES_PER_STEP:
                yield
            value, size = behind.queued.get(name, (None, 0))
            if name[:1] == LIFETIME:
                continue
            unit = (_block_of(value) if value is not None else None) or name
            sizes[unit] = sizes.get(unit, 0) + size + CHANGE
            if name in usage or value is None or isinstance(value, SetExpiry | Corrupt):
                stay.update((unit, block_name_of(name) or unit))
        left = sum(sizes.values())
        for unit in sorted(sizes.keys() - stay, key=sizes.__getitem__, reverse=True):
            if left <= freed and self._refused:
                break
            self._refused.append(unit)
            left -= sizes[unit]

    def drop_refused(self) -> None:
        """Drop the units that `find_refused` has found, about _MOST_REFUSED values of them."""
        names, contents, left = self._stored.usage.names, self._contents, _MOST_REFUSED
        for name in self._refused:
            unit = unit_named(contents, name)
            if unit is None or name in names or contents.spares(unit, monotonic_ms()):
                continue
            there = names_in(unit)
            if any(map(names.__contains__, there)) or not self._account.evict(unit):
                continue
            message = "%s is dropped: its write was refused, and the disk is full"
            self._seldom.log(logging.WARNING, message, described(name))
            left -= len(there)
            if left <= 0:
                break
        self._refused = []

    def is_removed(self, name: bytes) -> bool:
        """Return whether the store has no value with that name."""
        return is_removed(self._contents, name)

    def note_stored(self, batch: Batch[Value]) -> Iterator[None]:
        """Note that a batch is on disk. Yields after each step."""
        usage = self._stored.usage
        if batch.clears:
            usage.was_cleared()
        last: Block | None = None
        unit = b""
        for number, (name, (value, _)) in enumerate(batch.changes.items(), start=1):
            if not number % _VALUES_PER_STEP:
                yield
            if (type(value) is Slot or type(value) is ExtentPage) and type(value.unit) is Block:
                if value.unit is not last:
                    last, unit = value.unit, name_of_unit(value.unit)
                    usage.remove_unit(unit)
                    self._coder.add(last)
                size = records.footprint_of(len(last.req_id), batch.coded.get(name) or value.size)
                usage.add(name, unit, size, again=self._is_queued_again(name))
            elif value is None or isinstance(value, Corrupt):
                if name[:1] != LIFETIME:
                    self._removed(name)
            elif not isinstance(value, _WITHOUT_BODY):
                if block := block_name_of(name):
                    usage.note_stray(name, block)
                if self._coder.idle >= 0 and isinstance(value, Extent):
                    self._coder.add(self._contents.index.block(*parse_block(name)))
                usage.remove_unit(name)
                size = size_on_disk(name, value, batch.coded.get(name, 0))
                usage.add(name, name, size, again=self._is_queued_again(name))

    def _removed(self, name: bytes) -> None:
        """Note the removal of a value, and of its unit if nothing of it is left."""
        usage = self._stored.usage
        unit = (not usage.is_stray_string(name) and block_name_of(name)) or name
        usage.remove(name, unit, again=self._is_queued_again(name))
        if unit[:1] != b"b" or not self._contents.index.has(*parse_block(unit)):
            usage.remove_unit(unit)

    def _is_queued_again(self, name: bytes) -> bool:
        """Return whether a value waits to be written again; False without `maxdisk`, as no sizes are expected then."""
        return self._stored.maxdisk > 0 and self._stored.behind.waits_again(name)


def _block_of(value: Value) -> bytes | None:
    """Return the name of the block of a queued page; None for another value."""
    if isinstance(value, Slot | ExtentPage) and isinstance(value.unit, Block):
        return name_of_unit(value.unit)
    return None


_MOST_OFFERED = 1280  # units that may be evicted in one search; examining all of them would block the event loop
_MOST_DROPPED = 2048  # pages of a block that are dropped from memory in one step
_SHARE_OF_TEXTS = 0.5  # of maxmemory; above it, short strings are evicted, as they are never on disk only

log = logging.getLogger("kvpage")


class DiskTier(Tier):
    """The disk tier. Call `load`, then `connect` when the loop runs.

    `Tier` documents the notifications.
    """

    scrubber: Scrubber

    def __init__(self, disk: Disk, contents: Contents, memory: MemoryAccount, maxdisk: int) -> None:
        super().__init__(contents)
        self.disk = disk
        self.stored = Stored(maxdisk)
        self.fetching = Fetching(contents, memory, self.stored)
        self.coder = Coder(contents, memory, self.stored)
        self.fetching.loaded = self.coder.add
        self.account = DiskAccount(contents, self.stored)
        self._memory = memory
        self._loader = Loader(disk, contents, self.stored)
        self._saves: set[asyncio.Task[str]] = set()
        self._decoding: asyncio.Task[str] | None = None
        self._closing = False
        contents.tier = self
        contents.catalogue.costs = WITH_TIER

    def load(self) -> None:
        """Load all keys on disk."""
        self._contents.any_on_disk = self._loader.load()

    def load_lifetimes(self, restore: Callable[[Unit, int, bytes, int], int]) -> None:
        """Call `restore` with each unit that has a lifetime, its seconds, its tenant, and its end in unix milliseconds.
        Write the end that it returns. Delete the lifetimes of units that do not exist. If the disk refuses this, the
        next start repeats it.
        """
        changes: list[Change] = []
        for lifetime in self.disk.lifetimes():
            unit_name, ends, seconds, tenant = lifetime
            unit = unit_named(self._contents, unit_name)
            if unit is None:
                changes.append(Delete(LIFETIME + unit_name))
            elif (end := restore(unit, seconds, tenant, ends)) != ends:
                changes.append(Write(LIFETIME + unit_name, b"", lifetime._replace(ends=end).pack()))
        if changes:
            try:
                self.disk.write(changes)
            except (DiskError, DiskFull) as error:
                log.warning("the ends of lifetimes cannot be written: %s", error)

    def ensure_space_for_all(self) -> None:
        """Raise `maxdisk` if the loaded values exceed it. Called before other code uses the store."""
        least = self.account.least_for(self.stored.usage.used)
        if least > self.stored.maxdisk:
            self.stored.maxdisk = least
            self.disk.resize(least)

    def connect(
        self, *, mode: str, limit: int, scrub_rate: int, moved: Callable[[], None], page_code: str = "off"
    ) -> None:
        """Start to read and write on the event loop.

        Writers wait above `limit` queued bytes, or above 1/4 of maxmemory or 1/8 of maxdisk. `moved` is called when
        borrowed bytes, which may wait to be sent, have moved.
        """
        if self._memory.limit:
            limit = min(limit, self._memory.limit // 4)
        if self.stored.maxdisk:
            limit = min(limit, self.stored.maxdisk // 8)
        self.coder.idle = {"idle": fetching.IDLE, "always": 0}.get(page_code, -1)
        changes = Changes(self._contents, self.stored, self.account, self.coder, lambda: self.disk.space)
        self.stored.behind = WriteBehind(self.disk, changes, mode, limit)
        self._contents.leases.on_lifetime = self._note_lifetime
        self.fetching.connect(DiskReader(self.disk), moved)
        self.scrubber = Scrubber(self.disk, scrub_rate, self._found_damaged)

    @property
    def behind(self) -> WriteBehind[Value]:
        return self.stored.behind

    async def save(self) -> str:
        """Write all dirty values and make them durable. Returns the error; empty if all were written."""
        behind = self.behind
        position = behind.position
        await behind.settle()
        if behind.durable < position:
            return f"{behind.failing} ({behind.position - behind.durable} changes are in memory alone)"
        try:
            await asyncio.to_thread(self.disk.flush)
        except (DiskError, DiskFull) as error:
            return str(error)
        return ""

    def reset_statistics(self) -> None:
        """Set the counts and durations of usual work to 0. Those of damage and errors stay."""
        self.stored.counts.reset()
        self.behind.times, self.fetching.times = Durations(), Durations()

    @property
    def unsaved(self) -> int:
        """Number of changes that are not written yet."""
        return self.behind.position - self.behind.durable

    @property
    def values_on_disk(self) -> int:
        """Number of values on disk."""
        return len(self.stored.usage) + self._contents.index.unloaded_pages

    def begin_save(self) -> asyncio.Task[str]:
        """Start a task that runs `save`."""
        task = asyncio.create_task(self.save())
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)
        return task

    def begin_decoding(self) -> asyncio.Task[str]:
        """Start a task that stores all coded values on disk without the code, and restores the format that older
        versions read. Its result is the error; empty if all is done. If a task runs already, return that.
        """
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode())
        return self._decoding

    async def _decode(self) -> str:
        after: bytes | None = b""
        while after is not None:
            if self._closing:
                return "the server stops"
            found = await self.behind.run(partial(self.disk.decode_some, after))
            if not isinstance(found, Decoded):
                return str(found)
            for number, (name, size) in enumerate(found.sizes.items()):
                if not number % _VALUES_PER_STEP:
                    await asyncio.sleep(0)
                self._note_decoded(name, size)
            for name in found.damaged:
                self._found_damaged(name)
            after = found.last or None
        await self.behind.settle()  # damaged values leave the disk
        restored = await self.behind.run(self.disk.restore_format)
        if isinstance(restored, Exception):
            return str(restored)
        return "" if restored else "some values are still coded"

    def _note_decoded(self, name: bytes, size: int) -> None:
        body: object
        if name[:1] == b"b":
            unit, footprint_now = name, footprint(name, size)
            block = self._contents.index.block(*parse_block(name))
            body = block.extent.slot if block is not None and block.extent is not None else None
        else:
            body = self._contents.catalogue.get(name[1:])  # creates the entries of its block
            unit = block_name_of(name) or name
            footprint_now = records.footprint_of(len(parse_block(unit)[0]), size)
        if name in self.stored.usage:
            self.stored.usage.resize(name, unit, footprint_now)
        if isinstance(body, OnDisk) and body.code is None:
            self._contents.set_stored(body, body.size)

    async def close(self) -> str:
        """Write all dirty values, and close the disk. Return the reason if some could not be written, else ""."""
        self._closing = True
        await self.coder.close()
        if self._decoding is not None:
            await self._decoding
        await self.scrubber.close()
        if failed := await self.save():
            log.error("the last save: %s", failed)
        else:
            log.info("the last save: everything is on disk")
        failing = self.behind.failing
        lost = await self.behind.close()
        await self.fetching.close()
        why = self.behind.failing or failing
        try:
            self.disk.close()
        except (DiskError, DiskFull) as error:
            return f"the store cannot be closed, {plural(lost, 'queued value')} could not be written: {why or error}"
        return f"{plural(lost, 'queued value')} could not be written: {why}" if lost else ""

    # -- stored values -------------------------------------------------------------------------------------------------

    def stored_pages(self, keys: Sequence[bytes], pages: Sequence[Slot]) -> None:
        self.stored.store_pages(keys, pages)

    def stored_string(self, key: bytes, entry: Entry) -> None:
        self.stored.store(name_of_key(key), entry)

    def stored_block(self, block: Block) -> None:
        assert block.extent is not None
        self.stored.store(name_of_unit(block), block.extent)

    def splits(self, block: Block) -> None:
        """Prepare the split of a block stored whole. Raises NotLoaded if it is not in memory."""
        assert block.extent is not None
        if isinstance(block.extent.slot, OnDisk):
            raise NotLoaded(block.extent.slot.name)

    def _note_lifetime(self, unit: Unit, lease: Lease) -> None:
        """Queue the lifetime of a unit, or its end."""
        name = name_of_unit(unit)
        value = Lifetime(name, lease.ends, lease.seconds, lease.tenant) if lease.ends else None
        self.behind.note(LIFETIME + name, value, len(name))

    def follows(self, blocks: Sequence[Block]) -> None:
        self.account.chains.follow(blocks)

    def sweep(self) -> None:
        self.fetching.sweep()
        self.coder.sweep()

    def was_split(self, block: Block, pages: Mapping[bytes, ExtentPage]) -> None:
        self.stored.remove(name_of_block(block.req_id, block.page), replaced=True)
        self.stored.store_pages([*pages], [*pages.values()])

    def expiry_changes(self, key: bytes, entry: Entry) -> None:
        self.behind.note_old_expiry(name_of_key(key), entry, entry.expires)

    def expiry_changed(self, key: bytes) -> None:
        entry = self._contents.catalogue.entries.get(key)
        if entry is not None:
            self.stored.retime(name_of_key(key), entry)

    # -- removed values ------------------------------------------------------------------------------------------------

    def pages_dropped(self, block: Block) -> None:
        """Process the replacement of a block's pages by a block that is stored whole."""
        if block.extent is None:
            self.stored.remove_all(each_name_in(block), replaced=True)

    def removed(self, key: bytes) -> None:
        name = name_of_key(key)
        self.stored.remove(name, replaced=self.stored.maxdisk > 0 and not is_key_removed(self._contents, key))

    def pages_removed(self, keys: Sequence[bytes]) -> None:
        self.stored.remove_all(map(name_of_key, keys), replaced=True)

    def unit_removed(self, unit: Unit) -> None:
        if isinstance(unit, Block):
            self.account.block_removed(unit)
            self.coder.discard(unit)

    def block_removed(self, block: Block) -> None:
        self.account.block_removed(block)
        self.coder.discard(block)
        self.stored.remove_all(each_name_in(block))

    def clear(self) -> tuple[dict[bytes, Any] | OrderedMap[bytes, Any], ...]:
        """Remove everything from the disk. Return the former tables."""
        self.account.chains.clear()
        return *self.stored.clear(), self.coder.clear()

    # -- drops and evictions -------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        return self.fetching.holds.bytes_to_stay

    def holds(self, unit: Unit) -> bool:
        return unit in self.fetching.holds

    def units_below(self) -> Iterator[Unit]:
        for name in self.stored.usage.on_disk_only():
            if (unit := unit_named(self._contents, name)) is not None:
                yield unit

    def values_to_evict(self) -> Iterator[Source]:
        """Yield units to demote, if that may help: not if the policy keeps short strings, and they exceed maxmemory.

        A policy that may not evict every unit demotes any of them, and then evicts units that expire.
        """
        contents = self._contents
        yield Source(self._protected_above_half(), self._drop_protected, is_protected=True)
        if not self._keeps_texts or contents.texts <= self._memory.limit:
            yield Source(islice(contents.eviction_order.quotas.every.victims(), _MOST_OFFERED), self.demote)
        if self._keeps_texts:
            yield Source(islice(contents.victims(), _MOST_OFFERED), self.evict)
        yield Source(self._protected_units(), self._drop_protected, is_protected=True)
        self.behind.commit_soon()

    def _protected_units(self) -> Iterator[Unit]:
        """Yield up to _MOST_OFFERED protected units in memory, in turn: each call goes on after the units of the last
        one. They may have been leased or pinned while they took no memory, and loaded since.
        """
        by_unit, units = self._contents.leases.by_unit, self._contents.eviction_order.units
        for unit, lease in [*islice(by_unit.items(), _MOST_OFFERED)]:
            by_unit.move_to_end(unit)
            if lease.size and unit in units:
                yield unit

    def _protected_above_half(self) -> Iterator[Unit]:
        """Yield protected units in memory while they have more than their share of it, so that they do not displace the
        units of others.
        """
        leases, most = self._contents.leases, int(self._memory.limit * SHARE)
        if leases.bytes > most > 0:
            for unit in self._protected_units():
                yield unit
                if leases.bytes <= most:
                    return

    def _drop_protected(self, unit: Unit) -> bool:
        """Drop a protected unit from memory. Return False if it has to stay: it is not on disk, or a short string."""
        if self._is_text(unit) or self.waits(unit) or not self.stored.usage.has_all(names := names_in(unit)):
            return False
        self._drop(unit, names)
        return True

    def keys_to_evict(self) -> Iterator[Source]:
        """Yield units to evict from memory and disk. If the disk fails, also units that wait to be written."""
        yield Source(islice(self.account.evictable(), _MOST_OFFERED), partial(self.account.evict, room="memory"))
        yield Source(islice(self._contents.victims(), _MOST_OFFERED), self.evict)
        self.behind.commit_soon()

    @property
    def _keeps_texts(self) -> bool:
        return not self._contents.eviction_order.rules.evicts_any

    def demote(self, unit: Unit) -> bool:
        """Drop a unit, or evict it if it is not on disk. Returns False if it has to stay.

        A short string is not dropped. It is evicted if short strings use too much memory.
        """
        is_text = self._is_text(unit)
        if not self.waits(unit) and self.stored.usage.has_all(names := names_in(unit)):
            if not is_text:
                self._drop(unit, names)
                return True
            if self._contents.texts <= self._memory.limit * _SHARE_OF_TEXTS:
                return False
        return not self._keeps_texts and self.evict(unit)

    def evict(self, unit: Unit) -> bool:
        """Evict a unit. Returns False if it waits to be written, or is on disk only."""
        if all(is_on_disk_named(self._contents, name) for name in each_name_in(unit)):
            return False
        if not self.behind.failing and self.waits(unit):
            return False
        self._contents.evict(unit)
        return True

    def _is_text(self, unit: Unit) -> bool:
        """Return whether a unit is a short string, which is not dropped, because that frees nothing."""
        return isinstance(unit, bytes) and isinstance(self._contents.catalogue.entries[unit], Text)

    def waits(self, unit: Unit) -> bool:
        """Return whether a part of a unit waits to be written. Usually all of it does, or nothing."""
        return not self.behind.settled and any(map(self.behind.waits, each_name_in(unit)))

    def _drop(self, unit: Unit, names: Sequence[bytes]) -> None:
        """Free a unit's bytes in memory. Of a block of very many single pages, the next call frees more."""
        contents, units = self._contents, self._contents.eviction_order.units
        used = units.now - units.idle(unit)
        if isinstance(unit, bytes) or unit.extent is None:
            freed, all_dropped = self._drop_from_memory(unit, names, used)
            contents.grow(unit, -freed)
            contents.any_on_disk = True
            if not all_dropped:
                return
        elif isinstance(slot := unit.extent.slot, Slot):
            stored = self.stored.usage.stored_size(names[0], slot.size)
            contents.move_body(unit.extent, OnDisk(names[0], slot.size, unit=unit, used=used, stored=stored))
            contents.grow(unit, -slot.footprint)
            self.stored.counts.dropped += 1
        elif slot.code is not None:
            contents.grow(unit, -slot.footprint)
            slot.code, slot.used = None, used
            contents.set_stored(slot, self.stored.usage.stored_size(names[0], slot.size))
            self.stored.counts.dropped += 1
        units.evicted(unit)
        if isinstance(unit, Block):
            contents.note_used_on_disk(unit, used)
        self.stored.usage.note_on_disk_only(name_of_unit(unit))
        contents.any_on_disk = True

    def _drop_from_memory(self, unit: Unit, names: Iterable[bytes], used: int) -> tuple[int, bool]:
        """Replace the values of these names by placeholders, up to _MOST_DROPPED. Returns the freed bytes, and whether
        all are replaced.
        """
        contents, freed, left = self._contents, 0, _MOST_DROPPED
        for name in names:
            key = name[1:]
            entry = cast(Page, contents.catalogue.entries[key])
            if isinstance(entry, OnDisk) and entry.code is None:
                continue
            if not left:
                return freed, False
            left -= 1
            freed += entry.footprint
            self.stored.counts.dropped += 1
            stored = self.stored.usage.stored_size(name, entry.size)
            if isinstance(entry, OnDisk):
                entry.code, entry.used = None, used
                contents.set_stored(entry, stored)
            else:
                header = bytes(entry.header) if type(unit) is Block else b""
                on_disk = OnDisk(name, entry.size, expires=entry.expires, header=header, unit=entry.unit, used=used)
                on_disk.stored = stored
                contents.move_body(key, on_disk)
        return freed, True

    # -- damage that the scrubber finds --------------------------------------------------------------------------------

    def _found_damaged(self, name: bytes) -> None:
        """Write a damaged value, or the values of a damaged sheet, again from memory; remove those on disk only."""
        if name.startswith(records.PREFIX):
            block = self._contents.index.block(*parse_block(records.block_of(name)[0]))
            for one in [] if block is None else names_in(block):
                if records.is_in(one, name):
                    self._found_damaged(one)
            return
        self._contents.catalogue.get(name[1:])  # creates the entries of its block
        if name not in self.stored.usage or self.behind.waits(name):
            return
        value = value_named(self._contents, name)
        on_disk = value.slot if isinstance(value, Extent) else value
        if isinstance(on_disk, OnDisk) and on_disk.code is not None:
            if not on_disk.failing:  # it is decoded first
                self.fetching.fetch([on_disk], partial(self._found_damaged, name))
            return
        if isinstance(on_disk, OnDisk):
            self.fetching.lose(on_disk, Damaged("it is damaged on disk"))
            return
        self.stored.counts.repaired += 1
        log.warning("%s is damaged on disk, and written again from memory", described(name))
        self.stored.store(name, value)
