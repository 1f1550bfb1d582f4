"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from kvpage_server.store.eviction import LRU, Policy
from kvpage_server.store.prefix import Prefix
from kvpage_server.store.s3fifo import S3FIFO

NO_EVICTION = "noeviction"
VOLATILE_TTL = "volatile-ttl"

POLICIES: dict[str, Callable[[], Policy]] = {
    "allkeys-prefix": Prefix,
    "allkeys-lru": LRU,
    "allkeys-s3fifo": S3FIFO,
    VOLATILE_TTL: LRU,  # which knows how long units have been idle; the expiry knows what goes
    NO_EVICTION: LRU,
}
