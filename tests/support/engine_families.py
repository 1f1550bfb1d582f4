"""Every kind of cache that mlx-lm makes, in tiny random models of the families that make it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from engine_models import FAMILIES, letter_tokenizer, tiny

# isort: split
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, Arrays
from engine.spec import ModelCacheSpec

TOKENS = np.random.default_rng(6).integers(0, 96, 300).tolist()
TOKENIZER = letter_tokenizer()
STOCK = (
    os.environ.get("KVPAGE_BLAS") == "stock"
)  # MLX's own BLAS, whose products in a batch have the bits of single ones
QUANTIZED = [f"llama q{bits}/{group}" for bits in (4, 8) for group in (32, 64)]
KINDS = [*FAMILIES, *QUANTIZED]
WINDOWS = ["llama4", "gemma3_text", "gpt_oss", "cohere2"]
WITH_STATE = [*WINDOWS, "lfm2", "qwen3_next", "falcon_h1", "baichuan_m1", "jamba", "rwkv7", "mamba2"]
WITHOUT_OFFSET = ["rwkv7", "mamba2"]

Logits = npt.NDArray[np.float32]


class Family:
    """A tiny model and how its caches are made."""

    def __init__(self, kind: str, seed: int = 7, block_tokens: int = 256, **changes: Any) -> None:
        family, _, quantized = kind.partition(" q")
        self._settings = [int(number) for number in quantized.split("/")] if quantized else []
        self.model = tiny(family, seed, **({"head_dim": 64} if quantized else {}), **changes)
        own = {"cache": self.empty()} if quantized else {}
        self.spec = ModelCacheSpec.probe(self.model, TOKENIZER, model_id=kind, block_tokens=block_tokens, **own)

    def empty(self) -> list[Any]:
        made: list[Any] = make_prompt_cache(self.model)
        if not self._settings:
            return made
        bits, group_size = self._settings
        return [QuantizedKVCache(group_size, bits) if type(layer) is KVCache else layer for layer in made]

    def run(self, tokens: Sequence[int], cache: list[Any]) -> Logits:
        """The logits of every one of `tokens`, ``[tokens, vocabulary]``."""
        return np.array(self.model(mx.array([tokens]), cache=cache)[0])

    def computed(self, count: int, decoded: int = 0) -> list[Any]:
        """The cache after the first `count` tokens, the last `decoded` of them one by one."""
        cache = self.empty()
        self.run(TOKENS[: count - decoded], cache)
        for token in TOKENS[count - decoded : count]:
            self.run([token], cache)
        return cache

    def blocks(self, cache: list[Any], count: int, states: dict[int, Arrays] | None = None) -> AgentBlocks:
        ids = range(self.spec.blocks_for(count))
        blocks = kvcache.extract(self.spec, cache, ids, count, states=states)
        return AgentBlocks("agent", tuple(TOKENS[:count]), blocks, self.spec.fingerprint)

    def continuation(self, cache: list[Any], count: int) -> Logits:
        """The logits of a chunk from `count` on and of three steps of greedy decoding after it."""
        logits = [self.run(TOKENS[count : count + 5] or [7], cache)]
        for _ in range(3):
            logits.append(self.run([int(logits[-1][-1].argmax())], cache))
        return np.concatenate(logits)


@cache
def family(kind: str, seed: int = 7, block_tokens: int = 256) -> Family:
    return Family(kind, seed, block_tokens)
