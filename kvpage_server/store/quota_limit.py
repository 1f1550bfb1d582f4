"""The accounts of quotas: before a value is stored, other values of the same quota are evicted.

With `maxmemory`, a quota has also a share of the memory of the index. Otherwise a tenant could fill the index with many
small values, and values of other tenants would be evicted for it. The shares are proportional to the limits of the
quotas, and all of them together fit into the index, unless the quotas together exceed `maxmemory`.

When quotas are set, existing values are counted in steps. Until all are counted, a quota's size is too low.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from kvpage_server.page import HEADER_SIZE, BlockShape
from kvpage_server.store.contents import Contents, Source
from kvpage_server.store.evict import (
    LEAST_INDEX,
    Account,
    MemoryAccount,
    OverLimit,
    PendingWrite,
    ReservationParts,
    make_room,
    units_of,
)
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.eviction.quotas import Quota, Rule, block_name, counted
from kvpage_server.store.memory.entry import is_page
from kvpage_server.store.memory.index import Block

_PATTERNS_PER_STEP = (
    20_000  # pattern matches before other clients get their turn; to count a value costs as much as _OF_A_VALUE
)
_OF_A_VALUE = 16

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
            yield units, self._evict
        elif rules.evicts_expiring:
            yield filter(self.contents.may_expire, units), self._evict

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
        at_once = max(_PATTERNS_PER_STEP // (_OF_A_VALUE + len(self._contents.eviction_order.quotas.all)), 1)
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
