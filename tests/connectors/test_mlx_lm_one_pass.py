"""A short question after a context takes one pass in mlx-lm's server, and its answer is that of mlx-lm's generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_families import TOKENS, family

# isort: split
import mlx.core as mx
import numpy as np
from kvpage_connectors.mlx_lm_one_pass import OnePassGenerator
from mlx_lm.generate import BatchGenerator, StopSequences

CONTEXT, QUESTION, ANSWER = 250, 10, 20  # tokens; the answer outgrows the 256 rows of the restored cache


@dataclass
class CountedModel:
    """A model that counts its passes."""

    model: Any
    passes: int = 0

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        self.passes += 1
        logits: mx.array = self.model(*args, **options)
        return logits


@dataclass
class Answer:
    """One answer: its tokens, the passes and steps before each of them, and the fields of the last response."""

    tokens: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    reason: str = ""
    held: list[int] = field(default_factory=list)
    cache: list[Any] = field(default_factory=list)


def answers(
    kind: type[BatchGenerator],
    questions: Sequence[Sequence[int]],
    *,
    context: int = CONTEXT,
    limit: int = ANSWER,
    stop: Sequence[Sequence[int]] = (),
    processors: Sequence[Any] = (),
    later: int = 0,
) -> list[Answer]:
    """Ask all questions at once, or each `later` steps after the one before it."""
    of = family("llama")
    model = CountedModel(of.model)
    generator = kind(model, stream=mx.default_stream(mx.default_device()))
    waiting, found, steps = list(questions), dict[int, Answer](), 0
    while waiting or any(not answer.reason for answer in found.values()):
        while waiting and (not later or steps % later == 0):
            question = list(waiting.pop(0))
            (uid,) = generator.insert_segments(
                [[question]],
                max_tokens=[limit],
                caches=[of.computed(context) if context else of.empty()],
                all_tokens=[TOKENS[:context]],
                logits_processors=[list(processors)],
                stop_sequences=[StopSequences([list(words) for words in stop] or None)],
            )
            found[uid] = Answer()
            if later:
                break
        steps += 1
        assert steps < 500
        for token in generator.next()[1]:
            answer = found[token.uid]
            answer.tokens.append(token.token)
            answer.passes.append(model.passes)
            answer.steps.append(steps)
            answer.chances.append(float(token.logprobs[token.token].item()))
            if token.finish_reason:
                answer.reason, answer.held, answer.cache = token.finish_reason, token.all_tokens, token.prompt_cache
    return list(found.values())


QUESTIONS = [TOKENS[CONTEXT : CONTEXT + QUESTION], TOKENS[60:75], TOKENS[80:84]]


@pytest.mark.parametrize("size", [1, QUESTION, 64])
def test_a_question_takes_one_pass_to_its_first_token(size: int) -> None:
    question = [TOKENS[i] for i in range(size)]
    (theirs,), (ours,) = answers(BatchGenerator, [question]), answers(OnePassGenerator, [question])
    assert (ours.passes[0], theirs.passes[0]) == (1, 2 if size == 1 else 3)
    assert ours.passes[-1] == theirs.passes[-1] - (size > 1)
    assert ours.tokens == theirs.tokens
    assert (
        (ours.reason, ours.held)
        == (theirs.reason, theirs.held)
        == ("length", TOKENS[:CONTEXT] + question + ours.tokens)
    )
    assert np.allclose(ours.chances, theirs.chances, atol=1e-4)
    for mine, other in zip(ours.cache, theirs.cache, strict=True):
        assert mine.offset == other.offset == CONTEXT + size + ANSWER
        assert np.allclose(mine.keys, other.keys, atol=1e-4)
        assert np.allclose(mine.values, other.values, atol=1e-4)


@pytest.mark.parametrize(("context", "size"), [(CONTEXT, 65), (0, QUESTION)])
def test_a_long_question_or_no_context_is_left_to_mlx_lm(context: int, size: int) -> None:
    question = [TOKENS[i] for i in range(size)]
    theirs, ours = (answers(kind, [question], context=context) for kind in (BatchGenerator, OnePassGenerator))
    assert [(answer.tokens, answer.passes) for answer in ours] == [(answer.tokens, answer.passes) for answer in theirs]


@pytest.mark.parametrize("later", [0, 1, 2, 5])
def test_answers_of_several_questions_are_those_of_mlx_lm(later: int) -> None:
    theirs, ours = (answers(kind, QUESTIONS, later=later) for kind in (BatchGenerator, OnePassGenerator))
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert [answer.held for answer in ours] == [answer.held for answer in theirs]
    assert all(len(answer.tokens) == ANSWER for answer in ours)


def test_questions_do_not_stop_another_answer() -> None:
    """If a question arrives at each step, every second step advances the answers."""
    long, *others = answers(OnePassGenerator, QUESTIONS[:1] * 12, later=1, limit=8)
    assert long.tokens == others[-1].tokens
    assert long.steps[-1] <= 2 * 8 + 1


@pytest.mark.parametrize("limit", [1, 2])
def test_an_answer_that_ends_at_once_is_that_of_mlx_lm(limit: int) -> None:
    for stop in ([], [[token] for token in answers(OnePassGenerator, QUESTIONS[:1])[0].tokens[:1]]):
        theirs, ours = (
            answers(kind, QUESTIONS[:1], limit=limit, stop=stop) for kind in (BatchGenerator, OnePassGenerator)
        )
        assert [(each.tokens, each.reason, each.held) for each in ours] == [
            (each.tokens, each.reason, each.held) for each in theirs
        ]


def test_a_stop_sequence_can_begin_with_the_first_token() -> None:
    (whole,) = answers(OnePassGenerator, QUESTIONS[:1])
    (ours,) = answers(OnePassGenerator, QUESTIONS[:1], stop=[whole.tokens[:3]])
    assert (ours.tokens, ours.reason) == (whole.tokens[:3], "stop")


def test_processors_see_the_whole_prompt() -> None:
    seen: list[list[int]] = []

    def note(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(np.array(tokens).tolist())
        return logits

    (ours,) = answers(OnePassGenerator, QUESTIONS[:1], processors=[note], limit=3)
    prompt = [*TOKENS[:CONTEXT], *QUESTIONS[0]]
    assert seen[:3] == [prompt + ours.tokens[:count] for count in range(3)]
