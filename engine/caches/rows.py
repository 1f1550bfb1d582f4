"""Copies rows of tokens from caches' buffers into blocks and back, each byte once, in few operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache


def cut(planes: Sequence[mx.array], edges: Sequence[int]) -> list[list[mx.array]]:
    """Of each of `planes`, ``[1, heads, >= edges[-1], dim]``, copies of the rows between every two neighbours of
    `edges`, ``[heads, rows, dim]``: a list for each two, in the order of the planes.

    Planes with the same kind of row are copied together: of a context of 32 blocks in 48 layers there are 3,072 copies.
    """
    if len(edges) < 2:
        return []
    blocks: list[dict[int, mx.array]] = [{} for _ in edges[1:]]
    alike: dict[tuple[int, mx.Dtype], list[int]] = {}
    for i, plane in enumerate(planes):
        alike.setdefault((plane.shape[-1], plane.dtype), []).append(i)
    for indices in alike.values():
        group = [planes[i] for i in indices]
        heads = list(accumulate(plane.shape[1] for plane in group))[:-1]
        for block, pieces in zip(blocks, zip(*(_split(plane, edges) for plane in group), strict=True), strict=True):
            together = mx.contiguous(mx.concatenate(list(pieces), axis=0)).view(group[0].dtype)
            block |= zip(indices, mx.split(together, heads, axis=0), strict=True)
    return [[block[i] for i in range(len(planes))] for block in blocks]


def join(pieces: Sequence[mx.array], tokens: int) -> mx.array:
    """``[1, heads, capacity, dim]`` with the first `tokens` tokens of the pieces, then zeros up to the size that mlx-lm
    would grow it to.

    All pieces but the last are used whole.
    """
    *full, last = pieces
    heads, _, dim = last.shape
    word = _word(last)
    rest = tokens - sum(piece.shape[1] for piece in full)
    parts = [*(piece.view(word) for piece in full), last.view(word)[:, :rest]]
    if unused := -tokens % KVCache.step:
        parts.append(mx.zeros((heads, unused, dim), last.dtype).view(word))
    return mx.concatenate(parts, axis=1)[None].view(last.dtype)


def _split(plane: mx.array, edges: Sequence[int]) -> list[mx.array]:
    """Its rows between the edges, in words; nothing is copied yet."""
    rows = plane.view(_word(plane))[0, :, edges[0] : edges[-1]]
    return cast(list[mx.array], mx.split(rows, [edge - edges[0] for edge in edges[1:-1]], axis=1))


def _word(array: mx.array) -> mx.Dtype:
    """The largest type in which rows can be copied: on a CPU, MLX copies strided arrays value by value."""
    row = array.shape[-1] * array.itemsize
    return next((word for word in (mx.uint64, mx.uint32, mx.uint16) if row % word.size == 0), array.dtype)
