"""The sizes of values on disk, now and after all queued writes, and the eviction order of units on disk only.

The unit that was demoted or read longest ago is evicted first. A block is evicted as a whole. A unit that other units
extend is deferred until nothing extends it, see `DiskAccount`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvpage_server.core import Slot
from kvpage_server.store.disk.encoding import SetExpiry, ShortText, Value
from kvpage_server.store.disk.write_behind import WriteBehind
from kvpage_server.store.eviction.queues import OrderedMap
from kvpage_server.store.memory.entry import Entry, Text
from kvpage_server.store.memory.index import Block, Extent, ExtentPage, OnDisk
from kvpage_server.store.records import footprint, footprint_of


class DiskUsage:
    """The footprints of values on disk, in bytes by name, and the order of units on disk only. O(1) for each value.

    `used` is the approximate number of bytes on disk, and `expected` is `used` after all queued writes. Until these are
    committed, values of `replaced` bytes are on disk in addition to the values that replace them. The name of a unit is
    that of a string or a block (`naming.name_of_unit`). Sizes of blocks of single pages are known only with
    `counts_blocks`.
    """

    def __init__(self, *, counts_blocks: bool = True) -> None:
        self.used = 0
        self.expected = 0
        self.replaced = 0
        # Bytes by name: of values on disk; of values with queued writes after these (0: a removal); of values on disk
        # that queued writes replace. Invariant: `replaced` is the sum of `_replaced`.
        self._sizes: dict[bytes, int] = {}
        self._expected: dict[bytes, int] = {}
        self._replaced: dict[bytes, int] = {}
        self._blocks: dict[bytes, int] = {}  # bytes of blocks of single pages, by the block's name
        self._counts_blocks = counts_blocks
        self._strays: set[bytes] = set()  # names of strings whose keys name pages
        # Names of units on disk only; each is in one of these two.
        self._on_disk_only: OrderedMap[bytes, None] = OrderedMap()  # sorted by the order of eviction
        self._deferred: OrderedMap[bytes, None] = OrderedMap()  # other units extend these, so they stay

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    @property
    def names(self) -> Container[bytes]:
        """The names of all values on disk."""
        return self._sizes

    def has_all(self, names: Iterable[bytes]) -> bool:
        return all(map(self._sizes.__contains__, names))

    def expect(self, name: bytes, size: int, *, replaced: bool = False) -> None:
        """Note a queued write with this footprint, 0 for a removal.

        With `replaced`, the value is removed because a value with another name replaces it.
        """
        self.expected += size - self.size_of(name)
        self._expected[name] = size
        self.replaced -= self._replaced.pop(name, 0)
        if (size or replaced) and (there := self._sizes.get(name, 0)):
            self._replaced[name] = there
            self.replaced += there

    def expect_all(self, sizes: Mapping[bytes, int]) -> None:
        """Note queued writes with these footprints by name, each above 0."""
        stored, queued, replaced = self._sizes, self._expected, self._replaced
        before = [*map(queued.get, sizes)]
        queued.update(sizes)
        self.expected += sum(sizes.values()) - sum(filter(None, before))
        if not all(before):  # values without a queued write: the next commit replaces those on disk
            there = [(name, was) for name, was in zip(sizes, before, strict=True) if not was and name in stored]
            for name, was in there:
                self.expected -= stored[name] if was is None else 0
                self.replaced += stored[name] - replaced.get(name, 0)
                replaced[name] = stored[name]

    def expect_removals(self, names: Iterable[bytes], *, replaced: bool) -> None:
        """Note queued removals, see `expect`."""
        stored, queued, replaced_sizes = self._sizes, self._expected, self._replaced
        for name in names:
            there = stored.get(name, 0)
            self.expected -= queued.get(name, there)
            queued[name] = 0
            self.replaced -= replaced_sizes.pop(name, 0)
            if replaced and there:
                replaced_sizes[name] = there
                self.replaced += there

    def expect_nothing(self, name: bytes) -> None:
        """Note that the queued change of a value was dropped, so that the value on disk stays."""
        if (size := self._expected.pop(name, None)) is not None:
            self.expected += self._sizes.get(name, 0) - size
        self.replaced -= self._replaced.pop(name, 0)

    def to_replace(self, names: Iterable[bytes]) -> int:
        """Return the bytes on disk of these values, without the ones in `replaced`."""
        return sum(self._sizes.get(name, 0) for name in names if name not in self._replaced)

    def size_of(self, name: bytes) -> int:
        """Return a value's footprint after all queued writes; 0 if it is removed."""
        size = self._expected.get(name)
        return self._sizes.get(name, 0) if size is None else size

    def stored_size(self, name: bytes, size: int) -> int:
        """Return the bytes that a body of `size` bytes on disk takes for its quota: at most `size`."""
        return min(size, self._sizes[name])

    def size_of_unit(self, unit: bytes) -> int:
        """Return a unit's bytes on disk; 0 for an unloaded block, and for a block of single pages without
        `counts_blocks`.
        """
        return self._sizes.get(unit, 0) + self._blocks.get(unit, 0)

    def is_stray_string(self, name: bytes) -> bool:
        """Return whether a stray has this name: a string on disk whose key names a page."""
        return name in self._strays

    def note_stray(self, name: bytes, block: bytes) -> None:
        """Note that a string on disk has the name of a page of a block."""
        if name not in self._strays:
            self._grow(name, block, -self._sizes.get(name, 0))
            self._strays.add(name)

    def add(self, name: bytes, unit: bytes, size: int, *, again: bool = False) -> None:
        """Note a written value of a unit. With `again`, another change of it is queued. A page may replace a stray.

        The caller calls `remove_unit`, too: the unit is in memory, because it was written from there.
        """
        if unit != name and name in self._strays:
            self._strays.discard(name)
            self._grow(name, unit, self._sizes.get(name, 0))
            self.remove_unit(name)
        self._settle(name, size, again=again)
        grown = size - self._sizes.get(name, 0)
        self.used += grown
        self._sizes[name] = size
        if grown:
            self._grow(name, unit, grown)

    def resize(self, name: bytes, unit: bytes, size: int) -> None:
        """Note that a value on disk has another footprint now, because it was coded or decoded there."""
        grown = size - self._sizes[name]
        self._sizes[name] = size
        self.used += grown
        self._grow(name, unit, grown)
        if name not in self._expected:
            self.expected += grown
        if name in self._replaced:
            self._replaced[name] += grown
            self.replaced += grown

    def remove(self, name: bytes, unit: bytes, *, again: bool = False) -> None:
        """Note that a value was removed from disk. With `again`, another change of it is queued."""
        self._settle(name, 0, again=again)
        size = self._sizes.pop(name, 0)
        self.used -= size
        self._grow(name, unit, -size)
        self._strays.discard(name)

    def _grow(self, name: bytes, unit: bytes, size: int) -> None:
        if unit == name or not self._counts_blocks:
            return
        left = self._blocks.get(unit, 0) + size
        if left > 0:
            self._blocks[unit] = left
        else:
            self._blocks.pop(unit, None)

    def _settle(self, name: bytes, size: int, *, again: bool) -> None:
        """Remove a committed write from the expectations. With `again`, the next queued write replaces its value."""
        self.replaced -= self._replaced.pop(name, 0)
        if not again or name not in self._expected:
            self.expected += size - self.size_of(name)
            self._expected.pop(name, None)
        elif size and self._expected[name]:
            self._replaced[name] = size
            self.replaced += size

    def found(self, units: Iterable[bytes], loaded: Collection[bytes], size: int) -> None:
        """Set the units that the start has found, in the order of eviction, and the sum of their footprints."""
        for unit in units:
            if unit not in loaded:
                self._on_disk_only.append(unit, None)
        self.used = self.expected = size

    def note_found(self, name: bytes, unit: bytes, size: int) -> None:
        """Note the footprint of a value that is on disk at the start, or whose unloaded block was loaded."""
        self._sizes[name] = size
        self._grow(name, unit, size)

    def remove_unit(self, unit: bytes) -> None:
        """Remove a unit from the order of eviction, because it was removed or is in memory, too."""
        self._on_disk_only.pop(unit)
        self._deferred.pop(unit)

    def use(self, unit: bytes) -> None:
        """Note a read of a unit. If it is on disk only, it moves to the end of the order of eviction."""
        if self.is_on_disk_only(unit):
            self.note_on_disk_only(unit)

    def note_on_disk_only(self, unit: bytes) -> None:
        """Add a unit on disk only at the end of the order of eviction."""
        self.remove_unit(unit)
        self._on_disk_only.append(unit, None)

    def is_on_disk_only(self, unit: bytes) -> bool:
        """Return whether a unit is on disk only."""
        return unit in self._on_disk_only or unit in self._deferred

    @property
    def units_on_disk_only(self) -> int:
        """Number of units on disk only, including deferred ones."""
        return len(self._on_disk_only) + len(self._deferred)

    @property
    def first(self) -> bytes | None:
        """The name of the next unit to evict; None if there is none."""
        return next(iter(self._on_disk_only), None)

    def on_disk_only(self) -> Iterator[bytes]:
        """Yield the names of all units on disk only, in the order of eviction, deferred ones first. Meanwhile, other
        commands may run.
        """
        yield from self._deferred.keys_of_now()
        yield from self._on_disk_only.keys_of_now()

    def defer(self, unit: bytes) -> None:
        """Take a unit out of the order of eviction, because other units extend it."""
        self._on_disk_only.pop(unit)
        self._deferred.append(unit, None)

    def resume(self, unit: bytes) -> None:
        """Make a deferred unit the next to evict, because no unit extends it now."""
        if unit in self._deferred:
            self._deferred.pop(unit)
            self._on_disk_only.prepend(unit, None)

    @property
    def deferred(self) -> Iterator[bytes]:
        """Names of deferred units, the last deferred first: it is furthest from the start of its chain."""
        return reversed(self._deferred)

    def was_cleared(self) -> None:
        """Note that a commit has removed all values from disk; writes in the queue remain."""
        for name in list(self._sizes):
            self.remove(name, name, again=True)
        self._blocks.clear()
        self._strays.clear()
        self._on_disk_only.clear()
        self._deferred.clear()

    def clear(self) -> tuple[dict[bytes, Any] | OrderedMap[bytes, Any], ...]:
        """Remove all values and expectations. Return the former tables, which the caller may free in steps."""
        old = self._sizes, self._expected, self._replaced, self._blocks, self._on_disk_only, self._deferred
        self._sizes, self._expected, self._replaced, self._blocks = {}, {}, {}, {}
        self._on_disk_only, self._deferred = OrderedMap(), OrderedMap()
        self._strays.clear()
        self.used = self.expected = self.replaced = 0
        return old


