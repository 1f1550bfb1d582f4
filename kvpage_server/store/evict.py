"""The accounts of memory: values, which are limited by `maxmemory`, and the index.

Without a tier below, a unit that leaves memory is evicted: its keys are removed. With a tier, a unit that is also on
disk is demoted: its bytes leave memory, and its keys stay. Protected and held units are spared.

The index does not count against `maxmemory`. It may take as much again, and at least LEAST_INDEX. Above that, units are
evicted, also with a tier, because the keys of a demoted unit stay in the index.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from kvpage_server.store.accounts import Account, make_room
from kvpage_server.store.contents import Contents, Source
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.index import Block

MOST_LEAVE = 250  # keys evicted or demoted in one call, because other clients wait meanwhile
LEAST_INDEX = 64 << 20  # bytes that the index may take in any case


class IndexAccount(Account):
    """The memory of the index. Without `maxmemory` it has no limit."""

    def __init__(self, contents: Contents, memory: MemoryAccount) -> None:
        super().__init__(contents)
        self._memory = memory

    @property
    def limit(self) -> int:
        return max(self._memory.limit, LEAST_INDEX) if self._memory.limit else 0

    @property
    def used(self) -> int:
        """Approximate bytes of memory of the index. O(1)."""
        return self.contents.catalogue.index_size

    def sources(self, _: int) -> Iterator[Source]:
        return self.contents.tier.keys_to_evict()

    def refusal(self, _: int) -> str:
        return f"the index takes more than {self.limit} bytes (maxmemory, and at least 64mb)"


class MemoryAccount(Account):
    """The memory of values. Its limit is `maxmemory`."""

    limit = 0

    def __init__(self, contents: Contents, maxmemory: int) -> None:
        super().__init__(contents)
        self.limit = maxmemory
        self.receiving = 0  # bytes of slots whose values are not received completely; they do not count yet
        # Bytes of unread replies, which may borrow slots of values that have left the store. They count for
        # `maxmemory-clients`. Without this, unread replies of as many bytes as `maxmemory` would evict all values.
        self.unread = 0
        self.index = IndexAccount(contents, self)
        self._arena = contents.arena

    @property
    def used(self) -> int:
        """Bytes that count against maxmemory: short strings, and slots of completely received values."""
        return self._arena.used - self.receiving + self.contents.texts

    def goal(self, size: int) -> int:
        return super().goal(size) + self.contents.tier.held + self.unread

    @property
    def is_full(self) -> bool:
        """Whether memory exceeds `maxmemory`, or the index its limit."""
        most = self.limit
        if not most:
            return False
        values_may_be_full = self._arena.used + self.contents.texts > most
        index_size = self.contents.catalogue.index_size
        return (values_may_be_full and self.used > self.goal(0)) or index_size > max(most, LEAST_INDEX)

    def sources(self, _: int) -> Iterator[Source]:
        return self.contents.tier.values_to_evict()

    def ended(self) -> Iterator[Unit]:
        return takewhile(self.contents.evictor.units.__contains__, super().ended())  # behind them are demoted units

    def refusal(self, _: int) -> str:
        return "used memory > 'maxmemory'"

    def shrink(self) -> bool:
        """Evict or demote units until memory is within its limits, but at most about MOST_LEAVE keys.

        Return False if the call has to be repeated for more units, and True otherwise: also if only spared units are
        left and memory is still full. Raise OverLimit if memory is full and the policy may not evict more.
        """
        left = MOST_LEAVE
        for account in (self, self.index):
            for unit in make_room(account):
                left -= unit.pages if isinstance(unit, Block) else 1
                if left <= 0:
                    return not self.is_full
        return True
