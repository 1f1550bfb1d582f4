"""Generator of mlx-lm's server that sends the first token after a restored context earlier.

mlx-lm computes a prompt without its last token, then this token, and sends the first token of the answer when it has
computed the second one. So it runs the model three times until then, and copies the whole cache at each transition.
Here a short question after a context takes one pass of the model, as in kvpage-engine, without a copy of the cache, and
its first token is sent at once. Everything else is mlx-lm's. Tried with mlx-lm 0.32.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import mlx.core as mx
from kvpage.engine.generation.unbatched import SHORT_TOKENS
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import BatchKVCache, KVCache


class OnePassGenerator(BatchGenerator):  # type: ignore[misc]
    """mlx-lm's BatchGenerator for models that have the same results in one pass (`ModelCacheSpec.resumes`), and whose
    caches have no state: no copy of the cache is kept at the end of a question's segments.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sent: int | None = None  # the uid of an answer whose first token was sent, but mlx-lm returns it again

    def _next(self) -> tuple[list[Any], list[Any]]:
        """Send the first token of a short question; else let mlx-lm advance the answers and the prompts. A question
        delays the other answers by one pass, and is never computed directly after another one.
        """
        if self._sent is None and self._has_question():
            return self._begin(self._unprocessed_sequences.popleft())
        prompts, tokens = super()._next()
        sent, self._sent = self._sent, None
        return prompts, [token for token in tokens if token.uid != sent]

    def _has_question(self) -> bool:
        """Return whether one short question after a context waits, and nothing else. Several are faster in a batch."""
        if len(self._unprocessed_sequences) != 1 or len(self._generation_batch) >= self.completion_batch_size:
            return False
        _, segments, _, _, before, *_ = self._unprocessed_sequences[0]
        return bool(before) and sum(map(len, segments)) <= SHORT_TOKENS

    def _begin(self, question: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """Compute a question in one pass, and add its answer to the batch. Return its progress and its first token,
        which is left to mlx-lm if the answer ends with it.
        """
        uid, segments, limit, cache, before, sampler, processors, stops = question
        *rest, last = chain.from_iterable(segments)

        def after_rest(inputs: mx.array, cache: list[Any]) -> mx.array:
            logits: mx.array = self.model(mx.concatenate([mx.array([rest], inputs.dtype), inputs], axis=1), cache=cache)
            return logits

        answer = GenerationBatch(
            after_rest,
            [uid],
            mx.array([last]),
            cache,
            [[*before, *rest]],
            [sampler],
            self.sampler,
            [processors],
            [stops],
            [limit],
        )
        answer.model, answer.prompt_cache = self.model, [_batch_of(layer) for layer in cache]
        token, logprobs = answer._next_tokens.item(), answer._next_logprobs[0]
        self._generation_batch.extend(answer)
        count = len(rest) + 1
        progress = PromptProcessingBatch.Response(uid, (count, count), end_of_segment=True, end_of_prompt=True)
        if limit == 1 or stops.matcher().advance(token):
            return [progress], []
        self._sent = uid
        return [progress], [GenerationBatch.Response(uid, token, logprobs, None, None, None)]


def _batch_of(cache: Any) -> Any:
    """Return mlx-lm's cache of a batch with one sequence, without a copy of the usual kind."""
    if type(cache) is not KVCache:
        return cache.merge([cache])
    batch = BatchKVCache([0])
    batch.keys, batch.values, batch._idx = cache.keys, cache.values, cache.offset
    batch.offset += cache.offset
    return batch