# -- The values on disk, and their queued changes ----------------------------------------------------------------------


class DiskCounters:
    """Counters of loads, demotions, evictions and damage since the start."""

    fetched = 0  # values that were loaded or borrowed from disk
    decoded = 0  # values that were decoded from memory
    dropped = 0  # values that were demoted
    evicted = 0  # values that were evicted from disk
    corrupt = 0  # values that were found damaged, and removed
    repaired = 0  # values that were damaged on disk, and written again from memory

    def reset(self) -> None:
        """Set the counts of usual work to 0. Those of damage stay."""
        self.fetched = self.decoded = self.dropped = self.evicted = 0


class Stored:
    """The values on disk and their queued changes. `maxdisk` is in bytes, 0 for no limit."""

    behind: WriteBehind[Value]  # set when the loop runs

    def __init__(self, maxdisk: int) -> None:
        self.maxdisk = maxdisk
        self.usage = DiskUsage(counts_blocks=maxdisk > 0)
        self.counts = DiskCounters()

    def has(self, name: bytes) -> bool:
        """Return whether a value is on disk, or has a queued change."""
        return name in self.usage or self.behind.waits(name)

    def keeps(self, name: bytes) -> bool:
        """Return whether a value will be on disk after all queued writes."""
        waiting = self.behind.waiting(name)
        return name in self.usage if waiting is None else waiting[0] is not None

    def store(self, name: bytes, value: Entry | Extent) -> None:
        """Queue a write of a string, a page or an extent to disk."""
        if self.maxdisk and not isinstance(value, OnDisk):
            self.usage.expect(name, size_on_disk(name, value))
        if isinstance(value, Text):
            self.behind.note(name, (value.data, value.expires), value.size + len(name))
        elif isinstance(value, Extent):
            self.behind.note(name, value, value.slot.footprint)
        else:
            self.behind.note(name, value, value.footprint)

    def store_pages(self, keys: Sequence[bytes], pages: Sequence[Slot | ExtentPage]) -> None:
        """Queue writes of pages to disk, in one call for all."""
        new: dict[bytes, tuple[Any, int]] = {
            b"k" + key: (page, page.footprint) for key, page in zip(keys, pages, strict=True)
        }
        if self.maxdisk:
            sizes = dict[bytes, int]()
            for name, (page, _) in new.items():
                sizes[name] = footprint_of(len(page.unit.req_id), page.size)
            self.usage.expect_all(sizes)
        self.behind.note_all(new)

    def retime(self, name: bytes, value: Entry) -> None:
        """Queue a value's new expiry if the value will be on disk, or the whole value if its write is queued anyway."""
        if not self.keeps(name):
            return
        waiting = self.behind.waiting(name)
        is_whole = waiting is not None and not isinstance(waiting[0], SetExpiry)
        if is_whole and (type(value) is Text or self.behind.waits_again(name)):
            self.store(name, value)
        else:
            self.behind.note(name, SetExpiry(name, value.expires), len(name))

    def remove(self, name: bytes, *, replaced: bool = False) -> None:
        """Queue the removal of a value from disk. A `replaced` one stays there until its replacement is committed.

        If the value is neither on disk nor being written, its change is only dropped from the queue. So the removal of
        new values takes no memory, however long the disk cannot be written.
        """
        if not self.has(name):
            return
        if self.behind.may_cancel(name, is_on_disk=name in self.usage):
            self.usage.expect_nothing(name)
            self.behind.cancel([name])
            return
        if self.maxdisk:
            self.usage.expect(name, 0, replaced=replaced)
        self.behind.note(name, None, len(name))

    def remove_all(self, names: Iterable[bytes], *, replaced: bool = False) -> None:
        """Queue the removal of several values from disk, see `remove`."""
        written, dropped = self.behind.divided(names, self.usage.names)
        if dropped:
            for name in dropped:
                self.usage.expect_nothing(name)
            self.behind.cancel(dropped)
        if written:
            if self.maxdisk:
                self.usage.expect_removals(written, replaced=replaced)
            self.behind.note_all({name: (None, len(name)) for name in written}, removed=True)

    def clear(self) -> tuple[dict[bytes, Any] | OrderedMap[bytes, Any], ...]:
        """Queue the removal of all values from disk. Return the former tables, which the caller may free in steps."""
        return *self.behind.clear(), *self.usage.clear()


def size_on_disk(name: bytes, value: Entry | Extent | ShortText, coded: int = 0) -> int:
    """Return the approximate bytes that a value takes on disk. `coded` has the bytes of its code, 0 if there is none.

    Before a value is written, its code is unknown, and this is an upper bound.
    """
    if (type(value) is Slot or type(value) is ExtentPage) and type(value.unit) is Block:
        return footprint_of(len(value.unit.req_id), coded or value.size)
    if isinstance(value, tuple):
        return footprint(name, len(value[0]))
    return footprint(name, coded or (value.slot.size if isinstance(value, Extent) else value.size))
