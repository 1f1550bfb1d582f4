"""Codecs of caches with a state, which is valid only at one position: RotatingKVCache, ChunkedKVCache, ArraysCache.

They have the last tokens only, or a size that does not depend on the number of tokens. A CacheList is split into its
caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, RotatingKVCache

from kvpage_server.page import MAX_KV_TYPE, DType, KVType, Plane

from .codec import CacheStateError, Matrices, StateLayer, UnsupportedCacheError, join, plane_of

# -- RotatingKVCache ---------------------------------------------------------------------------------------------------
#
# Keys and values of the last tokens in a ring buffer. The state is stored in temporal order, so that pages do not
# depend on the position of the ring's beginning. The ring's index is stored with it, because sums over a rotated ring
# differ in their last bits.

_INDEX = Plane(int(KVType.K_SCALES), DType.UINT32, 1)  # the plane of the ring's index; a ring has no scales


@dataclass(frozen=True, slots=True)
class WindowLayer(StateLayer):
    """Codec of a cache that has, after n tokens, K and V of the last min(n, window): ``[heads, rows, head_dim]``, the
    oldest first.

    A further plane has the ring's index: the end of the youngest row. A layer without arrays has no planes.
    """

    KIND: ClassVar[type] = RotatingKVCache
    heads: tuple[int, ...]  # in each plane
    planes: tuple[Plane, ...]
    window: int  # mlx-lm's max_size

    @classmethod
    def describe(cls, cache: RotatingKVCache) -> Self:
        if cache.keep:
            raise UnsupportedCacheError(f"keeps a RotatingKVCache with keep={cache.keep}, which batches lose")
        if cache.keys is None:
            return cls((), (), cache.max_size)
        planes = (plane_of(KVType.K, cache.keys), plane_of(KVType.V, cache.values), _INDEX)
        return cls((cache.keys.shape[1], cache.values.shape[1], 1), planes, cache.max_size)

    def empty(self) -> RotatingKVCache:
        return RotatingKVCache(self.window)

    def matrices(self, end: int) -> tuple[Matrices, ...]:
        rows = min(end, self.window)
        return tuple(
            Matrices(plane, heads, 1 if plane is _INDEX else rows)
            for plane, heads in zip(self.planes, self.heads, strict=True)
        )

    def capture(self, cache: RotatingKVCache) -> tuple[mx.array, ...]:
        if not self.planes:
            return ()
        rows = min(cache.offset, self.window)
        turned = cache.offset >= self.window == cache.keys.shape[2]
        index = cache._idx if turned else rows
        keys, values = (
            mx.contiguous(cache._temporal_order(array)[0, :, -rows:]) for array in (cache.keys, cache.values)
        )
        return keys, values, mx.array([[[index]]], mx.uint32)

    def restore(self, state: Sequence[mx.array], end: int) -> RotatingKVCache:
        """Return the cache after `end` tokens, with its ring rotated as at the time of `capture`."""
        cache = self.empty()
        if not self.planes:
            return cache
        keys, values, index = state
        cache.offset = end
        cache._idx = index.item()
        cache.keys, cache.values = (mx.roll(array[None], cache._idx, 2) for array in (keys, values))
        return cache


# -- ChunkedKVCache ----------------------------------------------------------------------------------------------------
#
# Keys and values of the last tokens. mlx-lm cuts off the oldest ones before every step of the model. Attention extends
# back to the beginning of the current chunk. Earlier rows are also stored: they add zeros to the sums, and the order of
# summation determines the last bits of the results.


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


# -- ArraysCache -------------------------------------------------------------------------------------------------------
# The state of a convolution or a recurrence. Its size does not depend on the number of tokens.


@dataclass(frozen=True, slots=True)
class ArraysLayer(StateLayer):
    """Codec of up to six arrays ``[1, dim]``, ``[1, rows, dim]`` or ``[1, heads, rows, dim]``. Array n is stored in
    plane n.
    """

    KIND: ClassVar[type] = ArraysCache
    RECURRENT: ClassVar[bool] = True
    planes: tuple[Plane, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the arrays, as mlx-lm has them

    @classmethod
    def describe(cls, cache: ArraysCache) -> Self:
        arrays = cache.cache
        if any(array is None or not 2 <= array.ndim <= 4 for array in arrays) or len(arrays) > MAX_KV_TYPE + 1:
            found = [None if array is None else array.shape for array in arrays]
            raise UnsupportedCacheError(
                f"keeps an ArraysCache of {found}; supported: up to {MAX_KV_TYPE + 1} arrays of 2 to 4 axes"
            )
        planes = tuple(plane_of(kv_type, array) for kv_type, array in enumerate(arrays))
        return cls(planes, tuple(array.shape for array in arrays))

    def empty(self) -> ArraysCache:
        return ArraysCache(len(self.shapes))

    def matrices(self, end: int) -> tuple[Matrices, ...]:
        """Return the shapes of the state. They do not depend on `end`, the number of tokens."""
        return tuple(
            Matrices(plane, *(1, 1, *shape[1:])[-3:-1]) for plane, shape in zip(self.planes, self.shapes, strict=True)
        )

    def capture(self, cache: ArraysCache) -> tuple[mx.array, ...]:
        """Return a copy of the state of a cache with one sequence.

        Raises CacheStateError for a state of another shape: some states grow with the first tokens.
        """
        found = tuple(None if array is None else array.shape for array in cache.cache)
        if found != self.shapes:
            raise CacheStateError(f"an ArraysCache of {self.shapes} can be kept, this one is {found}")
        return tuple(
            mx.contiguous(array.reshape(kept.shape)) for array, kept in zip(cache.cache, self.matrices(0), strict=True)
        )

    def restore(self, state: Sequence[mx.array], end: int) -> ArraysCache:
        cache = self.empty()
        cache.cache = [array.reshape(shape) for array, shape in zip(state, self.shapes, strict=True)]
        return cache


# -- CacheList: a layer with several caches. Each is stored as a layer of its own --------------------------------------

Nesting = tuple["Nesting", ...] | None  # of a CacheList: the nesting of each of its caches; None for other caches


def nesting(cache: Any) -> Nesting:
    return tuple(nesting(part) for part in cache.caches) if type(cache) is CacheList else None


def parts(caches: Iterable[Any]) -> list[Any]:
    """Return all caches in order. A CacheList is replaced by the caches in it."""
    return [part for cache in caches for part in (parts(cache.caches) if type(cache) is CacheList else [cache])]


def assemble(nestings: Iterable[Nesting], remaining: Iterator[Any]) -> list[Any]:
    """Return caches with the given nestings, made of the caches in `remaining`, in order: the inverse of `parts`."""
    return [next(remaining) if inner is None else CacheList(*assemble(inner, remaining)) for inner in nestings]
