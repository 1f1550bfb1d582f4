"""The policies by name."""

from __future__ import annotations

from kvpage_server.store.eviction.lru import LRU
from kvpage_server.store.eviction.prefix import Prefix
from kvpage_server.store.eviction.queues import Queues
from kvpage_server.store.eviction.s3fifo import S3FIFO

PREFIX = "allkeys-prefix"
NO_EVICTION = "noeviction"
VOLATILE_TTL = "volatile-ttl"

POLICIES: dict[str, type[Queues]] = {
    PREFIX: Prefix,
    "allkeys-lru": LRU,
    "allkeys-s3fifo": S3FIFO,
    VOLATILE_TTL: LRU,  # it tells how long units have been idle; `Expirer` knows what goes first
    NO_EVICTION: LRU,
}
