"""Eviction: the accounts of the store's limited resources, and `make_room`, which evicts units for one of them.

Memory, its index, the disk and each quota are accounts. Before a value is stored, `make_room` evicts units from an
account until the value fits. The account decides which units may be evicted, in which order and how, and whether a
write is refused when no unit is left. Units are evicted without `make_room` only when a commit has failed because the
disk or `maxdisk` was used up: by `DiskAccount.evict_for_full_disk`, and by `Changes.drop_refused` (`disk/tier.py`).

Without a tier below, a unit that leaves memory is evicted: its keys are removed. With a tier, a unit that is also on
disk is demoted: its bytes leave memory, and its keys stay. Protected and held units are spared.

A write is admitted before its first step. Disk and quotas return the sizes of its parts, and a `Reservation` of these
makes room in each account. If it has to evict more than KEYS_PER_STEP keys, it is admitted again in its next step
(`MoreRoom`), and a `Claim` reserves its space until then. KVPAGEMSET turns into a reply in steps instead, which has a
claim from its own first MoreRoom on (`in_room`). If the parts are stored in steps, other writers count the space of the
next parts as used. If the write splits extents, each split is admitted in its own step, before a part is
stored, because its entries take memory of the index.

Memory is not reserved. `MemoryAccount.shrink` evicts units until memory is below its limit. If memory is full, it is
called before a command that stores values (`free_memory` in `commands/dispatch`), before values are loaded from disk,
and periodically.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, takewhile
from typing import NamedTuple, Self, TypeVar

from kvpage_server.core import CallAgain
from kvpage_server.page import HEADER_SIZE, BlockShape
from kvpage_server.store.contents import Contents, Source, unit_of
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.eviction.quotas import Quota, Rule, block_name, counted
from kvpage_server.store.memory.entry import is_page
from kvpage_server.store.memory.index import Block
from kvpage_server.system.text import monotonic_ms

T = TypeVar("T")


class Account(ABC):
    """A limited resource. Sizes are in bytes."""

    shrinks_in_steps = False  # whether a write evicts at most twice its size, after the limit was lowered
    evicts_waiting = True  # whether `ended` includes units that wait to be written to the tier below

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.reserved = 0  # for the next parts of batches that are stored in steps, and for writes that wait for room
        self.credit = 0  # bytes that such writes have evicted, if it `shrinks_in_steps`

    @property
    @abstractmethod
    def limit(self) -> int:
        """The size that eviction keeps to; 0 for no limit."""

    @property
    @abstractmethod
    def used(self) -> int:
        """The size of stored values."""

    @property
    def most(self) -> int:
        """The size above which a write is refused, if no unit is left that may be evicted."""
        return sys.maxsize if self.contents.eviction_order.rules.evicts_any else self.limit

    def evicts_above(self, size: int) -> int:
        """Return the greatest `used` with which no unit is evicted before `size` more bytes are stored."""
        limit = self.limit
        goal = limit - self.reserved - size if limit else sys.maxsize
        return max(goal, self.used - max(2 * size - self.credit, 0)) if self.shrinks_in_steps else goal

    def refuses(self, size: int) -> bool:
        """Return whether `size` more bytes do not even fit below `most`."""
        return self.used + self.reserved + size > self.most

    @abstractmethod
    def sources(self, size: int) -> Iterator[Source]:
        """Yield the units that the policy may evict before `size` more bytes are stored.

        The next source is used if the units of the sources before it did not free enough.
        """

    def ended(self) -> Iterator[Unit]:
        """Yield the units of the account whose lifetime has ended, and orphans. They are evicted before those of
        `sources`.
        """
        units = chain(self.contents.ended(), self.contents.orphans())
        return units if self.evicts_waiting else filterfalse(self.contents.tier.waits, units)

    @abstractmethod
    def refusal(self, size: int) -> str:
        """Return the reason to refuse a write of `size` bytes, as in "command not allowed when ..."."""


class OverLimit(Exception):
    """Error: a write would exceed the limit of `account`, and not enough may be evicted. The text is the reply."""

    def __init__(self, account: Account, size: int = 0) -> None:
        super().__init__(f"command not allowed when {account.refusal(size)}.")
        self.account = account


def make_room(account: Account, size: int = 0, stay: Collection[Unit] = ()) -> Iterator[Unit]:
    """Evict units until `size` more bytes fit in an account. Yield each one, so that other clients can get their turn.

    Units in `stay`, and protected and held units, are not evicted. If the remaining ones do not free enough, raise
    OverLimit if the account refuses the write, and return otherwise.
    """
    goal = account.evicts_above(size)
    if account.used <= goal:
        return
    sources = (
        source if source.is_protected else source._replace(units=chain(account.ended(), source.units))
        for source in account.sources(size)
    )
    for unit in evictions(account.contents, sources, stay):
        yield unit
        if account.used <= goal:
            return
    if account.refuses(size):
        raise OverLimit(account, size)


def evictions(contents: Contents, sources: Iterable[Source], stay: Collection[Unit] = ()) -> Iterator[Unit]:
    """Evict one unit after another, as `make_room` does, and yield each."""
    now = monotonic_ms()
    contents.leases.settle(now)
    for units, leave, is_protected in sources:
        for unit in units:
            spared = contents.tier.holds(unit) if is_protected else contents.spares(unit, now)
            if not (unit in stay or spared or leave(unit) is False):
                yield unit


class PendingWrite(NamedTuple):
    """A value that is about to be stored.

    `size` is in bytes, as quotas count it. `block` is the request and page id of a page's block, None for a string.
    """

    key: bytes
    size: int
    block: tuple[bytes, int] | None = None


def units_of(contents: Contents, values: Iterable[PendingWrite]) -> set[Unit]:
    """Return the existing units that new values extend or replace. They stay when units are evicted for the values."""
    units, blocks, catalogue = set[Unit](), set[tuple[bytes, int]](), contents.catalogue
    for key, _, name in values:
        if name is not None:
            blocks.add(name)
        entry = catalogue.get(key) if name is None else catalogue.entries.get(key)
        if entry is not None:
            units.add(unit_of(key, entry))
    units.update(block for name in blocks if (block := contents.index.block(*name)) is not None)
    return units


Sizes = dict[Account, int]  # bytes that a write, or a part of it, adds to accounts; negative if it frees some

KEYS_PER_STEP = 250  # keys evicted or demoted in one call, because other clients wait meanwhile


class MoreRoom(CallAgain):
    """Signal that a write has evicted KEYS_PER_STEP keys, and needs more space: it has to be admitted again in its next
    step. Nothing of it was stored. `total` has its sizes.
    """

    def __init__(self, total: Sizes) -> None:
        super().__init__("the write has to evict more units")
        self.total = total


class Claim:
    """Space that is reserved for a write between two steps of its admission, as long as the object exists. Without it,
    the writes of others could take all that the write evicts.
    """

    def __init__(self, lacking: MoreRoom) -> None:
        self._total = {account: size for account, size in lacking.total.items() if size > 0}
        for account, size in self._total.items():
            account.reserved += size

    def __del__(self) -> None:
        for account, size in self._total.items():
            account.reserved -= size


def in_room(write: Callable[[], T]) -> Generator[tuple[()], None, T]:
    """Call `write`, which admits a write, and return its result. After MoreRoom, call it again in another step."""
    while True:
        try:
            return write()
        except MoreRoom as lacking:
            claim = Claim(lacking)
        yield ()
        del claim


class Reservation:
    """Space for a write, from its admission until its last part is stored.

    `parts` are the sizes of its parts, in the order in which they are stored. `make_room` admits the write, and
    reserves nothing. A write of several steps uses the object as a context manager, which reserves the space. A part
    releases its reservation when it uses the space.
    Reservations of parts that are not stored are released when the write ends or fails, or its client disconnects.
    Space that a part frees is not available until the part is stored, so negative sizes are not reserved.

    The write adds to units of `extended` accounts, or replaces them. Such a unit is not evicted for its own growth, so
    these accounts refuse the write if it does not fit, under any policy.
    """

    def __init__(self, parts: Iterable[Sizes] = (), extended: Collection[Account] = ()) -> None:
        self._parts = deque(parts)
        self._extended = extended

    def make_room(self, stay: Callable[[], Collection[Unit]], *, in_steps: bool = True) -> Self:
        """Evict units until all parts fit in their accounts together. Raise OverLimit as `make_room` does and, with
        `in_steps`, MoreRoom.

        `stay` returns the units that the write extends or replaces. They are not evicted.
        """
        total: Sizes = {}
        for part in self._parts:
            for account, size in part.items():
                total[account] = total.get(account, 0) + size
        lacking = [(account, size) for account, size in total.items() if account.used > account.evicts_above(size)]
        if lacking:
            units, left = stay(), KEYS_PER_STEP if in_steps else sys.maxsize
            for account, size in lacking:
                used, goal = account.used, account.evicts_above(size)
                for unit in make_room(account, size, units):
                    left -= unit.pages if isinstance(unit, Block) else 1
                    if left <= 0 and account.used > goal:
                        account.credit += used - account.used
                        raise MoreRoom(total)
        for account, size in lacking:
            if size > 0 and account in self._extended and account.used > account.evicts_above(size):
                raise OverLimit(account, size)
        for account, size in total.items():
            account.credit = max(account.credit - 2 * max(size, 0), 0)
        return self

    def __enter__(self) -> Self:
        for part in self._parts:
            for account, size in part.items():
                account.reserved += max(size, 0)
        return self

    def __exit__(self, *_: object) -> None:
        while self._parts:
            self.release_part()

    def release_part(self) -> None:
        """Release the reservation of the next part, which is stored in the same step."""
        if self._parts:
            for account, size in self._parts.popleft().items():
                account.reserved -= max(size, 0)


# -- The accounts of memory: values, which are limited by `maxmemory`, and the index -----------------------------------
#
# The index does not count against `maxmemory`. It may take as much again, and at least LEAST_INDEX. Above that, units
# are evicted, also with a tier, because the keys of a demoted unit stay in the index.

LEAST_INDEX = 64 << 20  # bytes that the index may take in any case


class IndexAccount(Account):
    """The memory of the index. Without `maxmemory` it has no limit."""

    evicts_waiting = False

    def __init__(self, contents: Contents, memory: MemoryAccount) -> None:
        super().__init__(contents)
        self._memory = memory

    @property
    def limit(self) -> int:
        return max(self._memory.limit, LEAST_INDEX) if self._memory.limit else 0

    @property
    def used(self) -> int:
        """Approximate bytes of memory of the index. O(1)."""
        return self.contents.catalogue.index_size()

    def sources(self, _: int) -> Iterator[Source]:
        return self.contents.tier.keys_to_evict()

    def refusal(self, _: int) -> str:
        return f"the index takes more than {self.limit} bytes (maxmemory, and at least 64mb)"


class MemoryAccount(Account):
    """The memory of values. Its limit is `maxmemory`."""

    limit = 0

    def __init__(self, contents: Contents, maxmemory: int) -> None:
        super().__init__(contents)
        self.limit = maxmemory
        self.receiving = 0  # bytes of slots whose values are not received completely; they do not count yet
        # Bytes of unread replies, which may borrow slots of values that have left the store. They count for
        # `maxmemory-clients`. Without this, unread replies of as many bytes as `maxmemory` would evict all values.
        self.unread = 0
        self.index = IndexAccount(contents, self)
        self._arena, self._catalogue = contents.arena, contents.catalogue

    @property
    def used(self) -> int:
        """Bytes that count against maxmemory: short strings, and slots of completely received values."""
        return self._arena.used - self.receiving + self.contents.texts

    def evicts_above(self, size: int) -> int:
        return super().evicts_above(size) + self.contents.tier.held + self.unread

    def is_full(self) -> bool:
        """Return whether memory exceeds `maxmemory`, or the index its limit."""
        most = self.limit
        if not most:
            return False
        if self._arena.used + self.contents.texts > most and self.used > self.evicts_above(0):
            return True
        size = self._catalogue.index_size()
        return size > most and size > LEAST_INDEX

    def sources(self, _: int) -> Iterator[Source]:
        return self.contents.tier.values_to_evict()

    def ended(self) -> Iterator[Unit]:
        is_in_memory = self.contents.eviction_order.units.__contains__
        ended = takewhile(is_in_memory, self.contents.ended())  # behind them are demoted units
        return chain(ended, filter(is_in_memory, self.contents.orphans()))

    def refusal(self, _: int) -> str:
        return "used memory > 'maxmemory'"

    def shrink(self) -> bool:
        """Evict or demote units until memory is within its limits, but at most about KEYS_PER_STEP keys.

        Return False if the call has to be repeated for more units, and True otherwise: also if only spared units are
        left and memory is still full. Raise OverLimit if memory is full and the policy may not evict more.
        """
        left = KEYS_PER_STEP
        for account in (self, self.index):
            for unit in make_room(account):
                left -= unit.pages if isinstance(unit, Block) else 1
                if left <= 0:
                    return not self.is_full()
        return True


# -- Quotas ------------------------------------------------------------------------------------------------------------

# With `maxmemory`, a quota has also a share of the memory of the index. Otherwise a tenant could fill the index with
# many small values, and values of other tenants would be evicted for it. The shares are proportional to the limits of
# the quotas, and all of them together fit into the index, unless the quotas together exceed `maxmemory`.
#
# When quotas are set, existing values are counted in steps. Until all are counted, a quota's size is too low.

_PATTERNS_PER_STEP = 20_000  # pattern matches before other clients get their turn
_PATTERNS_PER_VALUE = 16  # to count a value costs as much as so many pattern matches

_LEAST_INDEX_OF_QUOTA = 1 << 20  # bytes of the index that a quota may take, however low its limit is


class QuotaAccount(Account):
    """The values of a quota."""

    def __init__(self, contents: Contents, quota: Quota) -> None:
        super().__init__(contents)
        self.quota = quota

    @property
    def limit(self) -> int:
        return self.quota.limit

    @property
    def used(self) -> int:
        return self.quota.bytes

    def sources(self, _: int) -> Iterator[Source]:
        rules, units = self.contents.eviction_order.rules, self.quota.units.victims()
        if rules.evicts_any:
            yield Source(units, self._evict)
        elif rules.evicts_expiring:
            yield Source(filter(self.contents.may_expire, units), self._evict)

    def ended(self) -> Iterator[Unit]:
        return filter(self.quota.sizes.__contains__, super().ended())

    def _evict(self, unit: Unit) -> None:
        self.quota.units.evicted(unit)
        self.contents.evict(unit, room="quota")

    def refusal(self, _: int) -> str:
        return self._refusal("is used up")

    def _refusal(self, reason: str) -> str:
        pattern = self.quota.pattern.decode("utf-8", "surrogateescape")
        return f"the quota of '{pattern}', {self.quota.limit} bytes, {reason}"


class QuotaIndexAccount(QuotaAccount):
    """The memory of the index that a quota's units may take. Without `maxmemory` it has no limit."""

    def __init__(self, contents: Contents, quota: Quota, memory: MemoryAccount) -> None:
        super().__init__(contents, quota)
        self._memory = memory

    @property
    def limit(self) -> int:
        quotas, maxmemory = self.contents.eviction_order.quotas, self._memory.limit
        if not (maxmemory and self.quota.limit):
            return 0
        least = min(_LEAST_INDEX_OF_QUOTA, LEAST_INDEX // 2 // len(quotas.all))
        rest = self._memory.index.limit - least * len(quotas.all)
        return least + rest * self.quota.limit // max(quotas.limits, maxmemory)

    most = limit

    @property
    def used(self) -> int:
        return self.quota.index

    def refusal(self, _: int) -> str:
        return self._refusal(f"has so many keys that their index takes more than {self.limit} bytes")


class QuotaAccounts:
    """The accounts of all quotas, and the count of existing values."""

    def __init__(self, contents: Contents, memory: MemoryAccount) -> None:
        self.of: dict[Quota, tuple[QuotaAccount, QuotaIndexAccount]] = {}
        self._contents = contents
        self._memory = memory
        self._uncounted: Iterator[None] | None = None  # the remaining steps of the count of existing values

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Replace the quotas, and begin to count the existing values. Nothing is evicted yet.

        A write that waits for room may still have an account of a replaced quota. Its limit is removed, because its
        units are not up to date any more: they may have been removed, and others may have their names.
        """
        contents = self._contents
        contents.eviction_order.set_quotas(rules, contents.catalogue.costs)
        for replaced in self.of.keys() - {*contents.eviction_order.quotas.all}:
            replaced.limit = 0
        self.of = {
            quota: (QuotaAccount(contents, quota), QuotaIndexAccount(contents, quota, self._memory))
            for quota in contents.eviction_order.quotas.all
        }
        contents.leases.recount()
        self._uncounted = self._count_all() if rules else None
        self.go_on()

    # -- sizes of writes ---------------------------------------------------------------------------------------------

    def add_sizes(
        self, sizes: Iterable[Sizes], parts: Iterable[Sequence[PendingWrite]], extended: set[Account]
    ) -> Iterator[Sizes]:
        """Add the bytes of each part of a batch to its sizes, and yield them. Add the accounts of blocks that get more
        or other pages to `extended`.
        """
        catalogue, index = self._contents.catalogue, self._contents.index
        growth, known = dict[bytes, int](), set[tuple[bytes, int]]()
        for of_part, part in zip(sizes, parts, strict=True):
            quotas = self._contents.eviction_order.quotas  # CONFIG SET may have changed them since the last part
            last, quota = None, None  # the block and the quota of the value before
            for key, size, block in part:
                if block is None or block is not last:
                    last, quota = block, quotas.named(key if block is None else block_name(block[0]))
                if quota is None:
                    continue
                entry, cost = catalogue.get(key), 0
                grows = size - counted(key, entry, as_page=block is not None)
                if block is not None and block not in known:
                    known.add(block)
                    if index.has(*block):
                        extended.add(self.of[quota][0])
                    else:
                        cost = catalogue.costs.of_block(block[0])
                if entry is None and key not in growth:
                    cost += catalogue.costs.of_key(key)
                of_values, of_index = self.of[quota]
                of_part[of_values] = of_part.get(of_values, 0) + grows - growth.get(key, 0)
                of_part[of_index] = of_part.get(of_index, 0) + cost
                growth[key] = grows
            yield of_part

    def sizes_of_block(self, req_id: bytes, page: int, shape: BlockShape) -> Sizes:
        """Return the sizes of a block that is stored as an extent, in place of its pages."""
        quota = self._contents.eviction_order.quotas.named(block_name(req_id))
        if quota is None:
            return {}
        of_values, of_index = self.of[quota]
        size = HEADER_SIZE * shape.pages + shape.nbytes
        block = self._contents.index.block(req_id, page)
        if block is None:
            return {of_values: size, of_index: quota.index_costs.of_block(req_id)}
        return {of_values: size - quota.sizes.get(block, 0), of_index: 0}

    def sizes_of_split(self, block: Block) -> Sizes:
        """Return the sizes of the split of an extent: the entries of its pages take memory of the index."""
        quota = self._contents.eviction_order.quotas.of(block)
        if quota is None:
            return {}
        of_values, of_index = self.of[quota]
        return {of_values: 0, of_index: quota.index_costs.of_pages(block)}

    # -- counting ----------------------------------------------------------------------------------------------------

    def go_on(self) -> bool:
        """Count the values of the next step. Return whether more values are left to count."""
        if self._uncounted is not None and next(self._uncounted, self) is self:
            self._uncounted = None
        return self._uncounted is not None

    def _count_all(self) -> Iterator[None]:
        at_once = max(_PATTERNS_PER_STEP // (_PATTERNS_PER_VALUE + len(self._contents.eviction_order.quotas.all)), 1)
        for number, unit in enumerate(self._every_unit(), start=1):
            if unit is not None:
                self._count(unit)
            if unit is None or not number % at_once:
                yield

    def _every_unit(self) -> Iterator[Unit | None]:
        """Yield the units that existed when the count began and still exist, the least recently used first, and some
        of them twice. A new unit is counted when it is stored. None is a step without a unit.

        Commands run between two steps, also FLUSHALL. So only names are kept, and each is looked up at its turn.
        """
        catalogue, index, every = (
            self._contents.catalogue,
            self._contents.index,
            self._contents.eviction_order.quotas.every,
        )
        yield from self._contents.tier.units_below()
        yield from every.in_order()
        for key in list(catalogue.entries):
            entry = catalogue.entries.get(key)
            if entry is not None and not is_page(entry):
                yield key
        for req_id in list(index.requests):
            for page in sorted(index.page_ids(req_id)):
                if block := index.block(req_id, page):
                    yield block

    def _count(self, unit: Unit) -> None:
        quota = self._contents.eviction_order.quotas.of(unit)
        if quota is None or unit in quota.sizes:
            return
        quota.resize(unit, self._contents.size_for_quota(unit))
        quota.units.used(unit)
        if isinstance(unit, Block):
            quota.units.follows(self._contents.index.around(unit))
        if (extended := self._contents.eviction_order.quotas.every.extended(unit)) is not None:
            quota.units.follows((extended, unit))
