"""The order in which keys are scanned. SCAN's cursors name places in it, and random keys are drawn from it.

It is kept only while somebody scans. A list has the keys that there were when it was begun, then those that came since.
A scan starts at the end of the list and goes back to its beginning. So it ends however many keys are added, and finds
every key that exists from its start to its end, since places do not change. It also finds deleted keys, which the
caller leaves out. A key that was deleted and set again is in the list twice, and so is a page whose block was stored
whole after that.

A list with more dead keys than living ones gets no more keys, and the next scan begins a new one. Cursors into the last
few lists stay valid. Any other cursor starts again, which repeats keys but skips none.

Costs: O(keys) to begin a list, paid for by as many deletions or by minutes; O(1) a key added or returned.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, TypeVar

_PLACE_BITS = 40
_OLD_LISTS = 2
_SLACK = 1024
REST_AFTER = 300_000  # milliseconds without a scan after which the lists are dropped


T = TypeVar("T")


class ScanOrder(Generic[T]):
    """Lists of what is scanned, by generation. A cursor has a generation and the number of places that are left.

    `everything()` lists what there is, and `count()` says how much that is.
    """

    def __init__(self, everything: Callable[[], list[T]], count: Callable[[], int]) -> None:
        self._everything = everything
        self._count = count
        self._lists: dict[int, list[T]] = {}
        self._generation = random.randrange(1, 1 << 22)  # so that cursors of an earlier process do not fit
        self.current: list[T] | None = None  # the owner adds what is new with `add`
        self._last_used = 0  # monotonic milliseconds

    def add(self, name: T) -> None:
        assert self.current is not None
        self.current.append(name)
        if len(self.current) > 2 * self._count() + _SLACK:
            self.current = None

    def visit(self, cursor: int, count: int, now: int) -> tuple[int, list[T]]:
        """The next cursor, 0 at the end, and up to `count` names, some of which may be dead."""
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
        """A random name, about half of which exist; None if there is none."""
        self._last_used = now
        generation, places = self._begin()
        return random.choice(self._lists[generation]) if places else None

    def _begin(self) -> tuple[int, int]:
        """The generation and number of places for a new scan."""
        if self.current is None or len(self.current) > 2 * self._count() + _SLACK:
            self.current = self._everything()
            self._generation += 1
            self._lists[self._generation] = self.current
            for old in list(self._lists)[: -1 - _OLD_LISTS]:
                del self._lists[old]
        return self._generation, len(self.current)

    def rest(self, now: int) -> None:
        """Drop the lists if nobody has scanned for a while."""
        if self._lists and now - self._last_used > REST_AFTER:
            self.clear()

    def clear(self) -> None:
        self.current = None
        self._lists.clear()
