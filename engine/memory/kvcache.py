"""Conversion of blocks to mlx-lm's caches and back. No bit changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import mlx.core as mx

from ..caches import StateLayer, TokenLayer, assemble, codec, describe, parts
from ..spec import ModelCacheSpec
from .blocks import Arrays, BlockError, KVBlock, states_of

Cache = list[Any]  # a cache of mlx-lm for each layer


def empty(spec: ModelCacheSpec) -> Cache:
    """Return empty caches, one for each layer."""
    return assemble(spec.nesting, (layer.empty() for layer in spec.layers))


def quantised(spec: ModelCacheSpec, cache: Sequence[Any]) -> Cache:
    """Return a filled cache with those layers quantised that are quantised in `spec`."""
    return assemble(
        spec.nesting,
        (
            part.to_quantized(group_size=layer.packed[1], bits=layer.packed[0])
            if layer.packed and hasattr(part, "to_quantized")
            else part
            for layer, part in zip(spec.layers, parts(cache), strict=True)
        ),
    )


def reconstruct(spec: ModelCacheSpec, blocks: Sequence[KVBlock], tokens: int) -> Cache:
    """Return caches, one for each layer, with the first `tokens` tokens of `blocks`.

    The arrays are lazy: each block is copied once, in the model's first step. Raises BlockError if the blocks have
    fewer tokens, or if layers have a state and none was captured at `tokens`.
    """
    held = sum(block.tokens for block in blocks)
    if not 0 < tokens <= held:
        raise BlockError(f"1 to {held} tokens can be restored from these blocks, got {tokens}")
    used = blocks[: spec.blocks_for(tokens)]
    state = _state_at(used, tokens) if spec.has_state else ()
    restored = (
        layer.join([block.layers[i] for block in used], tokens)
        if isinstance(layer, TokenLayer)
        else layer.restore(state[i], tokens)
        for i, layer in enumerate(spec.layers)
    )
    return assemble(spec.nesting, restored)


def _state_at(blocks: Sequence[KVBlock], tokens: int) -> Arrays:
    taken = states_of(blocks)
    if tokens not in taken:
        raise BlockError(f"the state of these blocks was taken after {sorted(taken)} tokens, not after {tokens}")
    return taken[tokens]


def capture(spec: ModelCacheSpec, cache: Sequence[Any]) -> Arrays:
    """Return evaluated copies of the layers' states in `cache`, which has one sequence, after its last token."""
    state = tuple(
        layer.capture(held) if isinstance(layer, StateLayer) else ()
        for layer, held in zip(spec.layers, parts(cache), strict=True)
    )
    mx.eval(state)
    return state


def extract(
    spec: ModelCacheSpec,
    cache: Sequence[Any],
    block_ids: Sequence[int],
    tokens: int,
    start: int = 0,
    states: Mapping[int, Arrays] | None = None,
    *,
    end: int | None = None,
) -> tuple[KVBlock, ...]:
    """Return blocks with evaluated copies of the tokens from `start` to `end`, by default all. The last block may be
    partial.

    `cache` has one sequence of `tokens` tokens, ``[1, heads, >= tokens, dim]`` per plane; further rows are ignored.
    `block_ids`, one for each block, are their ids in the pool. If layers have a state, each block gets the captured
    `states`, by position, that are within it, and a block that ends at `tokens` the current state.

    Raises BlockError for a wrong number of ids, for a layer that is missing, of another kind or geometry, or of another
    number of tokens, and for a `start` within a block; CacheStateError for a cache that was trimmed too far.
    """
    _check(spec, cache, tokens)
    end = tokens if end is None else end
    if start % spec.block_tokens or not start <= end <= tokens:
        raise BlockError(f"blocks start at a multiple of {spec.block_tokens} up to {end}, got {start}")
    edges = [*range(start, end, spec.block_tokens), end]
    if len(block_ids) != len(edges) - 1:
        raise BlockError(f"{end - start} tokens take {len(edges) - 1} blocks, got {len(block_ids)} ids")
    taken = dict(states or {})
    if spec.has_state and end == tokens and end not in taken:
        taken[end] = capture(spec, cache)
    blocks = tuple(
        KVBlock(block_id, stop - at, layers, taken.get(stop), {p - at: taken[p] for p in taken if at < p < stop})
        for block_id, (at, stop), layers in zip(block_ids, pairwise(edges), cut(spec, cache, edges), strict=True)
    )
    mx.eval([block.layers for block in blocks])
    return blocks


def cut(spec: ModelCacheSpec, cache: Sequence[Any], edges: Sequence[int]) -> list[Arrays]:
    """Return lazy copies of the rows between each two neighbours of `edges` (positions), for layers with a row for each
    token.
    """
    held = [
        layer.arrays(part) if isinstance(layer, TokenLayer) else ()
        for layer, part in zip(spec.layers, parts(cache), strict=True)
    ]
    blocks = map(iter, codec.cut([array for arrays in held for array in arrays], edges))
    return [tuple(tuple(islice(block, len(arrays))) for arrays in held) for block in blocks]


def _check(spec: ModelCacheSpec, cache: Sequence[Any], tokens: int) -> None:
    """Raise BlockError unless all layers are present and of the expected kind, and each has `tokens` tokens."""
    held = parts(cache)
    if len(held) != len(spec.layers):
        raise BlockError(f"a cache of {spec.model_id!r} has {len(spec.layers)} layers, got {len(held)}")
    offsets = set()
    for i, (layer, part) in enumerate(zip(spec.layers, held, strict=True)):
        if (found := describe(i, part)) != layer:
            raise BlockError(f"layer {i} must be a {layer}, got a {found}")
        if layer.planes and not layer.RECURRENT:
            offsets.add(part.offset)
    if offsets - {tokens}:
        raise BlockError(f"the layers of a cache of {tokens} tokens hold as many, got {sorted(offsets)}")
