"""Blocks to mlx-lm caches and back, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from engine.blocks import BlockError, KVBlock
from engine.spec import ModelCacheSpec


def reconstruct(spec: ModelCacheSpec, blocks: Sequence[KVBlock], tokens: int) -> list[KVCache]:
    """Caches, one a layer, that hold the first `tokens` tokens of `blocks`.

    Lazy: builds a graph that writes each block once into one buffer a plane, evaluated with the model's first step.
    The blocks stay as they are. Raises BlockError when they hold fewer tokens.
    """
    held = sum(block.tokens for block in blocks)
    if not 0 < tokens <= held:
        raise BlockError(f"1 to {held} tokens can be restored from these blocks, got {tokens}")
    used = blocks[: spec.blocks_for(tokens)]
    caches = []
    for i, layer in enumerate(spec.layers):
        cache = KVCache()
        if layer.planes:
            cache.keys, cache.values = (
                _join([block.layers[i][plane] for block in used], tokens) for plane in range(len(layer.planes))
            )
            cache.offset = tokens
        caches.append(cache)
    return caches


def _join(pieces: Sequence[mx.array], tokens: int) -> mx.array:
    """``[1, heads, capacity, dim]`` with the pieces' first `tokens` tokens, then zeros up to mlx-lm's next growth."""
    heads, _, dim = pieces[0].shape
    capacity = -(-tokens // KVCache.step) * KVCache.step
    buffer = mx.zeros((1, heads, capacity, dim), pieces[0].dtype)
    start = 0
    for piece in pieces:
        end = min(start + piece.shape[1], tokens)
        buffer[0, :, start:end] = piece[:, : end - start]
        start = end
    return buffer


def extract(
    spec: ModelCacheSpec, cache: Sequence[KVCache], block_ids: Sequence[int], start: int = 0
) -> tuple[KVBlock, ...]:
    """Blocks with copies of the tokens from `start` on, evaluated, the last as short as it comes.

    `cache` holds one sequence, ``[1, heads, >= offset, dim]`` a plane; what lies beyond its offset is not looked at.
    `block_ids`, as many as there are blocks, name them in the pool. Raises BlockError when they are of another
    number, when the layers disagree on the number of tokens or when `start` is not on a block's edge.
    """
    offsets = {layer.offset for layer, described in zip(cache, spec.layers, strict=True) if described.planes}
    if len(offsets) != 1:
        raise BlockError(f"the layers of a cache hold the same number of tokens, got {sorted(offsets)}")
    (end,) = offsets
    if start % spec.block_tokens or start > end:
        raise BlockError(f"blocks start at a multiple of {spec.block_tokens} up to {end}, got {start}")
    starts = range(start, end, spec.block_tokens)
    if len(block_ids) != len(starts):
        raise BlockError(f"{end - start} tokens take {len(starts)} blocks, got {len(block_ids)} ids")
    blocks = tuple(
        KVBlock(block_id, min(spec.block_tokens, end - at), _slice(spec, cache, at, min(at + spec.block_tokens, end)))
        for block_id, at in zip(block_ids, starts, strict=True)
    )
    mx.eval([block.layers for block in blocks])
    return blocks


def _slice(spec: ModelCacheSpec, cache: Sequence[KVCache], start: int, end: int) -> tuple[tuple[mx.array, ...], ...]:
    return tuple(
        tuple(mx.contiguous(array[0, :, start:end]) for array in (layer.keys, layer.values)) if described.planes else ()
        for layer, described in zip(cache, spec.layers, strict=True)
    )
