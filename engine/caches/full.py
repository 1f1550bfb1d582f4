"""Codec of KVCache: keys and values of every token. Their dimensions may differ, as in latent attention.

The values may be empty: the index of sparse attention has only keys. Then they have no plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kvpage_server.page import KVType, Plane

from .codec import Matrices, TokenLayer, join, plane_of


@dataclass(frozen=True, slots=True)
class FullLayer(TokenLayer):
    """Codec of ``[heads, tokens, head_dim]`` in the planes K and V, or only in K. A layer without arrays has no
    planes.
    """

    KIND: ClassVar[type] = KVCache
    heads: tuple[int, ...]  # of keys and of values
    planes: tuple[Plane, ...]

    @classmethod
    def describe(cls, cache: KVCache) -> Self:
        if cache.keys is None:
            return cls((), ())
        keys, values = plane_of(KVType.K, cache.keys), cache.values
        heads = (cache.keys.shape[1], values.shape[1])
        return cls(heads, (keys, plane_of(KVType.V, values)) if values.shape[-1] else (keys,))

    def empty(self) -> KVCache:
        return KVCache()

    def matrices(self, tokens: int) -> tuple[Matrices, ...]:
        return tuple(Matrices(plane, self.heads[plane.kv_type], tokens) for plane in self.planes)

    def arrays(self, cache: KVCache) -> tuple[mx.array, ...]:
        return (cache.keys, cache.values)[: len(self.planes)]

    def join(self, pieces: Sequence[tuple[mx.array, ...]], tokens: int) -> KVCache:
        cache = self.empty()
        if self.planes:
            keys, *values = (join(plane, tokens) for plane in zip(*pieces, strict=True))
            without = mx.zeros((1, self.heads[KVType.V], keys.shape[2], 0), keys.dtype)
            cache.keys, cache.values = keys, values[0] if values else without
            cache.offset = tokens
        return cache
