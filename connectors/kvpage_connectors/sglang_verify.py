"""`kvpage connectors verify sglang`: whether one process of SGLang's HiCache loads the pages that another one stored.

The pool of the pages is in main memory, and no model runs: SGLang's own host pools need a GPU.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from typing import Any

from kvpage_connectors.verify import NOT_LEASED, WITHIN, Job, answer_job, body_of, verify_objects

MODULE = "kvpage_connectors.sglang_verify"
PAGES, NBYTES = 128, 128 * 1024  # pages of a call, and bytes of each of their two pieces


def verify(url: str) -> list[str]:
    """Print the result of two processes, and return the failures."""
    return verify_objects(f"{PAGES} pages of {2 * NBYTES // 1024} KiB", MODULE, url)


# -- in a process of its own -------------------------------------------------------------------------------------------


class _HostPool:
    """Host pool with two pieces of memory for each page, K and V, as ``page_first`` has them."""

    layout, dtype, page_size = "page_first", "torch.bfloat16", 1

    def __init__(self) -> None:
        self._memory = bytearray(2 * NBYTES * PAGES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Return the addresses and sizes of the pieces of some pages."""
        pieces = [2 * page + plane for page in indices.tolist() for plane in (0, 1)]
        return [self._address + NBYTES * piece for piece in pieces], [NBYTES] * len(pieces)

    def fill(self) -> None:
        """Write the bytes of all pieces."""
        for piece in range(2 * PAGES):
            self._memory[NBYTES * piece : NBYTES * (piece + 1)] = body_of(piece, NBYTES)

    @property
    def different(self) -> int:
        """Number of pages with other bytes than `fill` writes."""
        found = memoryview(self._memory)
        pieces = {piece for piece in range(2 * PAGES) if found[NBYTES * piece :][:NBYTES] != body_of(piece, NBYTES)}
        return len({piece // 2 for piece in pieces})


class _Indices(list[int]):
    """Indices of tokens in a host pool, as a pool takes them."""

    def tolist(self) -> list[int]:
        return self


def run_sglang(job: Job) -> Job:
    """Store, or look up and load, the pages."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.version import __version__

    from kvpage_connectors.sglang_hicache import KvpageHiCache

    extra = {"interface_v1": 1, "url": job["url"], "weights": job["model"]}
    extra |= {"lookup_seconds": WITHIN, "transfer_seconds": WITHIN}
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="",
        extra_config=extra,
    )
    pool, backend = _HostPool(), KvpageHiCache(config, {})
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    keys, places = [f"{page:064x}" for page in range(PAGES)], _Indices(range(PAGES))
    failures, seconds = list[str](), dict[str, float]()

    def count(name: str, done: str, call: Callable[[], int]) -> None:
        begun = time.perf_counter()
        found = call()
        seconds[name] = time.perf_counter() - begun
        if found < PAGES:
            why = dict(backend.reasons.counts) or NOT_LEASED
            failures.append(f"{found} of {PAGES} pages were {done}: {why}")

    if job["step"] == "store":
        pool.fill()
        count("store", "stored", lambda: sum(backend.batch_set_v1(keys, places)))
    else:
        count("lookup", "found", lambda: backend.batch_exists(keys))
        count("load", "loaded", lambda: sum(backend.batch_get_v1(keys, places)))
        if pool.different and not failures:
            failures.append(f"{pool.different} of {PAGES} pages have other bytes")
    backend.close()
    versions = f"SGLang {__version__}, Python {platform.python_version()}"
    return {"versions": versions, "failures": failures, "seconds": seconds}


if __name__ == "__main__":
    answer_job(run_sglang)
