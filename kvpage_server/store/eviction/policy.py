"""Which unit is evicted when memory is full. A unit is a whole block of pages, or a string's key.

Reading or writing any page of a block is a use of the block. Policies know units and the order of their uses, not their
sizes: the owner asks for victims as long as it needs room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kvpage_server.store.memory.index import Block

Unit = Block | bytes

BURST = 2  # seconds; closer uses count as one, since a block is written and read page by page


class Policy(Protocol):
    """What every policy does."""

    now: int  # unix seconds, kept by the owner, since reading the clock would cost more than noting a use

    def __len__(self) -> int:
        """The number of units it knows."""

    def __iter__(self) -> Iterator[Unit]:
        """Every unit, in the order of use as far as it is known."""

    def __contains__(self, unit: Unit) -> bool:
        """Whether it knows a unit."""

    def used(self, unit: Unit) -> None:
        """The unit was written or read."""

    def used_all(self, units: list[Unit]) -> None:
        """These units were written or read, in this order."""

    def follows(self, units: Sequence[Unit]) -> None:
        """Each of these extends the one before it, without which it is useless. An unknown unit ends a run."""

    def idle(self, unit: Unit) -> int:
        """Seconds since a unit's last use."""

    def removed(self, unit: Unit) -> None:
        """The unit was deleted or has expired, if it is known."""

    def evicted(self, unit: Unit) -> None:
        """The unit, if it is known, was evicted."""

    def victims(self) -> Iterator[Unit]:
        """The units in the order they should go. One that still exists when the next is asked for is spared."""

    def clear(self) -> dict[Unit, Any]:
        """Forget everything. Returns what there was."""


def name_of(unit: Unit) -> int:
    """The name under which a unit is remembered when it is gone; the same when it comes back."""
    return hash((unit.req_id, unit.page)) if isinstance(unit, Block) else hash(unit)
