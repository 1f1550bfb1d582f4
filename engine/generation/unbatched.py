"""Generators: one for prompts that mlx-lm cannot batch, and one that computes short questions in one pass.

Both have the methods of mlx-lm's BatchGenerator. `UnbatchedGenerator.next` adds a token to every answer and a chunk to
one prompt, in rotation. So a long prompt delays the others by no more than a chunk, and a short prompt waits for one
chunk of each prompt before it. Its steps of the model are those of mlx-lm's generate_step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, StopSequences, generation_stream
from mlx_lm.models.cache import TokenBuffer

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [batch, vocabulary] -> token ids [batch]
# token ids of prompt and answer [n], and logits of the next token [1, vocabulary] -> logits [1, vocabulary]
Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Choice:
    """How the tokens of one answer are chosen."""

    sampler: Sampler | None = None  # None: the likeliest token
    processors: Sequence[Processor] = ()  # of the logits, one after another
    stop_tokens: Collection[int] = ()  # ids that end the answer, in addition to the model's


# -- one pass ----------------------------------------------------------------------------------------------------------
#
# A short question after a restored context takes one pass over the model.
#
# mlx-lm computes a prompt without its last token, then this token: two passes, each of which reads all weights. After
# a restored context the question is short, and the second pass would be half of the time to the first token. So the
# whole question runs in one pass, its last row is sampled, and the batch continues from there. Models with other
# results in one pass, which `ModelCacheSpec.probe` detects, take two.

SHORT_TOKENS = 64  # most tokens of a question that takes one pass, which delays the next tokens of other answers


@dataclass(slots=True)
class _Question:
    uid: int
    tokens: list[int]
    cache: list[Any]
    before: list[int]  # the tokens that the cache holds
    left: int  # tokens that may be generated
    choice: Choice


class OnePassGenerator:
    """mlx-lm's BatchGenerator, with one addition: a single short question after a restored context gets its first token
    in one pass of the model instead of two.
    """

    def __init__(
        self, model: nn.Module, *, stop_tokens: Collection[int], prefill_step_size: int, short: int = SHORT_TOKENS
    ) -> None:
        """Create a generator without prompts. `prefill_step_size` is the number of tokens in a chunk of a prompt,
        `short` the largest number of tokens of a question that is computed in one pass.
        """
        self._model = model
        self._short = short
        self._stop_tokens = frozenset(stop_tokens)
        stop = [[token] for token in stop_tokens]
        self._batch = BatchGenerator(model, stop_tokens=stop, prefill_step_size=prefill_step_size)
        self._uids = count()
        self._questions: deque[_Question] = deque()
        self._inner: dict[int, int] = {}  # uids of the batch, by uids of this generator
        self._outer: dict[int, int] = {}  # uids of this generator, by uids of the batch

    def insert_segments(
        self,
        segments: Sequence[Sequence[Sequence[int]]],
        max_tokens: Sequence[int],
        caches: Sequence[list[Any]],
        all_tokens: Sequence[Sequence[int]],
        choices: Sequence[Choice],
    ) -> list[int]:
        """Add prompts, as in mlx-lm's BatchGenerator, and return their uids."""
        uids = []
        for parts, left, cache, before, choice in zip(segments, max_tokens, caches, all_tokens, choices, strict=True):
            uids.append(next(self._uids))
            if before and len(parts) == 1 and len(parts[0]) <= self._short:
                self._questions.append(_Question(uids[-1], list(parts[0]), cache, list(before), left, choice))
            else:
                self._insert(uids[-1], parts, left, cache, before, choice)
        return uids

    def next(self) -> tuple[list[Any], list[Any]]:
        """Advance all answers by a token and the prompts by a chunk. A single short question gets its first token.

        Return the progress of prompts, and the next tokens of answers.
        """
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
            self._insert(waiting.uid, [waiting.tokens], waiting.left, waiting.cache, waiting.before, waiting.choice)
        return prompts, tokens

    def extract_cache(self, uids: Collection[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Return for each of these uids the cache, and the tokens that the cache has."""
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
        """Close mlx-lm's generator."""
        self._batch.close()

    def _insert(
        self,
        uid: int,
        parts: Sequence[Sequence[int]],
        left: int,
        cache: list[Any],
        before: Sequence[int],
        choice: Choice,
    ) -> None:
        """Add a prompt to mlx-lm's batch, under the uid `uid` of this generator. `left` is the number of tokens that
        may be generated, and `before` has the tokens in `cache`.
        """
        stop = [[token] for token in (*self._stop_tokens, *choice.stop_tokens)]
        (inner,) = self._batch.insert_segments(
            [[list(part) for part in parts]],
            max_tokens=[left],
            caches=[cache],
            all_tokens=[list(before)],
            samplers=[choice.sampler],
            logits_processors=[choice.processors],
            stop_sequences=[StopSequences(stop)] if choice.stop_tokens else None,
        )
        self._inner[uid], self._outer[inner] = inner, uid

    def _forget(self, uid: int) -> None:
        if (inner := self._inner.pop(uid, None)) is not None:
            del self._outer[inner]

    def _ours(self, response: Any) -> Any:
        return replace(response, uid=self._outer[response.uid])

    def _answer(self, question: _Question) -> NextToken:
        """Compute a question in one pass, and return the first token of its answer. The batch continues after it."""
        with mx.stream(generation_stream):
            choice, held = question.choice, [*question.before, *question.tokens]
            logits = logits_after(self._model, mx.array(question.tokens), question.cache)
            logprobs = _processed(choice, mx.array(held) if choice.processors else None, logits)
            token = cast(int, (choice.sampler or likeliest)(logprobs).item())
            ends = token in self._stop_tokens or token in choice.stop_tokens
            reason = "stop" if ends else "length" if question.left == 1 else None
            if not reason:
                self._insert(question.uid, [[token]], question.left - 1, question.cache, held, choice)
                return NextToken(question.uid, token, logprobs[0], None, None, None)
            self._model(mx.array([[token]]), cache=question.cache)
            mx.eval([layer.state for layer in question.cache])
            return NextToken(question.uid, token, logprobs[0], reason, question.cache, [*held, token])


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a prompt by a chunk, or by its last token."""

    uid: int
    end_of_segment: bool
    end_of_prompt: bool


@dataclass(frozen=True, slots=True)
class NextToken:
    """The next token of an answer. The last token also has the cache of prompt and answer."""

    uid: int
    token: int
    logprobs: mx.array  # [vocabulary], the log-probabilities from which it was sampled
    finish_reason: str | None  # "stop" or "length" for the last token
    prompt_cache: list[Any] | None
    all_tokens: list[int] | None  # tokens that the cache holds


@dataclass(slots=True)
class _Sequence:
    uid: int
    segments: deque[list[int]]  # the uncomputed rest of the prompt; the last segment is one token
    cache: list[Any]
    tokens: list[int]  # tokens that the cache holds
    left: int  # tokens that may still be generated
    whole: int  # tokens after which the cache is quantised; 0 if that is done, or never happens
    choice: Choice
    context: TokenBuffer  # prompt and answer, for processors
    upcoming: mx.array | None = None  # [1], the token sampled last, which the cache does not hold yet
    logprobs: mx.array | None = None  # [1, vocabulary], the log-probabilities from which it was sampled


class UnbatchedGenerator:
    """Generator that runs the model for one prompt at a time, in turns."""

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_tokens: Collection[int],
        prefill_step_size: int,
        quantised_from: int = 0,
        quantised: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        """Create a generator without prompts.

        `stop_tokens` are ids that end every answer. `prefill_step_size` is the number of tokens in a chunk of a prompt.
        A new cache is replaced by the result of `quantised(cache)` when `quantised_from` tokens of its prompt, or all
        but the last token, have been computed.
        """
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
        choices: Sequence[Choice],
    ) -> list[int]:
        """Add prompts after the tokens in their caches, and return their uids. No chunk of a prompt crosses the end of
        one of its `segments`.

        `all_tokens` are the tokens that each cache has. The generator takes ownership of the caches.
        """
        added = []
        for parts, left, cache, tokens, choice in zip(segments, max_tokens, caches, all_tokens, choices, strict=True):
            *others, (*rest, last) = parts
            ahead = deque([*map(list, others), *([rest] if rest else []), [last]])
            whole = 0 if tokens else min(self._quantised_from, max(1, sum(map(len, ahead)) - 1))
            context = TokenBuffer([*tokens, *chain.from_iterable(ahead)][:-1] if choice.processors else [])
            added.append(_Sequence(next(self._uids), ahead, cache, list(tokens), left, whole, choice, context))
        self._prompts.extend(added)
        return [sequence.uid for sequence in added]

    def next(self) -> tuple[list[Progress], list[NextToken]]:
        """Advance every answer by a token, then one prompt by a chunk. Return the progress of the prompt, and the next
        tokens.
        """
        self._steps += 1
        if self._steps % 512 == 0:
            mx.clear_cache()
        with mx.stream(generation_stream):
            tokens = [self._generate(sequence) for sequence in self._answers]
            self._answers = [sequence for sequence in self._answers if sequence.left]
            return [self._read(self._prompts.popleft())] if self._prompts else [], tokens

    def extract_cache(self, uids: Collection[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Return for each of these uids the cache, and the tokens that the cache has."""
        return {
            sequence.uid: (sequence.cache, sequence.tokens)
            for sequence in (*self._prompts, *self._answers)
            if sequence.uid in uids
        }

    def remove(self, uids: Collection[int]) -> None:
        self._prompts = deque(sequence for sequence in self._prompts if sequence.uid not in uids)
        self._answers = [sequence for sequence in self._answers if sequence.uid not in uids]

    def close(self) -> None:
        """Do nothing."""

    def _read(self, sequence: _Sequence) -> Progress:
        """Compute the next chunk of a prompt, or, if only its last token is left, sample the first token of its
        answer.
        """
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
        """Replace the cache by a quantised one once it has enough tokens."""
        if sequence.whole and len(sequence.tokens) >= sequence.whole:
            sequence.cache, sequence.whole = self._quantised(sequence.cache), 0

    def _generate(self, sequence: _Sequence) -> NextToken:
        """Return the token that was sampled in the last step, and start to compute the next one."""
        upcoming, logprobs = sequence.upcoming, sequence.logprobs
        assert upcoming is not None
        assert logprobs is not None
        self._sample(sequence, upcoming)
        token = cast(int, upcoming.item())
        sequence.tokens.append(token)
        sequence.left -= 1
        ends = token in self._stop_tokens or token in sequence.choice.stop_tokens
        reason = "stop" if ends else None if sequence.left else "length"
        if not reason:
            return NextToken(sequence.uid, token, logprobs[0], None, None, None)
        sequence.left = 0
        return NextToken(sequence.uid, token, logprobs[0], reason, sequence.cache, sequence.tokens)

    def _sample(self, sequence: _Sequence, tokens: mx.array) -> None:
        """Start to compute the token that follows `tokens` ``[n]``."""
        choice = sequence.choice
        logits = logits_after(self._model, tokens, sequence.cache)
        context = sequence.context.update_and_fetch(tokens) if choice.processors else None
        sequence.logprobs = _processed(choice, context, logits)
        sequence.upcoming = (choice.sampler or likeliest)(sequence.logprobs)
        mx.async_eval(sequence.upcoming)  # type: ignore[no-untyped-call]


def logits_after(model: nn.Module, tokens: mx.array, cache: list[Any]) -> mx.array:
    """Run the model for `tokens` ``[n]``, which the cache then has. Return the logits of the next token,
    ``[1, vocabulary]``.
    """
    logits: mx.array = model(tokens[None], cache=cache)[:, -1]
    return logits


def normalised(logits: mx.array) -> mx.array:
    """Return the log-probabilities for logits ``[batch, vocabulary]``."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _processed(choice: Choice, tokens: mx.array | None, logits: mx.array) -> mx.array:
    """Return log-probabilities ``[1, vocabulary]`` from processed logits. `tokens` are those of prompt and answer,
    which only processors need.
    """
    for processor in choice.processors:
        assert tokens is not None
        logits = processor(tokens, logits)
    return normalised(logits)


def likeliest(logprobs: mx.array) -> mx.array:
    """Return the likeliest token ids ``[batch]`` for log-probabilities ``[batch, vocabulary]``: the sampler of
    temperature 0.
    """
    return mx.argmax(logprobs, axis=-1)
