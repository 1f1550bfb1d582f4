"""Runs prompts whose caches cannot be batched, in turns.

Has the methods of mlx-lm's BatchGenerator. `next` adds a token to every answer and a chunk to one prompt, in rotation.
So a long prompt delays the others by no more than a chunk, and a short prompt waits for one chunk of each prompt before
it. The steps of the model are those of mlx-lm's generate_step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [batch, vocabulary] -> token ids [batch]


@dataclass(frozen=True, slots=True)
class Progress:
    """A prompt has advanced by a chunk, or by its last token."""

    uid: int
    end_of_segment: bool
    end_of_prompt: bool


@dataclass(frozen=True, slots=True)
class NextToken:
    """An answer has advanced by a token; with the last one, its context."""

    uid: int
    token: int
    logprobs: mx.array  # [vocabulary], from which it was sampled
    finish_reason: str | None  # "stop" or "length" for the last
    prompt_cache: list[Any] | None
    all_tokens: list[int] | None  # which the cache holds


@dataclass(slots=True)
class _Sequence:
    uid: int
    segments: deque[list[int]]  # of the prompt, what is still to be computed; the last is one token
    cache: list[Any]
    tokens: list[int]  # that the cache holds
    left: int  # tokens that may still be generated
    whole: int  # tokens of the cache that it will hold before it is quantised
    sampler: Sampler
    upcoming: mx.array | None = None  # [1], the token sampled last, which the cache doesn't hold yet
    logprobs: mx.array | None = None  # [1, vocabulary], from which it was


class UnbatchedGenerator:
    """Runs each prompt on its own, in turns."""

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_tokens: Collection[int],
        prefill_step_size: int,
        quantised_from: int = 0,
        quantised: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        """`prefill_step_size`: tokens in a chunk of a prompt. Caches that hold nothing yet are `quantised` when
        `quantised_from` tokens of their prompt are computed, or all but the last."""
        self._model = model
        self._stop_tokens = frozenset(stop_tokens)
        self._chunk = prefill_step_size
        self._quantised_from = quantised_from
        self._quantised = quantised
        self._uids = count()
        self._steps = 0
        self._prompts: deque[_Sequence] = deque()  # the next in turn first
        self._answers: list[_Sequence] = []

    def insert_segments(
        self,
        segments: Sequence[Sequence[Sequence[int]]],
        max_tokens: Sequence[int],
        caches: Sequence[list[Any]],
        all_tokens: Sequence[Sequence[int]],
        samplers: Sequence[Sampler | None],
    ) -> list[int]:
        """Take up prompts, in `segments` that no chunk goes beyond, each after the tokens in its cache; their uids.

        The caches are this generator's from now on.
        """
        added = []
        for parts, left, cache, tokens, sampler in zip(segments, max_tokens, caches, all_tokens, samplers, strict=True):
            *others, (*rest, last) = parts
            ahead = deque([*map(list, others), *([rest] if rest else []), [last]])
            whole = 0 if tokens else min(self._quantised_from, max(1, sum(map(len, ahead)) - 1))
            added.append(_Sequence(next(self._uids), ahead, cache, list(tokens), left, whole, sampler or likeliest))
        self._prompts.extend(added)
        return [sequence.uid for sequence in added]

    def next(self) -> tuple[list[Progress], list[NextToken]]:
        """Advance every answer by a token, then one prompt by a chunk."""
        self._steps += 1
        if self._steps % 512 == 0:
            mx.clear_cache()
        with mx.stream(generation_stream):
            tokens = [self._generate(sequence) for sequence in self._answers]
            self._answers = [sequence for sequence in self._answers if sequence.left]
            return [self._read(self._prompts.popleft())] if self._prompts else [], tokens

    def extract_cache(self, uids: Collection[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """The caches of these sequences, and the tokens that they hold."""
        return {
            sequence.uid: (sequence.cache, sequence.tokens)
            for sequence in (*self._prompts, *self._answers)
            if sequence.uid in uids
        }

    def remove(self, uids: Collection[int]) -> None:
        self._prompts = deque(sequence for sequence in self._prompts if sequence.uid not in uids)
        self._answers = [sequence for sequence in self._answers if sequence.uid not in uids]

    def close(self) -> None:
        """Does nothing."""

    def _read(self, sequence: _Sequence) -> Progress:
        """Compute its next chunk, or sample the first token of its answer."""
        segment = sequence.segments[0]
        if len(sequence.segments) == 1:
            self._sample(sequence, mx.array(segment))
            sequence.tokens += segment
            self._quantise_if_due(sequence)
            self._answers.append(sequence)
            return Progress(sequence.uid, end_of_segment=True, end_of_prompt=True)
        count = min(self._chunk, sequence.whole - len(sequence.tokens)) if sequence.whole else self._chunk
        chunk, sequence.segments[0] = segment[:count], segment[count:]
        if not sequence.segments[0]:
            sequence.segments.popleft()
        self._model(mx.array([chunk]), cache=sequence.cache)
        mx.eval([layer.state for layer in sequence.cache])
        mx.clear_cache()
        sequence.tokens += chunk
        self._quantise_if_due(sequence)
        self._prompts.append(sequence)
        return Progress(sequence.uid, end_of_segment=len(chunk) == len(segment), end_of_prompt=False)

    def _quantise_if_due(self, sequence: _Sequence) -> None:
        if sequence.whole and len(sequence.tokens) >= sequence.whole:
            sequence.cache, sequence.whole = self._quantised(sequence.cache), 0

    def _generate(self, sequence: _Sequence) -> NextToken:
        """The token that was sampled last; the one after it is being computed."""
        upcoming, logprobs = sequence.upcoming, sequence.logprobs
        assert upcoming is not None
        assert logprobs is not None
        self._sample(sequence, upcoming)
        token = cast(int, upcoming.item())
        sequence.tokens.append(token)
        sequence.left -= 1
        reason = "stop" if token in self._stop_tokens else None if sequence.left else "length"
        if not reason:
            return NextToken(sequence.uid, token, logprobs[0], None, None, None)
        sequence.left = 0
        return NextToken(sequence.uid, token, logprobs[0], reason, sequence.cache, sequence.tokens)

    def _sample(self, sequence: _Sequence, tokens: mx.array) -> None:
        """Start on the token that follows `tokens`."""
        sequence.logprobs = logprobs_after(self._model, tokens, sequence.cache)
        sequence.upcoming = sequence.sampler(sequence.logprobs)
        mx.async_eval(sequence.upcoming)  # type: ignore[no-untyped-call]


def logprobs_after(model: nn.Module, tokens: mx.array, cache: list[Any]) -> mx.array:
    """Feed `tokens`, ``[n]``; the log-probabilities of the one that follows, ``[1, vocabulary]``."""
    logits: mx.array = model(tokens[None], cache=cache)[:, -1]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def likeliest(logprobs: mx.array) -> mx.array:
    """The sampler of temperature 0."""
    return mx.argmax(logprobs, axis=-1)
