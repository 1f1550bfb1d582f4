"""Stub of vLLM's manager of tiers, with a tier on a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
from kvpage_connectors.vllm_tier import KvpageTier
from vllm.v1.kv_offload.base import LookupResult, OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.base import make_offload_key as named
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

ROWS, SIZE = 16, 8192


def spec(**changes: Any) -> OffloadingSpec:
    values = {"model": "another/model", "dtype": "float16", "layout": "LBNHC", "tp": 1, "blocks": 1, **changes}
    return OffloadingSpec(
        SimpleNamespace(
            model=SimpleNamespace(name=values["model"], dtype=values["dtype"]),
            cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=values["blocks"]),
            parallel=SimpleNamespace(tp_size=values["tp"], pp_size=1),
            kv_cache_layout=values["layout"],
            worker_kv_bytes_per_block=SIZE,
            groups=["group of layers"],
        )
    )


def chunk(name: str, group: int = 0) -> OffloadKey:
    return named(sha256(name.encode()).digest(), group)


class Manager:
    """The calls of vLLM's TieringOffloadingManager. A chunk of name "a" has the bytes of `content("a")`."""

    def __init__(self, url: str, changes: dict[str, Any], **options: Any) -> None:
        self.rows = np.zeros((ROWS, SIZE), np.int8)
        options = {"weights": "0123", "lookup_seconds": 30, "transfer_seconds": 30, **options}
        self.tier = KvpageTier(spec(**changes), memoryview(self.rows), "KvpageTier", None, url=url, **options)
        self.jobs = 0

    def step(self) -> list[JobResult]:
        self.tier.on_schedule_end(ScheduleEndContext([], []))
        return list(self.tier.get_finished_jobs())

    def store(self, names: str, request: str = "store", group: int = 0) -> JobResult:
        """Store chunks, a letter each. Return the result."""
        for row, name in enumerate(names):
            self.rows[row] = content(name, group)
        return self.transfer(names, request, group, is_promotion=False)

    def load(self, names: str, request: str = "load", group: int = 0) -> tuple[str, JobResult]:
        """Load chunks. Return the names of the successful ones, whose bytes are right, and the result."""
        self.rows[:] = 0
        result = self.transfer(names, request, group, is_promotion=True)
        good = names if result.success else [n for n in names if chunk(n, group) in (result.successful_keys or ())]
        for row, name in enumerate(names):
            if name in good:
                assert (self.rows[row] == content(name, group)).all()
        return "".join(good), result

    def transfer(self, names: str, request: str, group: int, *, is_promotion: bool) -> JobResult:
        keys = [chunk(name, group) for name in names]
        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.arange(len(keys), dtype=np.int32), is_promotion, ReqContext(request))
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)
        end = time.monotonic() + 60
        while not (results := self.step()):
            assert time.monotonic() < end
        (result,) = results
        assert result.job_id == self.jobs
        return result

    def lookup(self, names: str, request: str = "lookup", group: int = 0) -> str:
        """Look up chunks until the answer is there. Return the names of the found ones."""
        context = ReqContext(request)
        keys = [chunk(name, group) for name in names]
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, position)
        results = [self.tier.lookup(key, context) for key in keys]
        end = time.monotonic() + 60
        while LookupResult.RETRY in results:
            assert time.monotonic() < end
            self.step()
            results = [self.tier.lookup(key, context) for key in keys]
        self.tier.on_request_finished(context)
        return "".join(name for name, result in zip(names, results, strict=True) if result is LookupResult.HIT)


def content(name: str, group: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([ord(name), group]).integers(-128, 128, SIZE, np.int8)


@contextmanager
def manager_on(url: str, changes: dict[str, Any] | None = None, **options: Any) -> Iterator[Manager]:
    manager = Manager(url, changes or {}, **options)
    try:
        yield manager
    finally:
        manager.tier.shutdown()
