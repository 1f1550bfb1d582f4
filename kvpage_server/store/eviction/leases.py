"""Leases and pins, which protect units from eviction for a limited time or until they are unpinned.

A lease belongs to no client and is never shortened: a client cannot end a lease that another client relies on. The
protected bytes are limited in memory and on disk (see `Protection` in `keyspace`), so that some units can always be
evicted. Leases and pins do not prevent deletion and expiry. Costs: O(log leases) for a lease; O(1) for a pin, a lookup
and a change of size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvpage_server.store.eviction.queues import Unit

_LEASES_PER_STEP = 1000  # entries of the heap that one call of `settle` processes
LONGEST_LEASE = 3_600_000  # milliseconds; to protect a unit for longer, a client pins it


class Bytes(NamedTuple):
    """A size in bytes of memory, on disk, and of memory in the index, or a limit of each."""

    memory: int
    disk: int
    in_index: int = 0


@dataclass(slots=True)
class Lease:
    """Protection of a unit: a lease, a pin, or both."""

    size: int  # bytes of the unit in memory now
    on_disk: int  # bytes of the unit on disk when it was first protected
    in_index: int = 0  # bytes of the unit in the index when it was first protected
    until: int = 0  # the lease's end in monotonic milliseconds; 0 without a lease
    pinned: bool = False
    account: object = None  # the account whose limit the unit's bytes count against


_NONE = Lease(0, 0)
_NOTHING = Bytes(0, 0)


class Leases:
    """All leases and pins. A lease that has ended counts until `settle` removes it.

    `account_of` returns the account of a unit: its quota, or None. Each account has a limit of its own.
    """

    def __init__(self, account_of: Callable[[Unit], object]) -> None:
        self._account_of = account_of
        self._bytes: dict[object, Bytes] = {}  # protected bytes by account; no entry for 0 bytes
        self._leases: dict[Unit, Lease] = {}
        # Heap of (end, ticket, unit, lease), with one entry for each lease. A lease that was extended keeps its entry
        # with the earlier end, and gets a new one then. An entry is stale if the unit's protection was removed. Tickets
        # are consecutive numbers, which make entries with the same end comparable.
        self._due: list[tuple[int, int, Unit, Lease]] = []
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._leases

    @property
    def bytes(self) -> int:
        """Bytes of memory of all protected units."""
        return sum(size.memory for size in self._bytes.values())

    def protected_bytes(self, unit: Unit) -> Bytes:
        """Return the bytes of all protected units of a unit's account."""
        return self._bytes.get(self._account_of(unit), _NOTHING)

    def recount(self) -> None:
        """Count all protected bytes again, because the accounts of units have changed."""
        self._bytes.clear()
        for unit, lease in self._leases.items():
            lease.account = self._account_of(unit)
            self._count(lease, lease.size, lease.on_disk, lease.in_index)

    def _count(self, lease: Lease, size: int, on_disk: int = 0, in_index: int = 0) -> None:
        """Add bytes of memory, disk and index, which may be negative, to a lease's account."""
        had = self._bytes.get(lease.account, _NOTHING)
        left = Bytes(had.memory + size, had.disk + on_disk, had.in_index + in_index)
        if any(left):
            self._bytes[lease.account] = left
        else:
            self._bytes.pop(lease.account, None)

    def of(self, unit: Unit) -> Lease:
        """Return the lease of a unit; an empty one if it is not protected."""
        return self._leases.get(unit, _NONE)

    def spares(self, unit: Unit, now: int) -> bool:
        """Return whether a unit is protected at `now`, in monotonic milliseconds."""
        lease = self._leases.get(unit)
        return lease is not None and (lease.pinned or lease.until > now)

    def lease(self, unit: Unit, size: Bytes, until: int, most: Bytes) -> bool:
        """Protect a unit of `size` bytes until a time in monotonic milliseconds.

        A lease that ends later stays as it is. Return False if the account would exceed `most` protected bytes.
        """
        lease = self._lease(unit, size, most)
        if lease is None:
            return False
        if until > lease.until:
            if not lease.until:
                heapq.heappush(self._due, (until, next(self._tickets), unit, lease))
            lease.until = until
        return True

    def pin(self, unit: Unit, size: Bytes, most: Bytes) -> bool:
        """Protect a unit until it is unpinned. Return False as `lease` does."""
        lease = self._lease(unit, size, most)
        if lease is None:
            return False
        lease.pinned = True
        return True

    def _lease(self, unit: Unit, size: Bytes, most: Bytes) -> Lease | None:
        """Return a unit's `Lease`, which is created if it does not exist; None if it would exceed the limit."""
        lease = self._leases.get(unit)
        if lease is None and self.have_room(unit, size, most):
            lease = self._leases[unit] = Lease(*size, account=self._account_of(unit))
            self._count(lease, *size)
        return lease

    def have_room(self, unit: Unit, size: Bytes, most: Bytes) -> bool:
        """Return whether a unit's account may protect `size` more bytes within the limit `most`."""
        beside = self.protected_bytes(unit)
        return all(had + more <= limit for had, more, limit in zip(beside, size, most, strict=True))

    def unpin(self, unit: Unit) -> bool:
        """Remove a pin. Return whether the unit was pinned. A lease of the unit stays."""
        lease = self._leases.get(unit)
        if lease is None or not lease.pinned:
            return False
        lease.pinned = False
        if not lease.until:
            self.removed(unit)
        return True

    def grew(self, unit: Unit, size: int) -> None:
        """Add `size` bytes of memory, which may be negative, to a unit if it is protected."""
        lease = self._leases.get(unit)
        if lease is not None:
            lease.size += size
            self._count(lease, size)

    def removed(self, unit: Unit) -> None:
        """Remove the protection of a unit, if it has one."""
        lease = self._leases.pop(unit, None)
        if lease is not None:
            self._count(lease, -lease.size, -lease.on_disk, -lease.in_index)

    def settle(self, now: int) -> None:
        """Remove leases that have ended at `now`, in monotonic milliseconds; at most about _LEASES_PER_STEP in one
        call.
        """
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
        """Remove all leases and pins."""
        self._leases.clear()
        self._due.clear()
        self._bytes.clear()
