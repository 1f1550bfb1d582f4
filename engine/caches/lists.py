"""CacheList: a layer with several caches. Each is stored as a layer of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_lm.models.cache import CacheList

Nesting = tuple["Nesting", ...] | None  # of a CacheList, that of each of its caches; None of any other cache


def nesting(cache: Any) -> Nesting:
    return tuple(nesting(part) for part in cache.caches) if type(cache) is CacheList else None


def parts(caches: Iterable[Any]) -> list[Any]:
    """All caches, with those of a CacheList in its place."""
    return [part for cache in caches for part in (parts(cache.caches) if type(cache) is CacheList else [cache])]


def assemble(nestings: Iterable[Nesting], remaining: Iterator[Any]) -> list[Any]:
    """The inverse of `parts`: takes the caches that it needs from those that remain."""
    return [next(remaining) if inner is None else CacheList(*assemble(inner, remaining)) for inner in nestings]
