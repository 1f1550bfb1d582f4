"""The order in which keys are scanned: what SCAN's cursors name places in, and where a random key is drawn from.

Kept only while somebody scans. A list holds the keys there were when it was begun, then those that came since. A scan
goes through it backwards from where it ends at that moment, so that it comes to an end however many keys are added, and
every key that is there from a scan's start to its end is met: it was in the list, and its place does not change. Keys
that were deleted are met too; the caller knows. One that went and came back lies in it twice.

A list in which dead keys outnumber the living gets no more keys, and the next scan begins a new one. Cursors into the
last few lists remain good; any other begins anew, which repeats keys but skips none.

Costs: O(keys) to begin a list, which is paid for by as many deletions or minutes; O(1) a key added or met.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, TypeVar

_PLACE_BITS = 40
_OLD_LISTS = 2
_SLACK = 1024
REST_AFTER = 300_000  # milliseconds without a scan until the lists are dropped


T = TypeVar("T")


class ScanOrder(Generic[T]):
    """Lists of what is scanned, by generation. A cursor is a generation and the number of places still to visit.

    `everything()` lists what there is, `count()` says how much that is.
    """

    def __init__(self, everything: Callable[[], list[T]], count: Callable[[], int]) -> None:
        self._everything = everything
        self._count = count
        self._lists: dict[int, list[T]] = {}
        self._generation = random.randrange(1, 1 << 22)  # cursors of an earlier process name no list of this one
        self.current: list[T] | None = None  # the owner appends what comes to be, with `add`
        self._last_used = 0  # unix milliseconds

    def add(self, name: T) -> None:
        """Add a key."""
        assert self.current is not None
        self.current.append(name)
        if len(self.current) > 2 * self._count() + _SLACK:
            self.current = None

    def visit(self, cursor: int, count: int, now: int) -> tuple[int, list[T]]:
        """The next cursor, 0 at the end, and up to `count` names, dead ones among them."""
        self._last_used = now
        generation, left = cursor >> _PLACE_BITS, cursor & ((1 << _PLACE_BITS) - 1)
        if generation not in self._lists:
            generation, left = self._begin()
        order = self._lists[generation]
        left = min(left, len(order))
        names = order[max(left - count, 0) : left]
        left -= len(names)
        return (generation << _PLACE_BITS | left if left else 0), names[::-1]

    def draw(self, now: int) -> T | None:
        """A random name; every second one lives, or nearly. None when there is none."""
        self._last_used = now
        generation, places = self._begin()
        return random.choice(self._lists[generation]) if places else None

    def _begin(self) -> tuple[int, int]:
        """The list that a new scan goes through: generation and places."""
        if self.current is None or len(self.current) > 2 * self._count() + _SLACK:
            self.current = self._everything()
            self._generation += 1
            self._lists[self._generation] = self.current
            for old in list(self._lists)[: -1 - _OLD_LISTS]:
                del self._lists[old]
        return self._generation, len(self.current)

    def rest(self, now: int) -> None:
        """Drop the lists when nobody has scanned for a while."""
        if self._lists and now - self._last_used > REST_AFTER:
            self.clear()

    def clear(self) -> None:
        self.current = None
        self._lists.clear()
