"""Leases, pins and lifetimes, which protect units from eviction.

A lease lasts an hour at most, a pin until it is removed, a *lifetime* a day at most. A lifetime is the only one that is
on disk, so it survives a restart. It counts for a tenant, which may have a share of all protected bytes. After its end,
the unit is evicted before all others, unless it was used since.

Leases and lifetimes belong to no client and are never shortened: a client cannot end a lease that another client relies
on. Only the command that made a lease can undo it, before it replies. The protected bytes are limited in memory and on
disk (see `Protection` in `keyspace`), so that some units can always be evicted. Protection does not prevent deletion
and expiry. Costs: O(log leases) for a lease or a lifetime; O(1) for a pin, a lookup and a change of size.
"""

from __future__ import annotations

import heapq
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeVar

from kvpage_server.page import unix_ms
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.index import Block
from kvpage_server.system.text import monotonic_ms

_LEASES_PER_STEP = 1000  # entries of the heap that one call of `settle` processes
_LEAST_STALE = 1000  # stale entries of the heap that may stay
_TAKEN_OVER = 4  # entries of the old heap that the removal of a lease takes over
_CLOCK_IS_SET = 1000  # milliseconds by which the wall clock has to differ, for the correction of lifetimes
_MOST_PASSED = 1000  # units with ended lifetimes that one call of `ended` yields, at most
LONGEST_LEASE = 3_600_000  # milliseconds; to protect a unit for longer, a client pins it
LONGEST_LIFETIME = 86_400  # seconds
SHARE = 0.5  # of memory, of the disk, and of each quota, that leases, pins and lifetimes may protect


Tenant = bytes  # a tenant's name


class Bytes(NamedTuple):
    """A size in bytes of memory, on disk, and of memory in the index, or a limit of each."""

    memory: int
    disk: int
    in_index: int = 0

    def plus(self, memory: int, disk: int = 0, in_index: int = 0) -> Bytes:
        """Return the sum with other sizes, which may be negative."""
        return Bytes(self.memory + memory, self.disk + disk, self.in_index + in_index)

    def fits(self, size: Bytes, most: Bytes) -> bool:
        """Return whether `size` more bytes are within the limits `most`."""
        return all(had + more <= limit for had, more, limit in zip(self, size, most, strict=True))


@dataclass(slots=True)
class KeptBytes:
    """The units with a lifetime: their number, and their bytes on disk or in memory."""

    units: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Lease:
    """Protection of a unit: a lease, a pin, a lifetime, or several of them."""

    size: int  # bytes of the unit in memory now
    on_disk: int  # bytes of the unit on disk when it was first protected
    in_index: int = 0  # bytes of the unit in the index when it was first protected
    until: int = 0  # the lease's end in monotonic milliseconds; 0 without a lease
    ticket: int = 0  # of the last call that leased the unit; see `Leases.withdraw`
    pinned: bool = False
    kept_until: int = 0  # the lifetime's end in monotonic milliseconds; 0 without a lifetime
    ends: int = 0  # the lifetime's end in unix milliseconds
    seconds: int = 0  # the lifetime's length
    tenant: bytes = b""  # the tenant for which the lifetime counts
    account: object = None  # the account whose limit the unit's bytes count against
    due: int = 0  # the time of its entry in the heap; 0 without one


_Due = tuple[int, int, Unit, Lease]  # end in monotonic milliseconds, ticket, unit, its lease

_NONE = Lease(0, 0)
_NOTHING = Bytes(0, 0)
NO_LIMIT = Bytes(sys.maxsize, sys.maxsize, sys.maxsize)


