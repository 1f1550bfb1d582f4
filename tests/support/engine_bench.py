"""A batch engine on a family's small model: the model's inputs are recorded, and the blocks of answers are freed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from engine_families import Family
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.batch_engine import BlockPoolBatchEngine
from engine.pool import BlockPool
from engine.scheduling.model_runner import ModelWatch
from engine.scheduling.request import CompletedGeneration, SchedulerConfig


class Watched:
    """A model, and the shapes ``[batch, tokens]`` of its inputs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.given: list[tuple[int, ...]] = []

    def __call__(self, tokens: mx.array, **options: Any) -> Any:
        self.given.append(tokens.shape)
        return self.model(tokens, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class EngineBench:
    """Further ones say how it is asked."""

    def __init__(self, of: Family, tokenizer: TokenizerWrapper, blocks: int, **options: Any) -> None:
        self.of = of
        self.model = Watched(of.model)
        self.pool = BlockPool(blocks)
        self.batch = BlockPoolBatchEngine(self.model, tokenizer, of.spec, self.pool, SchedulerConfig(**options))
        self.batch._watch = ModelWatch(of.model, of.spec)  # who looks on makes no other model

    def free(self, *held: CompletedGeneration) -> None:
        for done in held:
            self.pool.free(done.blocks.block_ids, done.agent_id)
