"""The limits of quotas: before a value is stored, other values of the same quota are evicted.

With `maxmemory`, a quota has also a share of the memory of the index. Otherwise a tenant could fill the index with many
small values, and values of other tenants would be evicted for it. The shares are proportional to the limits of the
quotas, and all of them together fit into the index, unless the quotas together exceed `maxmemory`.

When quotas are set, existing values are counted in steps. Until all are counted, a quota's size is too low.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, cast

from kvpage_server.page import HEADER_SIZE, BlockShape
from kvpage_server.store.contents import Contents
from kvpage_server.store.evict import LEAST_INDEX, MemoryLimit
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.eviction.quotas import OverQuota, Quota, Rule, block_name, counted
from kvpage_server.store.memory.entry import is_page
from kvpage_server.store.memory.index import Block
from kvpage_server.store.reservation import ReservationParts
from kvpage_server.system.text import monotonic_ms

_PATTERNS_PER_STEP = (
    20_000  # pattern matches before other clients get their turn; to count a value costs as much as _OF_A_VALUE
)
_OF_A_VALUE = 16

_LEAST_INDEX_OF_QUOTA = 1 << 20  # bytes of the index that a quota may take, however low its limit is

Name = bytes | tuple[bytes, int]  # a string's key; a block's request and page id


class PendingWrite(NamedTuple):
    """A value that is about to be stored.

    `size` is in bytes, as quotas count it. `block` is the request and page id of a page's block, None for a string.
    """

    key: bytes
    size: int
    block: tuple[bytes, int] | None = None


class QuotaLimit:
    """The limits of all quotas: eviction before a write, and the count of existing values."""

    def __init__(self, contents: Contents, memory: MemoryLimit) -> None:
        self._contents = contents
        self._memory = memory
        self._uncounted: Iterator[None] | None = None  # the remaining steps of the count of existing values

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Replace the quotas, and begin to count the existing values. Nothing is evicted yet."""
        self._contents.evictor.set_quotas(rules, self._contents.catalogue.costs)
        self._contents.leases.recount()
        self._uncounted = self._count_all() if rules else None
        self.go_on()

    # -- before something is stored ---------------------------------------------------------------------------------

    def admit(self, parts: Iterable[Iterable[PendingWrite]]) -> list[ReservationParts]:
        """Evict values of the quotas of new values until these fit. Return the amounts to reserve for each part.

        Values that a part replaces, and blocks that it adds to, are not evicted. Raise OverQuota if the policy may not
        evict enough; the new values must not be stored then.
        """
        quotas = self._contents.evictor.quotas
        growth: dict[bytes, int] = {}
        taken: list[dict[Quota, int]] = []
        index_grows: dict[Quota, int] = {}
        stay: set[Name] = set()
        for part in parts:
            wanted: dict[Quota, int] = {}
            taken.append(wanted)
            for key, size, block in part:
                quota = quotas.named(key if block is None else block_name(block[0]))
                if quota is None:
                    continue
                entry = self._contents.catalogue.get(key)
                grows = size - counted(key, entry, as_page=block is not None)
                wanted[quota] = wanted.get(quota, 0) + grows - growth.get(key, 0)
                name = key if block is None else block
                if entry is None and key not in growth:
                    cost = self._new_index(key, block if name not in stay else None)
                    index_grows[quota] = index_grows.get(quota, 0) + cost
                growth[key] = grows
                stay.add(name)
                if block is None and entry is not None and is_page(entry):  # a string will replace this page
                    stay.add((cast(Block, entry.unit).req_id, cast(Block, entry.unit).page))
        for quota in dict.fromkeys(chain.from_iterable(taken)):
            coming = sum(wanted.get(quota, 0) for wanted in taken)
            self._evict_own(quota, coming, index_grows.get(quota, 0), stay)
        return [wanted.items() for wanted in taken]

    def admit_block(self, req_id: bytes, page: int, shape: BlockShape) -> None:
        """Evict values of a block's quota until its extent fits. Raise OverQuota as `admit` does."""
        quota = self._contents.evictor.quotas.named(block_name(req_id))
        if quota is not None:
            size = HEADER_SIZE * shape.pages + shape.nbytes
            block = self._contents.index.block(req_id, page)
            had = quota.sizes.get(block, 0) if block is not None else 0
            index = quota.index_costs.of_block(req_id) if block is None else 0
            self._evict_own(quota, size - had, index, {(req_id, page)})

    def most_index(self, quota: Quota) -> int:
        """Return the bytes of the index that a quota's units may take; no limit without `maxmemory`."""
        quotas, maxmemory = self._contents.evictor.quotas, self._memory.maxmemory
        if not (maxmemory and quota.limit):
            return sys.maxsize
        least = min(_LEAST_INDEX_OF_QUOTA, LEAST_INDEX // 2 // len(quotas.all))
        rest = self._memory.most_index - least * len(quotas.all)
        return least + rest * quota.limit // max(quotas.limits, maxmemory)

    def _new_index(self, key: bytes, block: tuple[bytes, int] | None) -> int:
        """Return the bytes of the index of a new key, and of its block if that is given and does not exist."""
        costs = self._contents.catalogue.costs
        size = costs.of_key(key)
        if block is not None and not self._contents.index.has(*block):
            size += costs.of_block(block[0])
        return size

    def _evict_own(self, quota: Quota, coming: int, index: int, stay: set[Name]) -> None:
        """Evict a quota's values, except `stay`, until `coming` more bytes and `index` more bytes of the index fit, or
        only protected values are left.

        Raise OverQuota if the policy may not evict enough, or if protected values fill the quota's share of the index.
        Only `noeviction` and `volatile-ttl` forbid evictions.
        """
        most_index = self.most_index(quota)
        if quota.lacks(coming) <= 0 and quota.index + index <= most_index:
            return
        rules = self._contents.evictor.rules
        if not rules.evicts_expiring:
            raise OverQuota(quota, most_index if quota.lacks(coming) <= 0 else 0)
        now = monotonic_ms()
        for unit in quota.units.victims():
            name = (unit.req_id, unit.page) if isinstance(unit, Block) else unit
            if name in stay or self._contents.leases.spares(unit, now) or not self._may_go(unit):
                continue
            quota.units.evicted(unit)
            self._contents.evict(unit, quota)
            if quota.lacks(coming) <= 0 and quota.index + index <= most_index:
                return
        if quota.index + index > most_index:
            raise OverQuota(quota, most_index)
        if not rules.evicts_any:
            raise OverQuota(quota)

    def _may_go(self, unit: Unit) -> bool:
        if self._contents.evictor.rules.evicts_any:
            return True
        if not isinstance(unit, Block):
            return bool(self._contents.expires_of(unit))
        # `soonest` alone is not enough: the page that it stands for may have been kept with PERSIST.
        return bool(unit.soonest) and any(map(self._contents.expires_of, unit.page_keys()))

    # -- counting ----------------------------------------------------------------------------------------------------

    def go_on(self) -> bool:
        """Count the values of the next step. Return whether more values are left to count."""
        if self._uncounted is not None and next(self._uncounted, self) is self:
            self._uncounted = None
        return self._uncounted is not None

    def _count_all(self) -> Iterator[None]:
        at_once = max(_PATTERNS_PER_STEP // (_OF_A_VALUE + len(self._contents.evictor.every_quota)), 1)
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
        quota = self._contents.evictor.quota_of(unit)
        if quota is None or unit in quota.sizes:
            return
        quota.resize(unit, self._contents.size_for_quota(unit))
        quota.units.used(unit)
        if isinstance(unit, Block):
            quota.units.follows(self._contents.index.around(unit))
