"""The keyspace with a disk behind it: what memory has no room for is dropped there and fetched when it is asked for.

Every key is known in memory. A value's bytes are there too, or it is `Cold`: they lie on disk alone. Every change is
handed to the write-behind; what is on disk and does not wait to be written again may be dropped.

With `appendfsync` always or everysec, all that is stored goes to disk, and writers wait when it comes faster than the
disk takes it. With no, nothing is promised: a value goes to disk when it is used for a second time, so what is stored
and never asked for again wears no SSD; when the disk cannot keep up it stays in memory; and when the server ends in
order, everything goes.

The policy holds for the store as a whole: see `diskroom`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

from kvpage_server.core import NewPages, PageNames, Slot
from kvpage_server.page import unix_ms
from kvpage_server.store.disk import sheet
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import Spoilt, Value, change_of
from kvpage_server.store.disk.mapped import MappedLoans
from kvpage_server.store.disk.readers import Fetcher
from kvpage_server.store.disk.record import Damaged, name_of_block, name_of_key
from kvpage_server.store.disk.scrub import Scrubber
from kvpage_server.store.disk.write_behind import Batch, WriteBehind
from kvpage_server.store.diskroom import DiskRoom, takes
from kvpage_server.store.eviction.policies import NO_EVICTION, VOLATILE_TTL
from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.keyspace import Fallen, OutOfMemory
from kvpage_server.store.known import unit_named
from kvpage_server.store.lookup import ANY, Found
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, Page, Text, page_named
from kvpage_server.store.memory.extent import Extent, ExtentPage
from kvpage_server.store.memory.index import Block
from kvpage_server.store.room import MOST_LEAVE

_AT_ONCE = 256  # values that are noted before others have their turn
_MOST_PASSED = 1024  # units that are not dropped, before no more are looked at
_SHARE_OF_TEXTS = 0.5  # of maxmemory, that short strings may take before they are evicted: memory always has them

log = logging.getLogger("kvpage")


class Tiered(DiskRoom):
    """Every key and value. `maxdisk` is in bytes, 0 for no limit. `load`, then `connect` once the loop runs."""

    def __init__(self, disk: Disk, *, maxmemory: int = 0, policy: str = "allkeys-prefix", maxdisk: int = 0) -> None:
        super().__init__(disk, maxmemory=maxmemory, policy=policy, maxdisk=maxdisk)
        self.left_out = 0  # values that the last save found no room for
        self._saves: set[asyncio.Task[str]] = set()
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
            self.disk,
            mode=mode,
            limit=limit,
            spell=change_of,
            stored=self._note_stored,
            make_room=self._give_up,
            is_gone=self._is_gone,
        )
        self._fetcher = Fetcher(self.disk)
        self.holds.on_end = partial(asyncio.get_running_loop().call_soon, self._after_a_hold)
        self.scrubber = Scrubber(self.disk, scrub_rate, self._found_damaged)

    async def settle(self) -> None:
        """Have everything on disk that was promised to be."""
        await self.behind.settle()

    async def save(self) -> str:
        """Have everything on disk, what is not promised to be there too; why some is not, empty when all is.

        In waves: the queue is no longer than ever.
        """
        behind = self.behind
        position = behind.position
        await behind.settle()
        waiting = list(self._unproven)
        while waiting and not behind.failing:
            while waiting and not behind.full:
                self._prove(waiting.pop())
            position = behind.position
            await behind.settle()
        self.left_out = len(self._unproven)
        if behind.durable < position:
            return f"{behind.failing} ({behind.position - behind.durable} changes are in memory alone)"
        return f"maxdisk has no room for all ({self.left_out} values are in memory alone)" if self.left_out else ""

    @property
    def unsaved(self) -> int:
        """Changes that are not on disk, and values that are not meant to be there yet."""
        return self.behind.position - self.behind.durable + len(self._unproven)

    def begin_save(self) -> asyncio.Task[str]:
        """Begin to `save`, now."""
        task = asyncio.create_task(self.save())
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)
        return task

    async def close(self) -> str:
        """Write what waits, and let go of the disk; why some could not be written, empty when all was."""
        await self.scrubber.close()
        log.info("the last save: %s", await self.save() or "everything is on disk")
        lost = await self.behind.close()
        await self._fetcher.close()
        self.holds.on_end = None
        self._mapped.call_in()
        self.disk.close()
        return f"{lost} values that were to be written are not on disk: {self.behind.failing}" if lost else ""

    # -- every change goes to disk ---------------------------------------------------------------------------------

    def _put(self, key: bytes, entry: Entry, old: Entry | None, event: str) -> None:
        super()._put(key, entry, old, event)
        self._offer(key, name_of_key(key), entry, known=old is not None or type(entry) is Text)

    def set_pages(self, pages: NewPages) -> None:
        """Store pages. Where that may be refused, they were admitted."""
        if self.index.resting:
            for block in pages.blocks():
                self.index.block(*block)  # is awake: its pages are entries
        entries = self._catalogue.entries
        known = [] if self.keeps_all else [key in entries for key in pages.keys]
        super().set_pages(pages)
        names = list(map(name_of_key, pages.keys))
        if self.keeps_all:
            self._store_pages(names, pages.slots)
        for name, slot, was_known in zip(names, pages.slots, known, strict=False):
            self._offer(cast(Block, slot.unit), name, slot, known=was_known)

    def _store_pages(self, names: Sequence[bytes], slots: Sequence[Slot]) -> None:
        if self.maxdisk:
            for name, slot in zip(names, slots, strict=True):
                self._on_disk.expect(name, takes(name, slot))
        self.behind.note_all(names, slots, [slot.footprint for slot in slots])

    def _rewrite(self, key: bytes, text: Text, value: bytes, expires: int, event: str) -> None:
        super()._rewrite(key, text, value, expires, event)
        self._offer(key, name_of_key(key), text, known=True)

    def _offer(self, unit: Unit, name: bytes, value: Entry | Extent, *, known: bool) -> None:
        """Something has a new value. Was it `known` before, it is used for a second time."""
        behind = self.behind
        keeps = self.keeps_all or (known and (behind.waits(name) or not behind.full) and self._fits([(name, value)]))
        if keeps:
            self._store(name, value)
        else:
            self.counts.skipped += known
            self._unproven.add(unit)
            self._unstore(name)

    def _store(self, name: bytes, entry: Entry | Extent) -> None:
        if self.maxdisk and not isinstance(entry, Cold):
            self._on_disk.expect(name, takes(name, entry))
        if isinstance(entry, Text):
            self.behind.note(name, (entry.data, entry.expires), entry.size + TEXT_OVERHEAD)
        elif isinstance(entry, Extent):
            self.behind.note(name, entry, entry.slot.footprint)
        else:
            self.behind.note(name, entry, entry.footprint)

    def set_block(self, req_id: bytes, page: int, extent: Extent) -> None:
        """Store a block whole, in place of whatever pages it had. Its slot is full."""
        known = self.index.block(req_id, page) is not None
        if self.maxdisk and self.keeps_all:
            self._admit_block_on_disk(req_id, page, extent)
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

    def read_pages(self, names: PageNames, first: int, stop: int, most: int = ANY) -> Found:
        """`read` of pages from `first` to before `stop`, or until they are `most` bytes; those without a value, too."""
        found = super().read_pages(names, first, stop, most)
        if self._unproven:
            for unit in dict.fromkeys(found.units):
                self._prove(unit)
        return found

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
        waits, on_disk = self.behind.waits, self._on_disk
        names = [one for one in self._names_of(unit) if one not in on_disk or waits(one)]  # an older one may have to go
        values = [(name, self._value_of(name)) for name in names]
        if self.behind.full or not self._fits(values):
            self.counts.skipped += 1
            return
        self._unproven.discard(unit)
        for name, value in values:
            self._store(name, value)

    # -- from memory to disk alone ---------------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Drop what is on disk, and evict what is not, until memory is within its limit, or much has left.

        Whether there is no more to do for now.

        Raises OutOfMemory when there is nothing to drop and the policy forbids eviction.
        """
        if not self.is_full:
            return True
        keeps_texts = self._policy in (NO_EVICTION, VOLATILE_TTL)
        if not (keeps_texts and self._texts > self.maxmemory):
            left = self._leave(self._units.victims(), self._leaves)
            if left is not None:
                return left
        if self._policy == VOLATILE_TTL:
            left = self._leave(self._victims(), self._is_evicted)
            if left is not None:
                return left
        self.behind.hurry()
        if keeps_texts:
            raise OutOfMemory
        return True

    def _leave(self, units: Iterator[Unit], leaves: Callable[[Unit], bool]) -> bool | None:
        """Have units leave memory, in order, until that is within its limit (True), or many have left (False).

        None when those that may do not suffice.
        """
        now, passed, left = unix_ms(), 0, MOST_LEAVE
        self.guards.settle(now)
        for unit in units:
            pages = unit.pages if isinstance(unit, Block) else 1
            if unit in self.holds or self.guards.spares(unit, now) or not leaves(unit):
                passed += 1
                if passed == _MOST_PASSED:
                    break
                continue
            left -= pages
            if not self.is_full:
                return True
            if left <= 0:
                return False
        return None if self.is_full else True

    def _leaves(self, unit: Unit) -> bool:
        """Drop a unit, or evict one that is not on disk; False when it has to stay.

        To drop a short string would gain nothing. They are evicted when they take too much of memory together.
        """
        names = list(self._names_of(unit))
        is_text = isinstance(unit, bytes) and isinstance(self._catalogue.entries[unit], Text)
        if self._on_disk.has_all(names) and (self.behind.settled or not any(map(self.behind.waits, names))):
            if not is_text:
                self._drop(unit, names)
                return True
            if self._texts <= self.maxmemory * _SHARE_OF_TEXTS:
                return False
        elif self.keeps_all:
            self._prove(unit)  # if it was stored under another policy
        return self._policy not in (NO_EVICTION, VOLATILE_TTL) and self._is_evicted(unit)

    def _is_evicted(self, unit: Unit) -> bool:
        """Evict a unit; False when it waits to be written, or memory would gain nothing."""
        names = list(self._names_of(unit))
        if all(map(self._is_cold, names)) or (not self.behind.failing and any(map(self.behind.waits, names))):
            return False
        self.evict(unit)
        return True

    def _drop(self, unit: Unit, names: Sequence[bytes]) -> None:
        """Let go of a unit's bytes in memory."""
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
        self._on_disk.is_alone(unit_named(unit))
        self.any_cold = True

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

    def _note_stored(self, batch: Batch[Value]) -> Iterator[None]:
        """Steps until it is known that a batch is on disk."""
        on_disk = self._on_disk
        if batch.clears:
            on_disk.was_cleared()
        last: object = None
        unit = b""
        for number, (name, (value, _)) in enumerate(batch.changes.items(), start=1):
            if not number % _AT_ONCE:
                yield
            if isinstance(value, Cold):
                continue
            if value is None or isinstance(value, Spoilt):
                on_disk.remove(name)
                self._drop_unit(name)
            elif isinstance(value, Slot | ExtentPage) and isinstance(value.unit, Block):
                if value.unit is not last:
                    last, unit = value.unit, unit_named(value.unit)
                on_disk.add(name, unit, takes(name, value))
            else:
                on_disk.add(name, name, takes(name, value))

    def _drop_unit(self, name: bytes) -> None:
        """Forget the unit of a value that is gone, if that is gone, too."""
        page = page_named(name[1:]) if name[:1] == b"k" else None
        if page is None:
            self._on_disk.remove_unit(name)
        elif self.index.block(page.req_id, page.page) is None:
            self._on_disk.remove_unit(name_of_block(page.req_id, page.page))

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
