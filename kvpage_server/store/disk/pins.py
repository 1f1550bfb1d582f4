"""Holds, which keep values in memory for a command that waits for other values.

A command that needs values from disk waits until all of them are in memory, while other commands run. All units that it
needs are *held*, including units that were in memory before: they are not demoted until the command has run. Values
that are loaded for a hold do not count against maxmemory until it ends, so they have a limit of their own. After the
wait, the command checks again that all values are in memory. So a hold may end before the command runs: if the client
is paused, or does not receive its replies, the hold ends after `LONGEST`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from weakref import WeakSet

from kvpage_server.store.eviction.queues import Unit

LONGEST = 10.0  # seconds of a hold


class TooMuch(Exception):
    """Error: a command needs more bytes at a time than may be loaded."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes would have to come to memory at once")
        self.size = size


class Hold:
    """Units that are held for one command. The hold ends with its last reference, or after `LONGEST`."""

    __slots__ = ("__weakref__", "_holds", "since", "size", "stays", "units")

    def __init__(self, holds: HeldUnits, units: Iterable[Unit]) -> None:
        self._holds = holds
        self.units: frozenset[Unit] = frozenset(units)
        self.size = 0  # bytes that were loaded for it
        self.stays = True  # whether these bytes stay in memory after the hold, and not only temporarily
        self.since = monotonic()  # seconds

    def __del__(self) -> None:
        self._holds.end(self)


class HeldUnits:
    """All holds. `on_end` is called after a hold for which values were loaded has ended."""

    def __init__(self) -> None:
        self.bytes = 0  # size of the values that were loaded for all holds
        self.bytes_to_stay = 0  # size of the values that were loaded for all holds, except temporarily
        self.on_end: Callable[[], object] | None = None
        self._counts: dict[Unit, int] = {}  # number of holds of each held unit
        self._holds: WeakSet[Hold] = WeakSet()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._counts

    def begin(self, units: Iterable[Unit]) -> Hold:
        hold = Hold(self, units)
        self._holds.add(hold)
        for unit in hold.units:
            self._counts[unit] = self._counts.get(unit, 0) + 1
        return hold

    def grow(self, hold: Hold, size: int, *, stays: bool) -> None:
        """Count `size` bytes that are loaded for a hold. `stays` is False for temporary loads."""
        hold.size += size
        hold.stays = stays
        self.bytes += size
        self.bytes_to_stay += size * stays

    def end(self, hold: Hold) -> None:
        """End a hold: memory may demote its units again, unless other holds have them."""
        for unit in hold.units:
            left = self._counts.pop(unit) - 1
            if left:
                self._counts[unit] = left
        size, hold.size, hold.units = hold.size, 0, frozenset()
        self.bytes -= size
        self.bytes_to_stay -= size * hold.stays
        if size and self.on_end is not None:
            self.on_end()

    def end_old(self) -> None:
        """End holds that are older than `LONGEST`, because other clients may need the memory."""
        since = monotonic() - LONGEST
        for hold in [hold for hold in self._holds if hold.since < since]:
            self.end(hold)
