"""SGLang's factory of storage backends with host pools of torch tensors, in a process with the real SGLang.

Arguments: the URL of a store, and a folder for SGLang's file backend. Prints "RESULT" and a JSON object.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.version import __version__

PAGES, TOKENS, LAYERS, HEADS, DIM = 160, 16, 4, 2, 32
URL, FOLDER = sys.argv[1:]
ROWS = {PoolName.KV: TOKENS, PoolName.INDEXER: TOKENS, PoolName.MAMBA: 1, PoolName.SWA: TOKENS}  # of a page


class Pool:
    """A host pool in SGLang's layout page_first: keys and values of each page are one piece of memory each."""

    layout, dtype, storage_format_tag = "page_first", torch.bfloat16, None

    def __init__(self, rows: int) -> None:
        self.page_size = rows
        self.buffer = torch.zeros((2, PAGES * rows, LAYERS, HEADS, DIM), dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        size = self.buffer[0, : self.page_size].nbytes
        starts = indices.tolist()[:: self.page_size]
        pointers = [self.buffer[plane, start:].data_ptr() for start in starts for plane in (0, 1)]
        return pointers, [size] * len(pointers)

    def page(self, start: int) -> torch.Tensor:
        return self.buffer[:, start : start + self.page_size]

    def get_data_page(self, start: int, flat: bool = True) -> torch.Tensor:
        return self.page(start).flatten() if flat else self.page(start)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, start: int, flat: torch.Tensor) -> None:
        self.page(start).copy_(flat.reshape(self.page(start).shape))

    def fill(self, seed: int) -> None:
        self.buffer.copy_(torch.rand(self.buffer.shape, generator=torch.Generator().manual_seed(seed)))


def made(kind: str, pools: dict[PoolName, Pool], **extra: Any) -> Any:
    """Return a backend of SGLang's factory, with its pools registered as SGLang's controllers do."""
    ours = {"backend_name": "kvpage", "module_path": "kvpage_connectors.sglang_hicache", "class_name": "KvpageHiCache"}
    options = {"interface_v1": 1, "url": URL, "weights": "w", "lookup_seconds": 30, "transfer_seconds": 60, **extra}
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
        model_name="m",
        extra_config={**ours, **options} if kind == "dynamic" else {"file_storage_path": FOLDER},
    )
    backend = StorageBackendFactory.create_backend(kind, config, pools[PoolName.KV])
    backend.register_mem_pool_host(pools[PoolName.KV])
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    return backend


def indices(pages: list[int], rows: int) -> torch.Tensor:
    return torch.tensor([page * rows + i for page in pages for i in range(rows)], dtype=torch.int64)


def hashes(chain: str, count: int) -> list[str]:
    return [f"{chain}{i:060x}" for i in range(count)]


def restored() -> int:
    """Return the number of pages, of 128, that a second backend restores with equal bytes at other places."""
    one, other, keys = Pool(TOKENS), Pool(TOKENS), hashes("a", 128)
    one.fill(1)
    writer, reader = made("dynamic", {PoolName.KV: one}), made("dynamic", {PoolName.KV: other})
    stored = writer.batch_set_v1(keys, indices([*range(128)], TOKENS))
    assert reader.batch_exists([*keys, "missing"]) == 128
    found = reader.batch_get_v1([*keys, "missing"], indices([*range(20, 149)], TOKENS))
    assert stored == [True] * 128
    assert found == [True] * 128 + [False]
    return sum(torch.equal(one.page(i * TOKENS), other.page((20 + i) * TOKENS)) for i in range(128))


def restored_flat() -> int:
    """Return the number of pages, of 8, that are restored through flat tensors, as without "interface_v1"."""
    one, other, keys = Pool(TOKENS), Pool(TOKENS), hashes("b", 9)
    one.fill(2)
    writer, reader = (made("dynamic", {PoolName.KV: pool}, interface_v1=0) for pool in (one, other))
    assert writer.batch_set(keys[:8], [one.get_data_page(i * TOKENS) for i in range(8)])
    pages = reader.batch_get(keys, [other.get_dummy_flat_data_page() for _ in keys])
    assert pages[8] is None
    for i in range(8):
        other.set_from_flat_data_page(i * TOKENS, pages[i])
    return sum(torch.equal(one.page(i * TOKENS), other.page(i * TOKENS)) for i in range(8))


def different_from_files(cases: int) -> list[str]:
    """Store random pages of several pools in SGLang's file backend and in ours. Return the lookups and loads with
    different results.
    """
    rng, different = random.Random(3), []
    pools = {name: Pool(rows) for name, rows in ROWS.items()}
    for seed, pool in enumerate(pools.values()):
        pool.fill(seed)
    ours, files = made("dynamic", pools), made("file", pools)
    policies = {PoolName.INDEXER: PoolHitPolicy.ALL_PAGES, PoolName.MAMBA: PoolHitPolicy.TRAILING_PAGES}
    policies[PoolName.SWA] = PoolHitPolicy.TRAILING_PAGES
    for case in range(cases):
        keys = hashes(f"{case:03d}", 10)
        sides = rng.sample([*policies], rng.randint(0, 3))
        for name in (PoolName.KV, *sides):
            pages = [
                i
                for i in range(10)
                if rng.random() < (0.9 if policies.get(name) != PoolHitPolicy.TRAILING_PAGES else 0.6)
            ]
            kept = [PoolTransfer(name, indices(pages, ROWS[name]), keys=[keys[i] for i in pages])]
            if pages and ours.batch_set_v2(kept) != files.batch_set_v2(kept):
                different.append(f"case {case}: batch_set_v2 of {name}")
        window = rng.randint(1, 3)
        asked = [PoolTransfer(name, keys=keys[-window:], hit_policy=policies[name]) for name in sides]
        one, other = (backend.batch_exists_v2(keys, asked) for backend in (ours, files))
        facts = [(each.kv_hit_pages, each.restorable_prefix_pages) for each in (one, other)]
        if facts[0] != facts[1]:
            different.append(f"case {case}: {facts[0]} instead of {facts[1]}")
        wanted = [PoolTransfer(PoolName.KV, indices([*range(10)], TOKENS), keys=keys)]
        if ours.batch_get_v2(wanted) != files.batch_get_v2(wanted):
            different.append(f"case {case}: batch_get_v2")
    return different


def with_faults(rounds: int) -> dict[str, int]:
    """Store and load pages while SGLang's switches delay and fail calls. Count calls, misses and wrong bytes."""
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.01"
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.3"
    one, other, counts = Pool(TOKENS), Pool(TOKENS), {"stored": 0, "loaded": 0, "missed": 0, "wrong": 0}
    one.fill(5)
    backends = [made("dynamic", {PoolName.KV: pool}) for pool in (one, other)]
    assert all(isinstance(each, HiCacheStorageFailureInjector) for each in backends)
    for number in range(rounds):
        keys, places = hashes(f"f{number:02d}", 8), indices([*range(8)], TOKENS)
        other.buffer.zero_()
        counts["stored"] += sum(backends[0].batch_set_v1(keys, places))
        backends[1].batch_exists(keys)
        for i, is_loaded in enumerate(backends[1].batch_get_v1(keys, places)):
            equal = torch.equal(one.page(i * TOKENS), other.page(i * TOKENS))
            counts["loaded" if is_loaded else "missed"] += 1
            counts["wrong"] += is_loaded and not equal
    return counts


def main() -> None:
    """Run all, and print the result."""
    result = {"version": __version__, "restored": restored(), "flat": restored_flat()}
    result |= {"different": different_from_files(60), "faults": with_faults(40)}
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
