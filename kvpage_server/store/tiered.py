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
import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import cast

from kvpage_server.page import unix_ms
from kvpage_server.store.arena import Slot
from kvpage_server.store.behind import Batch, WriteBehind
from kvpage_server.store.cold import Cold
from kvpage_server.store.disk import Disk
from kvpage_server.store.entry import TEXT_OVERHEAD, Entry, NewPage, Page, Text
from kvpage_server.store.eviction import Unit
from kvpage_server.store.extent import Extent, ExtentPage
from kvpage_server.store.fetch import Fetcher, Outcome
from kvpage_server.store.index import Block
from kvpage_server.store.memory import Fallen, Keyspace, OutOfMemory
from kvpage_server.store.policies import NO_EVICTION, VOLATILE_TTL
from kvpage_server.store.record import Damaged, Record, footprint, name_of_block, name_of_key
from kvpage_server.store.scrub import Scrubber
from kvpage_server.store.spelling import Spoilt, Value, change_of, extent_of

_SHARE_OF_DISK = 0.75  # of maxdisk, for values: LMDB needs room for what it replaces
_MOST_PASSED = 4096  # units that are not dropped, before no more are looked at
_MOST_AHEAD = 16 * 1024**2  # bytes that are fetched before somebody waits for them
_AT_ONCE = 32  # values that one reader fetches before it looks for other work

log = logging.getLogger("kvpage")


class DiskCounters:
    """What happened between memory and disk since the start."""

    fetched = 0
    dropped = 0  # values whose bytes memory has no more
    evicted = 0  # values that had to leave the disk
    corrupt = 0
    repaired = 0  # found damaged on disk, and written again from memory
    skipped = 0  # values that memory keeps to itself, since the disk could not keep up


