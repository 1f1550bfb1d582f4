"""What a model's cache looks like, learnt by running one token, and the fingerprint that names it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import xxhash
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvpage_server.page import DType, KVType, Plane

BLOCK_TOKENS = 256  # as mlx-lm grows its buffers; a page of one head is then 32 to 64 KiB
LAYOUT_VERSION = 1  # of blocks, pages and the hashes over them

DTYPES = {
    mx.float16: DType.FLOAT16,
    mx.float32: DType.FLOAT32,
    mx.bfloat16: DType.BFLOAT16,
}


class UnsupportedCacheError(TypeError):
    """The model keeps a kind of cache that cannot be stored and restored exactly; the message names it."""


@dataclass(frozen=True, slots=True)
class ModelTag:
    """The few numbers by which people and files tell models apart. Identity is the fingerprint's business."""

    model_id: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    block_tokens: int


class PageAt(NamedTuple):
    """Where in a block a page belongs: one head of one plane of one layer, ``[tokens, plane.head_dim]``."""

    layer: int
    head: int
    plane: Plane

    def nbytes(self, tokens: int) -> int:
        """Bytes of the page when the block holds `tokens` tokens."""
        return tokens * self.plane.head_dim * self.plane.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps for a token: in each plane, `heads` rows of the plane's head_dim."""

    kind: str  # the mlx-lm class that holds it
    heads: int
    planes: tuple[Plane, ...]  # in the order of kv_type; () for a layer that keeps nothing


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """The geometry and the identity of a model's cache."""

    model_id: str
    block_tokens: int
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    context: int | None  # tokens the model was made for; None when it does not say
    fingerprint: int  # 64 bits; caches with equal fingerprints are interchangeable

    @classmethod
    def probe(
        cls, model: nn.Module, tokenizer: Any, *, model_id: str = "", block_tokens: int = BLOCK_TOKENS
    ) -> ModelCacheSpec:
        """Run one token through `model` and describe the cache it leaves.

        Raises UnsupportedCacheError for a cache that is not understood.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        cache = make_prompt_cache(model)
        logits = model(mx.array([[0]]), cache=cache)
        mx.eval(logits, [layer.state for layer in cache])
        layers = tuple(_describe(i, layer) for i, layer in enumerate(cache))
        if not any(layer.planes for layer in layers):
            raise UnsupportedCacheError(f"{type(model).__module__} caches nothing that could be reused")
        return cls(
            model_id=model_id,
            block_tokens=block_tokens,
            layers=layers,
            vocab_size=logits.shape[-1],
            context=getattr(getattr(model, "args", None), "max_position_embeddings", None),
            fingerprint=fingerprint(model, tokenizer, layers, block_tokens),
        )

    @property
    def tag(self) -> ModelTag:
        """Heads and head_dim are those of the first layer's keys."""
        first = next(layer for layer in self.layers if layer.planes)
        return ModelTag(self.model_id, len(self.layers), first.heads, first.planes[0].head_dim, self.block_tokens)

    @property
    def token_nbytes(self) -> int:
        """Bytes a token takes in all layers."""
        return sum(page.nbytes(1) for page in self.page_order)

    @property
    def page_order(self) -> list[PageAt]:
        """A block's pages in canonical order: layer, plane, head."""
        return [
            PageAt(i, head, plane)
            for i, layer in enumerate(self.layers)
            for plane in layer.planes
            for head in range(layer.heads)
        ]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)


def _describe(index: int, cache: Any) -> LayerSpec:
    kind = type(cache)
    if kind is not KVCache:  # a subclass may hold what its parent does not
        raise UnsupportedCacheError(f"layer {index} keeps a {kind.__name__}; supported: {KVCache.__name__}")
    if cache.keys is None:
        return LayerSpec(kind.__name__, 0, ())
    planes = tuple(
        Plane(int(kv_type), _dtype(index, array), array.shape[-1])
        for kv_type, array in ((KVType.K, cache.keys), (KVType.V, cache.values))
    )
    return LayerSpec(kind.__name__, cache.keys.shape[1], planes)


def _dtype(index: int, array: mx.array) -> DType:
    try:
        return DTYPES[array.dtype]
    except KeyError:
        allowed = ", ".join(dtype.name.lower() for dtype in DTYPES.values())
        raise UnsupportedCacheError(f"layer {index} caches {array.dtype}; supported: {allowed}") from None


def fingerprint(model: nn.Module, tokenizer: Any, layers: Sequence[LayerSpec], block_tokens: int) -> int:
    """64 bits of everything that makes two caches interchangeable.

    The weights as they lie in memory (so a fine-tune, an adapter or another quantisation differs, and a copy in
    another directory does not), the model's class and configuration (rope, norms), the vocabulary, the geometry
    and dtypes of the cache, the block size and the layout's version. Not the model's name.
    """
    identity = {
        "layout": LAYOUT_VERSION,
        "model": [type(model).__module__, _configuration(model)],
        "weights": _weights_digest(model),
        "vocabulary": hashlib.blake2b(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest(),
        "layers": [[layer.kind, layer.heads, *map(dataclasses.astuple, layer.planes)] for layer in layers],
        "block_tokens": block_tokens,
    }
    canonical = json.dumps(identity, sort_keys=True, default=vars).encode()
    return int.from_bytes(hashlib.blake2b(canonical, digest_size=8).digest(), "little")


def _configuration(model: nn.Module) -> dict[str, Any]:
    return dict(vars(model.args))


def _weights_digest(model: nn.Module) -> str:
    digest = xxhash.xxh3_128()
    for name, array in sorted(tree_flatten(model.parameters())):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(memoryview(array.reshape(-1).view(mx.uint8)))
    return digest.hexdigest()
