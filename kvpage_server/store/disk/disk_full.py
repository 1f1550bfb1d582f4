"""The account of the disk: the sizes of writes on disk, and eviction from it, whether or not the disk is full.

Every value is written to disk, so the disk limits the store. If `maxdisk` is set, units are evicted before a value is
stored. The `allkeys` policies first evict units on disk only, in the order of their last read or of the time when they
were dropped from memory, and then units that are in memory, too, in the order of the policy. `allkeys-prefix` evicts no
block while another block extends it, except when nothing else is left. Short strings are evicted last, unless they use
much of the disk: evicting them frees little, and a block is useless without its seal, which is a string. `volatile-ttl`
evicts the units that expire soonest. `noeviction` refuses writes that do not fit. Leased and pinned units stay.

If all units that the search visits have to stay for now, because they are leased or wait to be written, no write is
refused. Values then use a part of the space that LMDB needs, and later writes evict for them. While commits fail,
waiting units are evicted like others.

A replaced value stays on disk until the commit that replaces it. If both do not fit, this commit and all later ones
fail. So a command or transaction evicts, or is refused, if it replaces more at a time than there is space for.
Reservations of batches that are stored in steps count as used.

If other programs fill the file system, only units that are not in memory are evicted, under any policy except
`noeviction`. When none of them is left, commits fail until there is space.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from math import ceil

from kvpage_server.page import HEADER_SIZE, BlockShape
from kvpage_server.store import records
from kvpage_server.store.contents import Contents, Source
from kvpage_server.store.disk.lmdb_file import DiskFull, MaxDisk
from kvpage_server.store.disk.naming import each_name_in, is_there, name_of_unit, names_in, parse_block, unit_named
from kvpage_server.store.disk.usage import Stored
from kvpage_server.store.evict import Account, OverLimit, PendingWrite, Sizes, evictions, units_of
from kvpage_server.store.eviction.policies import Policy
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Text
from kvpage_server.store.memory.index import Block, PageIndex
from kvpage_server.store.records import footprint, name_of_block, name_of_key

# -- Links between blocks: a block is useless to a reader without the block that it extends ----------------------------
#
# Page 7 of a request extends page 6. Clients that name blocks by their content pass them in order, with KVPAGEPREFIX
# and KVBLOCKMGET. The cost is O(1) for each block, except for a new link of a block that other blocks extend: this link
# is checked for a cycle.

_MOST_STEPS = 4096  # links that the search for a cycle follows

BlockName = tuple[bytes, int]


class Chains:
    """Links between blocks, in memory and on disk only. Links within a request follow from the page ids."""

    def __init__(self, index: PageIndex) -> None:
        self._index = index
        self._before: dict[Block, Block] = {}  # links that do not follow from page ids
        self._extensions: dict[Block, int] = {}  # number of links in `_before` to a block, above 0

    def follow(self, blocks: Sequence[Block]) -> None:
        """Note that each of these blocks extends the one before it."""
        for before, block in pairwise(blocks):
            known = self._before.get(block)
            if known is before or (block.req_id == before.req_id and block.page == before.page + 1):
                continue
            if (known is None or not self._index.still_has(known)) and not self._descends(before, block):
                self._before[block] = before
                self._extensions[before] = self._extensions.get(before, 0) + 1

    def _descends(self, block: Block, ancestor: Block) -> bool:
        """Return whether a block extends another, directly or not; True if the search takes too many steps."""
        if ancestor not in self._extensions:
            return block is ancestor
        at: Block | None = block
        for _ in range(_MOST_STEPS):
            if at is None or at is ancestor:
                return at is ancestor
            at = self._before.get(at)
        return True

    def is_extended(self, req_id: bytes, page: int) -> bool:
        """Return whether another block extends this one."""
        request = self._index.requests.get(req_id, {})
        return page + 1 in request or request.get(page) in self._extensions

    def removed(self, block: Block) -> Iterator[BlockName]:
        """Remove the links of a block, and yield the names of the blocks that it extended."""
        self._extensions.pop(block, None)
        before = self._before.pop(block, None)
        if before is not None and before in self._extensions:
            self._extensions[before] -= 1
            if not self._extensions[before]:
                del self._extensions[before]
            yield before.req_id, before.page
        if block.page:
            yield block.req_id, block.page - 1

    def clear(self) -> None:
        """Remove all links."""
        self._before.clear()
        self._extensions.clear()


_SHARE_OF_DISK = 0.75  # of maxdisk, for values; LMDB needs the rest for replaced pages
_SHARE_FOR_NOW = 0.875  # while units have to stay because they are leased or wait to be written
_SHARE_WITH_REPLACED = 0.9  # of maxdisk, for values and the values that they replace
_MOST_PASSED = 4096  # units that have to stay before the search ends
_SHARE_OF_TEXTS = 0.5  # of the space for values; above it, short strings are evicted like other values
_OVERHEAD = 8  # a commit needs about this fraction more than the bytes of its values
_TEXT_ON_DISK = 2  # approximate size of a string on disk, divided by its size in memory

Footprints = dict[bytes, int]  # sizes on disk in bytes, by name


class ReplacingAccount(Account):
    """The space for values together with the values that they replace, which stay until the next commit."""

    shrinks_in_steps = True
    evicts_waiting = False

    def __init__(self, disk: DiskAccount) -> None:
        super().__init__(disk.contents)
        self._disk = disk

    @property
    def limit(self) -> int:
        return int(self._disk.stored.maxdisk * _SHARE_WITH_REPLACED)

    most = limit

    @property
    def used(self) -> int:
        usage = self._disk.stored.usage
        return usage.expected + usage.replaced

    def sources(self, size: int) -> Iterator[Source]:
        return self._disk.units_to_evict(self, size)

    def refusal(self, size: int) -> str:
        size += self.used + self.reserved
        return (
            f"used disk > 'maxdisk': values and those that they replace, which stay until the next commit, would take "
            f"{size} bytes, and {self.limit} of {self._disk.stored.maxdisk} are allowed. Write less at once, or delete "
            "the old values first"
        )


class DiskAccount(Account):
    """The space for values: a part of `maxdisk`. Also eviction for the space that other programs leave."""

    shrinks_in_steps = True
    evicts_waiting = False

    def __init__(self, contents: Contents, stored: Stored) -> None:
        super().__init__(contents)
        self.stored = stored
        self.chains = Chains(contents.index)
        self._with_replaced = ReplacingAccount(self)
        self._freed = 0  # bytes of evicted units since the start
        # Bytes that queued values could use at most, since the first failure after so many commits.
        self._full_since, self._most_space = -1, 0
        self._full = "disk"  # the limit at which the last commit failed: `maxdisk`, or a full file system

    @property
    def limit(self) -> int:
        return int(self.stored.maxdisk * _SHARE_OF_DISK)

    @property
    def may_evict(self) -> bool:
        """Whether the policy may evict any value that is stored now."""
        rules = self.contents.eviction_order.rules
        return rules.evicts_any or (rules.evicts_expiring and bool(self.contents.expiry_order.keys))

    @property
    def most(self) -> int:
        return int(self.stored.maxdisk * _SHARE_FOR_NOW) if self.may_evict else self.limit

    @property
    def used(self) -> int:
        return self.stored.usage.expected

    def sources(self, size: int) -> Iterator[Source]:
        if size > self.limit:
            raise OverLimit(self, size)  # it would not fit if everything was evicted
        return self.units_to_evict(self, size)

    def units_to_evict(self, account: Account, size: int) -> Iterator[Source]:
        """Yield the units to evict. The last ones follow only if the account refuses the write without their eviction.

        Until then, values use a part of LMDB's space temporarily.
        """
        yield Source(self.evictable(last=False), self.evict)
        if account.refuses(size):
            yield Source(self.evictable(), self.evict)

    def refusal(self, size: int) -> str:
        values, failing = f"{self.limit} bytes of {self.stored.maxdisk} are for values", self.stored.behind.failing
        waiting = f"; {self.used - self.stored.usage.used} bytes wait: {failing}" if failing else ""
        return f"used disk > 'maxdisk': {values}, and {size} more do not fit{waiting}"

    # -- sizes of writes -----------------------------------------------------------------------------------------------

    @staticmethod
    def least_for(size: int) -> int:
        """Return the least `maxdisk` for values of this size in bytes."""
        return ceil(size / _SHARE_OF_DISK)

    def size_of(self, unit: Unit) -> int:
        """Return the bytes of a unit on disk."""
        return self.stored.usage.size_of_unit(name_of_unit(unit))

    def has_space(self, count: int, size: int) -> bool:
        """Return whether `count` pages with `size` bytes of bodies fit in any case, together with replaced pages. If
        not, `sizes` looks up the sizes of replaced pages. Blocks that are split need more space. O(1).
        """
        if not self.stored.maxdisk:
            return True
        usage, bound = self.stored.usage, size + size // 4096 + count * records.PAGE_BOUND
        used = usage.expected + usage.replaced + self._with_replaced.reserved
        return used + 2 * bound <= self.stored.maxdisk * _SHARE_OF_DISK

    def most_for(self, count: int, size: int) -> Sizes:
        """Return upper bounds of `sizes`, for pages for which `has_space` holds."""
        bound = size + size // 4096 + count * records.PAGE_BOUND
        return {self: bound, self._with_replaced: 2 * bound}

    def sizes(self, parts: Iterable[Collection[PendingWrite]]) -> Iterator[Sizes]:
        """Yield the sizes of each part of a batch, whose parts are stored in order."""
        before = dict[bytes, int]()  # sizes of values in earlier parts
        for part in parts:
            splits = units_of(self.contents, part) if self.contents.catalogue.in_extents else ()
            footprints = self._footprints_of_splits(splits)
            for value in part:
                footprints[name_of_key(value.key)] = _footprint_of(value)
            yield self._growth(footprints, before)
            before |= footprints

    def sizes_of_block(self, req_id: bytes, page: int, shape: BlockShape) -> Sizes:
        """Return the sizes of a block that is stored as an extent, in place of its pages."""
        if not self.stored.maxdisk:
            return {}
        name, block = name_of_block(req_id, page), self.contents.index.block(req_id, page)
        footprints = dict.fromkeys(names_in(block), 0) if block is not None else {}
        footprints[name] = footprint(name, shape.nbytes)
        return self._growth(footprints, {})

    def sizes_of_split(self, block: Block) -> Sizes:
        """Return the sizes of the split of an extent: its pages become separate values."""
        footprints = self._footprints_of_splits([block]) if self.stored.maxdisk else {}
        return self._growth(footprints, {}) if footprints else {}

    def _footprints_of_splits(self, units: Iterable[Unit]) -> Footprints:
        """Return the footprints of the pages of blocks, by the name of the block, for blocks that are on disk whole."""
        return {
            name: unit.pages * records.footprint_of(len(unit.req_id), unit.extent.slot.size // unit.pages)
            for unit in units
            if isinstance(unit, Block) and unit.extent is not None and self.stored.keeps(name := name_of_unit(unit))
        }

    def _growth(self, footprints: Footprints, before: Footprints) -> Sizes:
        """Return the sizes of values with these footprints, which replace values on disk and those of `before`."""
        usage, fresh = self.stored.usage, [name for name in footprints if name not in before]
        growth = sum(footprints.values()) - sum(map(usage.size_of, fresh))
        if len(fresh) < len(footprints):
            growth -= sum(before.get(name, 0) for name in footprints)
        # After the commit; and during it, when replaced values are on disk, too.
        return {self: growth, self._with_replaced: growth + usage.to_replace(fresh)}

    @property
    def _rules(self) -> Policy:
        return self.contents.eviction_order.rules

    # -- order of eviction ---------------------------------------------------------------------------------------------

    def block_removed(self, block: Block) -> None:
        """Remove the links of a removed block. The block that it extended may be evicted now."""
        for req_id, page in self.chains.removed(block):
            self.stored.usage.resume(name_of_block(req_id, page))

    def evict_for_full_disk(self, error: DiskFull, size: int, space: int) -> Iterator[None]:
        """Evict `size` bytes, if possible, because the disk is full. Yield after each unit.

        `space`: bytes for new pages. Evict nothing if the file system is full, and had too little space even without
        any value: then evictions would cost values and help no commit.
        """
        enough = self._freed + size
        alone = not isinstance(error, MaxDisk)
        self._full = "filesystem" if alone else "disk"
        if self._full_since != self.stored.behind.commits:
            self._full_since, self._most_space = self.stored.behind.commits, 0
        self._most_space = max(self._most_space, self.stored.usage.used + space)
        if alone and size + size // _OVERHEAD > self._most_space:
            return
        for _ in evictions(self.contents, [Source(self.evictable(alone=alone), partial(self.evict, room=self._full))]):
            if self._freed >= enough:
                return
            yield

    def evict(self, unit: Unit, *, room: str = "") -> bool:
        """Evict a unit from memory and disk for the limit of `room`: by default `maxdisk`, or a full file system
        while values cannot be written for that. Return False if it is not on disk, and does not wait to be written.
        """
        room = room or (self._full if self.stored.behind.failing else "disk")
        usage = self.stored.usage
        names = [name for name in each_name_in(unit) if name in usage.names or self.stored.behind.waits(name)]
        if not names:
            return False
        self._freed += sum(map(usage.size_of, names))
        usage.remove_unit(name_of_unit(unit))
        self.stored.counts.evicted += len(names)
        self.contents.evict(unit, room=room)
        return True

    def evictable(self, *, alone: bool = False, last: bool = True) -> Iterator[Unit]:
        """Return the units on disk that the policy may evict, in the order of eviction.

        With `alone`, only units on disk only; with `last`, also blocks that other blocks extend, and short strings.
        """
        return self._oldest(alone=alone, last=last) if self._rules.evicts_any else self._soonest(alone=alone)

    def _soonest(self, *, alone: bool) -> Iterator[Unit]:
        passed = 0
        for unit in self.contents.victims():
            if not alone or self.stored.usage.is_on_disk_only(name_of_unit(unit)):
                yield unit
            passed += is_there(self.contents, unit)
            if passed == _MOST_PASSED:
                return

    def _oldest(self, *, alone: bool, last: bool) -> Iterator[Unit]:
        for unit in islice(self.contents.eviction_order.quotas.exceeding(), _MOST_PASSED):
            name = name_of_unit(unit)
            stays = (alone and not self.stored.usage.is_on_disk_only(name)) or (not last and self._is_extended(name))
            if not stays and not self._waits(unit):
                yield unit
        yield from self._oldest_on_disk_only()
        if not alone:
            yield from self._also_in_memory(last=False)
        if last:
            yield from self._deferred()
        if last and not alone:
            yield from self._also_in_memory(last=True)

    def _oldest_on_disk_only(self) -> Iterator[Unit]:
        """Yield the units on disk only, the least recently used first. Defer units that other units extend."""
        usage, passed = self.stored.usage, 0
        most = min(_MOST_PASSED, usage.units_on_disk_only)
        if not self._rules.keeps_chains:  # no unit is deferred; the policy was changed
            for one in [*islice(usage.deferred, _MOST_PASSED)]:
                usage.resume(one)
        while passed < most and (name := usage.first) is not None:
            if self._is_extended(name):
                usage.defer(name)
                passed += 1
                continue
            unit = unit_named(self.contents, name)
            if unit is None:
                usage.remove_unit(name)
                continue
            if not self._waits(unit):
                yield unit
            if is_there(self.contents, unit):  # it was not evicted: it waits to be written, or has to stay
                usage.use(name)
                passed += 1

    def _also_in_memory(self, *, last: bool) -> Iterator[Unit]:
        """Yield the units that are in memory, too, in the order of the policy; `last` includes those evicted last."""
        get, passed, spares_texts = self.contents.catalogue.entries.get, 0, self._spares_texts
        for unit in self.contents.eviction_order.quotas.every.victims():
            is_last = not last and (
                self._is_extended(name_of_unit(unit))
                or (spares_texts and type(unit) is bytes and type(get(unit)) is Text)
            )
            if not is_last and not self._waits(unit):
                yield unit
            passed += is_there(self.contents, unit)
            if passed == _MOST_PASSED:
                return

    def _deferred(self) -> Iterator[Unit]:
        """Yield the deferred units: others extend them, and have to stay."""
        for name in [*islice(self.stored.usage.deferred, _MOST_PASSED)]:
            unit = unit_named(self.contents, name)
            if unit is None:
                self.stored.usage.remove_unit(name)
            elif not self._waits(unit):
                yield unit

    def _is_extended(self, name: bytes) -> bool:
        return name[:1] == b"b" and self._rules.keeps_chains and self.chains.is_extended(*parse_block(name))

    def _waits(self, unit: Unit) -> bool:
        """Return whether a unit has to stay because it waits to be written. While commits fail, none has to."""
        behind = self.stored.behind
        return not (behind.settled or behind.failing) and any(map(behind.waits, each_name_in(unit)))

    @property
    def _spares_texts(self) -> bool:
        """Whether short strings are evicted last."""
        return self.contents.texts * _TEXT_ON_DISK <= self.limit * _SHARE_OF_TEXTS


def _footprint_of(value: PendingWrite) -> int:
    if value.block is not None:
        return records.footprint_of(len(value.block[0]), value.size - HEADER_SIZE)
    return footprint(name_of_key(value.key), value.size - len(value.key) - TEXT_OVERHEAD)
