"""Answers of an engine and of mlx-lm to a prompt, token by token, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import generate_step

from engine.generation.unbatched import Sampler

Logits = npt.NDArray[np.float32]


class Model(Protocol):
    """A model, and the caches that it begins with."""

    model: Any

    def empty(self) -> list[Any]: ...


def recorder(seen: list[Logits]) -> Sampler:
    """Takes the likeliest token and keeps the log-probabilities that it was given."""

    def sample(logprobs: mx.array) -> mx.array:
        seen.append(np.array(logprobs[0].astype(mx.float32)))
        return mx.argmax(logprobs, axis=-1)

    return sample


@dataclass
class ReferenceAnswer:
    """An answer, and the log-probabilities of every token of it, ``[tokens, vocabulary]``."""

    tokens: list[int]
    logprobs: Logits


class MlxLm:
    """A conversation with mlx-lm itself, which keeps its caches from turn to turn."""

    def __init__(self, of: Model) -> None:
        self._of = of
        self._cache = of.empty()

    def answer(self, prompt: Sequence[int], count: int, chunk: int = 2048) -> ReferenceAnswer:
        seen: list[Logits] = []
        steps = generate_step(
            mx.array(prompt),
            self._of.model,
            max_tokens=count,
            prompt_cache=self._cache,
            sampler=recorder(seen),
            prefill_step_size=chunk,
        )
        tokens = [token for token, _ in steps]
        return ReferenceAnswer(tokens, np.array(seen[:count]))  # one more is computed ahead
