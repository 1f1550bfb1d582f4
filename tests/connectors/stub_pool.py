"""Stub of SGLang's host pools, and of the controller that calls a backend for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from kvpage_connectors.sglang_hicache import KvpageHiCache
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

PAGES, TOKENS, LAYERS, HEADS, DIM = 160, 4, 3, 2, 8


class Indices(list[int]):
    """Stub of a tensor of indices."""

    def tolist(self) -> list[int]:
        return self


class Tensor:
    """Stub of a flat tensor on the CPU."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous


class Pool:
    """Stub of a host pool of keys and values, in SGLang's layouts."""

    storage_format_tag: str | None = None

    def __init__(self, layout: str = "page_first", dtype: str = "torch.float16") -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, TOKENS
        self.buffer = np.zeros((2, PAGES * TOKENS, LAYERS, HEADS, DIM), np.float16)
        if layout == "layer_first":
            self.buffer = np.zeros((2, LAYERS, PAGES * TOKENS, HEADS, DIM), np.float16)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        every = [self.buffer[plane] for plane in (0, 1)]
        if self.layout == "layer_first":
            every = [self.buffer[plane, layer] for layer in range(LAYERS) for plane in (0, 1)]
        starts = indices.tolist()[:: self.page_size]
        size = every[0][: self.page_size].nbytes
        pointers = [one[start:].ctypes.data for start in starts for one in every]
        return pointers, [size] * len(pointers)

    def fill(self, seed: int) -> None:
        self.buffer[:] = np.random.default_rng(seed).integers(-1000, 1000, self.buffer.shape)

    def page(self, number: int) -> np.ndarray[Any, Any]:
        where = slice(number * TOKENS, (number + 1) * TOKENS)
        found: np.ndarray[Any, Any] = (
            self.buffer[:, :, where] if self.layout == "layer_first" else self.buffer[:, where]
        )
        return found


class MHATokenToKVPoolHost(Pool):
    """Stub of SGLang's pool of this name: heads of a draft model, which ranks divide."""


class States:
    """Stub of a host pool of states, which have pieces of different sizes and one token in a page."""

    layout, dtype, page_size = "page_first", "torch.float32", 1

    def __init__(self) -> None:
        self.buffers = [np.zeros((PAGES, size), np.float32) for size in (48, 8)]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        pieces = [one[i] for i in indices.tolist() for one in self.buffers]
        return [piece.ctypes.data for piece in pieces], [piece.nbytes for piece in pieces]


def indices(*pages: int, tokens: int = TOKENS) -> Indices:
    """Return the indices of pages of a pool."""
    return Indices(page * tokens + i for page in pages for i in range(tokens))


def hashes(count: int, chain: str = "a") -> list[str]:
    return [f"{chain}{i:063d}" for i in range(count)]


def config(url: str, model: str = "", **changes: Any) -> HiCacheStorageConfig:
    extra = {"backend_name": "kvpage", "interface_v1": 1, "url": url, "weights": "w1", "prefetch_threshold": 1}
    extra |= {"lookup_seconds": 30, "transfer_seconds": 60, **changes.pop("extra", {})}
    usual = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    flags = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
    return HiCacheStorageConfig(**{**usual, **flags, "model_name": model, "extra_config": extra, **changes})


@contextmanager
def backend(url: str, pool: Pool, states: States | None = None, **changes: Any) -> Iterator[KvpageHiCache]:
    found = KvpageHiCache(config(url, **changes), {})
    found.register_mem_pool_host(pool)
    if states:
        found.register_mem_host_pool_v2(pool, PoolName.KV)
        found.register_mem_host_pool_v2(states, PoolName.MAMBA)
    found.on_host_pools_registered()
    try:
        yield found
    finally:
        found.close()
