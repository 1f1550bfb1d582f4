"""A codec for each kind of mlx-lm's caches: it describes the arrays of a layer, and converts them to blocks and back.

A cache has either a row for each token, so that every prefix of it can be used (:class:`TokenLayer`), or a state that
is valid only at the position where it was captured (:class:`StateLayer`). A CacheList is split into its caches. A kind
without a codec is refused.
"""

from __future__ import annotations

from typing import Any

from .codec import DTYPES, MLX_DTYPES, CacheStateError, Matrices, StateLayer, TokenLayer, UnsupportedCacheError
from .state_layers import ArraysLayer, ChunkedLayer, Nesting, WindowLayer, assemble, nesting, parts
from .token_layers import FullLayer, QuantizedLayer, quantised

Layer = TokenLayer | StateLayer

CODECS: tuple[type[Layer], ...] = (FullLayer, QuantizedLayer, WindowLayer, ChunkedLayer, ArraysLayer)


def describe(index: int, cache: Any) -> Layer:
    """Return the codec of a cache that has processed some tokens, for the layer with index `index` of the model.

    Raises UnsupportedCacheError, which names the layer and the kind of its cache, if there is no codec.
    """
    for codec in CODECS:
        if type(cache) is codec.KIND:  # a subclass may have more state
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