class Leases:
    """All leases, pins and lifetimes. A lease or lifetime that has ended counts until `settle` removes it.

    `account_of` returns the account of a unit: its quota, or None. Each account has a limit of its own. `on_lifetime`
    is called with a unit and its lease, when its lifetime begins, is prolonged, or ends.
    """

    def __init__(self, account_of: Callable[[Unit], object]) -> None:
        self._account_of = account_of
        self._bytes: dict[object, Bytes] = {}  # protected bytes by account; no entry for 0 bytes
        self._kept: dict[tuple[object, Tenant], Bytes] = {}  # bytes with a lifetime, by account and tenant
        self.kept = KeptBytes()  # by all tenants
        self.tenants: OrderedDict[Tenant, KeptBytes] = OrderedDict()  # with units; in order of their first ones
        self.by_unit: OrderedDict[Unit, Lease] = OrderedDict()  # the first one may leave memory first
        # Blocks whose lifetime has ended, with its end in monotonic milliseconds; the last one is evicted first.
        self._ended: OrderedDict[Unit, int] = OrderedDict()
        self.on_lifetime: Callable[[Unit, Lease], object] = lambda *_: None
        self.most: Callable[[Unit], Bytes] = lambda _: NO_LIMIT  # the limit of a unit's account
        # Heap of (end, ticket, unit, lease), with one entry for each lease, for the first end of lease and lifetime. If
        # that is extended, the entry stays, and there is a new one at its time. An entry is stale if the unit's
        # protection was removed, or if its time is not the lease's `due`. Tickets are consecutive numbers from 1, which
        # make entries with the same end comparable.
        self._due: list[_Due] = []
        # When a third of the entries is stale, a new heap begins, and takes over the valid ones in steps.
        self._old: list[_Due] = []  # entries to take over
        self._stale = 0  # number of stale entries since then; long keys count as one more for each KiB
        self._ahead = unix_ms() - monotonic_ms()  # milliseconds by which the wall clock is ahead of the monotonic one
        self._to_correct: list[Unit] = []  # units whose lifetime may have a wrong end on the wall clock, as it was set
        self._tickets = count(1)

    def __len__(self) -> int:
        return len(self.by_unit)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self.by_unit

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
        self._kept.clear()
        for unit, lease in self.by_unit.items():
            lease.account = self._account_of(unit)
            _add(self._bytes, lease.account, lease.size, lease.on_disk, lease.in_index)
            if lease.kept_until:
                _add(self._kept, (lease.account, lease.tenant), lease.size, lease.on_disk, lease.in_index)

    def _count(self, lease: Lease, size: int, on_disk: int = 0, in_index: int = 0) -> None:
        """Add bytes of memory, disk and index, which may be negative, to a lease's account, and to its tenant."""
        _add(self._bytes, lease.account, size, on_disk, in_index)
        if lease.kept_until:
            self._count_kept(lease, 0, size, on_disk, in_index)

    def _count_kept(self, lease: Lease, units: int, size: int, on_disk: int, in_index: int) -> None:
        """Add units and their bytes, which may be negative, to the sums of the tenant of a lease."""
        _add(self._kept, (lease.account, lease.tenant), size, on_disk, in_index)
        tenant = self.tenants.setdefault(lease.tenant, KeptBytes())
        for kept in (tenant, self.kept):
            kept.units += units
            kept.nbytes += on_disk
        if not tenant.units:
            del self.tenants[lease.tenant]

    def of(self, unit: Unit) -> Lease:
        """Return the lease of a unit; an empty one if it is not protected."""
        return self.by_unit.get(unit, _NONE)

    def spares(self, unit: Unit, now: int) -> bool:
        """Return whether a unit is protected at `now`, in monotonic milliseconds."""
        lease = self.by_unit.get(unit)
        return lease is not None and (lease.pinned or lease.until > now or lease.kept_until > now)

    def lease(self, unit: Unit, size: Bytes, until: int, most: Bytes) -> bool:
        """Protect a unit of `size` bytes until a time in monotonic milliseconds.

        A lease that ends later stays as it is. Return False if the account would exceed `most` protected bytes.
        """
        lease = self._lease(unit, size, most)
        if lease is None:
            return False
        lease.ticket = next(self._tickets)
        if until > lease.until:
            lease.until = until
            self._schedule(unit, lease)
        return True

    def withdraw(self, unit: Unit, ticket: int, before: tuple[int, int]) -> None:
        """Undo the lease of a unit with this `ticket`: its end and its ticket are those `before` again, 0 for no lease.

        If the unit was leased again since, the lease stays, because another client may rely on it.
        """
        lease = self.by_unit.get(unit)
        if lease is None or lease.ticket != ticket:
            return
        lease.until, lease.ticket = before
        if lease.until or lease.pinned or lease.kept_until:
            self._schedule(unit, lease)
        else:
            self.removed(unit)

    def pin(self, unit: Unit, size: Bytes, most: Bytes) -> bool:
        """Protect a unit until it is unpinned. Return False as `lease` does."""
        lease = self._lease(unit, size, most)
        if lease is None:
            return False
        lease.pinned = True
        return True

    def keep(self, unit: Unit, size: Bytes, seconds: int, end: tuple[int, int], tenant: Tenant, share: Bytes) -> bool:
        """Give a unit a lifetime of `seconds` until `end`, in monotonic and in unix milliseconds. A later end stays as
        it is.

        Return False if the tenant would exceed its `share`. The caller has checked that the account has space.
        """
        lease, (until, ends) = self.of(unit), end
        if lease.kept_until >= until:
            return True
        if not lease.kept_until or lease.tenant != tenant:
            if lease is not _NONE:
                size = Bytes(lease.size, lease.on_disk, lease.in_index)
            if not self._kept.get((self._account_of(unit), tenant), _NOTHING).fits(size, share):
                return False
            lease = self._lease(unit, size, NO_LIMIT) or lease
            self._end_lifetime(unit, lease)
            lease.kept_until, lease.tenant = until, tenant
            self._count_kept(lease, 1, *size)
        lease.kept_until, lease.ends, lease.seconds = until, ends, seconds
        self._ended.pop(unit, None)
        self._schedule(unit, lease)
        self.on_lifetime(unit, lease)
        return True

    def _end_lifetime(self, unit: Unit, lease: Lease) -> None:
        """Remove the lifetime from the lease of a unit, if it has one."""
        if lease.kept_until:
            self._count_kept(lease, -1, -lease.size, -lease.on_disk, -lease.in_index)
            lease.kept_until = lease.ends = lease.seconds = 0
            self.on_lifetime(unit, lease)

    def follow_wall_clock(self, ahead: int) -> bool:
        """Correct the ends of lifetimes in unix milliseconds, which a restart uses, in steps after the wall clock was
        set. It is `ahead` milliseconds ahead of the monotonic clock. Return whether more lifetimes are left.
        """
        if abs(ahead - self._ahead) >= _CLOCK_IS_SET:
            self._ahead, self._to_correct = ahead, list(self.by_unit) if self.kept.units else []
        for _ in range(min(len(self._to_correct), _LEASES_PER_STEP)):
            unit = self._to_correct.pop()
            lease = self.of(unit)
            if lease.kept_until and lease.ends != lease.kept_until + self._ahead:
                lease.ends = lease.kept_until + self._ahead
                self.on_lifetime(unit, lease)
        return bool(self._to_correct)

    def _schedule(self, unit: Unit, lease: Lease) -> None:
        """Ensure that the heap has an entry for the first end of a lease."""
        first = min(filter(None, (lease.until, lease.kept_until)), default=0)
        if first and (not lease.due or first < lease.due):
            self._leave_stale(unit, lease)
            lease.due = first
            heapq.heappush(self._due, (first, next(self._tickets), unit, lease))

    def _leave_stale(self, unit: Unit, lease: Lease) -> None:
        """Note that the entry of a unit's lease in the heap, if it has one, is stale, and drop some stale entries."""
        if lease.due:
            kib = 0 if isinstance(unit, Block) else len(unit) >> 10
            lease.due = 0
            self._stale += 1 + kib
            if not self._old and self._stale > _LEAST_STALE + len(self._due) // 3:
                self._due, self._old, self._stale = self._old, self._due, 0
            self._take_over(_TAKEN_OVER + kib)

    def _take_over(self, most: int) -> None:
        """Move up to `most` entries from the old heap to the new one, without stale ones."""
        for _ in range(min(most, len(self._old))):
            entry = self._old.pop()
            if self._is_valid(entry):
                heapq.heappush(self._due, entry)

    def _is_valid(self, entry: _Due) -> bool:
        due, _, unit, lease = entry
        return self.by_unit.get(unit) is lease and lease.due == due

    def _lease(self, unit: Unit, size: Bytes, most: Bytes) -> Lease | None:
        """Return a unit's `Lease`, which is created if it does not exist; None if it would exceed the limit."""
        lease = self.by_unit.get(unit)
        if lease is None and self.have_room(unit, size, most):
            lease = self.by_unit[unit] = Lease(*size, account=self._account_of(unit))
            self._count(lease, *size)
        return lease

    def have_room(self, unit: Unit, size: Bytes, most: Bytes) -> bool:
        """Return whether a unit's account may protect `size` more bytes within the limit `most`."""
        return self.protected_bytes(unit).fits(size, most)

    def unpin(self, unit: Unit) -> bool:
        """Remove a pin. Return whether the unit was pinned. A lease and a lifetime of the unit stay."""
        lease = self.by_unit.get(unit)
        if lease is None or not lease.pinned:
            return False
        lease.pinned = False
        if not lease.until and not lease.kept_until:
            self.removed(unit)
        return True

    def grew(self, unit: Unit, size: int) -> None:
        """Add `size` bytes of memory, which may be negative, to a unit if it is protected."""
        lease = self.by_unit.get(unit)
        if lease is not None:
            lease.size += size
            self._count(lease, size)

    def removed(self, unit: Unit) -> None:
        """Remove the protection of a unit, if it has one."""
        self._ended.pop(unit, None)
        lease = self.by_unit.pop(unit, None)
        if lease is not None:
            self._leave_stale(unit, lease)
            self._end_lifetime(unit, lease)
            self._count(lease, -lease.size, -lease.on_disk, -lease.in_index)

    def replaced(self, key: Unit, size: int) -> None:
        """Process a new value of a string, which takes `size` bytes of memory.

        A lifetime stays if the account has space for the new value. A lease ends, because a value that was just written
        is not evicted soon.
        """
        lease = self.by_unit.get(key)
        if lease is None:
            return
        growth = size - lease.size
        if lease.kept_until and self.have_room(key, Bytes(growth, growth), self.most(key)):
            lease.until, lease.size, lease.on_disk = 0, lease.size + growth, lease.on_disk + growth
            self._count(lease, growth, growth)
        else:
            self.removed(key)

    def settle(self, now: int) -> None:
        """Remove leases and lifetimes that have ended at `now`, in monotonic milliseconds; at most about
        _LEASES_PER_STEP in one call.
        """
        self._take_over(_LEASES_PER_STEP)
        for _ in range(_LEASES_PER_STEP):
            if not self._due or self._due[0][0] > now:
                return
            entry = heapq.heappop(self._due)
            if not self._is_valid(entry):
                continue
            _, _, unit, lease = entry
            lease.due, ended = 0, 0
            if lease.until <= now:
                lease.until = 0
            if 0 < lease.kept_until <= now:
                ended = lease.kept_until
                self._end_lifetime(unit, lease)
            self._schedule(unit, lease)
            if not (lease.due or lease.pinned):
                self.removed(unit)
                if ended and isinstance(unit, Block):
                    self._ended[unit] = ended

    def ended(self) -> Iterator[tuple[Unit, int]]:
        """Yield blocks whose lifetime has ended, and its end in monotonic milliseconds: the last ended first.

        The caller evicts a block before it requests the next. A block that is still there then is yielded again after
        all others.
        """
        for _ in range(min(len(self._ended), _MOST_PASSED)):
            unit, end = next(reversed(self._ended.items()), (b"", 0))
            if not end:
                return
            yield unit, end
            if unit in self._ended:
                self._ended.move_to_end(unit, last=False)

    def forget_end(self, unit: Unit) -> None:
        """Forget that a unit's lifetime has ended, because the unit was used since."""
        self._ended.pop(unit, None)

    def clear(self) -> None:
        """Remove all leases, pins and lifetimes."""
        self.by_unit.clear()
        self._due.clear()
        self._old.clear()
        self._to_correct.clear()
        self._bytes.clear()
        self._kept.clear()
        self.kept, self.tenants = KeptBytes(), OrderedDict()
        self._ended.clear()


_Account = TypeVar("_Account")


def _add(sizes: dict[_Account, Bytes], account: _Account, *size: int) -> None:
    """Add a size, which may be negative, to that of an account. An account with 0 bytes has no entry."""
    left = sizes.get(account, _NOTHING).plus(*size)
    if any(left):
        sizes[account] = left
    else:
        sizes.pop(account, None)
