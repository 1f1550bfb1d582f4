"""Records of removed strings: why, when, and by which policy or quota.

There is one record for each key, that of its last removal. All records together take `most_bytes`; the oldest are
dropped first, and then `since` moves on. A record costs O(1) to make, to find and to drop.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from kvpage_server.page import unix_ms

MOST_BYTES = 16 << 20
LONGEST_KEY = 512  # bytes; of a longer key only a digest is kept, so it is found by its name and not by a pattern
_RECORD = 320  # bytes of a record without its key


class Loss(NamedTuple):
    """Why and when (unix milliseconds) a string was removed, and the policy or quota that evicted it."""

    reason: str  # expired, evicted, over quota, deleted, overwritten or corrupt
    at: int
    by: str = ""  # a policy, or the pattern of a quota; empty for other reasons


class LostStrings:
    """The removed strings. `since`: unix milliseconds from which on every removal is recorded."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.since = unix_ms()
        self.bytes = 0
        self._most_bytes = most_bytes
        self._losses: OrderedDict[bytes | str, Loss] = OrderedDict()  # the latest last; digests are of type str

    def __len__(self) -> int:
        return len(self._losses)

    def remember(self, key: bytes, reason: str, by: str = "") -> None:
        """Record the removal of a string."""
        name = _name(key)
        if self._losses.pop(name, None) is None:
            self.bytes += _RECORD + len(name)
        self._losses[name] = Loss(reason, unix_ms(), by)
        while self.bytes > self._most_bytes:
            name, oldest = self._losses.popitem(last=False)
            self.bytes -= _RECORD + len(name)
            self.since = max(self.since, oldest.at)

    def of(self, key: bytes) -> Loss | None:
        """How a string was last removed. It may have been stored again since."""
        return self._losses.get(_name(key))

    def latest(self) -> Iterator[bytes]:
        """Returns the keys of at most LONGEST_KEY bytes, the latest loss first. Records may be added meanwhile."""
        return iter([name for name in reversed(self._losses) if isinstance(name, bytes)])

    def clear(self) -> None:
        """Drop all records, and know nothing of the time before now."""
        self._losses.clear()
        self.bytes = 0
        self.since = unix_ms()


def _name(key: bytes) -> bytes | str:
    return key if len(key) <= LONGEST_KEY else hashlib.blake2b(key, digest_size=16).hexdigest()
