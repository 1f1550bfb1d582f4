"""The orders in which units are evicted and keys expire. `Contents.evict` and `Contents.expire` remove them.

**A change of policy** is O(1). The new policy takes over the units in steps, see `queues`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from kvpage_server.store.eviction.policies import POLICIES, Policy
from kvpage_server.store.eviction.queues import Queues, Unit, successor
from kvpage_server.store.eviction.quotas import Quota, Quotas, Rule
from kvpage_server.store.memory.catalogue import IN_MEMORY, IndexCosts
from kvpage_server.store.memory.index import Block, PageIndex

# -- The order of eviction: one policy for all units, and another of the same kind for each quota ----------------------

_UNITS_PER_STEP = 500  # units that a new policy takes over in one call, because other clients wait meanwhile


class EvictionOrder:
    """The policies of the store and its quotas. Callers report every use and removal of a unit to `units`."""

    def __init__(self, policy: str, index: PageIndex) -> None:
        self._policy = policy
        self._index = index
        every = POLICIES[policy].order()
        self.quotas = Quotas((), every, POLICIES[policy].order, IN_MEMORY)
        self.has_quotas = False
        self._changes = False  # whether a change of policy is not complete
        self.units: Queues | Quotas = every  # `quotas` if there are any

    @property
    def rules(self) -> Policy:
        """The units that the policy may evict."""
        return POLICIES[self._policy]

    @property
    def policy(self) -> str:
        """The name of the policy that selects the units to evict when memory is full."""
        return self._policy

    @policy.setter
    def policy(self, name: str) -> None:
        """Change the policy. The new policy takes over the units and their last uses in steps, see `hand_over`."""
        self._policy = name
        self._changes = True
        self.hand_over()

    def set_quotas(self, rules: Sequence[Rule], index_costs: IndexCosts) -> None:
        """Replace the quotas. A quota whose pattern existed before keeps its count of evictions; everything else of it
        starts empty, and the caller counts the existing units again (`QuotaAccounts.set_rules`). Nothing is evicted.

        `index_costs` computes the bytes that a unit takes in the index.
        """
        old = {quota.pattern: quota for quota in self.quotas.all}
        every = self._policies()[0]
        self.quotas = Quotas(rules, every, self.rules.order, index_costs)
        self.has_quotas = bool(rules)
        self.units = self.quotas if rules else every
        for quota in self.quotas.all:
            if quota.pattern in old:
                quota.evicted = old[quota.pattern].evicted

    def limit_of(self, unit: Unit) -> Quota | None:
        """Return the quota that a unit belongs to if it has a limit, and None otherwise."""
        quota = self.quotas.of(unit)
        return quota if quota is not None and quota.limit else None

    def chain(self, blocks: Sequence[Block]) -> None:
        """Note that each of these blocks extends the one before it: an engine cannot use it without that one."""
        if len(blocks) > 1:
            self.units.follows(blocks)

    def join(self, block: Block) -> None:
        """Note that a block extends its predecessor in its request, and that its successor extends it."""
        self.chain(self._index.around(block))

    # -- a change of policy ------------------------------------------------------------------------------------------

    def hand_over(self) -> bool:
        """Let the current policies take over up to _UNITS_PER_STEP units. Return whether more units are left.

        If `policy` was set again before that is complete, the next change begins afterwards.
        """
        if not self._changes:
            return False
        self._begin_to_hand_over()
        for policy in self._policies():
            for unit in policy.hand_over(_UNITS_PER_STEP):
                if isinstance(unit, Block):
                    policy.follows(self._index.around(unit))
            if policy.hands_over:
                return True
        self._changes = self._begin_to_hand_over()
        return self._changes

    def _begin_to_hand_over(self) -> bool:
        """Install policies of the class that `policy` requires, which take over from the present ones.

        Return False, and install none, if they are of this class already, or if the last change is incomplete.
        """
        kind = self.rules.order
        policies = self._policies()
        if all(type(policy) is kind for policy in policies) or any(policy.hands_over for policy in policies):
            return False
        self.quotas.every = successor(policies[0], kind)
        for quota in self.quotas.all:
            quota.units = successor(quota.units, kind)
        self.units = self.quotas if self.has_quotas else self.quotas.every
        return True

    def _policies(self) -> list[Queues]:
        """Return the policy of all units, and then the policy of each quota."""
        if isinstance(self.units, Quotas):
            return [self.units.every, *(quota.units for quota in self.units.all)]
        return [self.units]


# -- The order of expiry: keys by the second of their expiry, in which `volatile-ttl` evicts them, too -----------------
#
# Each second has a bucket: a list of every key whose expiry was set to that second. A heap orders the seconds. A bucket
# is processed when its second is over. An entry of a bucket is stale if the key's expiry was changed later. All stale
# entries are dropped together when they outnumber the others. Costs: amortised O(1) to add a key and to return an
# expired one, plus O(log seconds) for a new second.
#
# A caller may add keys between two results of an iterator: the load of a block adds its pages. That may extend, replace
# or drop any bucket, so an iterator looks up its bucket again for every key.
#
# Eviction takes the key that expires next, unless the key is protected: then it is spared. A spared key is returned
# again after all others, or after `_SPARED_FOR`, so that not every write examines the same protected keys.

_SLACK = 1024  # stale entries that are kept in any case
_SPARED_FOR = 3_000  # milliseconds until a spared key is examined again


class ExpiryOrder:
    """Buckets of keys. `expires_of(key)` returns a key's expiry in unix milliseconds, 0 for none or no such key."""

    def __init__(self, expires_of: Callable[[bytes], int]) -> None:
        self._expires_of = expires_of
        self._buckets: dict[int, list[bytes]] = {}  # keys by the second of their expiry, some of them stale
        self._seconds: list[int] = []  # heap of the seconds that have a bucket, which may be empty
        self._spared: dict[int, list[bytes]] = {}  # spared keys by the second of their expiry; they are in no bucket
        self._again = 0  # the next time at which spared keys return to the buckets, in monotonic milliseconds
        self._notes = 0  # number of entries in the buckets and of spared keys, stale ones included
        self.keys = 0  # number of keys that have an expiry; `Contents` updates it

    def note(self, key: bytes, expires: int) -> None:
        """Add a key that expires at `expires`, in unix milliseconds."""
        self.note_all([key], expires)

    def note_all(self, keys: Sequence[bytes], expires: int) -> None:
        """Add keys that expire at `expires`, in unix milliseconds."""
        second = expires // 1000
        bucket = self._buckets.get(second)
        if bucket is None:
            bucket = self._buckets[second] = []
            heapq.heappush(self._seconds, second)
        bucket += keys
        self._notes += len(keys)
        if self._notes > 2 * self.keys + _SLACK:
            self._drop_stale()

    def due(self, now: int) -> Iterator[bytes]:
        """Yield the keys that have expired and whose second is over at `now`, in unix milliseconds.

        A yielded key leaves its bucket. The caller removes it from the store.
        """
        if self._spared and (min(self._spared) + 1) * 1000 <= now:
            self._put_back()
        while (second := self._first_second()) is not None and (second + 1) * 1000 <= now:
            key = self._take(second)
            if 0 < self._expires_of(key) <= now:
                yield key

    def nearest(self, elapsed: int) -> Iterator[bytes]:
        """Yield the keys that have an expiry, in the order of its second, for eviction.

        Before it requests the next key, the caller evicts the last one or spares it. When the iterator is closed, the
        yielded keys that still exist are noted as spared: later iterators yield them after all others, or in order
        again after `_SPARED_FOR`. `elapsed` is now, in monotonic milliseconds, and serves only this timeout.
        """
        if elapsed >= self._again:
            self._put_back()
            self._again = elapsed + _SPARED_FOR
        given = []
        try:
            while (second := self._first_second()) is not None or self._spared:
                if second is None:
                    self._put_back()
                    self._again = elapsed + _SPARED_FOR
                    continue
                key = self._take(second)
                if self._expires_of(key) // 1000 == second:
                    given.append(key)
                    yield key
        finally:
            for key in given:
                if expires := self._expires_of(key):
                    self._spared.setdefault(expires // 1000, []).append(key)
                    self._notes += 1

    def _first_second(self) -> int | None:
        """Return the first second with a key in its bucket; None if there is none. Drop empty buckets before it."""
        while self._seconds and not self._buckets[self._seconds[0]]:
            del self._buckets[heapq.heappop(self._seconds)]
        return self._seconds[0] if self._seconds else None

    def _take(self, second: int) -> bytes:
        """Remove the last key of a bucket that is not empty, and return it. O(1)."""
        self._notes -= 1
        return self._buckets[second].pop()

    def _put_back(self) -> None:
        """Return the spared keys to their buckets."""
        for second, keys in self._spared.items():
            if second in self._buckets:
                self._buckets[second] += keys
            else:
                self._buckets[second] = keys
                heapq.heappush(self._seconds, second)
        self._spared.clear()

    def _drop_stale(self) -> None:
        """Drop stale and repeated entries of all buckets, and return spared keys to them. O(entries)."""
        self._put_back()
        self._notes = 0
        for second in list(self._buckets):
            bucket = [k for k in dict.fromkeys(self._buckets[second]) if self._expires_of(k) // 1000 == second]
            self._buckets[second] = bucket
            self._notes += len(bucket)
        self._buckets = {second: bucket for second, bucket in self._buckets.items() if bucket}
        self._seconds = sorted(self._buckets)

    def clear(self) -> None:
        """Remove all keys."""
        self._buckets.clear()
        self._seconds.clear()
        self._spared.clear()
        self._notes = self.keys = 0
