"""Codec of QuantizedKVCache: packed values with scales and biases. They are stored as they are, without another
quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from kvpage_server.page import KVType, Plane

from .codec import Matrices, TokenLayer, join, plane_of

_PLANES = (KVType.K, KVType.V, KVType.K_SCALES, KVType.K_BIASES, KVType.V_SCALES, KVType.V_BIASES)


@dataclass(frozen=True, slots=True)
class QuantizedLayer(TokenLayer):
    """Codec of six planes: K and V packed in uint32, ``[heads, tokens, head_dim * bits / 32]``, then the scales and
    biases of K and of V, ``[heads, tokens, head_dim / group_size]`` in the model's dtype.
    """

    KIND: ClassVar[type] = QuantizedKVCache
    heads: tuple[int, ...]  # in each plane
    planes: tuple[Plane, ...]
    group_size: int  # values that share a scale and a bias
    bits: int  # of a value

    @classmethod
    def describe(cls, cache: QuantizedKVCache) -> Self:
        if cache.keys is None:
            return cls((), (), cache.group_size, cache.bits)
        arrays = _arrays(cache)
        planes = tuple(plane_of(kv_type, array) for kv_type, array in zip(_PLANES, arrays, strict=True))
        return cls(tuple(array.shape[1] for array in arrays), planes, cache.group_size, cache.bits)

    @property
    def packed(self) -> tuple[int, int]:
        return self.bits, self.group_size

    def empty(self) -> QuantizedKVCache:
        return QuantizedKVCache(self.group_size, self.bits)

    def matrices(self, tokens: int) -> tuple[Matrices, ...]:
        return tuple(Matrices(plane, heads, tokens) for plane, heads in zip(self.planes, self.heads, strict=True))

    def arrays(self, cache: QuantizedKVCache) -> tuple[mx.array, ...]:
        return _arrays(cache) if self.planes else ()

    def join(self, pieces: Sequence[tuple[mx.array, ...]], tokens: int) -> QuantizedKVCache:
        cache = self.empty()
        if self.planes:
            keys, values, *rest = (join(plane, tokens) for plane in zip(*pieces, strict=True))
            cache.keys, cache.values = (keys, *rest[:2]), (values, *rest[2:])
            cache.offset = tokens
        return cache


def quantised(cache: Any, group_size: int, bits: int) -> Any:
    """Return an empty QuantizedKVCache in place of an empty KVCache, also within a CacheList. Other caches are returned
    unchanged.
    """
    if type(cache) is CacheList:
        return CacheList(*(quantised(part, group_size, bits) for part in cache.caches))
    return QuantizedKVCache(group_size, bits) if type(cache) is KVCache else cache


def _arrays(cache: QuantizedKVCache) -> tuple[mx.array, ...]:
    (keys, *of_keys), (values, *of_values) = cache.keys, cache.values
    return (keys, values, *of_keys, *of_values)
