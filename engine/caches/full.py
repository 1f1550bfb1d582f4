"""KVCache: keys and values of every token. Their dims may differ, as those of latent attention do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from engine.caches.planes import Matrices, plane_of
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

    def cut(self, cache: KVCache, start: int, end: int) -> tuple[mx.array, ...]:
        """Copies of the tokens `start` to `end` of a cache that holds one sequence."""
        return tuple(cut(array, start, end) for array in (cache.keys, cache.values)) if self.planes else ()

    def join(self, pieces: Sequence[tuple[mx.array, ...]], tokens: int) -> KVCache:
        """A cache with the first `tokens` tokens of the `pieces`."""
        cache = self.empty()
        if self.planes:
            cache.keys, cache.values = (join(plane, tokens) for plane in zip(*pieces, strict=True))
            cache.offset = tokens
        return cache


def cut(array: mx.array, start: int, end: int) -> mx.array:
    """``[heads, end - start, dim]``, a copy, of ``[1, heads, >= end, dim]``."""
    return mx.contiguous(array.view(_word(array))[0, :, start:end]).view(array.dtype)


def join(pieces: Sequence[mx.array], tokens: int) -> mx.array:
    """``[1, heads, capacity, dim]`` with the pieces' first `tokens` tokens, then zeros up to mlx-lm's next growth.

    All the pieces but the last are used whole. Each byte is written once.
    """
    *full, last = pieces
    heads, _, dim = last.shape
    word = _word(last)
    rest = tokens - sum(piece.shape[1] for piece in full)
    parts = [*(piece.view(word) for piece in full), last.view(word)[:, :rest]]
    if unused := -tokens % KVCache.step:
        parts.append(mx.zeros((heads, unused, dim), last.dtype).view(word))
    return mx.concatenate(parts, axis=1)[None].view(last.dtype)


def _word(array: mx.array) -> mx.Dtype:
    """The largest that rows can be copied in: on a CPU, MLX copies strided arrays a value at a time, whatever its
    size."""
    row = array.shape[-1] * array.itemsize
    return next((word for word in (mx.uint64, mx.uint32, mx.uint16) if row % word.size == 0), array.dtype)
