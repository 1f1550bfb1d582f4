"""Eviction: the accounts of the store's limited resources, and `make_room`, which evicts units for one of them.

Memory, its index, the disk and each quota are accounts. Before a value is stored, `make_room` evicts units from an
account until the value fits. It is the only function that evicts because of a limit. The account decides which units
may be evicted, in which order and how, and whether a write is refused when no unit is left.

Without a tier below, a unit that leaves memory is evicted: its keys are removed. With a tier, a unit that is also on
disk is demoted: its bytes leave memory, and its keys stay. Protected and held units are spared.

A batch that is stored in steps is admitted once, before its first step. Between its steps, other writers count the
space that its next parts will use as used, see `Reservation`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, takewhile
from typing import NamedTuple, Self

from kvpage_server.store.contents import Contents, Source, unit_of
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.index import Block
from kvpage_server.system.text import monotonic_ms


class Account(ABC):
    """A limited resource. Sizes are in bytes."""

    shrinks_in_steps = False  # whether a write evicts at most twice its size, after the limit was lowered

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.reserved = 0  # for the next parts of batches that are stored in steps

    @property
    @abstractmethod
    def limit(self) -> int:
        """The size that eviction keeps to; 0 for no limit."""

    @property
    @abstractmethod
    def used(self) -> int:
        """The size of stored values."""

    @property
    def most(self) -> int:
        """The size above which a write is refused, if no unit is left that may be evicted."""
        return sys.maxsize if self.contents.eviction_order.rules.evicts_any else self.limit

    def evicts_above(self, size: int) -> int:
        """Return the greatest `used` with which no unit is evicted before `size` more bytes are stored."""
        limit = self.limit
        goal = limit - self.reserved - size if limit else sys.maxsize
        return max(goal, self.used - 2 * size) if self.shrinks_in_steps else goal

    def refuses(self, size: int) -> bool:
        """Return whether `size` more bytes do not even fit below `most`."""
        return self.used + self.reserved + size > self.most

    @abstractmethod
    def sources(self, size: int) -> Iterator[Source]:
        """Yield the units that the policy may evict before `size` more bytes are stored.

        The next source is used if the units of the sources before it did not free enough.
        """

    def ended(self) -> Iterator[Unit]:
        """Yield the units of the account whose lifetime has ended. They are evicted before those of `sources`."""
        return self.contents.ended()

    @abstractmethod
    def refusal(self, size: int) -> str:
        """Return the reason to refuse a write of `size` bytes, as in "command not allowed when ..."."""


class OverLimit(Exception):
    """Error: a write would exceed the limit of `account`, and not enough may be evicted. The text is the reply."""

    def __init__(self, account: Account, size: int = 0) -> None:
        super().__init__(f"command not allowed when {account.refusal(size)}.")
        self.account = account


def make_room(account: Account, size: int = 0, stay: Collection[Unit] = ()) -> Iterator[Unit]:
    """Evict units until `size` more bytes fit in an account. Yield each one, so that other clients can get their turn.

    Units in `stay`, and protected and held units, are not evicted. If the remaining ones do not free enough, raise
    OverLimit if the account refuses the write, and return otherwise.
    """
    goal = account.evicts_above(size)
    if account.used <= goal:
        return
    sources = ((chain(account.ended(), units), leave) for units, leave in account.sources(size))
    for unit in evictions(account.contents, sources, stay):
        yield unit
        if account.used <= goal:
            return
    if account.refuses(size):
        raise OverLimit(account, size)


def evictions(contents: Contents, sources: Iterable[Source], stay: Collection[Unit] = ()) -> Iterator[Unit]:
    """Evict one unit after another, as `make_room` does, and yield each."""
    now = monotonic_ms()
    contents.leases.settle(now)
    for units, leave in sources:
        for unit in units:
            if not (unit in stay or contents.spares(unit, now) or leave(unit) is False):
                yield unit


class PendingWrite(NamedTuple):
    """A value that is about to be stored.

    `size` is in bytes, as quotas count it. `block` is the request and page id of a page's block, None for a string.
    """

    key: bytes
    size: int
    block: tuple[bytes, int] | None = None


def units_of(contents: Contents, values: Iterable[PendingWrite]) -> set[Unit]:
    """Return the existing units that new values extend or replace. They stay when units are evicted for the values."""
    units, blocks, catalogue = set[Unit](), set[tuple[bytes, int]](), contents.catalogue
    for key, _, name in values:
        if name is not None:
            blocks.add(name)
        entry = catalogue.get(key) if name is None else catalogue.entries.get(key)
        if entry is not None:
            units.add(unit_of(key, entry))
    units.update(block for name in blocks if (block := contents.index.block(*name)) is not None)
    return units


ReservationParts = Iterable[tuple[Account, int]]  # sizes for one part of a batch; negative if the part frees some


class Reservation:
    """Context manager that reserves space for the parts of a batch, in the order in which they are stored.

    A part releases its reservation when it uses the space. Reservations of parts that are not stored are released when
    the batch ends or fails, or its client disconnects. Space that a part frees is not available until the part is
    stored, so negative sizes are not reserved.
    """

    def __init__(self, parts: Iterable[ReservationParts] = ()) -> None:
        self._parts = deque([(account, max(size, 0)) for account, size in part] for part in parts)

    def __enter__(self) -> Self:
        for account, size in chain.from_iterable(self._parts):
            account.reserved += size
        return self

    def __exit__(self, *_: object) -> None:
        while self._parts:
            self.commit()

    def commit(self) -> None:
        """Release the reservation of the next part, which is stored in the same step."""
        for account, size in self._parts.popleft() if self._parts else ():
            account.reserved -= size


# -- The accounts of memory: values, which are limited by `maxmemory`, and the index -----------------------------------
#
# The index does not count against `maxmemory`. It may take as much again, and at least LEAST_INDEX. Above that, units
# are evicted, also with a tier, because the keys of a demoted unit stay in the index.

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

    def evicts_above(self, size: int) -> int:
        return super().evicts_above(size) + self.contents.tier.held + self.unread

    @property
    def is_full(self) -> bool:
        """Whether memory exceeds `maxmemory`, or the index its limit."""
        most = self.limit
        if not most:
            return False
        values_may_be_full = self._arena.used + self.contents.texts > most
        index_size = self.contents.catalogue.index_size
        return (values_may_be_full and self.used > self.evicts_above(0)) or index_size > max(most, LEAST_INDEX)

    def sources(self, _: int) -> Iterator[Source]:
        return self.contents.tier.values_to_evict()

    def ended(self) -> Iterator[Unit]:
        return takewhile(
            self.contents.eviction_order.units.__contains__, super().ended()
        )  # behind them are demoted units

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
