"""A codec for each of mlx-lm's kinds of cache: its arrays, and how it is cut into blocks and restored.

A kind keeps either a row for each token, so that every prefix can be cut out (:class:`TokenLayer`), or a state that is
valid only where it was taken (:class:`StateLayer`). A CacheList is taken apart. A kind without a codec is refused.

Contains: a file per codec, and the codecs' shared parts. Excludes: models, blocks' ids, and anything above.
"""

from __future__ import annotations

from typing import Any

from .arrays import ArraysLayer, Nesting, assemble, nesting, parts
from .chunked import ChunkedLayer
from .codec import DTYPES, MLX_DTYPES, CacheStateError, Matrices, StateLayer, TokenLayer, UnsupportedCacheError
from .full import FullLayer
from .quantized import QuantizedLayer, quantised
from .window import WindowLayer

Layer = TokenLayer | StateLayer

CODECS: tuple[type[Layer], ...] = (FullLayer, QuantizedLayer, WindowLayer, ChunkedLayer, ArraysLayer)


def describe(index: int, cache: Any) -> Layer:
    """Return the codec of a cache that has seen some tokens, in the layer `index` of the model.

    Raises UnsupportedCacheError, which names the layer and its kind, for a cache that is not understood.
    """
    for codec in CODECS:
        if type(cache) is codec.KIND:  # a subclass may hold more
            try:
                return codec.describe(cache)
            except UnsupportedCacheError as error:
                raise UnsupportedCacheError(f"layer {index} {error}") from None
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                what = f"layer {index} keeps a {type(cache).__name__} unlike those that are known"
                raise UnsupportedCacheError(f"{what}: {error}") from error
    supported = ", ".join([*(codec.KIND.__name__ for codec in CODECS), "CacheList"])
    raise UnsupportedCacheError(f"layer {index} keeps a {type(cache).__name__}; supported: {supported}")


__all__ = [
    "DTYPES",
    "MLX_DTYPES",
    "ArraysLayer",
    "CacheStateError",
    "ChunkedLayer",
    "FullLayer",
    "Layer",
    "Matrices",
    "Nesting",
    "QuantizedLayer",
    "StateLayer",
    "TokenLayer",
    "UnsupportedCacheError",
    "WindowLayer",
    "assemble",
    "describe",
    "nesting",
    "parts",
    "quantised",
]