class Tiered(Keyspace):
    """Every key and value. `maxdisk` is in bytes, 0 for no limit. `load`, then `connect` once the loop runs."""

    def __init__(self, disk: Disk, *, maxmemory: int = 0, policy: str = "allkeys-prefix", maxdisk: int = 0) -> None:
        super().__init__(maxmemory=maxmemory, policy=policy)
        self.disk = disk
        self.maxdisk = maxdisk
        self.used_disk = 0  # bytes that values take there, nearly
        self.counts = DiskCounters()
        self.any_cold = False  # whether there may be a cold value
        self._stored: dict[bytes, int] = {}  # what is on disk, with its footprint; what should go first is first
        self._unproven: set[Unit] = set()  # written and not used since: not for the disk yet
        self._saves: set[asyncio.Task[None]] = set()
        self._fetching: dict[Cold, list[_Group]] = {}
        self.behind: WriteBehind[Value]
        self.scrubber: Scrubber
        self._fetcher: Fetcher

    def connect(self, *, mode: str, limit: int, scrub_rate: int) -> None:
        """Begin to write, behind with at most `limit` bytes, and to read. On the loop."""
        if self.maxmemory:
            limit = min(limit, self.maxmemory // 4)
        if self.maxdisk:
            limit = min(limit, self.maxdisk // 8)
        self.behind = WriteBehind(
            self.disk, mode=mode, limit=limit, spell=change_of, stored=self._note_stored, make_room=self._give_up
        )
        self._fetcher = Fetcher(self.disk)
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
        self.disk.close()

    # -- the start -------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Know every value that is on disk. What has expired meanwhile, or cannot be read, is passed over."""
        now = unix_ms()
        used: dict[bytes, int] = {}
        collecting = gc.isenabled()
        gc.disable()  # nothing here is garbage, and there may be millions
        try:
            for _, record in self.disk.records():
                if isinstance(record, Damaged):
                    self.counts.corrupt += 1
                elif not 0 < record.expires <= now:
                    self._admit(record)
                    self._stored[record.name] = footprint(record.name, record.size)
                    used[record.name] = record.used
        finally:
            if collecting:
                gc.enable()
        self._stored = {name: self._stored[name] for name in sorted(used, key=used.__getitem__)}
        self.used_disk = sum(self._stored.values())
        self.any_cold = bool(used)

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
            self._catalogue.put(key, self._entry_of(key, record))
        if expires:
            self._expiry.keys += keys
            self._expiry.note(key, expires)

    def _entry_of(self, key: bytes, record: Record) -> Entry:
        expires, size = record.expires, record.size
        if record.meta:
            _, req_id, layer, head, page, kv_type = key.split(b":")
            block = self.index.open(req_id, int(page))
            block.add(int(layer), int(head), int(kv_type))
            block.expires_at(expires)
            used = record.used // 1000
            return Cold(record.name, size, expires=expires, header=record.meta, unit=block, used=used)
        self._catalogue.note_stray(key)
        if record.first:
            return Cold(record.name, size, expires=expires, used=record.used // 1000)
        text = Text(record.inline)
        text.expires = expires
        self._texts += len(key) + size + TEXT_OVERHEAD
        self._units.used(key)
        return text

    # -- every change goes to disk ---------------------------------------------------------------------------------

    def _put(self, key: bytes, entry: Entry, event: str = "set") -> None:
        known = key in self._catalogue.entries
        super()._put(key, entry, event)
        self._offer(self._unit(key, entry), name_of_key(key), entry, known=known or isinstance(entry, Text))

    def set_pages(self, pages: Iterable[NewPage]) -> None:
        """Store pages, whose slots have their headers; the names have been validated."""
        pages = list(pages)
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
        if name in self._stored or self.behind.waits(name):
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
        if entry is not None and (name in self._stored or self.behind.waits(name)):
            self._store(name, entry)

    def flush(self) -> Fallen:
        """Remove everything. What there was is freed with the result: piece by piece, or at once when it is dropped."""
        self.behind.clear()
        self._stored.clear()
        self._unproven.clear()
        self.used_disk = 0
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

    def use_block(self, block: Block) -> None:
        """A block is read whole: a use of it, and a hit."""
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
            if name not in self._stored:
                self._store(name, self._value_of(name))

    def _names_of(self, unit: Unit) -> Iterable[bytes]:
        if isinstance(unit, bytes):
            return (name_of_key(unit),)
        if unit.extent is not None:
            return (name_of_block(unit.req_id, unit.page),)
        return list(map(name_of_key, unit.page_keys()))

    def _value_of(self, name: bytes) -> Entry | Extent:
        if name[:1] == b"k":
            return self._catalogue.entries[name[1:]]
        req_id, _, page = name[1:].rpartition(b":")
        block = self.index.block(req_id, int(page))
        assert block is not None
        assert block.extent is not None
        return block.extent

    def idle(self, key: bytes) -> int:
        """Seconds since a living key, or its block, was last used, as far as that is known of what lies on disk."""
        cold = self.cold_of([key])
        return max(self._units.now - cold[0].used, 0) if cold else super().idle(key)

    # -- from memory to disk alone ---------------------------------------------------------------------------------

    def make_room(self, *, may_evict: bool = True) -> None:
        """Drop what is on disk, and evict what is not, until memory is within its limit.

        Raises OutOfMemory when there is nothing to drop and the policy forbids eviction.
        """
        if not self.maxmemory or self.used_memory <= self.maxmemory:
            return
        now, passed = unix_ms(), 0
        self.guards.settle(now)
        for unit in self._units.victims():
            if self.guards.spares(unit, now) or not self._leaves(unit):
                passed += 1
                if passed == _MOST_PASSED:
                    break
            if self.arena.sparse:
                self.gather()
            if self.used_memory <= self.maxmemory:
                return
        self.behind.hurry()
        if self.policy in (NO_EVICTION, VOLATILE_TTL):
            raise OutOfMemory

    def _leaves(self, unit: Unit) -> bool:
        """Drop or evict a unit; False when it has to stay, since it waits to be written or nothing would be gained."""
        names = list(self._names_of(unit))
        if all(name in self._stored and not self.behind.waits(name) for name in names):
            return self._drop(unit)
        if not self._may_evict(unit) or (any(map(self.behind.waits, names)) and not self.behind.failing):
            return False
        self.evict(unit)
        return True

    def _may_evict(self, unit: Unit) -> bool:
        if self.policy == VOLATILE_TTL:
            return bool(unit.soonest if isinstance(unit, Block) else self.expires_of(unit))
        return self.policy != NO_EVICTION

    def _drop(self, unit: Unit) -> bool:
        """Let go of a unit's bytes in memory. Those of a short string stay: they take less than what is known of it."""
        if isinstance(unit, bytes):
            entry = self._catalogue.entries[unit]
            if isinstance(entry, Text):
                return False
            self._cool(unit, entry)
        elif unit.extent is not None:
            self._cool_extent(unit, unit.extent)
        else:
            for key in unit.page_keys():
                self._cool(key, cast(Page, self._catalogue.entries[key]))
        self._units.evicted(unit)
        self.any_cold = True
        return True

    def _cool(self, key: bytes, entry: Page) -> None:
        if isinstance(entry, Cold):
            return
        name, unit = name_of_key(key), entry.unit
        header = bytes(entry.header) if isinstance(unit, Block) else b""
        used = self._units.now - self._units.idle(unit if isinstance(unit, Block) else key)
        cold = Cold(name, entry.size, expires=entry.expires, header=header, unit=unit, used=used)
        self._catalogue.entries[key] = cold
        self._dropped(name, unit, entry.footprint)

    def _cool_extent(self, block: Block, extent: Extent) -> None:
        slot = extent.slot
        if isinstance(slot, Cold):
            return
        name = name_of_block(block.req_id, block.page)
        extent.slot = Cold(name, slot.size, unit=block, used=self._units.now - self._units.idle(block))
        self._dropped(name, block, slot.footprint)

    def _dropped(self, name: bytes, unit: object, size: int) -> None:
        self.counts.dropped += 1
        self._stored[name] = self._stored.pop(name)  # the last to go
        if isinstance(unit, Block):
            self._grow(unit, -size)

    # -- from disk to memory ---------------------------------------------------------------------------------------

    def cold_of(self, keys: Iterable[bytes]) -> list[Cold]:
        """The values that have to be fetched before those keys can be read."""
        found: dict[Cold, None] = {}
        get = self._catalogue.get
        for key in keys:
            entry = get(key)
            if type(entry) is Cold:
                found[entry] = None
            elif type(entry) is ExtentPage and type(entry.extent.slot) is Cold:
                found[entry.extent.slot] = None
        return list(found)

    @property
    def values_on_disk(self) -> int:
        """How many values there are on disk."""
        return len(self._stored)

    def cold_blocks_of(self, keys: Iterable[bytes]) -> list[Cold]:
        """The blocks stored whole that have to be fetched before pages of theirs can change by themselves."""
        return [cold for cold in self.cold_of(keys) if cold.name[:1] == b"b"]

    def cold_of_block(self, req_id: bytes, page: int) -> list[Cold]:
        """The values that have to be fetched before a block can be read whole."""
        block = self.index.block(req_id, page)
        if block is None:
            return []
        if block.extent is not None:
            return [block.extent.slot] if type(block.extent.slot) is Cold else []
        return self.cold_of(block.page_keys())

    def cold_of_blocks(self, names: Iterable[tuple[bytes, int]]) -> list[Cold]:
        """The values that have to be fetched before some blocks can be read whole."""
        return [cold for name in names for cold in self.cold_of_block(*name)]

    def fetch_some(self, values: Sequence[Cold]) -> None:
        """Have the first of some values in memory soon, as many as `_MOST_AHEAD` bytes."""
        sizes = accumulate(value.size for value in values)
        self.fetch([value for value, size in zip(values, sizes, strict=True) if size <= _MOST_AHEAD], _nothing)

    def fetch(self, values: Sequence[Cold], then: Callable[[], None]) -> None:
        """Have values in memory, those at least that are intact; then call `then`. Raises MemoryError."""
        if not values:
            then()
            return
        try:
            self.make_room()
        except OutOfMemory:
            log.debug("memory is full; what is read is in it for a moment")
        new = [value for value in values if value not in self._fetching]
        slots = [self.arena.allocate(value.size) for value in new]
        group = _Group(len(values), then)
        for value in values:
            self._fetching.setdefault(value, []).append(group)
        for start in range(0, len(new), _AT_ONCE):
            some, into = new[start : start + _AT_ONCE], slots[start : start + _AT_ONCE]
            wanted = [(value.name, slot.body) for value, slot in zip(some, into, strict=True)]
            self._fetcher.fetch(wanted, partial(self._fetched, some, into))

    def _fetched(self, values: list[Cold], slots: list[Slot], outcomes: list[Outcome]) -> None:
        ready: list[Callable[[], None]] = []
        for value, slot, outcome in zip(values, slots, outcomes, strict=True):
            if outcome is True:
                self._warm(value, slot)
            else:
                self._lose(value, outcome)
            for group in self._fetching.pop(value):
                group.left -= 1
                if not group.left:
                    ready.append(group.then)
        for then in ready:
            then()

    def _warm(self, value: Cold, slot: Slot) -> None:
        """The bytes of a value are there, if it is still the one that was asked for."""
        place = self._place_of(value)
        if place is None:
            return
        self.counts.fetched += 1
        slot.header[:] = value.header or bytes(len(slot.header))
        slot.expires, slot.unit = value.expires, value.unit
        slot.seal()
        if isinstance(place, Extent):
            place.slot = slot
        else:
            self._catalogue.entries[place] = slot
        if isinstance(value.unit, Block):
            self._grow(value.unit, slot.footprint)
        self._units.used(value.unit if isinstance(value.unit, Block) else value.name[1:])
        if value.name in self._stored:
            self._stored[value.name] = self._stored.pop(value.name)

    def _place_of(self, value: Cold) -> bytes | Extent | None:
        """Where a value stands: a key or an extent; None when it is not there any more."""
        if value.name[:1] == b"k":
            key = value.name[1:]
            return key if self._catalogue.entries.get(key) is value else None
        block = cast(Block, value.unit)
        extent = block.extent
        there = extent is not None and extent.slot is value and self.index.block(block.req_id, block.page) is block
        return extent if there else None

    def _lose(self, value: Cold, outcome: Outcome) -> None:
        """A value could not be read, so it is gone."""
        place = self._place_of(value)
        if place is None:
            return
        self.counts.corrupt += 1
        log.error("%r could not be read from disk and is gone: %s", value.name, outcome or "it was not there")
        if isinstance(place, Extent):
            self.remove_block(cast(Block, value.unit), "del", "corrupt")
        elif value.header:
            self.remove_corrupt(place)
        else:
            self._remove(place, "del")
        self.behind.note(value.name, Spoilt(), 0)

    def _found_damaged(self, name: bytes) -> None:
        """The scrubber found a value damaged. Where memory has it, it is written again."""
        if name not in self._stored or self.behind.waits(name):
            return
        value = self._value_of(name)
        cold = value.slot if isinstance(value, Extent) else value
        if isinstance(cold, Cold):
            self._lose(cold, Damaged("the scrubber found it damaged"))
            return
        self.counts.repaired += 1
        log.warning("%r is damaged on disk, and written again from memory", name)
        self._store(name, value)

    # -- the disk's side -------------------------------------------------------------------------------------------

    def _note_stored(self, batch: Batch[Value]) -> None:
        if batch.clears:
            self._stored.clear()
            self.used_disk = 0
        stored = self._stored
        for name, (value, _) in batch.changes.items():
            if isinstance(value, Cold):
                continue
            self.used_disk -= stored.pop(name, 0)
            if value is not None and not isinstance(value, Spoilt):
                size = len(value[0]) if isinstance(value, tuple) else _size_of(value)
                stored[name] = footprint(name, size)
                self.used_disk += stored[name]
        too_much = self.used_disk - int(self.maxdisk * _SHARE_OF_DISK)
        if self.maxdisk and too_much > 0:
            self._give_up(too_much)

    def _give_up(self, size: int) -> list[bytes]:
        """Remove values that take so many bytes of the disk, what is worth least first; their names."""
        gone: list[bytes] = []
        passed, most = 0, len(self._stored)
        while size > 0 and passed <= 2 * most:
            name = next(iter(self._stored), b"")
            if not name:
                break
            if self.behind.waits(name) or (passed < most and not self._is_cold(name)):
                passed += 1
                self._stored[name] = self._stored.pop(name)
                continue
            for one in self._forget_on_disk(name):
                size -= self._stored.get(one, 0)
                self.used_disk -= self._stored.pop(one, 0)
                gone.append(one)
        return gone

    def _is_cold(self, name: bytes) -> bool:
        value = self._value_of(name)
        return isinstance(value.slot if isinstance(value, Extent) else value, Cold)

    def _forget_on_disk(self, name: bytes) -> list[bytes]:
        """Evict what is nowhere else, with its block; the names of what leaves the disk."""
        value = self._value_of(name)
        unit = value.unit if isinstance(value, Cold | Slot | ExtentPage) else None
        if isinstance(value, Extent):
            unit = value.slot.unit if isinstance(value.slot, Cold) else None
        if not self._is_cold(name):
            self.behind.note(name, None, 0)
            return [name]
        self.counts.evicted += 1
        names = list(self._names_of(cast(Unit, unit))) if isinstance(unit, Block) else [name]
        self.evict(unit if isinstance(unit, Block) else name[1:])
        return names


def _nothing() -> None:
    """Nobody waits."""


class _Group:
    """Values that are fetched together."""

    __slots__ = ("left", "then")

    def __init__(self, left: int, then: Callable[[], None]) -> None:
        self.left = left
        self.then = then


def _size_of(value: Slot | ExtentPage | Extent) -> int:
    return value.slot.size if isinstance(value, Extent) else value.size
