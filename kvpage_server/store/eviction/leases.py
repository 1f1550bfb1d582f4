"""Leases and pins: units that must not be evicted, for a while or until they are unpinned.

A lease has no owner, so it is never shortened: one client can't end a lease that another one relies on. The protected
bytes are limited, in memory and on disk (see `protection`), so that there is always something to evict. Leases and pins
do not prevent deletion and expiry. Costs: O(log n) for a lease, O(1) for everything else.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvpage_server.store.eviction.queues import Unit

_LEASES_PER_STEP = 1000  # leases that are removed at once
LONGEST_LEASE = 3_600_000  # milliseconds; to protect something for longer, pin it


class Bytes(NamedTuple):
    """Bytes that units take, or may take."""

    memory: int
    disk: int


@dataclass(slots=True)
class Lease:
    """Protection of a unit: a lease `until` a time in monotonic milliseconds (0: none), or a pin.

    `size` is its current size in memory, `on_disk` its size on disk when it was first protected.
    """

    size: int
    on_disk: int
    until: int = 0
    pinned: bool = False
    account: object = None


_NONE = Lease(0, 0)
_NOTHING = Bytes(0, 0)


class Leases:
    """Every protected unit. Expired leases count until `settle`.

    `account_of` says to which account a unit belongs. Each account has a limit of its own.
    """

    def __init__(self, account_of: Callable[[Unit], object]) -> None:
        self._account_of = account_of
        self._bytes: dict[object, Bytes] = {}  # of each account
        self._leases: dict[Unit, Lease] = {}
        self._due: list[tuple[int, int, Unit, Lease]] = []  # heap; one entry for each unit with a lease
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._leases

    @property
    def bytes(self) -> int:
        """The bytes of memory of all protected units."""
        return sum(size.memory for size in self._bytes.values())

    def beside(self, unit: Unit) -> Bytes:
        """Return the bytes of all protected units of the same account."""
        return self._bytes.get(self._account_of(unit), _NOTHING)

    def recount(self) -> None:
        """Count again, since units may belong to other accounts now."""
        self._bytes.clear()
        for unit, lease in self._leases.items():
            lease.account = self._account_of(unit)
            self._count(lease, lease.size, lease.on_disk)

    def _count(self, lease: Lease, size: int, on_disk: int = 0) -> None:
        had = self._bytes.get(lease.account, _NOTHING)
        left = Bytes(had.memory + size, had.disk + on_disk)
        if any(left):
            self._bytes[lease.account] = left
        else:
            self._bytes.pop(lease.account, None)

    def of(self, unit: Unit) -> Lease:
        """Return the lease of a unit; an empty one if it is not protected."""
        return self._leases.get(unit, _NONE)

    def spares(self, unit: Unit, now: int) -> bool:
        """Return whether a unit is protected."""
        lease = self._leases.get(unit)
        return lease is not None and (lease.pinned or lease.until > now)

    def lease(self, unit: Unit, size: Bytes, until: int, most: Bytes) -> bool:
        """Protect a unit of `size` bytes until then. False if its account would have more than `most`."""
        lease = self._lease(unit, size, most)
        if lease is None:
            return False
        if until > lease.until:
            if not lease.until:
                heapq.heappush(self._due, (until, next(self._tickets), unit, lease))
            lease.until = until
        return True

    def pin(self, unit: Unit, size: Bytes, most: Bytes) -> bool:
        """Protect a unit until it is unpinned. False as for `lease`."""
        lease = self._lease(unit, size, most)
        if lease is None:
            return False
        lease.pinned = True
        return True

    def _lease(self, unit: Unit, size: Bytes, most: Bytes) -> Lease | None:
        lease = self._leases.get(unit)
        if lease is None and self.have_room(unit, size, most):
            lease = self._leases[unit] = Lease(*size, account=self._account_of(unit))
            self._count(lease, *size)
        return lease

    def have_room(self, unit: Unit, size: Bytes, most: Bytes) -> bool:
        """Return whether a unit's account has room for it."""
        beside = self.beside(unit)
        return beside.memory + size.memory <= most.memory and beside.disk + size.disk <= most.disk

    def unpin(self, unit: Unit) -> bool:
        """End a pin, if there is one. A lease stays."""
        lease = self._leases.get(unit)
        if lease is None or not lease.pinned:
            return False
        lease.pinned = False
        if not lease.until:
            self.removed(unit)
        return True

    def grew(self, unit: Unit, size: int) -> None:
        """Count a unit's growth by `size` bytes, which may be negative."""
        lease = self._leases.get(unit)
        if lease is not None:
            lease.size += size
            self._count(lease, size)

    def removed(self, unit: Unit) -> None:
        """Forget a unit that was removed or is no longer protected."""
        lease = self._leases.pop(unit, None)
        if lease is not None:
            self._count(lease, -lease.size, -lease.on_disk)

    def settle(self, now: int) -> None:
        """Remove leases that have ended, a limited number each time."""
        for _ in range(_LEASES_PER_STEP):
            if not self._due or self._due[0][0] > now:
                return
            _, ticket, unit, lease = heapq.heappop(self._due)
            if self._leases.get(unit) is not lease:
                continue
            if lease.until > now:
                heapq.heappush(self._due, (lease.until, ticket, unit, lease))
                continue
            lease.until = 0
            if not lease.pinned:
                self.removed(unit)

    def clear(self) -> None:
        self._leases.clear()
        self._due.clear()
        self._bytes.clear()
