"""The accounts of the store, eviction for them, and the reservation of space in them.

Memory, its index, the disk and each quota are accounts. Before a value is stored, `make_room` evicts units from an
account until the value fits. It is the only function that evicts because of a limit. The account decides which units
may be evicted, in which order and how, and whether a write is refused when no unit is left.

A batch that is stored in steps is admitted once, before its first step. Between its steps, other writers count the
space that its next parts will use as used, see `Reservation`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import NamedTuple, Self

from kvpage_server.store.contents import Contents, Source, unit_of
from kvpage_server.store.eviction.queues import Unit
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
        return sys.maxsize if self.contents.evictor.rules.evicts_any else self.limit

    def goal(self, size: int) -> int:
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
    goal = account.goal(size)
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
