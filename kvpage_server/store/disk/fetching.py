"""Loading from disk to memory: threads read values, and clients continue when their values are available. And values
that are coded in memory, which a load decodes.

If memory is full, the values of a long reply are not loaded into it: the reply *borrows* their bytes, which are freed
after it. A value that was borrowed is loaded when it is read again before as many bytes as `maxmemory` were borrowed.

The reads of a client with CLIENT NO-TOUCH do not change the order of eviction. They borrow values, or load them
*temporarily*: the value stays on disk only, and its `temporary_slot` has the bytes as long as a client holds the value.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, compress, filterfalse, islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakSet

import numpy as np

from kvpage_server.core import Arena, Slot
from kvpage_server.core.regions import capacity_step
from kvpage_server.page import checksum
from kvpage_server.store.contents import Contents, unit_on_disk
from kvpage_server.store.disk.borrowed_reads import (
    VALUES_PER_COPY,
    BorrowedRead,
    Copies,
    Mapped,
    MappedBody,
    MappedReads,
)
from kvpage_server.store.disk.database import Found, Outcome
from kvpage_server.store.disk.encoding import Corrupt, Write, change_of, code_of
from kvpage_server.store.disk.lmdb_file import DiskError
from kvpage_server.store.disk.naming import described, name_of_unit
from kvpage_server.store.disk.prefetch import HeldUnits, Hold, Needed, TooMuch
from kvpage_server.store.disk.readers import Coded, DiskReader
from kvpage_server.store.disk.usage import Stored
from kvpage_server.store.evict import MemoryAccount, OverLimit
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.index import Block, Code, CodeCounts, Extent, OnDisk
from kvpage_server.store.records import name_of_key
from kvpage_server.system.text import Durations, LogRateLimit, monotonic_ms

_COPIED = 64 * 1024  # bytes of the largest value that is borrowed as a copy, which costs less than more pieces
_SIZE, _UNIT = attrgetter("size"), attrgetter("unit")
_VALUES_PER_READ = 64  # values that a reader thread loads in one job

BorrowedReads: TypeAlias = dict[OnDisk, BorrowedRead]
Start = Callable[[Callable[[], None]], object]  # starts a wait, and calls its argument when the wait has ended

log = logging.getLogger("kvpage")


class Fetching:
    """All loads and borrowed reads. Call `connect` when the event loop runs, before any other method."""

    _reader: DiskReader
    _mapped: MappedReads

    def __init__(self, contents: Contents, memory: MemoryAccount, stored: Stored) -> None:
        self.holds = HeldUnits()
        self.times = Durations()  # durations of jobs
        self._contents = contents
        self._memory = memory
        self._stored = stored
        self._seldom = LogRateLimit(log)
        self._fetching: dict[OnDisk, _Job] = {}  # the job of each value that is being read
        # Memory of small borrowed values, and of temporarily loaded ones. It does not count against maxmemory, because
        # replies may refer to it after the hold has ended.
        self._copied = Arena()
        self._bytes_borrowed = 0  # bytes borrowed since the start
        self._waiting: list[Callable[[], None]] = []  # clients that wait because other loads have reached the limit
        self._temporary: set[OnDisk] = set()  # values with a `temporary_slot`
        self.loaded: Callable[[Unit], object] = lambda _: None  # called with each unit that was loaded to stay

    def connect(self, reader: DiskReader, moved: Callable[[], None]) -> None:
        """Read with `reader` from now on.

        `moved` is called when borrowed bytes, which a session may be sending, have moved.
        """
        self._reader = reader
        self._mapped = MappedReads(moved)
        self.holds.on_end = partial(asyncio.get_running_loop().call_soon, self._after_a_hold)

    async def close(self) -> None:
        """Stop the reader, and copy borrowed bytes of the map to memory."""
        await self._reader.close()
        self.holds.on_end = None
        self._mapped.copy_to_memory()

    def fetch(
        self,
        values: Sequence[OnDisk],
        then: Callable[[], None],
        lent: BorrowedReads | None = None,
        *,
        touches: bool = True,
    ) -> bool:
        """Load values, then call `then`. Damaged values are removed from the store. Return whether values are borrowed.
        Raises MemoryError.

        With the map `lent`, the values are borrowed instead if memory is full (`_should_stay`), and their borrowed
        reads are added to the map. Without `touches`, all values are borrowed, or without the map loaded temporarily. A
        value that another call is loading already is not read again.
        """
        if not values:
            then()
            return False
        try:
            self._memory.shrink()
        except OverLimit:
            log.debug("memory is full; what is read is in it for a moment")
        fetching = self._fetching
        new = [*filterfalse(fetching.__contains__, values)]
        if lent is not None and new and touches and self._should_stay(new):
            lent = None
        jobs = {fetching[value] for value in values if value in fetching} if len(new) < len(values) else set()
        if new:
            begin = self._fetch_to_stay if lent is None else self._load_to_borrow
            jobs.update(begin(new, touches=touches))
        group = _Group(values, len(jobs), then, lent)
        for job in jobs:
            job.groups.append(group)
        return lent is not None

    def load_and_hold(
        self, needed: Iterable[Needed], on_disk: Sequence[OnDisk], most: int, *, touches: bool
    ) -> tuple[Hold, Start]:
        """Start to load the values `on_disk`, and hold all of `needed`. Return the hold, and a function that waits.

        The loads of all holds together are limited to `most` bytes, 0 for no limit; one unit is always allowed. If
        other holds have reached the limit, the call starts no load, and the hold is empty: the client waits until a
        hold ends, and then tries again. Raises TooMuch or MemoryError, and has started nothing then.
        """
        size, units = sum(map(_SIZE, on_disk)), {unit for unit, _ in needed}
        if 0 < most < size and len(units) > 1:
            raise TooMuch(size)
        if self.holds.bytes and (self._waiting or 0 < most < self.holds.bytes + size):
            return self.holds.begin(()), self._waiting.append
        hold = self.holds.begin(units)
        self.fetch(on_disk, _nothing, touches=touches)
        self.holds.grow(hold, size, stays=touches)
        return hold, partial(self.fetch, on_disk, touches=touches)

    def _after_a_hold(self) -> None:
        """Let waiting clients try again, because a hold has ended."""
        self._free_temporary()
        waiting, self._waiting = self._waiting, []
        with suppress(OverLimit):
            self._memory.shrink()
        for then in waiting:
            then()

    def sweep(self) -> None:
        """End borrowed reads and holds that have lasted too long. Call it repeatedly, between commands."""
        self._copied.trim()
        self._mapped.copy_old_to_memory()
        self.holds.end_old()
        self._free_temporary()

    def _should_stay(self, values: Sequence[OnDisk]) -> bool:
        """Return whether to load the values of a long reply into memory. Otherwise the reply borrows them.

        They are loaded if memory has space for them. They are also loaded if one of them was borrowed before, and fewer
        bytes than `maxmemory` were borrowed afterwards, unless memory stays full, for example because clients do not
        read replies with values that were demoted.
        """
        needs = 2 * sum(map(_SIZE, values))  # upper bound: slots are larger than their values
        memory = self._memory
        if not memory.limit or memory.used + needs <= memory.limit:
            return True
        since = max(self._bytes_borrowed - memory.limit, 0)
        return needs <= memory.limit and not memory.is_full() and any(value.borrowed_at >= since for value in values)

    def _begin(self, values: Sequence[OnDisk], *, touches: bool) -> _Job:
        """Create a job for a thread. No other job may be reading one of these values."""
        job = _Job(values, touches=touches)
        for value in values:
            value.failing = ""
        self._fetching.update(dict.fromkeys(values, job))
        return job

    def _end(self, job: _Job, outcomes: Sequence[Found]) -> None:
        """Process the outcomes of a job, and call `then` of the groups for which it was the last job."""
        failing = ""
        self.times.note(time.monotonic_ns() - job.began)
        for value, outcome in zip(job.values, outcomes, strict=True):
            del self._fetching[value]
            if isinstance(outcome, DiskError):
                failing = value.failing = str(outcome)
            elif outcome is False or isinstance(outcome, Exception):
                self.lose(value, outcome)
        if failing:
            self._seldom.log(logging.ERROR, "values cannot be read from disk: %s", failing)
        for group in job.groups:
            group.left -= 1
            if not group.left:
                group.then()

    def _fetch_to_stay(self, values: list[OnDisk], *, touches: bool) -> list[_Job]:
        arena = self._contents.arena if touches else self._copied
        slots = [arena.allocate(value.size) for value in values]
        parts = [slice(start, start + _VALUES_PER_READ) for start in range(0, len(values), _VALUES_PER_READ)]
        return [self._begin_to_stay(values[part], slots[part], touches=touches) for part in parts]

    def _begin_to_stay(self, values: list[OnDisk], slots: list[Slot], *, touches: bool) -> _Job:
        job = self._begin(values, touches=touches)

        def keep(outcomes: list[Outcome]) -> None:
            intact = (outcome is True for outcome in outcomes)
            fetched = compress(zip(values, slots, strict=True), intact)
            if touches:
                self._replace_by_slots(fetched)
            else:
                self._keep_temporarily(fetched)
            self._end(job, outcomes)

        self._reader.fetch(
            [(value.name, slot.body, coded_in(value)) for value, slot in zip(values, slots, strict=True)], keep
        )
        return job

    def _load_to_borrow(self, values: list[OnDisk], *, touches: bool) -> list[_Job]:
        if touches:
            for value in values:
                value.borrowed_at = self._bytes_borrowed
            self._bytes_borrowed += sum(map(_SIZE, values))
        large = all(value.size > _COPIED for value in values)
        return [(self._begin_to_map if large else self._begin_to_copy)(values, touches=touches)]

    def _begin_to_copy(self, values: list[OnDisk], *, touches: bool) -> _Job:
        parts = [values[start : start + VALUES_PER_COPY] for start in range(0, len(values), VALUES_PER_COPY)]
        copies = [Copies(self._copied, part) for part in parts]
        bodies = chain.from_iterable(copy.bodies for copy in copies)
        job = self._begin(values, touches=touches)

        def lend_out(outcomes: list[Outcome]) -> None:
            intact = {value for value, outcome in zip(values, outcomes, strict=True) if outcome is True}
            reads = BorrowedReads()
            for copy, part in zip(copies, parts, strict=True):
                copy.filled(read := [value for value in part if value in intact])
                reads.update(dict.fromkeys(read, copy))
            self._note_lent(reads, job)
            self._end(job, outcomes)

        self._reader.fetch(
            [(value.name, body, coded_in(value)) for value, body in zip(values, bodies, strict=True)], lend_out
        )
        return job

    def _begin_to_map(self, values: list[OnDisk], *, touches: bool) -> _Job:
        job = self._begin(values, touches=touches)

        def lend_out(result: tuple[object, list[Found]]) -> None:
            txn, found = result
            mapped = Mapped(txn)
            reads = BorrowedReads()
            for value, views in zip(values, found, strict=True):
                if isinstance(views, list):
                    reads[value] = MappedBody(mapped, value, views)
            self._mapped.add(mapped)
            self._note_lent(reads, job)
            self._end(job, found)

        self._reader.find([(value.name, value.size, coded_in(value)) for value in values], lend_out)
        return job

    def _note_lent(self, reads: BorrowedReads, job: _Job) -> None:
        """Add the borrowed reads of a job to the maps of its groups, and note the use of their values."""
        for group in job.groups:
            if group.lent is not None:
                group.lent.update((value, reads[value]) for value in group.values if value in reads)
        if job.touches:
            now = self._contents.eviction_order.units.now
            for value in reads:
                value.used = now
            for unit in dict.fromkeys(map(_UNIT, reads)):
                if self._contents.index.still_has(cast(Block, unit)):  # False if it was removed during the read
                    self._note_borrowed(cast(Block, unit))
        for value in reads:
            self._count(value)

    def _note_borrowed(self, unit: Block) -> None:
        """Note a use of a borrowed block in the order of units on disk only, and in its policy if that has it."""
        eviction_order = self._contents.eviction_order
        self._stored.usage.use(name_of_unit(unit))
        self._contents.note_used_on_disk(unit, eviction_order.units.now)
        if unit in eviction_order.units:
            eviction_order.units.used(unit)
        elif quota := eviction_order.quotas.of(unit):
            quota.units.used(unit)

    def _replace_by_slots(self, fetched: Iterable[tuple[OnDisk, Slot]]) -> None:
        """Replace values on disk only by their loaded slots, except values that were changed or removed meanwhile."""
        contents = self._contents
        grown: dict[Unit, int] = {}
        for value, slot in fetched:
            place = self._place_of(value)
            if place is None:
                continue
            if value.header:
                slot.header[:] = value.header
            slot.expires = value.expires
            if type(place) is bytes:
                slot.unit = value.unit
            contents.move_body(place, slot)
            unit = unit_on_disk(value)
            grown[unit] = grown.get(unit, 0) + slot.footprint - value.footprint
            self._count(value)
            value.code = None
        for unit, size in grown.items():
            contents.grow(unit, size)
            contents.eviction_order.units.used(unit)
            self._stored.usage.remove_unit(name_of_unit(unit))
            self.loaded(unit)

    def _count(self, value: OnDisk) -> None:
        if value.code is None:
            self._stored.counts.fetched += 1
        else:
            self._stored.counts.decoded += 1

    def _keep_temporarily(self, fetched: Iterable[tuple[OnDisk, Slot]]) -> None:
        """Set the loaded bytes as `temporary_slot` of the values, for clients that hold the values."""
        for value, slot in fetched:
            if value.header:
                slot.header[:] = value.header
            slot.unit = value.unit
            value.temporary_slot = slot
            self._temporary.add(value)
            self._count(value)

    def _free_temporary(self) -> None:
        """Free the temporary slots of values that no client holds."""
        for value in [value for value in self._temporary if unit_on_disk(value) not in self.holds]:
            self._temporary.remove(value)
            value.temporary_slot = None

    def _place_of(self, value: OnDisk) -> bytes | Extent | None:
        """Return the owner of a value: its key, or its extent; None if the value was changed or removed."""
        if value.name[:1] == b"k":
            key = value.name[1:]
            return key if self._contents.catalogue.entries.get(key) is value else None
        block = cast(Block, value.unit)
        extent, known = block.extent, self._contents.index.block(block.req_id, block.page)
        return extent if extent is not None and extent.slot is value and known is block else None

    def lose(self, value: OnDisk, outcome: Outcome) -> None:
        """Remove a value that could not be read, unless it was changed, and move its record to the quarantine."""
        place = self._place_of(value)
        if place is None:
            return
        self._stored.counts.corrupt += 1
        why = outcome or "it was not there"
        log.error("%s could not be read from disk and is gone: %s", described(value.name), why)
        if isinstance(place, Extent):
            self._contents.remove_block(cast(Block, value.unit), "del", "corrupt")
        elif value.header:
            self._contents.remove_corrupt(place)
        else:
            self._contents.remove(place, "del", "corrupt")
        self._stored.behind.note(value.name, Corrupt(), 0)


def _nothing() -> None:
    """Do nothing, because another callback continues the client."""


def coded_in(value: OnDisk) -> Coded | None:
    """Return the code of a value that is coded in memory."""
    code = value.code
    return None if code is None else ([slot.body for slot in code.slots], code.digest)


class _Job:
    """Values that a thread reads together, and the groups that wait for it."""

    __slots__ = ("began", "groups", "touches", "values")

    def __init__(self, values: Sequence[OnDisk], *, touches: bool) -> None:
        self.values = values
        self.touches = touches  # whether the read counts as a use
        self.began = time.monotonic_ns()
        self.groups: list[_Group] = []


class _Group:
    """The values of one call of `fetch`.

    `left` is the number of unfinished jobs that read them; at 0, `then` is called.
    """

    __slots__ = ("left", "lent", "then", "values")

    def __init__(
        self, values: Sequence[OnDisk], left: int, then: Callable[[], None], lent: BorrowedReads | None
    ) -> None:
        self.values = values
        self.left = left
        self.then = then
        self.lent = lent


# -- Codes in memory ---------------------------------------------------------------------------------------------------
#
# A value that is coded in memory is an `OnDisk` with a `code`: every reader handles it as a value on disk only, and the
# load decodes the code in a reader thread. So a value is coded only if it is on disk, and dropping its code demotes it.
#
# Blocks that were written to disk or loaded are *candidates*. Each sweep takes the candidates that were idle for long
# enough, up to _MOST_CODED bytes of them. The writer's thread encodes them between two commits, the loop allocates
# slots for the codes, and the thread copies the codes into them. Then the loop replaces bodies that have not changed.

IDLE = 10  # seconds without a use, after which `page-code idle` encodes a block
_LEAST_CODED = 4096  # bytes of the smallest single page that is coded in memory: its index entry grows by 400 bytes
_MOST_CODED = 4 << 20  # bytes of bodies, after which a sweep takes no more, and candidates wait for the next
_SLACK = 256  # bytes that a slot may have too much in any case, because each slot has about 80 more
_PAGES_PER_STEP = 64  # bodies, and single pages of a block, after which a sweep takes no more
_LONGEST_STEP = 1_000_000  # nanoseconds in which a sweep examines candidates

_Place = bytes | Extent  # the key of a page, or the extent, whose body is coded


class _Body(NamedTuple):
    """A body in memory that is to be coded."""

    block: Block
    place: _Place
    slot: Slot
    write: Write


class _CodedExtents(WeakSet[OnDisk]):
    """The placeholders of extents that are coded in memory. Each refers to its block, which refers to the placeholder.
    So when the block is removed, only this set or the garbage collector frees the code.
    """

    def popitem(self) -> None:
        """Remove a placeholder, and free its code. The part of a `Flushed` is freed so."""
        with suppress(KeyError):
            self.pop().code = None


class Coder:
    """Encoder of bodies in memory of blocks that were not used for `idle` seconds; of none if that is negative."""

    def __init__(self, contents: Contents, memory: MemoryAccount, stored: Stored) -> None:
        self.idle = -1
        self.counts = CodeCounts()
        self._contents = contents
        self._memory = memory
        self._stored = stored
        # Blocks in memory and on disk, in the order in which they are examined, and the number of the first single page
        # to examine.
        self._candidates: OrderedDict[Block, int] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._extents = _CodedExtents()

    def add(self, unit: object) -> None:
        """Note that a unit was written to disk, or loaded into memory."""
        if self.idle >= 0 and type(unit) is Block:
            self._candidates.setdefault(unit, 0)

    def discard(self, block: Block) -> None:
        """Note that a block was removed."""
        self._candidates.pop(block, None)
        if block.extent is not None and isinstance(placeholder := block.extent.slot, OnDisk):
            placeholder.code = None

    def clear(self) -> Any:
        """Note that everything was removed. Return a table of codes, which the caller frees in steps."""
        self._candidates.clear()
        old, self._extents = self._extents, _CodedExtents()
        return old

    def sweep(self) -> None:
        """Begin to encode the bodies that are due, unless others are being encoded. Call it repeatedly."""
        if self._candidates and (self._task is None or self._task.done()) and (bodies := self._due()):
            self._task = asyncio.create_task(self._encode(bodies))

    async def close(self) -> None:
        """Wait until no body is being encoded."""
        self._candidates.clear()
        if self._task is not None:
            await asyncio.wait([self._task])

    def _due(self) -> list[_Body]:
        """Return bodies to encode. A block that is not due becomes the last candidate."""
        found, size, candidates = list[_Body](), 0, self._candidates
        end, now = time.monotonic_ns() + _LONGEST_STEP, monotonic_ms()
        for _ in range(len(candidates)):
            block, at = candidates.popitem(last=False)
            if block not in self._contents.eviction_order.units:
                continue  # it is on disk only
            if not self._rests(block, now):
                candidates[block] = at
            else:
                bodies, following = self._bodies_of(block, at)
                found += bodies
                size += sum(body.slot.size for body in bodies)
                if following is not None:
                    candidates[block] = following
            if size >= _MOST_CODED or len(found) >= _PAGES_PER_STEP or time.monotonic_ns() > end:
                break
        return found

    def _rests(self, block: Block, now: int) -> bool:
        """Return whether a block is idle, and neither leased, pinned nor held."""
        contents = self._contents
        return contents.eviction_order.units.idle(block) >= self.idle and not contents.spares(block, now)

    def _bodies_of(self, block: Block, at: int) -> tuple[list[_Body], int | None]:
        """Return the bodies of a block to encode, from its single page number `at` on, and the number of the page to go
        on with; None if there is none. If one of the pages waits to be written, none is encoded before that: those
        without a code would be encoded again and again, as long as the disk fails.
        """
        extent, entries = block.extent, self._contents.catalogue.entries
        if extent is not None:
            name, slot = name_of_unit(block), extent.slot
            if isinstance(slot, OnDisk):
                return [], None
            if not self._is_stored(name):
                return [], at
            return [_Body(block, extent, slot, cast(Write, change_of(name, extent)))], None
        found = list[_Body]()
        keys = [*islice(block.page_keys(), at, at + _PAGES_PER_STEP)]
        for key in keys:
            page, name = entries.get(key), name_of_key(key)
            if isinstance(page, Slot) and page.size >= _LEAST_CODED:
                if not self._is_stored(name):
                    return [], at
                found.append(_Body(block, key, page, cast(Write, change_of(name, page))))
        return found, at + len(keys) if len(keys) == _PAGES_PER_STEP else None

    def _is_stored(self, name: bytes) -> bool:
        return name in self._stored.usage and not self._stored.behind.waits(name)

    async def _encode(self, bodies: list[_Body]) -> None:
        """Encode bodies, and then others, until none is due."""
        while bodies:
            await self._encode_some(bodies)
            bodies = self._due()

    async def _encode_some(self, bodies: list[_Body]) -> None:
        run = self._stored.behind.run
        codes = await run(partial(_codes_of, [(body.place, body.write) for body in bodies]))
        if not isinstance(codes, list):
            return
        coded, copies = list[tuple[_Body, Code]](), list[tuple[memoryview, memoryview]]()
        for body, found in zip(bodies, codes, strict=True):
            if found is None or not self._is_same(body):
                continue
            try:
                code = Code(self._slots_for(len(found[0])), found[1], body.slot.size, self.counts)
            except MemoryError:
                break
            if code.footprint < body.slot.footprint:
                coded.append((body, code))
                start = 0
                for slot in code.slots:
                    copies.append((memoryview(found[0])[start : start + slot.size], slot.body))
                    start += slot.size
        # The codes do not count until they replace bodies, or a full memory would demote the bodies for them.
        size = sum(code.footprint for _, code in coded)
        self._memory.receiving += size
        try:
            if coded:
                await run(partial(_copy_all, copies))
        finally:
            self._memory.receiving -= size
        now = monotonic_ms()
        for body, code in coded:
            if self._is_same(body):
                if self._rests(body.block, now):
                    self._replace(body, code)
                else:
                    self._candidates.setdefault(body.block, 0)

    def _slots_for(self, size: int) -> list[Slot]:
        """Allocate one slot for a code, or two if one would have more than a sixteenth too much. Raises MemoryError."""
        allocate, step = self._contents.arena.allocate, capacity_step(size)
        whole = size - size % step
        return [allocate(size)] if -size % step <= max(size >> 4, _SLACK) else [allocate(whole), allocate(size - whole)]

    def _is_same(self, body: _Body) -> bool:
        """Return whether a body is still that of its value, and on disk."""
        place, block = body.place, body.block
        if isinstance(place, Extent):
            is_there = self._contents.index.still_has(block) and block.extent is place and place.slot is body.slot
        else:
            is_there = self._contents.catalogue.entries.get(place) is body.slot
        return is_there and self._is_stored(body.write.name)

    def _replace(self, body: _Body, code: Code) -> None:
        contents, place, units = self._contents, body.place, self._contents.eviction_order.units
        header = b"" if isinstance(place, Extent) else body.write.meta
        expires = 0 if isinstance(place, Extent) else body.slot.expires
        used = units.now - units.idle(body.block)
        value = OnDisk(
            body.write.name,
            body.slot.size,
            expires=expires,
            header=header,
            unit=body.block,
            used=used,
            stored=code.size,
        )
        value.code = code
        if isinstance(place, Extent):
            self._extents.add(value)
        contents.move_body(place, value)
        contents.grow(body.block, code.footprint - body.slot.footprint)
        contents.any_on_disk = True


def _codes_of(bodies: Sequence[tuple[_Place, Write]]) -> list[tuple[bytes | memoryview, int] | None]:
    """Return the code of each body and the XXH3-64 of the body, or None. Runs in a thread.

    The checksums of an extent's pages are computed as well, because they cannot be computed from its code.
    """
    found = list[tuple[bytes | memoryview, int] | None]()
    for place, write in bodies:
        code = code_of(write)
        if code is None:
            found.append(None)
            continue
        if isinstance(place, Extent) and place.digest:
            place.hash_pages(memoryview(write.body))
        found.append((code, write.digest or checksum(write.body)))
    return found


def _copy_all(copies: Sequence[tuple[memoryview, memoryview]]) -> None:
    for code, into in copies:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(code, np.uint8))
