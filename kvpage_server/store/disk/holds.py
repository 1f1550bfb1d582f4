"""What stays in memory for those who are about to use it.

A command that needs values from disk waits until all of them are in memory, and others go on meanwhile. So what it
needs is *held*, what was in memory already too: it is not dropped before the command has run. What is fetched for that
comes on top of what memory may have otherwise, so there is a limit to it. Whoever goes on after a wait looks again
whether all is there. So a hold may end before, when its owner does not go on: it reads nothing, or is paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from weakref import WeakSet

from kvpage_server.store.eviction.policy import Unit

LONGEST = 10.0  # seconds


class TooMuch(Exception):
    """More bytes would have to come to memory at once than may."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes would have to come to memory at once")
        self.size = size


class Hold:
    """Some units that are held. It ends with the last reference to it, or when it has lasted for too long."""

    __slots__ = ("__weakref__", "_holds", "since", "size", "units")

    def __init__(self, holds: Holds, units: Iterable[Unit]) -> None:
        self._holds = holds
        self.units: frozenset[Unit] = frozenset(units)
        self.size = 0  # bytes that came to memory for it
        self.since = monotonic()

    def __del__(self) -> None:
        self._holds.end(self)


class Holds:
    """Every hold. `bytes` is what came to memory for all of them; `on_end` is called when that becomes less."""

    def __init__(self) -> None:
        self.bytes = 0
        self.on_end: Callable[[], object] | None = None
        self._counts: dict[Unit, int] = {}
        self._holds: WeakSet[Hold] = WeakSet()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._counts

    def begin(self, units: Iterable[Unit]) -> Hold:
        """Hold units."""
        hold = Hold(self, units)
        self._holds.add(hold)
        for unit in hold.units:
            self._counts[unit] = self._counts.get(unit, 0) + 1
        return hold

    def grow(self, hold: Hold, size: int) -> None:
        """So many bytes come to memory for a hold, to be used and then to count as everything does."""
        hold.size += size
        self.bytes += size

    def end(self, hold: Hold) -> None:
        """What was held may leave memory."""
        for unit in hold.units:
            left = self._counts.pop(unit) - 1
            if left:
                self._counts[unit] = left
        size, hold.size, hold.units = hold.size, 0, frozenset()
        self.bytes -= size
        if size and self.on_end is not None:
            self.on_end()

    def end_old(self) -> None:
        """End those that have lasted for too long: somebody else may have use for the memory."""
        since = monotonic() - LONGEST
        for hold in [hold for hold in self._holds if hold.since < since]:
            self.end(hold)
