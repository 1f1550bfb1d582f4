"""Tiny models of families that keep or compute something unusual, ready to be asked."""

from __future__ import annotations

from typing import Any

from engine_models import letter_tokenizer
from every_family import random_model

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from engine.spec import ModelCacheSpec

TOKENS = np.random.default_rng(4).integers(0, 96, 300).tolist()
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []


class Model:
    """A family's tiny model, in float32 or in the given dtype."""

    def __init__(self, name: str, dtype: mx.Dtype = mx.float32, times: float = 1.0) -> None:
        self.model = random_model(name)
        parameters = self.model.parameters()
        self.model.update(
            tree_map(lambda array: (array * times if array.ndim > 1 else array).astype(dtype), parameters)
        )
        self.spec = ModelCacheSpec.probe(self.model, TOKENIZER, block_tokens=32)

    def empty(self) -> list[Any]:
        return list(make_prompt_cache(self.model))
