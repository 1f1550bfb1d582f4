"""Whether a batch of ragged prompts says what each of them says alone.

Prompts of different lengths are padded to be computed together. What layers carry from token to token must not see the
padding, and some models let it in: their answers are wrong in a batch and right alone. Nothing tells them apart but
trying, so it is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

from engine.singly import SingleGenerator

_PADDED, _LONGER = [1, 1], [1, 0] * 5  # 8 tokens of padding, more than convolutions look back; any vocabulary has them
_TOLERANCE = 0.05  # of the spread of log-probabilities: above the rounding of bfloat16, far below what padding does


def batches_rightly(model: nn.Module, empty: Callable[[], list[Any]]) -> bool:
    """Whether mlx-lm's batches of `model` are right; `empty` makes its caches. Takes some 20 tokens of computing."""
    together = BatchGenerator(model)
    try:
        found = _first_logprobs(together, empty, [_PADDED, _LONGER])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it was not made to be batched
        return False
    finally:
        together.close()
    alone = SingleGenerator(model, stop_tokens=(), prefill_step_size=len(_PADDED))
    right = _first_logprobs(alone, empty, [_PADDED])
    return bool((mx.abs(found - right).max() < _TOLERANCE * (right.max() - right.min())).item())


def _first_logprobs(generator: Any, empty: Callable[[], list[Any]], prompts: list[list[int]]) -> mx.array:
    """Of the first token of the answer to the first prompt, ``[vocabulary]``."""
    seen: list[mx.array] = []

    def sample(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    generator.insert_segments(
        [[prompt] for prompt in prompts],
        max_tokens=[1 for _ in prompts],
        caches=[empty() for _ in prompts],
        all_tokens=[[] for _ in prompts],
        samplers=[sample, *(None for _ in prompts[1:])],
    )
    while not seen:
        generator.next()
    return seen[0][0].astype(mx.float32)
