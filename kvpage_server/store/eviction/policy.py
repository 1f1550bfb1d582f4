"""Which unit goes when memory is full. A unit is a whole block of pages, or a plain string key.

Reading or writing any page of a block is a use of the block. Policies know units and the order of their uses, no
bytes: the owner asks for victims for as long as it needs room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kvpage_server.store.memory.index import Block

Unit = Block | bytes

BURST = 2  # seconds: uses that come closer together count as one, since a block is written and read page by page


class Policy(Protocol):
    """What every policy does."""

    now: int  # unix seconds, kept by the owner: looking at the clock at every use would cost more than the use

    def __len__(self) -> int:
        """How many units it knows."""

    def __iter__(self) -> Iterator[Unit]:
        """Every unit; of those last used in one second, the first first, if that is known."""

    def __contains__(self, unit: Unit) -> bool:
        """Whether it knows a unit."""

    def used(self, unit: Unit) -> None:
        """The unit was written or read."""

    def used_all(self, units: list[Unit]) -> None:
        """These units were written or read, in this order."""

    def follows(self, units: Sequence[Unit]) -> None:
        """Each of these extends the one before it and is worth nothing without it. Unknown ones end a run."""

    def idle(self, unit: Unit) -> int:
        """Seconds since a unit's last use."""

    def removed(self, unit: Unit) -> None:
        """The unit, if it is known, is gone and not missed: it was deleted or has expired."""

    def evicted(self, unit: Unit) -> None:
        """The unit, if it is known, is gone for want of room."""

    def victims(self) -> Iterator[Unit]:
        """The units in the order they should go. One that is still there when the next is asked for is spared."""

    def clear(self) -> dict[Unit, Any]:
        """Forget everything; what there was."""


def name_of(unit: Unit) -> int:
    """What a unit is remembered by when it is gone: the same when it comes back."""
    return hash((unit.req_id, unit.page)) if isinstance(unit, Block) else hash(unit)
