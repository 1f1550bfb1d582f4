"""Layout of vLLM's paged cache in main memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvpage_connectors.names import DTYPES
from kvpage_server.client.page import PageLayout
from kvpage_server.page import DType


@dataclass(frozen=True, slots=True)
class Paged:
    """Layout of the paged cache: each layer has ``[blocks, heads, K and V, tokens, dim]``."""

    layers: tuple[str, ...]
    heads: int  # of a rank
    tokens: int  # of a block
    dim: int
    dtype: DType
    rank: int
    ranks: int

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page."""
        return self.tokens * self.dim * self.dtype.itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block in this rank."""
        return len(self.layers) * self.heads * 2 * self.page_nbytes

    @property
    def pages(self) -> int:
        """Pages of a block in all ranks."""
        return len(self.layers) * self.heads * 2 * self.ranks


@lru_cache(4)
def pages_of(paged: Paged) -> PageLayout:
    """Return the pages of a block in this rank, in the order of the cache."""
    first, shape = paged.rank * paged.heads, (paged.dtype, paged.tokens, paged.dim)
    layers, heads = range(len(paged.layers)), range(first, first + paged.heads)
    return PageLayout([(layer, head, plane, *shape) for layer in layers for head in heads for plane in (0, 1)])


def layout_of(vllm_config: Any, kv_cache_config: Any) -> Paged:
    """Return the layout of the paged cache. Raises ValueError for a cache that this connector can't store."""
    device, groups = vllm_config.device_config.device_type, kv_cache_config.kv_cache_groups
    if device != "cpu":
        raise ValueError(f"the cache is on {device}, not in main memory: use the tier kvpage_connectors.vllm_tier")
    if len(groups) != 1 or type(groups[0].kv_cache_spec).__name__ != "FullAttentionSpec":
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        raise ValueError(f"the cache must have one group of kind FullAttentionSpec, got {kinds}")
    spec, parallel = groups[0].kv_cache_spec, vllm_config.parallel_config
    dtype = DTYPES.get(str(spec.dtype))
    if dtype is None:
        raise ValueError(f"the dtype of the cache must be one of {[*DTYPES]}, got {spec.dtype}")
    layout = Paged(
        tuple(groups[0].layer_names), spec.num_kv_heads, spec.block_size, spec.head_size, dtype, parallel.rank,
        parallel.world_size,
    )  # fmt: skip
    hashed = vllm_config.cache_config.hash_block_size or spec.block_size
    if hashed != spec.block_size or spec.page_size_bytes != layout.heads * 2 * layout.page_nbytes:
        raise ValueError(f"a block must be hashed as a whole, and have K and V of equal sizes: {spec}")
    return layout
