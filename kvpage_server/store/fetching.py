"""From disk to memory: what is asked for is fetched by threads, all that wait for it are told, and it is warm again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import cast

from kvpage_server.store.arena import Slot
from kvpage_server.store.behind import WriteBehind
from kvpage_server.store.cold import Cold
from kvpage_server.store.disk import Disk, Outcome
from kvpage_server.store.eviction import Unit
from kvpage_server.store.extent import Extent
from kvpage_server.store.fetch import Fetcher
from kvpage_server.store.index import Block
from kvpage_server.store.known import Known, unit_named
from kvpage_server.store.memory import OutOfMemory
from kvpage_server.store.spelling import Spoilt, Value

_MOST_AHEAD = 16 * 1024**2  # bytes that are fetched before somebody waits for them
_AT_ONCE = 64  # values that one reader fetches before it looks for other work

log = logging.getLogger("kvpage")


class Fetching(Known):
    """See the module."""

    behind: WriteBehind[Value]
    _fetcher: Fetcher

    def __init__(self, disk: Disk, *, maxmemory: int = 0, policy: str = "allkeys-prefix") -> None:
        super().__init__(disk, maxmemory=maxmemory, policy=policy)
        self._fetching: dict[Cold, list[_Group]] = {}

    def fetch_some(self, values: Sequence[Cold]) -> None:
        """Have the first of some values in memory soon, as many as `_MOST_AHEAD` bytes."""
        sizes = accumulate(value.size for value in values)
        self.fetch([value for value, size in zip(values, sizes, strict=True) if size <= _MOST_AHEAD], _nothing)

    def fetch(self, values: Sequence[Cold], then: Callable[[], None]) -> None:
        """Have values in memory, those at least that are intact; then call `then`. Raises MemoryError."""
        if not values:
            then()
            return
        try:
            self.make_room()
        except OutOfMemory:
            log.debug("memory is full; what is read is in it for a moment")
        new = [value for value in values if value not in self._fetching]
        slots = [self.arena.allocate(value.size) for value in new]
        group = _Group(len(values), then)
        for value in values:
            self._fetching.setdefault(value, []).append(group)
        for start in range(0, len(new), _AT_ONCE):
            some, into = new[start : start + _AT_ONCE], slots[start : start + _AT_ONCE]
            wanted = [(value.name, slot.body) for value, slot in zip(some, into, strict=True)]
            self._fetcher.fetch(wanted, partial(self._fetched, some, into))

    def _fetched(self, values: list[Cold], slots: list[Slot], outcomes: list[Outcome]) -> None:
        ready: list[Callable[[], None]] = []
        self._warm(
            (value, slot) for value, slot, outcome in zip(values, slots, outcomes, strict=True) if outcome is True
        )
        for value, outcome in zip(values, outcomes, strict=True):
            if outcome is not True:
                self._lose(value, outcome)
            for group in self._fetching.pop(value):
                group.left -= 1
                if not group.left:
                    ready.append(group.then)
        for then in ready:
            then()

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


def _nothing() -> None:
    """Nobody waits."""


class _Group:
    """Values that are fetched together."""

    __slots__ = ("left", "then")

    def __init__(self, left: int, then: Callable[[], None]) -> None:
        self.left = left
        self.then = then
