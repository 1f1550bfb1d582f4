"""The interface of a codec, which stores and restores one kind of mlx-lm's caches.

To add a kind, write a module in this package with a frozen dataclass that derives from :class:`TokenLayer` or
:class:`StateLayer`, and add the class to CODECS in ``engine.caches``. Names, files, pages and
restoring follow from the codec. Only two other modules name a kind: ``engine.startup`` the unquantised part of a
quantised cache, ``engine.spec`` sparse attention. Its fields are part of a model's fingerprint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kvpage_server.page import DType, Plane

# -- The arrays of a layer as planes of pages: matrices ``[rows, head_dim]``, one for each head ------------------------

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
    """Error: a kind of cache cannot be stored and restored exactly. The message names the kind."""


class CacheStateError(ValueError):
    """Error: a cache has other rows or shapes than a cache of its kind with this number of tokens."""


class Matrices(NamedTuple):
    """Shape of one array of a layer, which is one plane: ``[heads, rows, plane.head_dim]``. Each head is a page."""

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
    """Return the plane for an array, whose last axis is a row of a page. Raises UnsupportedCacheError for an
    unsupported dtype.
    """
    try:
        return Plane(int(kv_type), DTYPES[array.dtype], array.shape[-1])
    except KeyError:
        allowed = ", ".join(dtype.name.lower() for dtype in DTYPES.values())
        raise UnsupportedCacheError(f"caches {array.dtype}; supported: {allowed}") from None


# -- Copies of tokens' rows from caches' buffers to blocks and back, each byte once, in few operations -----------------


def cut(planes: Sequence[mx.array], edges: Sequence[int]) -> list[list[mx.array]]:
    """Copy planes ``[1, heads, >= edges[-1], dim]``, split at the token positions `edges`.

    Return a list for each pair of consecutive edges, with a copy ``[heads, rows, dim]`` of each plane. Planes with rows
    of the same size and dtype are copied together, because there are many: a context of 32 blocks in 48 layers has
    3,072 copies.
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
    """Concatenate pieces ``[heads, rows, dim]`` of one plane to a buffer ``[1, heads, capacity, dim]`` for a cache of
    mlx-lm.

    It has the rows of the first `tokens` tokens, and zeros up to the capacity that mlx-lm would allocate. Only the last
    piece may have more rows than are used.
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
    """Return the rows of a plane between each two neighbours of `edges`, as elements of the dtype `_word`, without a
    copy.
    """
    rows = plane.view(_word(plane))[0, :, edges[0] : edges[-1]]
    return cast(list[mx.array], mx.split(rows, [edge - edges[0] for edge in edges[1:-1]], axis=1))


def _word(array: mx.array) -> mx.Dtype:
    """Return the largest dtype as which rows can be copied. On a CPU, MLX copies strided arrays element by element."""
    row = array.shape[-1] * array.itemsize
    return next((word for word in (mx.uint64, mx.uint32, mx.uint16) if row % word.size == 0), array.dtype)


class CacheCodec(ABC):
    """Description of one cache of one layer: its arrays, as planes of pages. It contains no data of the cache."""

    __slots__ = ()
    KIND: ClassVar[type]  # exactly mlx-lm's class: a subclass may have more state
    RECURRENT: ClassVar[bool] = False  # whether its state accumulates rounding errors, and has no offset
    planes: tuple[Plane, ...]  # () for a layer without arrays

    @classmethod
    @abstractmethod
    def describe(cls, cache: Any) -> Self:
        """Return the codec of a cache that has processed some tokens.

        Raises UnsupportedCacheError for a cache that the codec does not support.
        """

    @abstractmethod
    def empty(self) -> Any:
        """Return a cache without a token."""

    @abstractmethod
    def matrices(self, tokens: int, /) -> tuple[Matrices, ...]:
        """Return the shape of each plane, for `tokens` tokens, or for the state after them."""

    @property
    def packed(self) -> tuple[int, int] | None:
        """Bits of a quantised value, and number of values in a group; None if the cache is not quantised."""
        return None


class TokenLayer(CacheCodec):
    """Codec of a cache with a row for each token, so that every prefix of it can be used."""

    __slots__ = ()

    @abstractmethod
    def arrays(self, cache: Any) -> tuple[mx.array, ...]:
        """Return the arrays of a cache with one sequence, one for each plane: ``[1, heads, >= offset, dim]``."""

    @abstractmethod
    def join(self, pieces: Sequence[tuple[mx.array, ...]], tokens: int) -> Any:
        """Return a cache with the first `tokens` tokens of the `pieces`. Each piece has an array ``[heads, rows, dim]``
        for each plane.
        """


class StateLayer(CacheCodec):
    """Codec of a cache with a state, which is valid only at the position where it was captured."""

    __slots__ = ()

    @abstractmethod
    def capture(self, cache: Any) -> tuple[mx.array, ...]:
        """Return a copy of the state of a cache with one sequence, one array for each plane.

        Raises CacheStateError for a cache whose content does not fit its kind and number of tokens.
        """

    @abstractmethod
    def restore(self, state: Sequence[mx.array], end: int) -> Any:
        """Return the cache after `end` tokens."""
