"""Leases and pins: units that must not be evicted, for a while or until they are unpinned.

A lease has no owner, so it is never shortened: one client can't end a lease that another one relies on. Leased and
pinned units together may take `SHARE` of their quota, or, without a quota, `SHARE` of the memory that is in no quota.
Otherwise there would be nothing to evict for new pages. Leases and pins do not prevent deletion and expiry. Costs:
O(log n) for a lease, O(1) for everything else.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from kvpage_server.store.eviction.policy import Unit

SHARE = 0.5  # of a quota, or of what quotas leave of maxmemory
_AT_ONCE = 1000  # leases that are let go of
LONGEST_LEASE = 3_600_000  # milliseconds; to protect something for longer, pin it


@dataclass(slots=True)
class Lease:
    """What protects a unit of `size` bytes: a lease `until` a unix time in milliseconds (0: none), or a pin."""

    size: int
    until: int = 0
    pinned: bool = False
    account: object = None


_NONE = Lease(0)


class Leases:
    """Every protected unit. Leases that ran out count until `settle`.

    `account_of` says whose a unit is: what is protected is counted for each by itself.
    """

    def __init__(self, account_of: Callable[[Unit], object]) -> None:
        self._account_of = account_of
        self._bytes: dict[object, int] = {}  # of every account
        self._leases: dict[Unit, Lease] = {}
        self._due: list[tuple[int, int, Unit, Lease]] = []  # heap; one entry a lease that has a lease
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def bytes(self) -> int:
        """The bytes of all protected units."""
        return sum(self._bytes.values())

    def beside(self, unit: Unit) -> int:
        """The bytes of all protected units of the same account."""
        return self._bytes.get(self._account_of(unit), 0)

    def recount(self) -> None:
        """Units may belong to other accounts now."""
        self._bytes.clear()
        for unit, lease in self._leases.items():
            lease.account = self._account_of(unit)
            self._count(lease, lease.size)

    def _count(self, lease: Lease, size: int) -> None:
        left = self._bytes.get(lease.account, 0) + size
        if left:
            self._bytes[lease.account] = left
        else:
            self._bytes.pop(lease.account, None)

    def of(self, unit: Unit) -> Lease:
        """The lease of a unit; an empty one if the unit is not protected."""
        return self._leases.get(unit, _NONE)

    def spares(self, unit: Unit, now: int) -> bool:
        """Whether a unit is protected."""
        lease = self._leases.get(unit)
        return lease is not None and (lease.pinned or lease.until > now)

    def lease(self, unit: Unit, size: int, until: int, most: int) -> bool:
        """Protect a unit of `size` bytes until then. False if its account would then have more than `most`."""
        lease = self._lease(unit, size, most)
        if lease is None:
            return False
        if until > lease.until:
            if not lease.until:
                heapq.heappush(self._due, (until, next(self._tickets), unit, lease))
            lease.until = until
        return True

    def pin(self, unit: Unit, size: int, most: int) -> bool:
        """Protect a unit until it is unpinned. False as for `lease`."""
        lease = self._lease(unit, size, most)
        if lease is None:
            return False
        lease.pinned = True
        return True

    def _lease(self, unit: Unit, size: int, most: int) -> Lease | None:
        lease = self._leases.get(unit)
        if lease is None and self.beside(unit) + size <= most:
            lease = self._leases[unit] = Lease(size, account=self._account_of(unit))
            self._count(lease, size)
        return lease

    def unpin(self, unit: Unit) -> bool:
        """End a pin, if there was one; a lease goes on."""
        lease = self._leases.get(unit)
        if lease is None or not lease.pinned:
            return False
        lease.pinned = False
        if not lease.until:
            self.removed(unit)
        return True

    def grew(self, unit: Unit, size: int) -> None:
        """A unit occupies `size` bytes more (or less)."""
        lease = self._leases.get(unit)
        if lease is not None:
            lease.size += size
            self._count(lease, size)

    def removed(self, unit: Unit) -> None:
        """Remove a unit that is gone or not protected any more."""
        lease = self._leases.pop(unit, None)
        if lease is not None:
            self._count(lease, -lease.size)

    def settle(self, now: int) -> None:
        """Remove leases that have ended, a limited number each time."""
        for _ in range(_AT_ONCE):
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
