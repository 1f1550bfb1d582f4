"""Expiry: the keys by the second in which their TTL ends, and the removal of expired ones. In the same order,
`volatile-ttl` evicts keys.

Each second has a bucket: a list of every key whose expiry was set to that second. A heap orders the seconds. A bucket
is processed when its second is over. An entry of a bucket is stale if the key's expiry was changed later. When stale
entries outnumber the others, or may have many bytes, all entries are examined, a few with each new one, and stale ones
are dropped. Costs: amortised O(1) to add a key, also O(KiB of the key), and to return an expired one, plus O(log
seconds) for a new second.

A caller may add keys between two results of an iterator: the load of a block adds its pages. That may extend, replace
or drop any bucket, so an iterator looks up its bucket again for every key.

Eviction takes the key that expires next, unless the key is protected: then it is spared. A spared key is returned
again after all others, or after `_SPARED_FOR`, so that not every write examines the same protected keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

_SLACK = 1024  # stale entries that are kept in any case
_SLACK_KIB = 16_384  # KiB of long keys that may be noted in any case before all entries are examined again
_EXAMINED = 2  # entries that are examined with each new one
_EXAMINED_AT_ONCE = 4096  # entries that `remove_due` examines
_SPARED_FOR = 3_000  # milliseconds until a spared key is examined again


class ExpiryOrder:
    """Buckets of keys. `expires_of(key)` returns a key's expiry in unix milliseconds, 0 for none or no such key."""

    def __init__(self, expires_of: Callable[[bytes], int]) -> None:
        self._expires_of = expires_of
        self._buckets: dict[int, list[bytes]] = {}  # keys by the second of their expiry, some of them stale
        self._seconds: list[int] = []  # heap of all seconds that have a bucket, which may be empty, and of others
        self._spared: dict[int, list[bytes]] = {}  # spared keys by the second of their expiry; they are in no bucket
        self._again = 0  # the next time at which spared keys return to the buckets, in monotonic milliseconds
        self._notes = 0  # number of entries in the buckets and of spared keys, stale ones included
        self._kib = 0  # KiB of the long keys that were noted since the last examination of all entries began
        self.keys = 0  # number of keys that have an expiry; `Contents` updates it
        self._unexamined: list[int] = []  # seconds whose buckets are to be examined for stale entries
        # The bucket that is examined now: its second, the entries that are left, and the keys of the others, which are
        # in the second's new bucket. If that is used up before, the entries that are left become the bucket.
        self._examined = 0
        self._left: list[bytes] = []
        self._seen: set[bytes] = set()

    def note(self, key: bytes, expires: int) -> None:
        """Add a key that expires at `expires`, in unix milliseconds."""
        kib = len(key) >> 10
        self._kib += kib
        self.note_all([key], expires, kib)

    def note_all(self, keys: Sequence[bytes], expires: int, more: int = 0) -> None:
        """Add keys that expire at `expires`, in unix milliseconds. Examine `more` entries in addition."""
        second = expires // 1000
        bucket = self._buckets.get(second)
        if bucket is None:
            bucket = self._buckets[second] = []
            heapq.heappush(self._seconds, second)
        bucket += keys
        self._notes += len(keys)
        self._tidy(_EXAMINED * len(keys) + more)

    def remove_due(self, now: int, most: int, remove: Callable[[bytes], None]) -> int:
        """Call `remove`, which removes a key from the store, for up to `most` keys that `due` yields. Return their
        number. Also examine some entries.
        """
        self._tidy(_EXAMINED_AT_ONCE)
        removed = 0
        for key in islice(self.due(now), most):
            remove(key)
            removed += 1
        return removed

    def due(self, now: int) -> Iterator[bytes]:
        """Yield the keys that have expired and whose second is over at `now`, in unix milliseconds.

        A yielded key leaves its bucket. The caller removes it from the store.
        """
        if self._spared and (min(self._spared) + 1) * 1000 <= now:
            self._put_back()
        while (second := self._first_second()) is not None and (second + 1) * 1000 <= now:
            key = self._take(second)
            if 0 < self._expires_of(key) <= now:
                yield key

    def nearest(self, elapsed: int) -> Iterator[bytes]:
        """Yield the keys that have an expiry, in the order of its second, for eviction.

        Before it requests the next key, the caller evicts the last one or spares it. When the iterator is closed, the
        yielded keys that still exist are noted as spared: later iterators yield them after all others, or in order
        again after `_SPARED_FOR`. `elapsed` is now, in monotonic milliseconds, and serves only this timeout.
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
        """Return the first second with a key in its bucket; None if there is none. Drop empty buckets before it."""
        while self._seconds and not self._buckets.get(self._seconds[0]):
            second = self._seconds[0]
            if self._left and second == self._examined:
                self._buckets[second], self._left = self._left, []
            else:
                self._buckets.pop(heapq.heappop(self._seconds), None)
        return self._seconds[0] if self._seconds else None

    def _take(self, second: int) -> bytes:
        """Remove the last key of a bucket that is not empty, and return it. O(1)."""
        self._notes -= 1
        return self._buckets[second].pop()

    def _put_back(self) -> None:
        """Return the spared keys to their buckets."""
        for second, keys in self._spared.items():
            if second in self._buckets:
                self._buckets[second] += keys
            else:
                self._buckets[second] = keys
                heapq.heappush(self._seconds, second)
        self._spared.clear()

    def _tidy(self, most: int) -> None:
        """Continue to examine all entries, up to about `most` of them; begin if stale ones outnumber the others."""
        if self._unexamined or self._left:
            self._drop_stale(most)
        elif self._notes > 2 * self.keys + _SLACK or self._kib > self.keys + _SLACK_KIB:
            self._kib = 0
            self._put_back()
            self._unexamined = list(self._buckets)
            if len(self._seconds) > 2 * len(self._buckets) + _SLACK:
                self._seconds = sorted(self._buckets)

    def _drop_stale(self, most: int) -> None:
        """Examine up to about `most` entries, and drop stale and repeated ones, and buckets without others."""
        for _ in range(most):
            if not self._left:
                if not self._unexamined:
                    return
                self._examine(self._unexamined.pop())
            if not self._left:
                continue
            key, bucket = self._left.pop(), self._buckets[self._examined]
            if key in self._seen or self._expires_of(key) // 1000 != self._examined:
                self._notes -= 1
            else:
                self._seen.add(key)
                bucket.append(key)
            if not (self._left or bucket):
                del self._buckets[self._examined]

    def _examine(self, second: int) -> None:
        """Begin to examine the bucket of a second. Drop the bucket if it is empty."""
        self._seen = set()
        if bucket := self._buckets.get(second):
            self._examined, self._left, self._buckets[second] = second, bucket, []
        else:
            self._buckets.pop(second, None)

    def clear(self) -> None:
        """Remove all keys."""
        self._buckets.clear()
        self._seconds.clear()
        self._spared.clear()
        self._unexamined, self._left, self._seen = [], [], set()
        self._notes = self._kib = self.keys = 0
