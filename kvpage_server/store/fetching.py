"""From disk to memory: what is asked for is fetched by threads, all that wait for it are told, and it is warm again.

A long reply need not have what it sends in memory for others, too. Where memory is full, it is *lent* what it reads:
memory for the moment, laid out as it is sent. Only what is read again before as much as memory holds has been lent
meanwhile would have stayed there until then, and is worth what has to leave memory for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias, cast

from kvpage_server.store.arena import Arena, Slot
from kvpage_server.store.behind import WriteBehind
from kvpage_server.store.cold import Cold
from kvpage_server.store.disk import Disk, Outcome
from kvpage_server.store.eviction import Unit
from kvpage_server.store.extent import Extent
from kvpage_server.store.fetch import Fetcher
from kvpage_server.store.index import Block
from kvpage_server.store.known import Known, unit_named
from kvpage_server.store.loan import Loan
from kvpage_server.store.memory import OutOfMemory
from kvpage_server.store.spelling import Spoilt, Value

_AT_ONCE = 64  # values that one reader fetches before it looks for other work

Lent: TypeAlias = dict[Cold, Loan]

log = logging.getLogger("kvpage")


class Fetching(Known):
    """See the module."""

    behind: WriteBehind[Value]
    _fetcher: Fetcher

    def __init__(self, disk: Disk, *, maxmemory: int = 0, policy: str = "allkeys-prefix") -> None:
        super().__init__(disk, maxmemory=maxmemory, policy=policy)
        self._fetching: dict[Cold, list[_Group]] = {}
        self._loans = Arena()  # what is lent: for the moment, beside what memory has
        self._bytes_lent = 0  # so far

    def fetch(self, values: Sequence[Cold], then: Callable[[], None], lent: Lent | None = None) -> None:
        """Have values in memory, those at least that are intact; then call `then`. Raises MemoryError.

        Those that memory need not have for others are in `lent` then.
        """
        if not values:
            then()
            return
        try:
            self.make_room()
        except OutOfMemory:
            log.debug("memory is full; what is read is in it for a moment")
        new = [value for value in values if value not in self._fetching]
        if lent is not None and new and self._are_worth_memory(new):
            lent = None
        group = _Group(len(values), then, lent)
        for value in values:
            self._fetching.setdefault(value, []).append(group)
        if lent is None:
            self._fetch_to_stay(new)
        elif new:
            self._fetch_to_lend(new)

    def sweep(self, now: int, most: int) -> int:
        """See `Keyspace`."""
        self._loans.rest()
        return super().sweep(now, most)

    def _are_worth_memory(self, values: Sequence[Cold]) -> bool:
        """Whether a long reply should have values in memory. If not, they are lent."""
        size = sum(value.size for value in values)
        if not self.maxmemory or self.used_memory + size <= self.maxmemory:
            return True
        since = max(self._bytes_lent - self.maxmemory, 0)
        if any(value.lent >= since for value in values):
            return True
        for value in values:
            value.lent = self._bytes_lent
        self._bytes_lent += size
        return False

    def _fetch_to_stay(self, values: list[Cold]) -> None:
        slots = [self.arena.allocate(value.size) for value in values]
        for start in range(0, len(values), _AT_ONCE):
            some, into = values[start : start + _AT_ONCE], slots[start : start + _AT_ONCE]
            wanted = [(value.name, slot.body) for value, slot in zip(some, into, strict=True)]
            self._fetcher.fetch(wanted, partial(self._fetched, some, into))

    def _fetched(self, values: list[Cold], slots: list[Slot], outcomes: list[Outcome]) -> None:
        self._warm(
            (value, slot) for value, slot, outcome in zip(values, slots, outcomes, strict=True) if outcome is True
        )
        self._tell(values, outcomes)

    def _tell(self, values: list[Cold], outcomes: list[Outcome]) -> None:
        """Values were fetched, or lost: who waits may go on."""
        ready: list[Callable[[], None]] = []
        for value, outcome in zip(values, outcomes, strict=True):
            if outcome is not True:
                self._lose(value, outcome)
            for group in self._fetching.pop(value):
                group.left -= 1
                if not group.left:
                    ready.append(group.then)
        for then in ready:
            then()

    def _fetch_to_lend(self, values: list[Cold]) -> None:
        loan = Loan(self._loans, values)
        wanted = [(value.name, body) for value, body in zip(values, loan.bodies, strict=True)]
        self._fetcher.fetch(wanted, partial(self._lend, loan))

    def _lend(self, loan: Loan, outcomes: list[Outcome]) -> None:
        values, fetching, now = loan.values, self._fetching, self._units.now
        loan.is_intact = all(outcome is True for outcome in outcomes)
        intact = [value for value, outcome in zip(values, outcomes, strict=True) if outcome is True]
        for value in intact:
            value.used = now
            for group in fetching[value]:
                if group.lent is not None:
                    group.lent[value] = loan
        self.counts.fetched += len(intact)
        for unit, value in {value.unit: value for value in intact}.items():
            self._note_lent(unit if isinstance(unit, Block) else value.name[1:])
        self._tell(values, outcomes)

    def _note_lent(self, unit: Unit) -> None:
        """A unit that may be on disk alone was used: what orders those in memory need not know of it."""
        self._on_disk.use(unit_named(unit))
        if unit in self._units:
            self._units.used(unit)
        elif self._quotas is not None and (quota := self._quotas.of(unit)):
            quota.units.used(unit)

    def _warm(self, fetched: Iterable[tuple[Cold, Slot]]) -> None:
        """The bytes of values are there, of those at least that are still the ones that were asked for."""
        entries = self._catalogue.entries
        grown: dict[Unit, int] = {}
        for value, slot in fetched:
            place = self._place_of(value)
            if place is None:
                continue
            if value.header:
                slot.header[:] = value.header
            slot.expires, slot.unit = value.expires, value.unit
            slot.seal()
            if type(place) is bytes:
                entries[place] = slot
            else:
                cast(Extent, place).slot = slot
            unit = value.unit if type(value.unit) is Block else value.name[1:]
            grown[unit] = grown.get(unit, 0) + slot.footprint
            self.counts.fetched += 1
        for unit, size in grown.items():
            if isinstance(unit, Block):
                self._grow(unit, size)
            self._units.used(unit)
            self._on_disk.use(unit_named(unit))

    def _place_of(self, value: Cold) -> bytes | Extent | None:
        """Where a value stands: a key or an extent; None when it is not there any more."""
        if value.name[:1] == b"k":
            key = value.name[1:]
            return key if self._catalogue.entries.get(key) is value else None
        block = cast(Block, value.unit)
        extent = block.extent
        there = extent is not None and extent.slot is value and self.index.block(block.req_id, block.page) is block
        return extent if there else None

    def _lose(self, value: Cold, outcome: Outcome) -> None:
        """A value could not be read, so it is gone."""
        place = self._place_of(value)
        if place is None:
            return
        self.counts.corrupt += 1
        log.error("%r could not be read from disk and is gone: %s", value.name, outcome or "it was not there")
        if isinstance(place, Extent):
            self.remove_block(cast(Block, value.unit), "del", "corrupt")
        elif value.header:
            self.remove_corrupt(place)
        else:
            self._remove(place, "del")
        self.behind.note(value.name, Spoilt(), 0)


class _Group:
    """Values that are fetched together, to be in memory or `lent`."""

    __slots__ = ("left", "lent", "then")

    def __init__(self, left: int, then: Callable[[], None], lent: Lent | None) -> None:
        self.left = left
        self.then = then
        self.lent = lent
