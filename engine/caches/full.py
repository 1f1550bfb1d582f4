"""KVCache: keys and values of every token. Their dims may differ, as those of latent attention do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from engine.caches.planes import Matrices, plane_of
from engine.caches.rows import join
from kvpage_server.page import KVType, Plane


@dataclass(frozen=True, slots=True)
class FullLayer:
    """``[heads, tokens, head_dim]`` in the planes K and V; no planes for a layer that keeps nothing."""

    KIND: ClassVar[type] = KVCache
    heads: tuple[int, ...]  # in each plane
    planes: tuple[Plane, ...]

    @classmethod
    def describe(cls, cache: KVCache) -> Self:
        if cache.keys is None:
            return cls((), ())
        arrays = (cache.keys, cache.values)
        planes = tuple(plane_of(kv_type, array) for kv_type, array in zip((KVType.K, KVType.V), arrays, strict=True))
        return cls(tuple(array.shape[1] for array in arrays), planes)

    def empty(self) -> KVCache:
        """A cache without a token."""
        return KVCache()

    def matrices(self, tokens: int) -> tuple[Matrices, ...]:
        """What it keeps of `tokens` tokens."""
        return tuple(Matrices(plane, heads, tokens) for plane, heads in zip(self.planes, self.heads, strict=True))

    def arrays(self, cache: KVCache) -> tuple[mx.array, ...]:
        """Of a cache that holds one sequence: ``[1, heads, >= offset, dim]`` for each plane."""
        return (cache.keys, cache.values) if self.planes else ()

    def join(self, pieces: Sequence[tuple[mx.array, ...]], tokens: int) -> KVCache:
        """A cache with the first `tokens` tokens of the `pieces`."""
        cache = self.empty()
        if self.planes:
            cache.keys, cache.values = (join(plane, tokens) for plane in zip(*pieces, strict=True))
            cache.offset = tokens
        return cache
