"""The keyspace with a disk behind it: what memory has no room for is dropped there and fetched when it is asked for.

Every key is known in memory. A value's bytes are there too, or it is `Cold`: they lie on disk alone. Every change is
handed to the write-behind; what is on disk and does not wait to be written again may be dropped.

With `appendfsync` always or everysec, all that is stored goes to disk, and writers wait when it comes faster than the
disk takes it. With no, nothing is promised: a value goes to disk when it is used for a second time, so what is stored
and never asked for again wears no SSD; when the disk cannot keep up it stays in memory; and when the server ends in
order, everything goes.

Where the disk is full, what was stored, or dropped from memory, or fetched the longest ago goes first, whole blocks at
a time; what lies in memory too is passed over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

from kvpage_server.page import unix_ms
from kvpage_server.store import sheet
from kvpage_server.store.arena import Slot
from kvpage_server.store.behind import Batch, WriteBehind
from kvpage_server.store.cold import Cold
from kvpage_server.store.disk import Disk
from kvpage_server.store.entry import Entry, NewPage, Page, Text, page_named
from kvpage_server.store.eviction import Unit
from kvpage_server.store.extent import Extent, ExtentPage
from kvpage_server.store.fetch import Fetcher
from kvpage_server.store.fetching import Fetching
from kvpage_server.store.index import Block
from kvpage_server.store.known import unit_named
from kvpage_server.store.mapped import MappedLoans
from kvpage_server.store.memory import Fallen, OutOfMemory
from kvpage_server.store.policies import NO_EVICTION, VOLATILE_TTL
from kvpage_server.store.record import Damaged, footprint, name_of_block, name_of_key
from kvpage_server.store.scrub import Scrubber
from kvpage_server.store.spelling import ShortText, Spoilt, Value, change_of

_SHARE_OF_DISK = 0.75  # of maxdisk, for values: LMDB needs room for what it replaces
_MOST_PASSED = 4096  # units that are not dropped, before no more are looked at

log = logging.getLogger("kvpage")


class Tiered(Fetching):
    """Every key and value. `maxdisk` is in bytes, 0 for no limit. `load`, then `connect` once the loop runs."""

    def __init__(self, disk: Disk, *, maxmemory: int = 0, policy: str = "allkeys-prefix", maxdisk: int = 0) -> None:
        super().__init__(disk, maxmemory=maxmemory, policy=policy)
        self.maxdisk = maxdisk
        self._unproven: set[Unit] = set()  # written and not used since: not for the disk yet
        self._saves: set[asyncio.Task[None]] = set()
        self.scrubber: Scrubber

    def connect(self, *, mode: str, limit: int, scrub_rate: int, moved: Callable[[], None]) -> None:
        """Begin to write, behind with at most `limit` bytes, and to read. On the loop.

        `moved` is called when some of what is lent, and may wait to be sent, has moved.
        """
        self._mapped = MappedLoans(moved)
        if self.maxmemory:
            limit = min(limit, self.maxmemory // 4)
        if self.maxdisk:
            limit = min(limit, self.maxdisk // 8)
        self.behind = WriteBehind(
            self.disk, mode=mode, limit=limit, spell=change_of, stored=self._note_stored, make_room=self._give_up
        )
        self._fetcher = Fetcher(self.disk)
        self.holds.on_end = partial(asyncio.get_running_loop().call_soon, self._after_a_hold)
        self.scrubber = Scrubber(self.disk, scrub_rate, self._found_damaged)

    async def settle(self) -> None:
        """Have everything on disk that was promised to be."""
        await self.behind.settle()

    async def save(self) -> None:
        """Have everything on disk, what is not promised to be there too. In waves: the queue is no longer than ever."""
        waiting = list(self._unproven)
        while waiting and not self.behind.failing:
            while waiting and not self.behind.full:
                self._prove(waiting.pop())
            await self.behind.settle()
        await self.behind.settle()

    def begin_save(self) -> asyncio.Task[None]:
        """Begin to `save`, now."""
        task = asyncio.create_task(self.save())
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)
        return task

    async def close(self) -> None:
        """Write what is not on disk, and let go of it."""
        await self.scrubber.close()
        await self.save()
        await self.behind.close()
        await self._fetcher.close()
        self.holds.on_end = None
        self._mapped.call_in()
        self.disk.close()

    # -- every change goes to disk ---------------------------------------------------------------------------------

    def _put(self, key: bytes, entry: Entry, event: str = "set") -> None:
        known = key in self._catalogue.entries
        super()._put(key, entry, event)
        self._offer(self._unit(key, entry), name_of_key(key), entry, known=known or isinstance(entry, Text))

    def set_pages(self, pages: Iterable[NewPage]) -> None:
        """Store pages, whose slots have their headers; the names have been validated."""
        pages = list(pages)
        if self.index.resting:
            for req_id, page in {(name.req_id, name.page) for name, _, _ in pages}:
                self.index.block(req_id, page)  # is awake: its pages are entries
        known = [name.key in self._catalogue.entries for name, _, _ in pages]
        super().set_pages(pages)
        for (name, slot, _), was_known in zip(pages, known, strict=True):
            self._offer(cast(Block, slot.unit), name_of_key(name.key), slot, known=was_known)

    def _rewrite(self, key: bytes, text: Text, value: bytes, expires: int, event: str) -> None:
        super()._rewrite(key, text, value, expires, event)
        self._offer(key, name_of_key(key), text, known=True)

    def _offer(self, unit: Unit, name: bytes, value: Entry | Extent, *, known: bool) -> None:
        """Something has a new value. Was it `known` before, it is used for a second time."""
        behind = self.behind
        if behind.mode == "no" and (not known or (behind.full and not behind.waits(name))):
            self.counts.skipped += known
            self._unproven.add(unit)
            self._unstore(name)
        else:
            self._store(name, value)

    def _store(self, name: bytes, entry: Entry | Extent) -> None:
        if isinstance(entry, Text):
            self.behind.note(name, (entry.data, entry.expires), entry.size)
        elif isinstance(entry, Extent):
            self.behind.note(name, entry, entry.slot.footprint)
        else:
            self.behind.note(name, entry, entry.footprint)

    def _unstore(self, name: bytes) -> None:
        if name in self._on_disk or self.behind.waits(name):
            self.behind.note(name, None, 0)

    def set_block(self, req_id: bytes, page: int, extent: Extent) -> None:
        """Store a block whole, in place of whatever pages it had. Its slot is full."""
        known = self.index.block(req_id, page) is not None
        super().set_block(req_id, page, extent)
        block = self.index.block(req_id, page)
        assert block is not None
        self._offer(block, name_of_block(req_id, page), extent, known=known)

    def _drop_pages(self, block: Block, stay: Mapping[int, int]) -> dict[bytes, int]:
        if block.extent is None:
            for key in block.page_keys():
                self._unstore(name_of_key(key))
        return super()._drop_pages(block, stay)

    def _split(self, block: Block) -> None:
        extent = block.extent
        assert extent is not None
        if isinstance(extent.slot, Cold):
            _ = extent.slot.body  # raises Absent
        super()._split(block)
        self._unstore(name_of_block(block.req_id, block.page))
        for key in block.page_keys():
            self._store(name_of_key(key), self._catalogue.entries[key])

    def _remove(self, key: bytes, event: str) -> None:
        unit = self._unit(key, self._catalogue.entries[key])
        super()._remove(key, event)
        self._gone(key, unit)

    def remove_corrupt(self, key: bytes) -> None:
        """Remove a page that is not what was stored."""
        unit = self._unit(key, cast(Entry, self._own(key)))
        super().remove_corrupt(key)
        self._gone(key, unit)

    def _gone(self, key: bytes, unit: Unit) -> None:
        if not isinstance(unit, Block) or not unit.pages:
            self._unproven.discard(unit)
        self._unstore(name_of_key(key))

    def remove_block(self, block: Block, event: str, reason: str = "") -> int:
        """Remove every page of a block; how many it had. `reason`: what is remembered, if the event does not tell."""
        self._unproven.discard(block)
        for name in self._names_of(block):
            self._unstore(name)
        return super().remove_block(block, event, reason)

    def set_expiry(self, key: bytes, expires: int) -> None:
        """Give a living key an expiry in unix milliseconds, 0 to take it away. One in the past removes the key."""
        super().set_expiry(key, expires)
        entry = self._catalogue.entries.get(key)
        name = name_of_key(key)
        if entry is not None and (name in self._on_disk or self.behind.waits(name)):
            self._store(name, entry)

    def flush(self) -> Fallen:
        """Remove everything. What there was is freed with the result: piece by piece, or at once when it is dropped."""
        self.behind.clear()
        self._on_disk.clear()
        self._unproven.clear()
        return super().flush()

    # -- what has proven itself ------------------------------------------------------------------------------------

    def read(self, key: bytes) -> Entry | None:
        """The living value of a key; a use of it, and a hit or a miss."""
        entry = super().read(key)
        if self._unproven and entry is not None:
            self._prove(self._unit(key, entry))
        return entry

    def read_all(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """`read` of many keys; those of one block in a row are one use of it."""
        entries = super().read_all(keys)
        if self._unproven:
            for unit in {self._unit(key, entry) for key, entry in zip(keys, entries, strict=True) if entry}:
                self._prove(unit)
        return entries

    def read_apart(self, keys: Sequence[bytes]) -> tuple[Slot, ...] | None:
        """`read` of many pages, if each lives in a slot of its own; None, and nothing was read, if one does not."""
        pages = super().read_apart(keys)
        if pages and self._unproven:
            for block in {page.unit for page in pages}:
                self._prove(cast(Block, block))
        return pages

    def use_block(self, block: Block) -> None:
        """A block is read whole: a use of it, and a hit."""
        if block.extent is not None and type(block.extent.slot) is Cold:  # who reads it has been lent its bytes
            self.counters.hits += 1
            return
        super().use_block(block)
        if self._unproven:
            self._prove(block)

    def _prove(self, unit: Unit) -> None:
        """A unit is used for a second time, or the server ends: it goes to disk, if there is room on the way."""
        if unit not in self._unproven:
            return
        if self.behind.full:
            self.counts.skipped += 1
            return
        self._unproven.discard(unit)
        for name in self._names_of(unit):
            if name not in self._on_disk or self.behind.waits(name):  # what waits may be that an older one is to go
                self._store(name, self._value_of(name))

    # -- from memory to disk alone ---------------------------------------------------------------------------------

    def make_room(self, *, may_evict: bool = True) -> None:
        """Drop what is on disk, and evict what is not, until memory is within its limit.

        Raises OutOfMemory when there is nothing to drop and the policy forbids eviction.
        """
        if not self.is_full:
            return
        now, passed = unix_ms(), 0
        self.guards.settle(now)
        for unit in self._units.victims():
            if unit in self.holds or self.guards.spares(unit, now) or not self._leaves(unit):
                passed += 1
                if passed == _MOST_PASSED:
                    break
            if self.arena.sparse:
                self.gather()
            if not self.is_full:
                return
        self.behind.hurry()
        if self.policy in (NO_EVICTION, VOLATILE_TTL):
            raise OutOfMemory

    def _leaves(self, unit: Unit) -> bool:
        """Drop or evict a unit; False when it has to stay, since it waits to be written or nothing would be gained."""
        names = list(self._names_of(unit))
        waits = not self.behind.settled and any(map(self.behind.waits, names))
        if not waits and self._on_disk.has_all(names):
            return self._drop(unit, names)
        if not self._may_evict(unit) or (waits and not self.behind.failing):
            return False
        self.evict(unit)
        return True

    def _may_evict(self, unit: Unit) -> bool:
        if self.policy == VOLATILE_TTL:
            return bool(unit.soonest if isinstance(unit, Block) else self.expires_of(unit))
        return self.policy != NO_EVICTION

    def _drop(self, unit: Unit, names: Sequence[bytes]) -> bool:
        """Let go of a unit's bytes in memory. Those of a short string stay: they take less than what is known of it."""
        if isinstance(unit, bytes) and isinstance(self._catalogue.entries[unit], Text):
            return False
        used = self._units.now - self._units.idle(unit)
        if isinstance(unit, bytes):
            self._cool(unit, names, used)
        elif unit.extent is None:
            self._grow(unit, -self._cool(unit, names, used))
        elif not isinstance(slot := unit.extent.slot, Cold):
            unit.extent.slot = Cold(names[0], slot.size, unit=unit, used=used)
            self._grow(unit, -slot.footprint)
            self.counts.dropped += 1
        self._units.evicted(unit)
        self._on_disk.use(unit_named(unit))
        self.any_cold = True
        return True

    def _cool(self, unit: Unit, names: Iterable[bytes], used: int) -> int:
        """Let go of the bytes of keys; how many they were."""
        entries, freed = self._catalogue.entries, 0
        for name in names:
            key = name[1:]
            entry = cast(Page, entries[key])
            if type(entry) is not Cold:
                header = bytes(entry.header) if type(unit) is Block else b""
                entries[key] = Cold(name, entry.size, expires=entry.expires, header=header, unit=entry.unit, used=used)
                freed += entry.footprint
                self.counts.dropped += 1
        return freed

    # -- the disk's side -------------------------------------------------------------------------------------------

    def _note_stored(self, batch: Batch[Value]) -> None:
        on_disk = self._on_disk
        if batch.clears:
            on_disk.clear()
        last: object = None
        unit = b""
        for name, (value, _) in batch.changes.items():
            if isinstance(value, Cold):
                continue
            if value is None or isinstance(value, Spoilt):
                on_disk.remove(name)
                self._drop_unit(name)
            elif isinstance(value, Slot | ExtentPage) and isinstance(value.unit, Block):
                if value.unit is not last:
                    last, unit = value.unit, unit_named(value.unit)
                on_disk.add(name, unit, sheet.footprint_of(value.size))
            else:
                on_disk.add(name, name, footprint(name, _size_of(value)))
        too_much = on_disk.used - int(self.maxdisk * _SHARE_OF_DISK)
        if self.maxdisk and too_much > 0:
            self._give_up(too_much)

    def _drop_unit(self, name: bytes) -> None:
        """Forget the unit of a value that is gone, if that is gone, too."""
        page = page_named(name[1:]) if name[:1] == b"k" else None
        if page is None:
            self._on_disk.remove_unit(name)
        elif self.index.block(page.req_id, page.page) is None:
            self._on_disk.remove_unit(name_of_block(page.req_id, page.page))

    def _give_up(self, size: int) -> list[bytes]:
        """Remove values that take so many bytes of the disk, what is worth least first; their names."""
        gone: list[bytes] = []
        passed, most = 0, self._on_disk.units
        while size > 0 and passed <= 2 * most:
            name = self._on_disk.first()
            if name is None:
                break
            unit = self._block_named(name) if name[:1] == b"b" else name[1:]
            names = [] if unit is None else [one for one in self._names_of(unit) if one in self._on_disk]
            cold = any(map(self._is_cold, names))
            if any(map(self.behind.waits, names)) or (names and passed < most and not cold):
                passed += 1
                self._on_disk.use(name)
                continue
            if cold:
                self.counts.evicted += len(names)
                self.evict(cast(Unit, unit))
            for one in names:
                self.behind.note(one, None, 0)
                size -= self._on_disk.remove(one)
            self._on_disk.remove_unit(name)
            gone += names
        return gone

    def _is_cold(self, name: bytes) -> bool:
        value = self._value_of(name)
        return isinstance(value.slot if isinstance(value, Extent) else value, Cold)

    def _found_damaged(self, name: bytes) -> None:
        """The scrubber found a value, or a sheet, damaged. Where memory has it, it is written again."""
        if name.startswith(sheet.PREFIX):
            block = self._block_named(sheet.block_of(name)[0])
            for one in [] if block is None else self._names_of(block):
                if sheet.is_in(one, name):
                    self._found_damaged(one)
            return
        self._catalogue.get(name[1:])  # it is awake
        if name not in self._on_disk or self.behind.waits(name):
            return
        value = self._value_of(name)
        cold = value.slot if isinstance(value, Extent) else value
        if isinstance(cold, Cold):
            self._lose(cold, Damaged("the scrubber found it damaged"))
            return
        self.counts.repaired += 1
        log.warning("%r is damaged on disk, and written again from memory", name)
        self._store(name, value)


def _size_of(value: Slot | ExtentPage | Extent | ShortText) -> int:
    if isinstance(value, tuple):
        return len(value[0])
    return value.slot.size if isinstance(value, Extent) else value.size
