"""When keys are due. Each second has a bucket of keys, which is opened when the second is over.

A bucket has every key whose expiry was set to its second. If the expiry was changed since, the key is not due then.
Such stale notes are dropped together when they outnumber the others. Costs: amortised O(1) for a note and for a key
that is due.

A caller may add keys between two results: when a block is loaded, its pages are added. That may fill, replace or drop
any bucket, so no bucket is kept in hand meanwhile.

Eviction takes the next due key, which may be protected. A spared key is returned again after all others, or after a
while, so that not every write looks at it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

_SLACK = 1024
_SPARED_FOR = 3_000  # milliseconds


class Expirer:
    """`expires_of(key)` returns a key's expiry in unix milliseconds, 0 for none or no such key."""

    def __init__(self, expires_of: Callable[[bytes], int]) -> None:
        self._expires_of = expires_of
        self._buckets: dict[int, list[bytes]] = {}
        self._seconds: list[int] = []  # heap of the seconds that have a bucket
        self._spared: dict[int, list[bytes]] = {}  # keys that are in no bucket, by the second of their expiry
        self._again = 0  # when they are put back, in monotonic milliseconds
        self._notes = 0
        self.keys = 0  # keys that have an expiry; kept by the owner

    def note(self, key: bytes, expires: int) -> None:
        self.note_all([key], expires)

    def note_all(self, keys: Sequence[bytes], expires: int) -> None:
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
        """Yield the keys whose second of expiry has passed at `now` (unix milliseconds). Each is returned once."""
        if self._spared and (min(self._spared) + 1) * 1000 <= now:
            self._put_back()
        while (second := self._first_second()) is not None and (second + 1) * 1000 <= now:
            key = self._take(second)
            if 0 < self._expires_of(key) <= now:
                yield key

    def nearest(self, elapsed: int) -> Iterator[bytes]:
        """Yield the keys that expire, by second. A key that still exists afterwards was spared. `elapsed`: monotonic
        milliseconds.
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
        """Return the first second that has a key in its bucket. Empty buckets before it are dropped."""
        while self._seconds and not self._buckets[self._seconds[0]]:
            del self._buckets[heapq.heappop(self._seconds)]
        return self._seconds[0] if self._seconds else None

    def _take(self, second: int) -> bytes:
        """Return a key out of a bucket that has some."""
        self._notes -= 1
        return self._buckets[second].pop()

    def _put_back(self) -> None:
        for second, keys in self._spared.items():
            if second in self._buckets:
                self._buckets[second] += keys
            else:
                self._buckets[second] = keys
                heapq.heappush(self._seconds, second)
        self._spared.clear()

    def _drop_stale(self) -> None:
        self._put_back()
        self._notes = 0
        for second in list(self._buckets):
            bucket = [k for k in dict.fromkeys(self._buckets[second]) if self._expires_of(k) // 1000 == second]
            self._buckets[second] = bucket
            self._notes += len(bucket)
        self._buckets = {second: bucket for second, bucket in self._buckets.items() if bucket}
        self._seconds = sorted(self._buckets)

    def clear(self) -> None:
        self._buckets.clear()
        self._seconds.clear()
        self._spared.clear()
        self._notes = self.keys = 0
