"""`python -m benchmarks states`: bytes of a state, and the time to copy it, in the geometries of three models.

A turn keeps two states more than the one at its end where `state_budget` allows it, and otherwise one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from engine.caches import StateLayer, describe

ROUNDS = 9
END = 4096  # tokens of the context


def windows(layers: int, heads: int, head_dim: int, window: int) -> list[Any]:
    """Return full caches of `layers` layers with windows."""
    caches = [RotatingKVCache(window) for _ in range(layers)]
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal((1, heads, END, head_dim), mx.bfloat16) for _ in "kv"))
        cache.update_and_fetch(*(mx.random.normal((1, heads, 1, head_dim), mx.bfloat16) for _ in "kv"))
    mx.eval([cache.state for cache in caches])
    return caches


def recurrences(layers: int, heads: int, key_dim: int, value_dim: int, channels: int) -> list[Any]:
    """Return caches of `layers` layers with a convolution and a recurrence."""
    caches = [ArraysCache(2) for _ in range(layers)]
    for cache in caches:
        cache[0] = mx.random.normal((1, 3, channels), mx.bfloat16)
        cache[1] = mx.random.normal((1, heads, value_dim, key_dim))
    mx.eval([cache.state for cache in caches])
    return caches


MODELS: dict[str, tuple[Callable[..., list[Any]], tuple[int, ...]]] = {
    "Gemma 3 1B": (windows, (22, 1, 256, 512)),
    "Gemma 3 12B": (windows, (40, 8, 256, 1024)),
    "Qwen3-Next 80B": (recurrences, (36, 32, 128, 128, 8192)),
}


def row(name: str, rounds: int) -> str:
    """Return a row of the table."""
    make, geometry = MODELS[name]
    caches = make(*geometry)
    codecs = [codec for i, cache in enumerate(caches) if isinstance(codec := describe(i, cache), StateLayer)]
    seconds, nbytes = [], 0
    for _ in range(rounds):
        begun = time.perf_counter()
        state = [codec.capture(cache) for codec, cache in zip(codecs, caches, strict=True)]
        mx.eval(state)
        seconds.append(time.perf_counter() - begun)
        nbytes = sum(array.nbytes for arrays in state for array in arrays)
    return f"| {name} | {nbytes / 1e6:.0f} MB | {1000 * median(seconds):.1f} ms |"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks states", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    rounds = 1 if parser.parse_args(words).quick else ROUNDS
    print("| model | a state | copying it |")
    print("| --- | ---: | ---: |")
    for name in MODELS:
        print(row(name, rounds), flush=True)
