"""The choice of an answer's tokens: the parameters of a request, and the functions of them that mlx-lm calls.

The parameters have the names and meanings of mlx-lm, vLLM and OpenAI's API. mlx-lm applies processors to the logits of
an answer, normalises them, and calls its sampler with the log-probabilities. mlx-lm's own samplers share one random
generator, so an answer's random numbers depend on the other answers in the batch. Here an answer has a random key of
its own, so with a seed it is always the same.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from .unbatched import Processor, Sampler, likeliest

COLD = 1e-5  # below this, logprobs divided by the temperature overflow
LEAST_TOP_P = 1e-6  # the likeliest token of a large vocabulary has a higher probability; float32 is too coarse for less
MAX_XTC_THRESHOLD = 0.5  # as mlx-lm; above it at most one token can reach the threshold
MAX_BIAS = 100  # as OpenAI's API


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of the choice of one answer's tokens. By default, each token is the likeliest one.

    Raises ValueError for a parameter outside of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0  # total probability of the likeliest tokens that may be drawn
    top_k: int = 0  # number of the likeliest tokens that may be drawn; 0 for all
    min_p: float = 0.0  # least probability of a token, as a part of the likeliest one's
    xtc_probability: float = 0.0  # probability that a token is drawn without all but the last above the threshold
    xtc_threshold: float = 0.1
    xtc_special_tokens: Collection[int] = ()  # that XTC keeps
    seed: int | None = None  # None: the system's random generator makes one
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to logits, by token id
    repetition_penalty: float = 1.0  # factor for logits of tokens in prompt and answer, as in vLLM
    repetition_context_size: int | None = None  # of these, only the last tokens in this number
    presence_penalty: float = 0.0  # subtracted from logits of tokens in the answer
    frequency_penalty: float = 0.0  # subtracted for each time that the answer has a token
    min_tokens: int = 0  # tokens before one that ends the answer
    ignore_eos: bool = False  # whether tokens that end the answer are never chosen

    def __post_init__(self) -> None:
        for name, least, most in (
            ("temperature", 0, None),
            ("top_p", 0, 1),
            ("top_k", 0, None),
            ("min_p", 0, 1),
            ("xtc_probability", 0, 1),
            ("xtc_threshold", 0, MAX_XTC_THRESHOLD),
            ("repetition_context_size", 1, None),
            ("min_tokens", 0, None),
        ):
            value = getattr(self, name)
            if value is not None and not (value >= least and (most is None or value <= most)):
                allowed = f"{least} or more" if most is None else f"{least} to {most}"
                raise ValueError(f"{name} must be {allowed}, got {value}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        for token, bias in self.logit_bias.items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ValueError(f"logit_bias must be -{MAX_BIAS} to {MAX_BIAS}, got {bias} for token {token}")

    def sampler(self) -> Sampler | None:
        """Return a sampler for one answer, to be used on one thread. None stands for the likeliest token.

        The filters are those of mlx-lm in its order: top_p, min_p, XTC, top_k, each on log-probabilities before the
        temperature. The result is None if `temperature` is below COLD or `top_p` below LEAST_TOP_P.
        """
        if self.temperature < COLD or self.top_p < LEAST_TOP_P:
            return None
        start = int.from_bytes(os.urandom(8), "little") if self.seed is None else self.seed % (1 << 64)
        keep = mx.array(sorted(self.xtc_special_tokens), mx.int32)
        key: mx.array | None = None

        def draw(logprobs: mx.array) -> mx.array:
            nonlocal key
            key, drawn_with = mx.random.split(mx.random.key(start) if key is None else key)
            if self.top_p < 1:
                logprobs = apply_top_p(logprobs, self.top_p)
            if self.min_p > 0:
                logprobs = apply_min_p(logprobs, self.min_p)
            if self.xtc_probability > 0:
                drawn_with, chance = mx.random.split(drawn_with)
                excludes = mx.random.uniform(key=chance) <= self.xtc_probability
                logprobs = mx.where(excludes, self._without_top_choices(logprobs, keep), logprobs)
            if 0 < self.top_k < logprobs.shape[-1]:
                logprobs = apply_top_k(logprobs, self.top_k)
            # mx.random.categorical draws by cumulative probabilities: a rounding error, as of another batch, moves
            # every later token. With noise for each token, it changes the draw only if two sums are nearly equal.
            noise = mx.random.gumbel(logprobs.shape, key=drawn_with)
            return mx.argmax(logprobs * (1 / self.temperature) + noise, axis=-1)

        return draw

    def _without_top_choices(self, logprobs: mx.array, keep: mx.array) -> mx.array:
        """Return log-probabilities ``[1, vocabulary]`` without the tokens above the threshold, except the least likely
        of them and the ids `keep`: XTC ("exclude top choices") as in mlx-lm.
        """
        probabilities = mx.softmax(logprobs, axis=-1)
        above = mx.where(probabilities > self.xtc_threshold, probabilities, mx.inf)
        excluded = probabilities > above.min(axis=-1, keepdims=True)
        if keep.size:
            excluded[..., keep] = False
        return mx.where(excluded, -mx.inf, logprobs)

    def processors(self, prompt: int, ends: Collection[int]) -> list[Processor]:
        """Return the processors of the logits of one answer, in mlx-lm's order.

        `prompt` is the number of tokens of the prompt, `ends` the ids that end the answer.
        """
        found: list[Processor] = []
        if self.logit_bias:
            found.append(_bias(self.logit_bias))
        if self.repetition_penalty != 1:
            found.append(self._penalise_repetition)
        if self.presence_penalty or self.frequency_penalty:
            found.append(lambda tokens, logits: self._penalise(tokens[prompt:], logits))
        if ends and (self.min_tokens or self.ignore_eos):
            least = None if self.ignore_eos else prompt + self.min_tokens
            found.append(_forbid_end_tokens(least, ends))
        return found

    def _penalise_repetition(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return logits ``[1, vocabulary]`` with those of `tokens` divided by the penalty, or multiplied if negative
        (https://arxiv.org/abs/1909.05858).
        """
        count = min(self.repetition_context_size or tokens.size, tokens.size)  # MLX takes no index above 32 bits
        some = tokens[tokens.size - count :]
        found = logits[:, some]
        logits[:, some] = mx.where(found < 0, found * self.repetition_penalty, found / self.repetition_penalty)
        return logits

    def _penalise(self, answer: mx.array, logits: mx.array) -> mx.array:
        """Return logits ``[1, vocabulary]`` less the penalties for tokens in `answer`, as in OpenAI's API."""
        if not answer.size:
            return logits
        counts = mx.zeros(logits.shape[-1:]).at[answer].add(1)
        return logits - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)


