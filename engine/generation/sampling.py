"""Samplers as mlx-lm's, with a separate random key for every answer.

mlx-lm's samplers share one random generator, so an answer's random numbers depend on the other answers in the batch.
Here an answer with a seed is always the same.
"""

from __future__ import annotations

import os
from collections import deque
from typing import cast

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_p

from .unbatched import Sampler, likeliest

COLD = 1e-5  # below this, logprobs divided by the temperature overflow
LEAST_TOP_P = 1e-6  # the likeliest token of a large vocabulary has a higher probability; float32 is too coarse for less


def sampler(temperature: float, top_p: float = 1.0, seed: int | None = None) -> Sampler | None:
    """Return a sampler for one answer, to be used on one thread. None stands for the likeliest token.

    It draws at `temperature` from the likeliest tokens with a total probability of `top_p`. Without `seed`, the
    system's random generator seeds it. The result is None if `top_p` is below LEAST_TOP_P or `temperature` below COLD.
    Raises ValueError for a negative `temperature`, or a `top_p` outside 0 to 1.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p must be 0 to 1, got {top_p}")
    if temperature < COLD or top_p < LEAST_TOP_P:
        return None
    start = int.from_bytes(os.urandom(8), "little") if seed is None else seed % (1 << 64)
    key: mx.array | None = None

    def draw(logprobs: mx.array) -> mx.array:
        nonlocal key
        key, drawn_with = mx.random.split(mx.random.key(start) if key is None else key)
        likely = apply_top_p(logprobs, top_p) if top_p < 1 else logprobs
        return mx.random.categorical(likely * (1 / temperature), key=drawn_with)

    return draw


class SamplerError(ValueError):
    """Error: the result of a caller's sampler is not a token id of the model."""


class Guarded:
    """Wrapper of a caller's sampler, for use in a batch. It stores an exception of the sampler, or a result that is not
    a token id, until `check` raises it. Until then the batch continues with a token that is not used.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._drawn: deque[mx.array | Exception] = deque()  # sampled but not yet checked, two at most

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Return a token id ``[1]`` for log-probabilities ``[1, vocabulary]``. It is always an id of the vocabulary."""
        try:
            drawn = self._sampler(logprobs)
            if not isinstance(drawn, mx.array) or drawn.shape != (1,) or not mx.issubdtype(drawn.dtype, mx.integer):
                raise SamplerError(f"a sampler gives token ids [1], one of whole numbers, got {drawn!r:.80}")
        except Exception as error:  # noqa: BLE001 - any error is passed to the caller
            self._drawn.append(error)
            return likeliest(logprobs)
        self._drawn.append(drawn)
        return mx.clip(drawn, 0, logprobs.shape[-1] - 1)

    def check(self, token: int) -> None:
        """Raise the stored error of the next sampled token, if there is one. `token` is the id with which the batch has
        continued.
        """
        drawn = self._drawn.popleft()
        if isinstance(drawn, Exception):
            raise drawn
        if (given := cast(int, drawn.item())) != token:
            raise SamplerError(f"a sampler gave the token {given}, which the model does not have")
