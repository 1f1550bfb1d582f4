"""Codec of ArraysCache, the state of a convolution or a recurrence, whose size does not depend on the context's length;
and the splitting of a CacheList into its caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from kvpage_server.page import MAX_KV_TYPE, Plane

from .codec import CacheStateError, Matrices, StateLayer, UnsupportedCacheError, plane_of


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