def _bias(bias: Mapping[int, float]) -> Processor:
    ids, values = mx.array(list(bias), mx.int32), mx.array(list(bias.values()))
    return lambda _, logits: logits.at[:, ids].add(values.astype(logits.dtype))


def _forbid_end_tokens(least: int | None, ends: Collection[int]) -> Processor:
    """Return a processor that forbids the tokens `ends` until there are `least` tokens of prompt and answer; with None
    always.
    """
    ids = mx.array(sorted(ends), mx.int32)

    def mask(tokens: mx.array, logits: mx.array) -> mx.array:
        if least is None or tokens.size < least:
            logits[:, ids] = -mx.inf
        return logits

    return mask


class SamplerError(ValueError):
    """Error: the result of a caller's sampler or processor is unusable."""


class Guarded:
    """Wrapper of a caller's sampler and processors, for use in a batch. It stores their exception, or an unusable
    result, until `check` raises it. Until then the batch continues with a token that is not used.
    """

    def __init__(self, sampler: Sampler | None, processors: Sequence[Processor]) -> None:
        self._sampler = sampler or likeliest
        self._processors = processors
        self._error: Exception | None = None  # of a processor, until the token of the same step is drawn
        self._drawn: deque[mx.array | Exception] = deque()  # sampled but not yet checked, two at most

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Return a token id ``[1]`` for log-probabilities ``[1, vocabulary]``. It is always an id of the vocabulary."""
        try:
            if self._error:
                raise self._error
            drawn = self._sampler(logprobs)
            if not isinstance(drawn, mx.array) or drawn.shape != (1,) or not mx.issubdtype(drawn.dtype, mx.integer):
                raise SamplerError(f"a sampler gives token ids [1], one of whole numbers, got {drawn!r:.80}")
        except Exception as error:  # noqa: BLE001 - any error is passed to the caller
            self._drawn.append(error)
            return likeliest(logprobs)
        self._drawn.append(drawn)
        return mx.clip(drawn, 0, logprobs.shape[-1] - 1)

    def process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the logits ``[1, vocabulary]`` after all processors; `tokens` ``[n]`` are those of prompt and
        answer.
        """
        processed = logits
        try:
            for processor in self._processors:
                processed = processor(tokens, processed)
                if not isinstance(processed, mx.array) or processed.shape != logits.shape:
                    raise SamplerError(f"a processor gives logits {list(logits.shape)}, got {processed!r:.80}")
        except Exception as error:  # noqa: BLE001 - any error is passed to the caller
            self._error = error
            return logits
        return processed.astype(logits.dtype)

    def check(self, token: int) -> None:
        """Raise the stored error of the next sampled token, if there is one. `token` is the id with which the batch has
        continued.
        """
        drawn = self._drawn.popleft()
        if isinstance(drawn, Exception):
            raise drawn
        if (given := cast(int, drawn.item())) != token:
            raise SamplerError(f"a sampler gave the token {given}, which the model does not have")
