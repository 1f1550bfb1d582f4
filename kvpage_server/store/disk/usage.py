"""The sizes of values on disk, now and after all queued writes, and the eviction order of units on disk only.

The unit that was dropped or read longest ago is the first to evict. Blocks are evicted whole. A unit that other units
extend is deferred until nothing extends it, see `DiskLimit`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import cast

from kvpage_server.core import Slot
from kvpage_server.store.disk.encoding import SetExpiry, ShortText, Value
from kvpage_server.store.disk.write_behind import WriteBehind
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, Text
from kvpage_server.store.memory.index import Block, Extent, ExtentPage
from kvpage_server.store.memory.on_disk import OnDisk
from kvpage_server.store.records import footprint, footprint_of, names_of_keys


class DiskUsage:
    """Footprints of values by name, and the units that they belong to. Each operation on a value is O(1).

    `used` is the approximate number of bytes on disk, and `expected` is `used` after all queued writes. Until then,
    `replaced` bytes are on disk in addition to the values that replace them. Units have the names of strings and of
    blocks that are stored whole. Sizes of blocks with separate pages are known only with `counts_blocks`.
    """

    def __init__(self, *, counts_blocks: bool = True) -> None:
        self.used = 0
        self.expected = 0
        self.replaced = 0
        # Bytes by name: values on disk; values after queued writes (0: a removal); values that queued writes replace.
        # `replaced` is always the sum of `_replaced`.
        self._sizes: dict[bytes, int] = {}
        self._expected: dict[bytes, int] = {}
        self._replaced: dict[bytes, int] = {}
        self._blocks: dict[bytes, int] = {}  # bytes of blocks with separate pages, by the block's name
        self._counts_blocks = counts_blocks
        self._strays: set[bytes] = set()  # names of strings whose keys could be a page's
        # A unit on disk only is in one of these two. The first item of an OrderedDict is found in O(1); a dict skips
        # all items that were removed before it.
        self._alone: OrderedDict[bytes, None] = OrderedDict()  # the next to evict is the first
        self._deferred: OrderedDict[bytes, None] = OrderedDict()  # not evicted, because other units extend them

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    def has_all(self, names: Iterable[bytes]) -> bool:
        return self._sizes.keys() >= set(names)

    def expect(self, name: bytes, size: int, *, replaced: bool = False) -> None:
        """Note a queued write with this footprint, 0 for a removal; `replaced` if another value replaces this one."""
        self.expected += size - self.size_of(name)
        self._expected[name] = size
        self.replaced -= self._replaced.pop(name, 0)
        if (size or replaced) and (there := self._sizes.get(name, 0)):
            self._replaced[name] = there
            self.replaced += there

    def expect_all(self, names: Iterable[bytes], sizes: Iterable[int]) -> None:
        """Note queued writes with these footprints, above 0."""
        stored, queued, replaced = self._sizes, self._expected, self._replaced
        for name, size in zip(names, sizes, strict=True):
            there = stored.get(name, 0)
            self.expected += size - queued.get(name, there)
            queued[name] = size
            if there:
                self.replaced += there - replaced.get(name, 0)
                replaced[name] = there

    def expect_nothing(self, name: bytes) -> None:
        """Note that a queued write of a value was dropped."""
        if (size := self._expected.pop(name, None)) is not None:
            self.expected += self._sizes.get(name, 0) - size
        self.replaced -= self._replaced.pop(name, 0)

    def to_replace(self, names: Iterable[bytes]) -> int:
        """Return the bytes on disk of these values, without values that are in `replaced` already."""
        return sum(self._sizes.get(name, 0) for name in names if name not in self._replaced)

    def size_of(self, name: bytes) -> int:
        """Return a value's footprint after all queued writes; 0 if it is removed."""
        size = self._expected.get(name)
        return self._sizes.get(name, 0) if size is None else size

    def size_of_unit(self, unit: bytes) -> int:
        """Return a unit's footprint; 0 for a block found at the start, until one of its pages is looked up."""
        return self._sizes.get(unit, 0) + self._blocks.get(unit, 0)

    def is_stray_string(self, name: bytes) -> bool:
        """Return whether a string on disk has this name, although a page could have it."""
        return name in self._strays

    def note_stray(self, name: bytes, block: bytes) -> None:
        """Note that a string has the name of a page of a block."""
        if name not in self._strays:
            self._grow(name, block, -self._sizes.get(name, 0))
            self._strays.add(name)

    def add(self, name: bytes, unit: bytes, size: int, *, again: bool = False) -> None:
        """Note a written value; `again` if another change is queued. A page may replace a string with its name."""
        if unit != name and name in self._strays:
            self._strays.discard(name)
            self._grow(name, unit, self._sizes.get(name, 0))
            self.remove_unit(name)
        self._settle(name, size, again=again)
        grown = size - self._sizes.get(name, 0)
        self.used += grown
        self._sizes[name] = size
        self._grow(name, unit, grown)
        self.remove_unit(unit)  # it is in memory, too, because it was written from there

    def remove(self, name: bytes, unit: bytes, *, again: bool = False) -> None:
        """Note a value removed from disk; `again` if another change is queued."""
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
        """Remove a committed write from the expectations; if `again`, the next one replaces its value."""
        self.replaced -= self._replaced.pop(name, 0)
        if not again or name not in self._expected:
            self.expected += size - self.size_of(name)
            self._expected.pop(name, None)
        elif size and self._expected[name]:
            self._replaced[name] = size
            self.replaced += size

    def found(self, units: Iterable[bytes], in_memory: Collection[bytes], size: int) -> None:
        """Set the units found at the start, in the order of eviction, and the sum of their footprints."""
        self._alone.update((unit, None) for unit in units if unit not in in_memory)
        self.used = self.expected = size

    def note_found(self, name: bytes, unit: bytes, size: int) -> None:
        """Note a value that was found at the start."""
        self._sizes[name] = size
        self._grow(name, unit, size)

    def remove_unit(self, unit: bytes) -> None:
        """Remove a unit from the eviction order, because it was removed or is in memory, too."""
        self._alone.pop(unit, None)
        self._deferred.pop(unit, None)

    def use(self, unit: bytes) -> None:
        """Make a unit on disk only the last to evict."""
        if self.is_on_disk_only(unit):
            self.note_on_disk_only(unit)

    def note_on_disk_only(self, unit: bytes) -> None:
        """Note that a unit is on disk only, as the last to evict."""
        self.remove_unit(unit)
        self._alone[unit] = None

    def is_on_disk_only(self, unit: bytes) -> bool:
        """Return whether a unit is on disk only."""
        return unit in self._alone or unit in self._deferred

    @property
    def units_on_disk_only(self) -> int:
        """Number of units on disk only."""
        return len(self._alone) + len(self._deferred)

    @property
    def first(self) -> bytes | None:
        """The next unit to evict; None if there is none."""
        return next(iter(self._alone), None)

    def defer(self, unit: bytes) -> None:
        """Skip a unit on disk only, because other units extend it."""
        del self._alone[unit]
        self._deferred[unit] = None

    def resume(self, unit: bytes) -> None:
        """Make a deferred unit the next to evict, because nothing extends it now."""
        if unit in self._deferred:
            del self._deferred[unit]
            self._alone[unit] = None
            self._alone.move_to_end(unit, last=False)

    @property
    def deferred(self) -> Iterator[bytes]:
        """Deferred units, the last one first, because it is furthest from the start of its chain."""
        return reversed(self._deferred)

    def was_cleared(self) -> None:
        """Note that all written values were deleted; queued writes remain."""
        for name in list(self._sizes):
            self.remove(name, name, again=True)
        self._blocks.clear()
        self._strays.clear()
        self._alone.clear()
        self._deferred.clear()

    def clear(self) -> None:
        """Remove all values and expectations."""
        self._sizes.clear()
        self._expected.clear()
        self._replaced.clear()
        self._blocks.clear()
        self._strays.clear()
        self._alone.clear()
        self._deferred.clear()
        self.used = self.expected = self.replaced = 0


