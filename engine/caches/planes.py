"""The arrays of a layer as planes of pages: matrices ``[rows, head_dim]``, one a head."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from kvpage_server.page import DType, Plane

DTYPES = {
    mx.float16: DType.FLOAT16,
    mx.float32: DType.FLOAT32,
    mx.bfloat16: DType.BFLOAT16,
    mx.float64: DType.FLOAT64,
    mx.bool_: DType.BOOL,
    mx.uint8: DType.UINT8,
    mx.uint16: DType.UINT16,
    mx.uint32: DType.UINT32,
    mx.uint64: DType.UINT64,
    mx.int8: DType.INT8,
    mx.int16: DType.INT16,
    mx.int32: DType.INT32,
    mx.int64: DType.INT64,
}
MLX_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}


class UnsupportedCacheError(TypeError):
    """A kind of cache that cannot be stored and restored exactly; the message names it."""


class CacheStateError(ValueError):
    """A cache of a supported kind whose content is not as usual for so many tokens."""


class Matrices(NamedTuple):
    """What a layer keeps in one plane: an array ``[heads, rows, plane.head_dim]``, a page a head."""

    plane: Plane
    heads: int
    rows: int

    @property
    def nbytes(self) -> int:
        return self.heads * self.rows * self.plane.head_dim * self.plane.dtype.itemsize

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.heads, self.rows, self.plane.head_dim)


def plane_of(kv_type: int, array: mx.array) -> Plane:
    """The plane that holds `array`, whose last axis is a page's row. Raises UnsupportedCacheError for its dtype."""
    try:
        return Plane(int(kv_type), DTYPES[array.dtype], array.shape[-1])
    except KeyError:
        allowed = ", ".join(dtype.name.lower() for dtype in DTYPES.values())
        raise UnsupportedCacheError(f"caches {array.dtype}; supported: {allowed}") from None
