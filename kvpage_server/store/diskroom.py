"""What goes when the disk is full, and what is refused then: the policy holds for the store as a whole.

Everything that is stored goes to disk sooner or later, so the store has room for what the disk has. Where `maxdisk`
limits that, room is made before something is stored: under the `allkeys` policies what lies on disk alone goes first,
what was read or left memory the longest ago before the others, then what memory has, too; under `volatile-ttl` what
expires soonest; under `noeviction` nothing, and what has no room is refused. What is leased or pinned stays. With
`appendfsync no`, what memory has is not evicted for that: it leaves the disk alone, and nothing was promised of it.

Where others fill the disk, what memory has stays where it is, whatever the policy: room is made of what lies on disk
alone. When there is no more of that, writing fails until there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from kvpage_server.core import Slot
from kvpage_server.page import HEADER_SIZE, unix_ms
from kvpage_server.store.disk import sheet
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.encoding import ShortText
from kvpage_server.store.disk.lmdb_file import DiskFull, MaxDisk
from kvpage_server.store.disk.record import footprint, name_of_block, name_of_key
from kvpage_server.store.eviction.policies import NO_EVICTION, VOLATILE_TTL
from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.eviction.quotas import OverLimit
from kvpage_server.store.fetching import Fetching
from kvpage_server.store.known import unit_named
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, page_named
from kvpage_server.store.memory.extent import Extent, ExtentPage
from kvpage_server.store.memory.index import Block
from kvpage_server.store.ration import Coming

_SHARE_OF_DISK = 0.75  # of maxdisk, for values: LMDB needs room for what it replaces
_MOST_PASSED = 4096  # units that stay, before no more are looked at

Sizes = dict[bytes, int]  # footprints on disk, by name


class DiskUsedUp(OverLimit):
    """A write does not fit on the disk, and there is nothing that the policy may evict for it."""

    def __init__(self, maxdisk: int, size: int) -> None:
        super().__init__(
            f"command not allowed when used disk > 'maxdisk': {int(maxdisk * _SHARE_OF_DISK)} bytes of {maxdisk} are "
            f"for values, and {size} more do not fit."
        )


class DiskRoom(Fetching):
    """See the module. `maxdisk` is in bytes, 0 for no limit."""

    def __init__(self, disk: Disk, *, maxmemory: int = 0, policy: str = "allkeys-prefix", maxdisk: int = 0) -> None:
        super().__init__(disk, maxmemory=maxmemory, policy=policy)
        self.maxdisk = maxdisk
        self._unproven: set[Unit] = set()  # written and not used since: not for the disk yet

    @property
    def keeps_all(self) -> bool:
        """Whether everything that is stored goes to disk, and not only what is used again."""
        return self.behind.mode != "no" or self._policy in (NO_EVICTION, VOLATILE_TTL)

    # -- before something is stored --------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        """Bytes of the disk that values may take."""
        return int(self.maxdisk * _SHARE_OF_DISK)

    @property
    def rationed(self) -> bool:
        """Whether there are limits on what may be stored besides maxmemory."""
        return self.maxdisk > 0 or super().rationed

    def admit(self, coming: Iterable[Coming]) -> None:
        """Make room for values, in their quotas and on the disk. Raises OverLimit: nothing has changed."""
        coming = list(coming)
        if self.maxdisk and self.keeps_all and self._on_disk.expected + sum(map(_takes_coming, coming)) > self._most:
            sizes = {name_of_key(value.key): _takes_coming(value) for value in coming}
            blocks = {name_of_block(*value.block) for value in coming if value.block is not None}
            self._have_room(sizes, {*sizes, *blocks})
        if self._quotas is not None:
            super().admit(coming)

    def _admit_block_on_disk(self, req_id: bytes, page: int, extent: Extent) -> None:
        name, block = name_of_block(req_id, page), self.index.block(req_id, page)
        sizes = dict.fromkeys(self._names_of(block), 0) if block is not None else {}
        sizes[name] = footprint(name, extent.shape.nbytes)
        self._have_room(sizes, {name})

    def _fits(self, values: Iterable[tuple[bytes, Entry | Extent]]) -> bool:
        """Whether there is room on the disk for values that memory has; it is made if it can be."""
        if not self.maxdisk:
            return True
        sizes = {name: takes(name, value) for name, value in values if not isinstance(value, Cold)}
        try:
            self._have_room(sizes, {self._unit_of(name) for name in sizes})
        except DiskUsedUp:
            return False
        return True

    def _have_room(self, sizes: Sizes, stay: Collection[bytes]) -> None:
        """Have room for values of those sizes, without the units that are to `stay`. Raises DiskUsedUp."""
        on_disk, most = self._on_disk, self._most
        growth = sum(sizes.values()) - sum(map(on_disk.size_of, sizes))
        lacking = min(on_disk.expected + growth - most, 2 * growth)  # if maxdisk was lowered: step by step
        if lacking <= 0:
            return
        if growth > most or self._policy == NO_EVICTION or not self._free(lacking, stay, alone=False):
            raise DiskUsedUp(self.maxdisk, growth)

    # -- what goes -------------------------------------------------------------------------------------------------

    def _give_up(self, error: DiskFull, size: int) -> None:
        """Have units leave the disk, which is full, for as many bytes."""
        if self._policy != NO_EVICTION:
            self._free(size, (), alone=not isinstance(error, MaxDisk))

    def _free(self, size: int, stay: Collection[bytes], *, alone: bool) -> bool:
        """Have units leave the disk until there are so many bytes more; whether there are."""
        on_disk = self._on_disk
        there, aim = on_disk.used, on_disk.used - size
        for unit in self._going(alone=alone):
            name, names = unit_named(unit), [one for one in self._names_of(unit) if self._is_stored(one)]
            if name in stay or not names:
                continue
            there -= sum(map(on_disk.size_of, names))
            on_disk.remove_unit(name)
            if self.keeps_all or any(map(self._is_cold, names)):
                self.counts.evicted += len(names)
                self.evict(unit)
            else:
                self._leave_to_memory(unit, names)
            if there <= aim:
                return True
        return False

    def _leave_to_memory(self, unit: Unit, names: Iterable[bytes]) -> None:
        self._unproven.add(unit)
        for name in names:
            self._unstore(name)

    def _going(self, *, alone: bool) -> Iterator[Unit]:
        """The units on disk in the order they go; those that memory has not, if they have to lie there `alone`."""
        now = unix_ms()
        self.guards.settle(now)
        units = self._soonest(alone=alone) if self._policy == VOLATILE_TTL else self._oldest(alone=alone)
        for unit in units:
            if unit not in self.holds and not self.guards.spares(unit, now):
                yield unit

    def _soonest(self, *, alone: bool) -> Iterator[Unit]:
        passed = 0
        for unit in self._victims():
            if not alone or self._on_disk.lies_alone(unit_named(unit)):
                yield unit
            passed += self._exists(unit)
            if passed == _MOST_PASSED:
                return

    def _oldest(self, *, alone: bool) -> Iterator[Unit]:
        on_disk = self._on_disk
        may_pass = min(_MOST_PASSED, on_disk.units)
        while may_pass > 0 and (name := on_disk.first(alone=alone)) is not None:
            unit = self._block_named(name) if name[:1] == b"b" else name[1:]
            if unit is None or not self._exists(unit):
                on_disk.remove_unit(name)
                continue
            if not any(map(self.behind.waits, self._names_of(unit))):
                yield unit
            if self._exists(unit):  # it waits to be written again, or it is spared
                on_disk.use(name)
                may_pass -= 1

    def _exists(self, unit: Unit) -> bool:
        if isinstance(unit, Block):
            return self.index.has(unit.req_id, unit.page)
        return unit in self._catalogue.entries

    def _is_gone(self, name: bytes) -> bool:
        """Whether the store has nothing of that name, nor the block that it was a part of."""
        if name[:1] == b"b":
            req_id, _, number = name[1:].rpartition(b":")
            return not self.index.has(req_id, int(number))
        page = page_named(name[1:])
        return name[1:] not in self._catalogue.entries and (page is None or not self.index.has(page.req_id, page.page))

    def _unit_of(self, name: bytes) -> bytes:
        """What the unit is called that a value belongs to."""
        entry = None if name[:1] == b"b" else self._catalogue.entries[name[1:]]
        return name if entry is None else unit_named(self._unit(name[1:], entry))

    def _is_cold(self, name: bytes) -> bool:
        value = self._value_of(name)
        return isinstance(value.slot if isinstance(value, Extent) else value, Cold)

    def _is_stored(self, name: bytes) -> bool:
        """Whether a value is on disk, or on its way there."""
        return name in self._on_disk or self.behind.waits(name)

    def _unstore(self, name: bytes) -> None:
        """A value is to leave the disk."""
        if self._is_stored(name):
            if self.maxdisk:
                self._on_disk.expect(name, 0)
            self.behind.note(name, None, 0)


def takes(name: bytes, value: Entry | Extent | ShortText) -> int:
    """Bytes of the disk that a value takes, nearly."""
    if (type(value) is Slot or type(value) is ExtentPage) and type(value.unit) is Block:
        return sheet.footprint_of(value.size)
    if isinstance(value, tuple):
        return footprint(name, len(value[0]))
    return footprint(name, value.slot.size if isinstance(value, Extent) else value.size)


def _takes_coming(value: Coming) -> int:
    if value.block is not None:
        return sheet.footprint_of(value.size - HEADER_SIZE)
    return footprint(name_of_key(value.key), value.size - len(value.key) - TEXT_OVERHEAD)
