"""When keys are due. Each second has a bucket of keys, which is opened when the second is over.

A bucket has every key that was given an expiry in its second. If the expiry was changed since, the key is not due then.
Stale notes are dropped together when they outnumber the others. Costs: O(1) for a note and a key that is due,
amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

_SLACK = 1024


class Expirer:
    """`expires_of(key)` returns a key's expiry in unix milliseconds, 0 for none or no such key."""

    def __init__(self, expires_of: Callable[[bytes], int]) -> None:
        self._expires_of = expires_of
        self._buckets: dict[int, list[bytes]] = {}
        self._seconds: list[int] = []  # heap of the buckets' seconds
        self._notes = 0
        self.keys = 0  # keys that have an expiry now; kept by the owner

    def note(self, key: bytes, expires: int) -> None:
        """`key` will be due at `expires`."""
        self.note_all([key], expires)

    def note_all(self, keys: Sequence[bytes], expires: int) -> None:
        """All of `keys` will be due at `expires`."""
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
        """The keys whose second of expiry has passed at `now` (unix milliseconds). Each is returned once."""
        while self._seconds and (self._seconds[0] + 1) * 1000 <= now:
            bucket = self._buckets[self._seconds[0]]
            while bucket:
                key = bucket.pop()
                self._notes -= 1
                if 0 < self._expires_of(key) <= now:
                    yield key
            del self._buckets[heapq.heappop(self._seconds)]

    def nearest(self) -> Iterator[bytes]:
        """The keys that expire, in order of the second. A key that still exists afterwards is kept."""
        stay = []
        try:
            while self._seconds:
                second = self._seconds[0]
                bucket = self._buckets[second]
                while bucket:
                    key = bucket.pop()
                    self._notes -= 1
                    if self._expires_of(key) // 1000 == second:
                        stay.append(key)
                        yield key
                del self._buckets[heapq.heappop(self._seconds)]
        finally:
            for key in stay:
                if expires := self._expires_of(key):
                    self.note(key, expires)

    def _drop_stale(self) -> None:
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
        self._notes = self.keys = 0
