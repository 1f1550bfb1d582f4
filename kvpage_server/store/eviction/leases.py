"""Leases and pins: what eviction has to spare, for a while or until it is unpinned.

A lease has no owner, so it is only ever prolonged: one client can't cut short what another counts on. Together, leased
and pinned units of a quota may take `SHARE` of it, and those of none `SHARE` of the memory that quotas leave: else
nothing could be evicted to make room for new pages. Only eviction is held off: what is deleted or expires is gone.
Costs: O(log n) a lease, O(1) for all else.
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
class Guard:
    """What protects a unit of `size` bytes: a lease `until` a unix time in milliseconds (0: none), or a pin."""

    size: int
    until: int = 0
    pinned: bool = False
    account: object = None


_NONE = Guard(0)


class Guards:
    """Every guarded unit. Leases that ran out count until `settle`.

    `account_of` says whose a unit is: what is guarded is counted for each by itself.
    """

    def __init__(self, account_of: Callable[[Unit], object]) -> None:
        self._account_of = account_of
        self._bytes: dict[object, int] = {}  # of every account
        self._guards: dict[Unit, Guard] = {}
        self._due: list[tuple[int, int, Unit, Guard]] = []  # heap; one entry a guard that has a lease
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._guards)

    @property
    def bytes(self) -> int:
        """What guarded units occupy together."""
        return sum(self._bytes.values())

    def beside(self, unit: Unit) -> int:
        """What the guarded units of the same account occupy together."""
        return self._bytes.get(self._account_of(unit), 0)

    def recount(self) -> None:
        """Units may belong to other accounts now."""
        self._bytes.clear()
        for unit, guard in self._guards.items():
            guard.account = self._account_of(unit)
            self._count(guard, guard.size)

    def _count(self, guard: Guard, size: int) -> None:
        left = self._bytes.get(guard.account, 0) + size
        if left:
            self._bytes[guard.account] = left
        else:
            self._bytes.pop(guard.account, None)

    def of(self, unit: Unit) -> Guard:
        """What protects a unit; a guard without lease and pin when nothing does."""
        return self._guards.get(unit, _NONE)

    def spares(self, unit: Unit, now: int) -> bool:
        """Whether eviction has to leave a unit alone."""
        guard = self._guards.get(unit)
        return guard is not None and (guard.pinned or guard.until > now)

    def lease(self, unit: Unit, size: int, until: int, most: int) -> bool:
        """Protect a unit of `size` bytes until then; False when those of its account would take more than `most`."""
        guard = self._guard(unit, size, most)
        if guard is None:
            return False
        if until > guard.until:
            if not guard.until:
                heapq.heappush(self._due, (until, next(self._tickets), unit, guard))
            guard.until = until
        return True

    def pin(self, unit: Unit, size: int, most: int) -> bool:
        """Protect a unit until it is unpinned; False as for `lease`."""
        guard = self._guard(unit, size, most)
        if guard is None:
            return False
        guard.pinned = True
        return True

    def _guard(self, unit: Unit, size: int, most: int) -> Guard | None:
        guard = self._guards.get(unit)
        if guard is None and self.beside(unit) + size <= most:
            guard = self._guards[unit] = Guard(size, account=self._account_of(unit))
            self._count(guard, size)
        return guard

    def unpin(self, unit: Unit) -> bool:
        """End a pin, if there was one; a lease goes on."""
        guard = self._guards.get(unit)
        if guard is None or not guard.pinned:
            return False
        guard.pinned = False
        if not guard.until:
            self.removed(unit)
        return True

    def grew(self, unit: Unit, size: int) -> None:
        """A unit occupies `size` bytes more (or less)."""
        guard = self._guards.get(unit)
        if guard is not None:
            guard.size += size
            self._count(guard, size)

    def removed(self, unit: Unit) -> None:
        """The unit is gone, or nothing protects it any more."""
        guard = self._guards.pop(unit, None)
        if guard is not None:
            self._count(guard, -guard.size)

    def settle(self, now: int) -> None:
        """Let go of leases that have run out; the rest of very many the next time."""
        for _ in range(_AT_ONCE):
            if not self._due or self._due[0][0] > now:
                return
            _, ticket, unit, guard = heapq.heappop(self._due)
            if self._guards.get(unit) is not guard:
                continue
            if guard.until > now:
                heapq.heappush(self._due, (guard.until, ticket, unit, guard))
                continue
            guard.until = 0
            if not guard.pinned:
                self.removed(unit)

    def clear(self) -> None:
        """Forget everything."""
        self._guards.clear()
        self._due.clear()
        self._bytes.clear()
