"""Lookups in a thread, gathered in a step of the scheduler."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable

from vllm.v1.kv_offload.base import OffloadKey, ReqContext


class AsyncLookupManager(ABC):
    def __init__(self, tier_type: str) -> None:
        self._results: dict[OffloadKey, bool | None] = {}
        self._requests: dict[str, set[OffloadKey]] = {}
        self._batch: dict[str, tuple[ReqContext, list[OffloadKey]]] = {}
        self._queue: queue.SimpleQueue[list[tuple[ReqContext, list[OffloadKey]]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @abstractmethod
    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]: ...

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if key not in self._results:
            self._results[key] = None
            self._batch.setdefault(req_context.req_id, (req_context, []))[1].append(key)
        self._requests.setdefault(req_context.req_id, set()).add(key)
        return self._results[key]

    def flush(self) -> None:
        self._queue.put(list(self._batch.values()))
        self._batch = {}

    def mark_miss(self, keys: Collection[OffloadKey]) -> None:
        for key in keys:
            if key in self._results:
                self._results[key] = False

    def cleanup(self, req_id: str) -> None:
        for key in self._requests.pop(req_id, ()):
            self._results.pop(key, None)

    def shutdown(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (batches := self._queue.get()) is not None:
            for context, keys in batches:
                self._results.update(zip(keys, self.batch_lookup(keys, context), strict=True))
