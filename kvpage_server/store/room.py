"""What goes when memory is full, and what is spared: the policy's victims, leases and pins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import cast

from kvpage_server.page import unix_ms
from kvpage_server.store.eviction.leases import SHARE
from kvpage_server.store.eviction.policies import NO_EVICTION, POLICIES, VOLATILE_TTL
from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.eviction.queues import Queues, successor
from kvpage_server.store.eviction.quotas import Quota, Quotas
from kvpage_server.store.holdings import OVER_QUOTA, Holdings
from kvpage_server.store.memory.entry import Entry, Text
from kvpage_server.store.memory.index import Block

PROMISE = 10_000  # milliseconds
MOST_LEAVE = 250  # keys that leave memory before others have their turn
_AT_ONCE = 500  # units that are handed over before others have their turn


class OutOfMemory(Exception):
    """Memory is full, and there is nothing that the policy may evict."""


class Room(Holdings):
    """Keeps memory within its limit."""

    @property
    def policy(self) -> str:
        """What decides which unit goes when memory is full."""
        return self._policy

    @policy.setter
    def policy(self, name: str) -> None:
        """Let another policy decide. It is told what there is, and when that was used last, in steps."""
        self._policy = name
        self._hand_over()

    def _hand_over(self) -> bool:
        """Tell the policy some of what the one before knew; whether there is more."""
        self._begin_to_hand_over()
        for policy in self._policies():
            for unit in policy.hand_over(_AT_ONCE):
                if isinstance(unit, Block):
                    policy.follows(self.index.around(unit))
            if policy.hands_over:
                return True
        return self._begin_to_hand_over()

    def _begin_to_hand_over(self) -> bool:
        """Have the policies that are wanted, unless those there are were not told everything yet."""
        kind = POLICIES[self._policy]
        if all(type(policy) is kind for policy in self._policies()) or any(p.hands_over for p in self._policies()):
            return False
        if self._quotas is None:
            self._units = successor(self._policies()[0], kind)
        else:
            self._quotas.every = successor(self._quotas.every, kind)
            for quota in self._quotas.all:
                quota.units = successor(quota.units, kind)
        return True

    def _policies(self) -> list[Queues]:
        """That of all units, and those of quotas."""
        if isinstance(self._units, Quotas):
            return [self._units.every, *(quota.units for quota in self._units.all)]
        return [self._units]

    @property
    def is_full(self) -> bool:
        """Whether memory has more than it may."""
        return self.used_memory > self.maxmemory > 0

    def make_room(self) -> bool:
        """Evict until memory is within its limit, or much has gone: whether there is no more to do for now.

        Raises OutOfMemory when the policy forbids it.
        """
        if not self.is_full:
            return True
        if self.policy == NO_EVICTION:
            raise OutOfMemory
        now, left = unix_ms(), MOST_LEAVE
        self.guards.settle(now)
        for unit in self._victims():
            if self.guards.spares(unit, now):
                continue
            left -= unit.pages if isinstance(unit, Block) else 1
            self.evict(unit)
            if not self.is_full:
                return True
            if left <= 0:
                return False
        if self.policy == VOLATILE_TTL:
            raise OutOfMemory
        return True

    def _victims(self) -> Iterator[Unit]:
        if self.policy != VOLATILE_TTL:
            return self._units.victims()
        get = self._catalogue.get
        return (self._unit(key, cast(Entry, get(key))) for key in self._expiry.nearest())

    def evict(self, unit: Block | bytes) -> None:
        """Remove a unit whole, for want of room; for its quota, if that is exceeded."""
        quota = self._quotas.of(unit) if self._quotas is not None else None
        self._evict(unit, quota if quota is not None and quota.is_over else None)

    def _evict(self, unit: Unit, quota: Quota | None) -> None:
        self._units.evicted(unit)
        keys = 1
        if isinstance(unit, Block):
            keys = self.remove_block(unit, "evicted", OVER_QUOTA if quota is not None else "")
        else:
            self._remove(unit, "evicted")
        self.counters.evicted += keys
        if quota is not None:
            quota.evicted += keys

    def promise(self, key: bytes, entry: Entry) -> None:
        """Somebody was told that `key` is there and will come to read it: eviction spares it for a while.

        The client of LMCache that asks EXISTS and then misses with GET waits for ever.
        """
        if self.maxmemory and not isinstance(entry, Text):
            unit = self._unit(key, entry)
            size = unit.footprint if isinstance(unit, Block) else entry.footprint
            self.guards.lease(unit, size, unix_ms() + PROMISE, self.guardable(unit))

    def guardable(self, unit: Unit) -> int:
        """Bytes that leases and pins may take together: of a unit's quota, or of all that have none.

        Quotas that are more than there is of memory, taken together, have no more of it than it is.
        """
        quota, promised = self._quota_of(unit), self._quotas.limits if self._quotas is not None else 0
        if not self.maxmemory:
            return int(quota.limit * SHARE) if quota is not None else sys.maxsize
        if quota is not None:
            return int(quota.limit * min(1, self.maxmemory / promised) * SHARE)
        return int((self.maxmemory - min(promised, self.maxmemory)) * SHARE)
