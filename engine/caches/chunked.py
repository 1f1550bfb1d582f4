"""Codec of ChunkedKVCache: keys and values of the last tokens. mlx-lm cuts off the oldest ones before every step of the
model.

Attention extends back to the beginning of the current chunk. Earlier rows are also stored: they add zeros to the sums,
and the order of summation determines the last bits of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from kvpage_server.page import KVType, Plane

from .codec import CacheStateError, Matrices, StateLayer, join, plane_of


@dataclass(frozen=True, slots=True)
class ChunkedLayer(StateLayer):
    """Codec of a cache that has, after n tokens, K and V of the last min(n, chunk): ``[heads, rows, head_dim]``, the
    oldest first.

    A layer without arrays has no planes.
    """

    KIND: ClassVar[type] = ChunkedKVCache
    heads: tuple[int, ...]  # in each plane
    planes: tuple[Plane, ...]
    chunk: int  # mlx-lm's chunk_size

    @classmethod
    def describe(cls, cache: ChunkedKVCache) -> Self:
        if cache.keys is None:
            return cls((), (), cache.chunk_size)
        planes = (plane_of(KVType.K, cache.keys), plane_of(KVType.V, cache.values))
        return cls((cache.keys.shape[1], cache.values.shape[1]), planes, cache.chunk_size)

    def empty(self) -> ChunkedKVCache:
        return ChunkedKVCache(self.chunk)

    def matrices(self, end: int) -> tuple[Matrices, ...]:
        rows = min(end, self.chunk)
        return tuple(Matrices(plane, heads, rows) for plane, heads in zip(self.planes, self.heads, strict=True))

    def capture(self, cache: ChunkedKVCache) -> tuple[mx.array, ...]:
        """Return a copy of the rows of a cache with one sequence.

        Raises CacheStateError for a cache that was trimmed to fewer rows than its chunk.
        """
        if not self.planes:
            return ()
        held = cache.offset - cache.start_position
        rows = min(cache.offset, self.chunk)
        if held < rows:
            raise CacheStateError(f"a ChunkedKVCache after {cache.offset} tokens holds {rows} of them, got {held}")
        return tuple(mx.contiguous(array[0, :, held - rows : held]) for array in (cache.keys, cache.values))

    def restore(self, state: Sequence[mx.array], end: int) -> ChunkedKVCache:
        cache = self.empty()
        if not self.planes:
            return cache
        rows = min(end, self.chunk)
        cache.keys, cache.values = (join([array], rows) for array in state)
        cache.offset = end
        cache.start_position = end - rows
        return cache
