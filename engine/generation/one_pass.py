"""Answers a short question after a restored context in one pass over the model.

mlx-lm computes a prompt without its last token, then this token: two passes, each of which reads all weights. After a
restored context the question is short, and the second pass would be half of the time to the first token. So the whole
question runs in one pass, its last row is sampled, and the batch continues from there. Models that give other results
in one pass, which `probe` finds out, take two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generation_stream

from engine.generation.unbatched import NextToken, Progress, Sampler, likeliest, logprobs_after

SHORT_TOKENS = 64  # tokens of a question that takes one pass; it delays the others' next tokens


@dataclass(slots=True)
class _Question:
    uid: int
    tokens: list[int]
    cache: list[Any]
    before: list[int]  # the tokens that the cache holds
    left: int  # tokens that may be generated
    sampler: Sampler | None


class OnePassGenerator:
    """mlx-lm's BatchGenerator, but the first token of a lone short question after a context takes one pass."""

    def __init__(
        self, model: nn.Module, *, stop_tokens: Collection[int], prefill_step_size: int, short: int = SHORT_TOKENS
    ) -> None:
        """`prefill_step_size`: tokens in a chunk of a prompt. `short`: tokens of a question that takes one pass."""
        self._model = model
        self._short = short
        self._stop_tokens = frozenset(stop_tokens)
        stop = [[token] for token in stop_tokens]
        self._batch = BatchGenerator(model, stop_tokens=stop, prefill_step_size=prefill_step_size)
        self._uids = count()
        self._questions: deque[_Question] = deque()
        self._inner: dict[int, int] = {}  # the batch's uids, by ours
        self._outer: dict[int, int] = {}  # and ours by the batch's

    def insert_segments(
        self,
        segments: Sequence[Sequence[Sequence[int]]],
        max_tokens: Sequence[int],
        caches: Sequence[list[Any]],
        all_tokens: Sequence[Sequence[int]],
        samplers: Sequence[Sampler | None],
    ) -> list[int]:
        """See BatchGenerator."""
        uids = []
        for parts, left, cache, before, sampler in zip(segments, max_tokens, caches, all_tokens, samplers, strict=True):
            uids.append(next(self._uids))
            if before and len(parts) == 1 and len(parts[0]) <= self._short:
                self._questions.append(_Question(uids[-1], list(parts[0]), cache, list(before), left, sampler))
            else:
                self._insert(uids[-1], parts, left, cache, before, sampler)
        return uids

    def next(self) -> tuple[list[Any], list[Any]]:
        """Advance all answers by a token and the prompts by a chunk. A lone waiting question gets its first token."""
        prompts, tokens = self._batch.next()
        prompts = [self._ours(response) for response in prompts]
        tokens = [self._ours(response) for response in tokens]
        for response in tokens:
            if response.finish_reason:
                self._forget(response.uid)
        if len(self._questions) == 1:
            first = self._answer(self._questions.popleft())
            return [*prompts, Progress(first.uid, end_of_segment=True, end_of_prompt=True)], [*tokens, first]
        while self._questions:  # several are faster in the batch
            waiting = self._questions.popleft()
            self._insert(waiting.uid, [waiting.tokens], waiting.left, waiting.cache, waiting.before, waiting.sampler)
        return prompts, tokens

    def extract_cache(self, uids: Collection[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """The caches of these sequences, and the tokens that they hold."""
        found = self._batch.extract_cache([self._inner[uid] for uid in uids if uid in self._inner])
        waiting = {question.uid: (question.cache, question.before) for question in self._questions}
        return {self._outer[uid]: held for uid, held in found.items()} | {
            uid: held for uid, held in waiting.items() if uid in uids
        }

    def remove(self, uids: Collection[int]) -> None:
        self._questions = deque(question for question in self._questions if question.uid not in uids)
        self._batch.remove([self._inner[uid] for uid in uids if uid in self._inner])
        for uid in uids:
            self._forget(uid)

    def close(self) -> None:
        """Free what mlx-lm holds of the system's memory."""
        self._batch.close()

    def _insert(
        self,
        uid: int,
        parts: Sequence[Sequence[int]],
        left: int,
        cache: list[Any],
        before: Sequence[int],
        sampler: Sampler | None,
    ) -> None:
        (inner,) = self._batch.insert_segments(
            [[list(part) for part in parts]],
            max_tokens=[left],
            caches=[cache],
            all_tokens=[list(before)],
            samplers=[sampler],
        )
        self._inner[uid], self._outer[inner] = inner, uid

    def _forget(self, uid: int) -> None:
        if (inner := self._inner.pop(uid, None)) is not None:
            del self._outer[inner]

    def _ours(self, response: Any) -> Any:
        return replace(response, uid=self._outer[response.uid])

    def _answer(self, question: _Question) -> NextToken:
        """The first token; the batch goes on with it, unless it is the last."""
        with mx.stream(generation_stream):
            logprobs = logprobs_after(self._model, mx.array(question.tokens), question.cache)
            token = cast(int, (question.sampler or likeliest)(logprobs).item())
            held = [*question.before, *question.tokens]
            reason = "stop" if token in self._stop_tokens else "length" if question.left == 1 else None
            if not reason:
                self._insert(question.uid, [[token]], question.left - 1, question.cache, held, question.sampler)
                return NextToken(question.uid, token, logprobs[0], None, None, None)
            self._model(mx.array([[token]]), cache=question.cache)
            mx.eval([layer.state for layer in question.cache])
            return NextToken(question.uid, token, logprobs[0], reason, question.cache, [*held, token])
