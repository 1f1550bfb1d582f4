"""The quota limit: a quota's own values are evicted before others are stored.

When quotas are set, the values that there are get counted in steps. Until that is done, a quota knows only some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, cast

from kvpage_server.page import HEADER_SIZE, BlockShape
from kvpage_server.store.contents import Contents
from kvpage_server.store.eviction.policies import NO_EVICTION, VOLATILE_TTL
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.eviction.quotas import OverQuota, Quota, Rule, block_name, text_size
from kvpage_server.store.memory.entry import Entry, is_page
from kvpage_server.store.memory.index import Block
from kvpage_server.store.reservation import ReservationParts
from kvpage_server.system.text import monotonic_ms

_PATTERNS_PER_STEP = (
    20_000  # patterns that names are held against before others have their turn; a value costs as much as some
)
_OF_A_VALUE = 16

Name = bytes | tuple[bytes, int]  # a string's key; a block's request and page id


class PendingWrite(NamedTuple):
    """A value that is about to be stored. `size` is its size for the limit, `block` the block of a page."""

    key: bytes
    size: int
    block: tuple[bytes, int] | None = None


class QuotaLimit:
    """Keeps the keys of each quota within it."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._uncounted: Iterator[None] | None = None  # the rest of the counting, if it is not complete

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Replace the quotas. Counting many values takes steps; nothing is evicted yet."""
        self._contents.evictor.set_quotas(rules)
        self._contents.leases.recount()
        self._uncounted = self._count_all() if rules else None
        self.go_on()

    # -- before something is stored ---------------------------------------------------------------------------------

    def admit(self, parts: Iterable[Iterable[PendingWrite]]) -> list[ReservationParts]:
        """Make room in their quotas for values. Return the reservation of each part. Raises OverQuota if nothing was
        changed.
        """
        quotas = self._contents.evictor.quotas
        assert quotas is not None
        growth: dict[bytes, int] = {}
        taken: list[dict[Quota, int]] = []
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
                growth[key] = grows
                stay.add(key if block is None else block)
                if block is None and entry is not None and is_page(entry):  # whose key will be a string's
                    stay.add((cast(Block, entry.unit).req_id, cast(Block, entry.unit).page))
        for quota in dict.fromkeys(chain.from_iterable(taken)):
            self._evict_own(quota, sum(wanted.get(quota, 0) for wanted in taken), stay)
        return [wanted.items() for wanted in taken]

    def admit_block(self, req_id: bytes, page: int, shape: BlockShape) -> None:
        """Admit a block that is stored whole."""
        quotas = self._contents.evictor.quotas
        quota = quotas.named(block_name(req_id)) if quotas is not None else None
        if quota is not None:
            size = HEADER_SIZE * shape.pages + shape.nbytes
            block = self._contents.index.block(req_id, page)
            had = quota.sizes.get(block, 0) if block is not None else 0
            self._evict_own(quota, size - had, {(req_id, page)})

    def _evict_own(self, quota: Quota, coming: int, stay: set[Name]) -> None:
        """Evict a quota's own values until `coming` bytes fit, or only protected values are left."""
        if quota.lacks(coming) <= 0:
            return
        policy = self._contents.evictor.policy
        if policy == NO_EVICTION:
            raise OverQuota(quota)
        now = monotonic_ms()
        for unit in quota.units.victims():
            name = (unit.req_id, unit.page) if isinstance(unit, Block) else unit
            if name in stay or self._contents.leases.spares(unit, now) or not self._may_go(unit):
                continue
            quota.units.evicted(unit)
            self._contents.evict(unit, quota)
            if quota.lacks(coming) <= 0:
                return
        if policy == VOLATILE_TTL:
            raise OverQuota(quota)

    def _may_go(self, unit: Unit) -> bool:
        if self._contents.evictor.policy != VOLATILE_TTL:
            return True
        if not isinstance(unit, Block):
            return bool(self._contents.expires_of(unit))
        return bool(unit.soonest) and any(map(self._contents.expires_of, unit.page_keys()))  # or the last one was kept

    # -- counting ----------------------------------------------------------------------------------------------------

    def size_of(self, unit: Unit) -> int:
        """Return the size of a unit for its quota. O(1) for strings and blocks stored whole, O(pages) for others."""
        entries = self._contents.catalogue.entries
        if not isinstance(unit, Block):
            return counted(unit, entries[unit], as_page=False)
        if unit.extent is not None:
            return HEADER_SIZE * unit.pages + unit.extent.slot.size
        return sum(HEADER_SIZE + entries[key].size for key in unit.page_keys())

    def grew(self, block: Block, size: int) -> None:
        """Count the growth of a block's pages, in bytes."""
        quota = self._contents.evictor.quota_of(block)
        if quota is not None:
            known = block in quota.sizes
            quota.resize(block, quota.sizes[block] + size if known else self.size_of(block))

    def go_on(self) -> bool:
        """Count some more values. Returns whether there are more."""
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
        """Yield the units that there were at the start of the counting and that still exist. New units are counted when
        they are stored.

        Between two units anything may happen, a flush too. So only names are kept, and looked up when it is their turn.
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
        quota.resize(unit, self.size_of(unit))
        quota.units.used(unit)
        if isinstance(unit, Block):
            quota.units.follows(self._contents.index.around(unit))


def counted(key: bytes, entry: Entry | None, *, as_page: bool) -> int:
    """Return the size of a value for its quota, if it is of this kind."""
    if entry is None or is_page(entry) != as_page:
        return 0
    return HEADER_SIZE + entry.size if as_page else text_size(key, entry.size)
