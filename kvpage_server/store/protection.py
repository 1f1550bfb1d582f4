"""What may be leased and pinned: half of memory, and half of the disk's room for values.

What is protected can't make room for other values. So both memory and disk need enough that is not protected. Memory
alone would not do: a store that has just started has all of its values on disk only, so they could all be protected,
and the disk would have to refuse what comes. Units of a quota may take half of it, all others half of what quotas
leave.
"""

from __future__ import annotations

import sys
from typing import cast

from kvpage_server.store.contents import Contents, unit_of
from kvpage_server.store.disk.limit import DiskLimit
from kvpage_server.store.eviction.leases import Bytes
from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.memory.entry import Entry, Page, Text
from kvpage_server.store.memory.index import Block
from kvpage_server.store.memory_limit import MemoryLimit
from kvpage_server.system.durations import monotonic_ms

SHARE = 0.5
PROMISE = 10_000  # milliseconds


class Protection:
    """Leases and pins units, within these limits."""

    def __init__(self, contents: Contents, memory: MemoryLimit, disk: DiskLimit | None) -> None:
        self._contents = contents
        self._memory = memory
        self._disk = disk

    def promise(self, key: bytes, entry: Entry) -> None:
        """Protect a key for a while, since a client was told that it exists and will read it.

        A client of LMCache that is told so by EXISTS, and then misses with GET, waits for ever.
        """
        if (self._memory.maxmemory or self._of_disk) and not isinstance(entry, Text):
            self.lease(unit_of(key, entry), PROMISE)

    def lease(self, unit: Unit, milliseconds: int) -> bool:
        """Protect a unit for that long. False if that would be too much."""
        until = monotonic_ms() + milliseconds
        return self._contents.leases.lease(unit, self.size_of(unit), until, self.most(unit))

    def pin(self, unit: Unit) -> bool:
        """Protect a unit until it is unpinned. False if that would be too much."""
        return self._contents.leases.pin(unit, self.size_of(unit), self.most(unit))

    def size_of(self, unit: Unit) -> Bytes:
        """What a unit takes. If it waits to be written, it will take as much of the disk as of memory."""
        entries = self._contents.catalogue.entries
        memory = unit.footprint if isinstance(unit, Block) else cast(Page, entries[unit]).footprint
        return Bytes(memory, max(memory, self._disk.size_of(unit)) if self._disk is not None else 0)

    def most(self, unit: Unit) -> Bytes:
        """What leases and pins may take together in a unit's quota, or of all units without one."""
        disk = self._of_disk
        return Bytes(self._share(unit, self._memory.maxmemory), self._share(unit, disk) if disk else sys.maxsize)

    @property
    def _of_disk(self) -> int:
        return self._disk.most if self._disk is not None else 0

    def _share(self, unit: Unit, room: int) -> int:
        """A quota's share of the room. Quotas that add up to more than there is are reduced."""
        quotas = self._contents.evictor.quotas
        quota, promised = self._contents.evictor.limit_of(unit), quotas.limits if quotas is not None else 0
        if not room:
            return int(quota.limit * SHARE) if quota is not None else sys.maxsize
        if quota is not None:
            return int(quota.limit * min(1, room / promised) * SHARE)
        return int((room - min(promised, room)) * SHARE)
