"""Conversions of a block's body between three memory layouts.

========= ===================================================================================================
canonical a block's body: ``[layer, plane, head, token, dim]``, one after the other
MLX       for each layer and plane, ``[heads, tokens, dim]``
vLLM      for each layer, keys ``[num_kv_heads, head_size/x, block_size, x]`` with x = 16 bytes of elements, and
          values ``[num_kv_heads, head_size, block_size]``: ``split_kv_cache`` in vllm/attention/ops/paged_attn.py
========= ===================================================================================================

Elements are moved, never converted. numpy has neither bfloat16 nor float8, so the elements of a body are unsigned
integers of the same width. Every function except `from_mlx` returns a view if strides permit: a write into the view
changes the source, and ``np.ascontiguousarray`` of it is a copy in the new order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from kvpage_server.page import BlockShape, DType, PageError

Array = NDArray[Any]

VLLM_VECTOR = 16  # contiguous bytes of a key


def raw_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the little-endian numpy dtype of unsigned integers that are as wide as elements of `dtype`."""
    return np.dtype(f"<u{dtype.itemsize}")


def to_mlx(body: Buffer, shape: BlockShape) -> list[dict[int, Array]]:
    """Split a block's body into MLX's layout: for each layer, the planes by kv_type, each a numpy view ``[heads,
    tokens, dim]`` of `body`. ``mx.array(view).view(mx.bfloat16)`` makes one an array of MLX, here of bfloat16.

    Raises PageError if `body` does not have the length of a block of `shape`.
    """
    view = memoryview(body).cast("B")
    if len(view) != shape.nbytes:
        raise PageError(f"a block of this shape has {shape.nbytes} bytes, got {len(view)}")
    layers = []
    start = 0
    for _ in range(shape.layers):
        layer = {}
        for plane in shape.planes:
            stop = start + shape.heads * shape.page_nbytes(plane)
            values = np.frombuffer(view[start:stop], raw_dtype(plane.dtype))
            layer[int(plane.kv_type)] = values.reshape(shape.heads, shape.page_size, plane.head_dim)
            start = stop
        layers.append(layer)
    return layers


def from_mlx(layers: Sequence[Mapping[int, Any]], shape: BlockShape) -> bytearray:
    """Return the body of a block, a copy, from its planes by layer and kv_type. It is the inverse of `to_mlx`.

    The arrays, of numpy or MLX, may have any dtype as wide as their plane's, and any strides. Raises PageError if one
    is missing or has another shape or width, TypeError for an object of another type.
    """
    body = bytearray(shape.nbytes)
    if len(layers) != shape.layers:
        raise PageError(f"a block of this shape has {shape.layers} layers, got {len(layers)}")
    for i, (given, targets) in enumerate(zip(layers, to_mlx(body, shape), strict=True)):
        if given.keys() != targets.keys():
            raise PageError(f"layer {i} must have the planes {sorted(targets)}, got {sorted(given)}")
        for kv_type, target in targets.items():
            array = given[kv_type]
            if not isinstance(array, np.ndarray) and type(array).__module__ != "mlx.core":
                raise TypeError(
                    f"plane {kv_type} of layer {i} must be an array of numpy or MLX, got {type(array).__name__}"
                )
            if (array.shape, array.itemsize) != (target.shape, target.itemsize):
                raise PageError(
                    f"plane {kv_type} of layer {i} must be {target.shape} of {target.itemsize} bytes, "
                    f"got {array.shape} of {array.itemsize}"
                )
            target[...] = _as_integers(array, target.dtype)
    return body


def _as_integers(array: Any, dtype: np.dtype[Any]) -> Array:
    """Return the elements of an array of numpy or MLX as unsigned integers of `dtype`."""
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    mlx = import_module("mlx.core")  # it exists, if there is an array of it
    return np.asarray(array.view(getattr(mlx, dtype.name)))


def keys_to_vllm(keys: Array) -> Array:
    """Return keys ``[..., tokens, dim]`` in vLLM's layout ``[..., dim/x, tokens, x]``; x elements are 16 bytes.

    Leading axes, such as heads or blocks, are not changed. Raises PageError unless dim is a multiple of x.
    """
    *leading, tokens, dim = keys.shape
    x = VLLM_VECTOR // keys.itemsize
    if dim % x:
        raise PageError(
            f"head_dim must be a multiple of {x} for vLLM, which keeps {VLLM_VECTOR} bytes together, got {dim}"
        )
    return keys.reshape(*leading, tokens, dim // x, x).swapaxes(-3, -2)


def keys_from_vllm(keys: Array) -> Array:
    """Return keys in vLLM's layout ``[..., dim/x, tokens, x]`` as ``[..., tokens, dim]``.

    The result is a copy, unless `keys` is a view from `keys_to_vllm`. Raises PageError unless the last axis has 16
    bytes.
    """
    *leading, groups, tokens, x = keys.shape
    if x * keys.itemsize != VLLM_VECTOR:
        raise PageError(f"vLLM keeps {VLLM_VECTOR} bytes of a key together, got {x} of {keys.itemsize}")
    return keys.swapaxes(-3, -2).reshape(*leading, tokens, groups * x)


def values_to_vllm(values: Array) -> Array:
    """Return ``[..., tokens, dim]`` as ``[..., dim, tokens]``."""
    return values.swapaxes(-2, -1)


def values_from_vllm(values: Array) -> Array:
    """Return ``[..., dim, tokens]`` as ``[..., tokens, dim]``."""
    return values.swapaxes(-2, -1)