# -- The values on disk, and their queued changes ----------------------------------------------------------------------

_CHANGE = 100  # approximate bytes of memory of a queued change, without the name and the value


class DiskCounters:
    """Counters of loads, drops and evictions since the start."""

    fetched = 0  # values that were read for a client
    dropped = 0  # values that were dropped from memory
    evicted = 0  # values that were evicted from the disk
    corrupt = 0  # values that were damaged, and removed
    repaired = 0  # damaged on disk, and written again from memory


class Stored:
    """Values on disk and their queued changes. `maxdisk` is in bytes, 0 for no limit."""

    behind: WriteBehind[Value]  # set when the loop runs

    def __init__(self, maxdisk: int) -> None:
        self.maxdisk = maxdisk
        self.usage = DiskUsage(counts_blocks=maxdisk > 0)
        self.counts = DiskCounters()

    def has(self, name: bytes) -> bool:
        """Return whether a value is on disk or waits to be written."""
        return name in self.usage or self.behind.waits(name)

    def keeps(self, name: bytes) -> bool:
        """Return whether a value will be on disk after all queued writes."""
        waiting = self.behind.waiting(name)
        return name in self.usage if waiting is None else waiting[0] is not None

    def store(self, name: bytes, value: Entry | Extent) -> None:
        """Queue a write of a value."""
        if self.maxdisk and not isinstance(value, OnDisk):
            self.usage.expect(name, takes(name, value))
        if isinstance(value, Text):
            self.behind.note(name, (value.data, value.expires), value.size + TEXT_OVERHEAD + len(name))
        elif isinstance(value, Extent):
            self.behind.note(name, value, value.slot.footprint + _change_size(name))
        else:
            self.behind.note(name, value, value.footprint + _change_size(name))

    def store_pages(self, keys: Sequence[bytes], pages: Sequence[Slot | ExtentPage]) -> None:
        """Queue writes of pages."""
        names = names_of_keys(keys)
        sizes, on_disk = list[int](), list[int]()
        for name, page in zip(names, pages, strict=True):
            sizes.append(page.footprint + _CHANGE + len(name))
            on_disk.append(footprint_of(len(cast(Block, page.unit).req_id), page.size))
        if self.maxdisk:
            self.usage.expect_all(names, on_disk)
        self.behind.note_all(names, pages, sizes)

    def retime(self, name: bytes, value: Entry) -> None:
        """Queue a value's new expiry if the value is or will be on disk; queue the whole value if it waits anyway."""
        if not self.keeps(name):
            return
        waiting = self.behind.waiting(name)
        is_whole = waiting is not None and not isinstance(waiting[0], SetExpiry)
        if is_whole and (type(value) is Text or self.behind.waits_again(name)):
            self.store(name, value)
        else:
            self.behind.note(name, SetExpiry(name, value.expires), _change_size(name))

    def remove(self, name: bytes, *, replaced: bool = False) -> None:
        """Queue the removal of a value from disk. One that is `replaced` stays until its replacement is committed.

        A value that is neither on disk nor being written only leaves the queue. So removals take no memory for new
        values, however long the disk cannot be written.
        """
        if not self.has(name):
            return
        if self.behind.may_cancel(name, is_on_disk=name in self.usage):
            self.usage.expect_nothing(name)
            self.behind.cancel(name)
            return
        if self.maxdisk:
            self.usage.expect(name, 0, replaced=replaced)
        self.behind.note(name, None, _change_size(name))

    def clear(self) -> None:
        """Queue the removal of all values."""
        self.behind.clear()
        self.usage.clear()


def _change_size(name: bytes) -> int:
    """Return the approximate bytes of memory of a queued change, without the value."""
    return _CHANGE + len(name)


def takes(name: bytes, value: Entry | Extent | ShortText) -> int:
    """Return the approximate bytes of a value on disk."""
    if (type(value) is Slot or type(value) is ExtentPage) and type(value.unit) is Block:
        return footprint_of(len(value.unit.req_id), value.size)
    if isinstance(value, tuple):
        return footprint(name, len(value[0]))
    return footprint(name, value.slot.size if isinstance(value, Extent) else value.size)
