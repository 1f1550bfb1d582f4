"""Eviction: the accounts of the store's limited resources, and `make_room`, which evicts units for one of them.

Memory, its index, the disk and each quota are accounts. Before a value is stored, `make_room` evicts units from an
account until the value fits. It is the only function that evicts because of a limit. The account decides which units
may be evicted, in which order and how, and whether a write is refused when no unit is left.

Without a tier below, a unit that leaves memory is evicted: its keys are removed. With a tier, a unit that is also on
disk is demoted: its bytes leave memory, and its keys stay. Protected and held units are spared.

A batch that is stored in steps is admitted once, before its first step. Between its steps, other writers count the
space that its next parts will use as used, see `Reservation`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, takewhile
from typing import NamedTuple, Self

from kvpage_server.page import HEADER_SIZE, BlockShape
from kvpage_server.store.contents import Contents, Source, unit_of
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.eviction.quotas import Quota, Rule, block_name, counted
from kvpage_server.store.memory.entry import is_page
from kvpage_server.store.memory.index import Block
from kvpage_server.system.text import monotonic_ms


class Account(ABC):
    """A limited resource. Sizes are in bytes."""

    shrinks_in_steps = False  # whether a write evicts at most twice its size, after the limit was lowered
    evicts_waiting = True  # whether `ended` includes units that wait to be written to the tier below

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.reserved = 0  # for the next parts of batches that are stored in steps

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
        return max(goal, self.used - 2 * size) if self.shrinks_in_steps else goal

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


ReservationParts = Iterable[tuple[Account, int]]  # sizes for one part of a batch; negative if the part frees some


class Reservation:
    """Context manager that reserves space for the parts of a batch, in the order in which they are stored.

    A part releases its reservation when it uses the space. Reservations of parts that are not stored are released when
    the batch ends or fails, or its client disconnects. Space that a part frees is not available until the part is
    stored, so negative sizes are not reserved.
    """

    def __init__(self, parts: Iterable[ReservationParts] = ()) -> None:
        self._parts = deque([(account, max(size, 0)) for account, size in part] for part in parts)

    def __enter__(self) -> Self:
        for account, size in chain.from_iterable(self._parts):
            account.reserved += size
        return self

    def __exit__(self, *_: object) -> None:
        while self._parts:
            self.commit()

    def commit(self) -> None:
        """Release the reservation of the next part, which is stored in the same step."""
        for account, size in self._parts.popleft() if self._parts else ():
            account.reserved -= size


# -- The accounts of memory: values, which are limited by `maxmemory`, and the index -----------------------------------
#
# The index does not count against `maxmemory`. It may take as much again, and at least LEAST_INDEX. Above that, units
# are evicted, also with a tier, because the keys of a demoted unit stay in the index.

MOST_LEAVE = 250  # keys evicted or demoted in one call, because other clients wait meanwhile
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
        return self.contents.catalogue.index_size

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
        self._arena = contents.arena

    @property
    def used(self) -> int:
        """Bytes that count against maxmemory: short strings, and slots of completely received values."""
        return self._arena.used - self.receiving + self.contents.texts

    def evicts_above(self, size: int) -> int:
        return super().evicts_above(size) + self.contents.tier.held + self.unread

    @property
    def is_full(self) -> bool:
        """Whether memory exceeds `maxmemory`, or the index its limit."""
        most = self.limit
        if not most:
            return False
        values_may_be_full = self._arena.used + self.contents.texts > most
        index_size = self.contents.catalogue.index_size
        return (values_may_be_full and self.used > self.evicts_above(0)) or index_size > max(most, LEAST_INDEX)

    def sources(self, _: int) -> Iterator[Source]:
        return self.contents.tier.values_to_evict()

    def ended(self) -> Iterator[Unit]:
        is_in_memory = self.contents.eviction_order.units.__contains__
        ended = takewhile(is_in_memory, self.contents.ended())  # behind them are demoted units
        return chain(ended, filter(is_in_memory, self.contents.orphans()))

    def refusal(self, _: int) -> str:
        return "used memory > 'maxmemory'"

    def shrink(self) -> bool:
        """Evict or demote units until memory is within its limits, but at most about MOST_LEAVE keys.

        Return False if the call has to be repeated for more units, and True otherwise: also if only spared units are
        left and memory is still full. Raise OverLimit if memory is full and the policy may not evict more.
        """
        left = MOST_LEAVE
        for account in (self, self.index):
            for unit in make_room(account):
                left -= unit.pages if isinstance(unit, Block) else 1
                if left <= 0:
                    return not self.is_full
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
        """Replace the quotas, and begin to count the existing values. Nothing is evicted yet."""
        contents = self._contents
        contents.eviction_order.set_quotas(rules, contents.catalogue.costs)
        self.of = {
            quota: (QuotaAccount(contents, quota), QuotaIndexAccount(contents, quota, self._memory))
            for quota in contents.eviction_order.quotas.all
        }
        contents.leases.recount()
        self._uncounted = self._count_all() if rules else None
        self.go_on()

    # -- before something is stored ---------------------------------------------------------------------------------

    def admit(self, parts: Sequence[Sequence[PendingWrite]]) -> Iterator[ReservationParts]:
        """Evict values of the quotas of new values until these fit. Return the sizes to reserve for each part.

        Values that a part replaces, and blocks that it extends, are not evicted. Raise OverLimit if the policy may not
        evict enough, or if a block would grow above the quota; the new values must not be stored then.
        """
        catalogue, index, quotas = self._contents.catalogue, self._contents.index, self._contents.eviction_order.quotas
        growth, existed = dict[bytes, int](), dict[tuple[bytes, int], bool]()
        taken: list[dict[Quota, int]] = []
        index_grows: dict[Quota, int] = {}
        extended = set[Quota]()  # quotas of blocks that get more or other pages
        for part in parts:
            wanted: dict[Quota, int] = {}
            taken.append(wanted)
            for key, size, block in part:
                quota = quotas.named(key if block is None else block_name(block[0]))
                if quota is None:
                    continue
                entry, cost = catalogue.get(key), 0
                grows = size - counted(key, entry, as_page=block is not None)
                wanted[quota] = wanted.get(quota, 0) + grows - growth.get(key, 0)
                if block is not None and block not in existed:
                    existed[block] = index.has(*block)
                    if existed[block]:
                        extended.add(quota)
                    else:
                        cost = catalogue.costs.of_block(block[0])
                if entry is None and key not in growth:
                    cost += catalogue.costs.of_key(key)
                index_grows[quota] = index_grows.get(quota, 0) + cost
                growth[key] = grows
        lacking: list[tuple[Account, int]] = []
        sizes = {quota: sum([wanted.get(quota, 0) for wanted in taken]) for quota in chain.from_iterable(taken)}
        for quota, size in sizes.items():
            lacking += self._lacking(quota, size, index_grows.get(quota, 0))
        if lacking:
            _make_room(lacking, units_of(self._contents, chain.from_iterable(parts)))
            for quota in extended:
                account, size = self.of[quota][0], sizes[quota]
                if size > 0 and account.used > account.evicts_above(size):
                    raise OverLimit(account, size)
        return (((self.of[quota][0], size) for quota, size in wanted.items()) for wanted in taken)

    def admit_block(self, req_id: bytes, page: int, shape: BlockShape) -> None:
        """Evict values of a block's quota until its extent fits. Raise OverLimit as `admit` does."""
        quota = self._contents.eviction_order.quotas.named(block_name(req_id))
        if quota is not None:
            size = HEADER_SIZE * shape.pages + shape.nbytes
            block = self._contents.index.block(req_id, page)
            if block is None:
                _make_room(self._lacking(quota, size, quota.index_costs.of_block(req_id)), ())
            else:
                _make_room(self._lacking(quota, size - quota.sizes.get(block, 0), 0), {block})

    def admit_split(self, block: Block) -> None:
        """Evict values of a block's quota until the index has space for its pages. Raise OverLimit as `admit` does."""
        quota = self._contents.eviction_order.quotas.of(block)
        if quota is not None:
            _make_room(self._lacking(quota, 0, quota.index_costs.of_pages(block)), {block})

    def _lacking(self, quota: Quota, size: int, index: int) -> list[tuple[Account, int]]:
        """Return the accounts of a quota, and the bytes to store in each; nothing if they fit in both."""
        of_values, of_index = self.of[quota]
        if of_values.used <= of_values.evicts_above(size) and of_index.used <= of_index.evicts_above(index):
            return []
        return [(of_values, size), (of_index, index)]

    # -- counting ----------------------------------------------------------------------------------------------------

    def go_on(self) -> bool:
        """Count the values of the next step. Return whether more values are left to count."""
        if self._uncounted is not None and next(self._uncounted, self) is self:
            self._uncounted = None
        return self._uncounted is not None

    def _count_all(self) -> Iterator[None]:
        at_once = max(_PATTERNS_PER_STEP // (_PATTERNS_PER_VALUE + len(self._contents.eviction_order.quotas.all)), 1)
        for number, unit in enumerate(self._every_unit(), start=1):
            self._count(unit)
            if not number % at_once:
                yield

    def _every_unit(self) -> Iterator[Unit]:
        """Yield the units that existed when the count began and still exist. A new unit is counted when it is stored.

        Commands run between two steps, also FLUSHALL. So only names are kept, and each is looked up at its turn.
        """
        catalogue, index = self._contents.catalogue, self._contents.index
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


def _make_room(lacking: Iterable[tuple[Account, int]], stay: Collection[Unit]) -> None:
    for account, size in lacking:
        for _ in make_room(account, size, stay):
            pass
