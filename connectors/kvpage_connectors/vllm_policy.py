"""An eviction policy for vLLM's own offloading to RAM: the store's policy allkeys-prefix.

vLLM loads it by name, in `kv_connector_extra_config` of its OffloadingConnector:

    "eviction_policy": "PrefixPolicy", "cache_policy_module_path": "kvpage_connectors.vllm_policy"

The policy knows which chunk extends which, so it evicts the ends of prompts before their beginnings. It learns how soon
chunks are used again, by the number of their uses and their age. See `kvpage_server.store.eviction.prefix`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic
from typing import cast

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvpage_server.store.eviction.prefix import Prefix
from kvpage_server.store.eviction.queues import Unit


class PrefixPolicy(CachePolicy):
    """The chunks of vLLM's RAM tier, in the order of allkeys-prefix.

    A chunk is used when it is inserted, and by each later request that finds it. Uses within two seconds count as one.
    A chunk that is being transferred has another `ref_cnt` than 0, and stays.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        """Remove all chunks, and all statistics of their uses."""
        self._order = Prefix()
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._evictable = 0  # number of chunks that are not being transferred

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._chunks[key] = chunk
        self._evictable += chunk.ref_cnt == 0
        self._order.now = int(monotonic())
        self._order.used(key)

    def remove(self, key: OffloadKey) -> None:
        self._evictable -= self._chunks.pop(key).ref_cnt == 0
        self._order.removed(key)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._evictable += 1

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._evictable -= 1

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Ignore missing chunks. `insert` remembers the uses of chunks that were evicted."""

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of each chunk. `keys` are in the order of the prompt."""
        self._use([key for key in keys if key in self._chunks])

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Count a use of each chunk that the request found, and link the chunks of each KV cache group."""
        self._use([key for keys in key_groups for key in keys if key in reused_keys and key in self._chunks])
        for keys in key_groups:
            self._order.follows(keys)

    def _use(self, keys: list[Unit]) -> None:
        self._order.now = int(monotonic())
        self._order.used_all(keys)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict `n` chunks that are neither protected nor being transferred, or none if there are fewer: None."""
        kept = sum(key in self._chunks and self._chunks[key].ref_cnt == 0 for key in protected)
        if n > self._evictable - kept:
            return None
        evicted: list[tuple[OffloadKey, ChunkStatus]] = []
        victims = self._order.victims()
        while len(evicted) < n:
            key = cast(OffloadKey, next(victims))
            if key not in protected and self._chunks[key].ref_cnt == 0:
                self._order.evicted(key)
                evicted.append((key, self._chunks.pop(key)))
        self._evictable -= n
        return evicted
