"""CacheList: a layer that keeps several caches. Each of them is stored as a layer of its own, in the list's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_lm.models.cache import CacheList

Nesting = tuple["Nesting", ...] | None  # of a CacheList, that of each of its caches; None of any other cache


def nesting(cache: Any) -> Nesting:
    """How caches are nested in `cache`."""
    return tuple(nesting(part) for part in cache.caches) if type(cache) is CacheList else None


def parts(caches: Iterable[Any]) -> list[Any]:
    """The caches, those within a CacheList in its place."""
    return [part for cache in caches for part in (parts(cache.caches) if type(cache) is CacheList else [cache])]


def assemble(nestings: Iterable[Nesting], remaining: Iterator[Any]) -> list[Any]:
    """What `parts` took apart: takes the parts that it needs from those that remain."""
    return [next(remaining) if inner is None else CacheList(*assemble(inner, remaining)) for inner in nestings]
