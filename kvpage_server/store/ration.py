"""What goes when a quota is used up: its own values, before what comes is stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvpage_server.core import NewPages
from kvpage_server.page import HEADER_SIZE, BlockShape, unix_ms
from kvpage_server.store.eviction.policies import NO_EVICTION, POLICIES, VOLATILE_TTL
from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.eviction.quotas import OverQuota, Quota, Quotas, Rule, block_name, text_size
from kvpage_server.store.memory.entry import Entry, is_page
from kvpage_server.store.memory.index import Block
from kvpage_server.store.room import Room

_AT_ONCE = 20_000  # patterns that names are held against before others have their turn; a value costs as much as some
_OF_A_VALUE = 16

Name = bytes | tuple[bytes, int]  # a string's key; a block's request and page id


class Coming(NamedTuple):
    """A value that is about to be stored: `size` is what it counts as, `block` whose page it is, if it is one."""

    key: bytes
    size: int
    block: tuple[bytes, int] | None = None


class Ration(Room):
    """Keeps the keys of each quota within it."""

    _uncounted: Iterator[None] | None = None  # what is left to do until every value is counted

    @property
    def rationed(self) -> bool:
        """Whether there are limits on what may be stored besides maxmemory."""
        return self._quotas is not None

    @property
    def quotas(self) -> Sequence[Quota]:
        """Every quota, in order."""
        return self._quotas.all if self._quotas is not None else ()

    def set_quotas(self, rules: Sequence[Rule]) -> None:
        """Have these quotas and no others. What there is is counted in steps, when it is much; nothing goes yet."""
        old = {quota.pattern: quota for quota in self.quotas}
        every = self._policies()[0]
        self._quotas = Quotas(rules, every, POLICIES[self._policy]) if rules else None
        self._units = every if self._quotas is None else self._quotas
        for quota in self.quotas:
            if quota.pattern in old:
                quota.evicted = old[quota.pattern].evicted
        self.guards.recount()
        self._uncounted = self._count_all() if rules else None
        self._count_some()

    # -- before something is stored ---------------------------------------------------------------------------------

    def admit_pages(self, batches: Iterable[NewPages]) -> Iterator[tuple[()]]:
        """Make room for pages that are to be stored all or none, in steps. Raises OverLimit: nothing has changed."""
        coming: list[Coming] = []
        for pages in batches if self.rationed else ():
            for block, places in pages.runs(range(len(pages))):
                coming += [Coming(pages.keys[i], HEADER_SIZE + pages.slots[i].size, block) for i in places]
            yield ()
        if coming:
            self.admit(coming)

    def admit(self, coming: Iterable[Coming]) -> None:
        """Make room in their quotas for values. Raises OverQuota: nothing has changed."""
        assert self._quotas is not None
        growth: dict[bytes, int] = {}
        wanted: dict[Quota, int] = {}
        stay: set[Name] = set()
        for key, size, block in coming:
            quota = self._quotas.named(key if block is None else block_name(block[0]))
            if quota is None:
                continue
            grows = size - self._counted(key, self._catalogue.get(key), as_page=block is not None)
            wanted[quota] = wanted.get(quota, 0) + grows - growth.get(key, 0)
            growth[key] = grows
            stay.add(key if block is None else block)
        for quota, lacking in wanted.items():
            self._make_way(quota, lacking, stay)

    def admit_block(self, req_id: bytes, page: int, shape: BlockShape) -> None:
        """The same for a block that is stored whole."""
        quota = self._quotas.named(block_name(req_id)) if self._quotas is not None else None
        if quota is not None:
            size = HEADER_SIZE * shape.pages + shape.nbytes
            block = self.index.block(req_id, page)
            had = quota.sizes.get(block, 0) if block is not None else 0
            self._make_way(quota, size - had, {(req_id, page)})

    @staticmethod
    def _counted(key: bytes, entry: Entry | None, *, as_page: bool) -> int:
        if entry is None or is_page(entry) != as_page:
            return 0
        return HEADER_SIZE + entry.size if as_page else text_size(key, entry.size)

    def _make_way(self, quota: Quota, coming: int, stay: set[Name]) -> None:
        """Evict what is a quota's own until so many bytes fit in, or nothing is left but what is to stay."""
        if quota.lacks(coming) <= 0:
            return
        if self._policy == NO_EVICTION:
            raise OverQuota(quota)
        now = unix_ms()
        for unit in quota.units.victims():
            name = (unit.req_id, unit.page) if isinstance(unit, Block) else unit
            if name in stay or self.guards.spares(unit, now) or not self._may_go(unit):
                continue
            quota.units.evicted(unit)
            self._evict(unit, quota)
            if quota.lacks(coming) <= 0:
                return
        if self._policy == VOLATILE_TTL:
            raise OverQuota(quota)

    def _may_go(self, unit: Unit) -> bool:
        if self._policy != VOLATILE_TTL:
            return True
        return bool(unit.soonest if isinstance(unit, Block) else self.expires_of(unit))

    # -- counting ----------------------------------------------------------------------------------------------------

    def _size_of(self, unit: Unit) -> int:
        """What a unit counts as. O(1) for strings and blocks that were stored whole, O(pages) for others."""
        if not isinstance(unit, Block):
            return self._counted(unit, self._catalogue.entries[unit], as_page=False)
        if unit.extent is not None:
            return HEADER_SIZE * unit.pages + unit.extent.slot.size
        entries = self._catalogue.entries
        return sum(HEADER_SIZE + entries[key].size for key in unit.page_keys())

    def _grew(self, block: Block, size: int) -> None:
        """Pages of a block take so many bytes more."""
        quota = self._quotas.of(block) if self._quotas is not None else None
        if quota is not None:
            known = block in quota.sizes
            quota.resize(block, quota.sizes[block] + size if known else self._size_of(block))

    def _go_on(self) -> bool:
        """Do a part of what is done in steps; whether there is more."""
        counts, hands_over = self._count_some(), self._hand_over()
        return counts or hands_over

    def _count_some(self) -> bool:
        if self._uncounted is not None and next(self._uncounted, self) is self:
            self._uncounted = None
        return self._uncounted is not None

    def _count_all(self) -> Iterator[None]:
        at_once = max(_AT_ONCE // (_OF_A_VALUE + len(self.quotas)), 1)
        for number, unit in enumerate(self._every_unit(), start=1):
            self._count(unit)
            if not number % at_once:
                yield

    def _every_unit(self) -> Iterator[Unit]:
        """What there was when it began, if it is still there; what comes meanwhile is counted as it comes."""
        for key in list(self._catalogue.entries):
            entry = self._catalogue.entries.get(key)
            if entry is not None and not is_page(entry):
                yield key
        for req_id in list(self.index.requests):
            yield from self.index.of(req_id)

    def _count(self, unit: Unit) -> None:
        quota = self._quotas.of(unit) if self._quotas is not None else None
        if quota is None or unit in quota.sizes:
            return
        quota.resize(unit, self._size_of(unit))
        quota.units.used(unit)
        if isinstance(unit, Block):
            quota.units.follows(self.index.around(unit))
