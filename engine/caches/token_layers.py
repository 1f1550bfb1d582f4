"""Codecs of caches with rows for every token: KVCache and QuantizedKVCache; and batches of quantised caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache, QuantizedKVCache, dynamic_roll

from kvpage_server.page import KVType, Plane

from .codec import Matrices, TokenLayer, join, plane_of


@dataclass(frozen=True, slots=True)
class FullLayer(TokenLayer):
    """Codec of KVCache: ``[heads, tokens, head_dim]`` in the planes K and V. Their dimensions may differ, as in latent
    attention.

    The values may be empty: the index of sparse attention has only keys. Then they have no plane. A layer without
    arrays has no planes.
    """

    KIND: ClassVar[type] = KVCache
    heads: tuple[int, ...]  # of keys and of values
    planes: tuple[Plane, ...]

    @classmethod
    def describe(cls, cache: KVCache) -> Self:
        if cache.keys is None:
            return cls((), ())
        keys, values = plane_of(KVType.K, cache.keys), cache.values
        heads = (cache.keys.shape[1], values.shape[1])
        return cls(heads, (keys, plane_of(KVType.V, values)) if values.shape[-1] else (keys,))

    def empty(self) -> KVCache:
        return KVCache()

    def matrices(self, tokens: int) -> tuple[Matrices, ...]:
        return tuple(Matrices(plane, self.heads[plane.kv_type], tokens) for plane in self.planes)

    def arrays(self, cache: KVCache) -> tuple[mx.array, ...]:
        return (cache.keys, cache.values)[: len(self.planes)]

    def join(self, pieces: Sequence[tuple[mx.array, ...]], tokens: int) -> KVCache:
        cache = self.empty()
        if self.planes:
            keys, *values = (join(plane, tokens) for plane in zip(*pieces, strict=True))
            without = mx.zeros((1, self.heads[KVType.V], keys.shape[2], 0), keys.dtype)
            cache.keys, cache.values = keys, values[0] if values else without
            cache.offset = tokens
        return cache


# -- QuantizedKVCache --------------------------------------------------------------------------------------------------
#
# Packed values with scales and biases. They are stored as they are, without another quantisation. mlx-lm cannot batch
# quantised caches, so `BatchQuantizedCache` does.

_PLANES = (KVType.K, KVType.V, KVType.K_SCALES, KVType.K_BIASES, KVType.V_SCALES, KVType.V_BIASES)


@dataclass(frozen=True, slots=True)
class QuantizedLayer(TokenLayer):
    """Codec of six planes: K and V packed in uint32, ``[heads, tokens, head_dim * bits / 32]``, then the scales and
    biases of K and of V, ``[heads, tokens, head_dim / group_size]`` in the model's dtype.
    """

    KIND: ClassVar[type] = QuantizedKVCache
    heads: tuple[int, ...]  # in each plane
    planes: tuple[Plane, ...]
    group_size: int  # values that share a scale and a bias
    bits: int  # of a value

    @classmethod
    def describe(cls, cache: QuantizedKVCache) -> Self:
        if cache.keys is None:
            return cls((), (), cache.group_size, cache.bits)
        arrays = _arrays(cache)
        planes = tuple(plane_of(kv_type, array) for kv_type, array in zip(_PLANES, arrays, strict=True))
        return cls(tuple(array.shape[1] for array in arrays), planes, cache.group_size, cache.bits)

    @property
    def packed(self) -> tuple[int, int]:
        return self.bits, self.group_size

    def empty(self) -> QuantizedKVCache:
        return _empty(self.group_size, self.bits)

    def matrices(self, tokens: int) -> tuple[Matrices, ...]:
        return tuple(Matrices(plane, heads, tokens) for plane, heads in zip(self.planes, self.heads, strict=True))

    def arrays(self, cache: QuantizedKVCache) -> tuple[mx.array, ...]:
        return _arrays(cache) if self.planes else ()

    def join(self, pieces: Sequence[tuple[mx.array, ...]], tokens: int) -> QuantizedKVCache:
        cache = self.empty()
        if self.planes:
            _fill(cache, [join(plane, tokens) for plane in zip(*pieces, strict=True)], tokens)
        return cache


class BatchQuantizedCache(BatchKVCache):  # type: ignore[misc]
    """Several QuantizedKVCaches as one: mlx-lm's BatchKVCache, with six arrays ``[batch, heads, capacity, dim]`` in
    place of keys and values.

    Row `left_padding[i]` of sequence i has its first token; the rows before it are masked. The batch quantises only new
    rows: rows that join and leave it are copied.
    """

    offset: mx.array  # [batch], the number of tokens of each sequence
    left_padding: mx.array  # [batch]
    _idx: int  # the number of used rows, with padding
    _right_padding: mx.array | None  # [batch], of the current chunk of the prompts

    def __init__(self, left_padding: Sequence[int], group_size: int, bits: int) -> None:
        super().__init__(left_padding)
        self.group_size = group_size
        self.bits = bits  # mlx-lm's attention looks for this attribute
        self.arrays: list[mx.array] = []  # in the order of `_PLANES`; [] before the first token

    @classmethod
    def merge(cls, caches: Sequence[QuantizedKVCache]) -> Self:
        """Return a batch with the tokens of `caches`, which have the same bits and groups."""
        length = max(cache.offset for cache in caches)
        merged = cls([length - cache.offset for cache in caches], caches[0].group_size, caches[0].bits)
        if length:
            some = next(_arrays(cache) for cache in caches if cache.offset)
            held = [[array[..., : cache.offset, :] for array in _arrays(cache) or some] for cache in caches]
            merged.arrays = [
                mx.concatenate([_padded(array, length) for array in plane]) for plane in zip(*held, strict=True)
            ]
            merged.offset += length
            merged._idx = length
        return merged

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append rows ``[batch, heads, rows, dim]``. Return the triples of the keys and of the values."""
        before, self._idx = self._idx, self._idx + keys.shape[2]
        self.offset += keys.shape[2]
        added = _in_order(*(mx.quantize(rows, group_size=self.group_size, bits=self.bits) for rows in (keys, values)))
        if not self.arrays or self._idx > self.arrays[0].shape[2]:
            capacity = before + -(-keys.shape[2] // self.step) * self.step
            held = self.arrays or [array[..., :0, :] for array in added]
            self.arrays = [_padded(array[..., :before, :], capacity, left=False) for array in held]
        for array, rows in zip(self.arrays, added, strict=True):
            array[..., before : self._idx, :] = rows
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        keys, values, *rest = (array[..., : self._idx, :] for array in self.arrays)
        return (keys, *rest[:2]), (values, *rest[2:])

    def finalize(self) -> None:
        """Move padding on the right of a chunk of the prompts to the left."""
        if self._right_padding is not None:
            self.arrays = [dynamic_roll(array, self._right_padding[:, None], axis=2) for array in self.arrays]
            self.offset -= self._right_padding
            self.left_padding += self._right_padding
            self._right_padding = None

    @property
    def state(self) -> Any:
        return self.arrays, self.offset, self.left_padding

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep only these sequences, and drop padding that all of them have."""
        kept = mx.array(list(batch_indices))
        self.offset, self.left_padding = self.offset[kept], self.left_padding[kept]
        unused = cast(int, self.left_padding.min().item())
        self.arrays = [array[kept, :, unused:] for array in self.arrays]
        self.left_padding -= unused
        self._idx -= unused

    def extend(self, other: Self) -> None:
        """Add the sequences of another batch."""
        end = max(self._idx, other._idx)
        if some := self.arrays or other.arrays:
            both = []
            for batch in (self, other):
                count = batch.offset.shape[0]
                held = batch.arrays or [mx.zeros((count, *array.shape[1:]), array.dtype) for array in some]
                both.append([_padded(array[..., : batch._idx, :], end) for array in held])
            self.arrays = [mx.concatenate(list(plane)) for plane in zip(*both, strict=True)]
        padding = [batch.left_padding + end - batch._idx for batch in (self, other)]
        self.left_padding, self.offset = mx.concatenate(padding), mx.concatenate([self.offset, other.offset])
        self._idx = end

    def extract(self, idx: int) -> QuantizedKVCache:
        """Return a copy of one sequence."""
        cache = _empty(self.group_size, self.bits)
        if self.arrays:
            begin = cast(int, self.left_padding[idx].item())
            rows = [mx.contiguous(array[idx : idx + 1, :, begin : self._idx]) for array in self.arrays]
            _fill(cache, rows, self._idx - begin)
        return cache

    def empty(self) -> bool:
        return not self.arrays

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def quantised(cache: Any, group_size: int, bits: int) -> Any:
    """Return an empty QuantizedKVCache in place of an empty KVCache, also within a CacheList. Other caches are returned
    unchanged.
    """
    if type(cache) is CacheList:
        return CacheList(*(quantised(part, group_size, bits) for part in cache.caches))
    return QuantizedKVCache(group_size, bits) if type(cache) is KVCache else cache


def _empty(group_size: int, bits: int) -> QuantizedKVCache:
    """Return a cache without a token, with the method from which mlx-lm makes batches; its class has none."""
    cache = QuantizedKVCache(group_size, bits)
    cache.merge = BatchQuantizedCache.merge
    return cache


def _arrays(cache: QuantizedKVCache) -> tuple[mx.array, ...]:
    return _in_order(cache.keys, cache.values) if cache.keys is not None else ()


def _in_order(of_keys: Sequence[mx.array], of_values: Sequence[mx.array]) -> tuple[mx.array, ...]:
    """Return the arrays of keys and of values in the order of `_PLANES`."""
    return (of_keys[0], of_values[0], *of_keys[1:], *of_values[1:])


def _fill(cache: QuantizedKVCache, arrays: Sequence[mx.array], tokens: int) -> None:
    keys, values, *rest = arrays
    cache.keys, cache.values, cache.offset = (keys, *rest[:2]), (values, *rest[2:]), tokens


def _padded(array: mx.array, rows: int, *, left: bool = True) -> mx.array:
    """Return ``[batch, heads, rows, dim]`` with zeros before the rows of `array`, or after them."""
    missing = rows - array.shape[2]
    return mx.pad(array, [(0, 0), (0, 0), (missing, 0) if left else (0, missing), (0, 0)]) if missing else array
