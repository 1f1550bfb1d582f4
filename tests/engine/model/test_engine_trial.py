"""Whether a model runs in batches, and answers a short question in one pass, is tried, and the trial is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_bench import EngineBench
from engine_models import tiny
from odd_models import TOKENIZER, TOKENS, Model
from reference_answers import MlxLm, ReferenceAnswer, recorder

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from engine.spec import ModelCacheSpec

DTYPES = [mx.float32, pytest.param(mx.float16, marks=pytest.mark.soak), mx.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["afm7", "baichuan_m1", "mamba", "nemotron_h", "olmo_hybrid", "recurrent_gemma", "rwkv7"]
)
def test_a_batch_that_answers_otherwise_is_seen_in_every_dtype(name: str, dtype: mx.Dtype) -> None:
    assert not Model(name, dtype).spec.batches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", "qwen3", "phi3"])
def test_rounding_is_not_taken_for_it(name: str, dtype: mx.Dtype) -> None:
    spec = Model(name, dtype).spec
    assert (spec.batches, spec.resumes) == (True, True)


def test_differences_beyond_the_window_are_detected() -> None:
    """plamo3 masks several tokens otherwise than one, but only when its window is full. minimax_m3_vl leaves blocks of
    keys out, and in a batch other ones, but only when there are more than it looks at."""
    assert not Model("plamo3").spec.resumes
    assert not Model("minimax_m3_vl").spec.batches


def test_a_window_larger_than_the_weights_is_not_tried() -> None:
    """A simulated context of this window would have 50 GB. A load must not need more than the folder's size allows."""
    model = tiny("gemma3_text", sliding_window=100_000_000)
    assert not ModelCacheSpec.probe(model, TOKENIZER).batches


@pytest.mark.parametrize(
    ("name", "dtype"), [("mamba2", mx.bfloat16), ("plamo3", mx.float32), ("granitemoehybrid", mx.float32)]
)
def test_a_question_after_a_restore_is_answered_as_by_mlx_lm(name: str, dtype: mx.Dtype) -> None:
    of = Model(name, dtype)
    ours, theirs = second_turn(of), second_turn_of_mlx_lm(of)
    assert ours.tokens == theirs.tokens
    if of.spec.resumes:
        assert farthest(ours, theirs) <= 1e-4
    else:
        assert np.array_equal(ours.logprobs, theirs.logprobs)


def second_turn(of: Model) -> ReferenceAnswer:
    bench = EngineBench(of, TOKENIZER, 64)  # type: ignore[arg-type]

    def answer(prompt: list[int], known: Any = None) -> tuple[Any, ReferenceAnswer]:
        seen: list[Any] = []
        bench.batch.submit("agent", prompt, known, max_tokens=8, sampler=recorder(seen))
        (done,) = bench.batch.step()
        return done, ReferenceAnswer(list(done.tokens), np.array(seen[: len(done.tokens)]))

    first, _ = answer(TOKENS[:100])
    second, ours = answer([*first.blocks.tokens, *TOKENS[100:111]], first.blocks)
    assert second.tokens_reused == len(first.blocks)
    bench.free(first, second)
    bench.pool.check_empty()
    return ours


def second_turn_of_mlx_lm(of: Model, chunk: int | None = None) -> ReferenceAnswer:
    theirs = MlxLm(of)
    theirs.answer(TOKENS[:100], 8, chunk or (32 if of.spec.has_state else 2048))
    return theirs.answer(TOKENS[100:111], 8)


def farthest(one: ReferenceAnswer, other: ReferenceAnswer) -> float:
    return float(np.abs(one.logprobs - other.logprobs).max())


@pytest.mark.parametrize("name", ["granitemoehybrid", pytest.param("longcat_flash", marks=pytest.mark.soak)])
def test_a_restored_context_differs_only_by_the_models_rounding(name: str) -> None:
    """Weights five times as large make of the last bit a thousandth. In two passes there is no difference at all, and
    mlx-lm with other chunks of the same prompt is as far from itself."""
    of = Model(name, times=5)
    right, chunked = second_turn_of_mlx_lm(of), second_turn_of_mlx_lm(of, 7)
    of.spec = replace(of.spec, resumes=False)
    assert np.array_equal(second_turn(of).logprobs, right.logprobs)
    of.spec = replace(of.spec, resumes=True)
    once = second_turn(of)
    assert once.tokens == chunked.tokens == right.tokens
    print(f"{name}: {farthest(once, right):.1e} in one pass, {farthest(chunked, right):.1e} in other chunks")
    assert farthest(once, right) < 10 * farthest(chunked, right) < 0.1
