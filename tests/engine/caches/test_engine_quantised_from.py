"""Caches that are quantised after the first tokens of a prompt, compared with mlx-lm's `kv_bits`.

Chunks of the same lengths give mlx-lm's log-probabilities to the bit. Chunks of other lengths multiply matrices of
other shapes, for which a BLAS sums in another order: values on the edge of two quantisation steps then round to either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine_families import TOKENIZER, TOKENS
from engine_models import tiny_llama
from pools import pool_of

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from engine.batch_engine import BlockPoolBatchEngine
from engine.memory import kvcache
from engine.pool import BlockPool
from engine.scheduling.request import CompletedGeneration, SchedulerConfig
from engine.spec import ModelCacheSpec

MODEL = tiny_llama(head_dim=64)
FROM = 128
ANSWER = 12


def spec(quantised_from: int) -> ModelCacheSpec:
    cache = [QuantizedKVCache(64, 8) for _ in MODEL.layers]
    return ModelCacheSpec.probe(MODEL, TOKENIZER, cache=cache, quantised_from=quantised_from)


SPECS = {start: spec(start) for start in (0, FROM)}


pool = pool_of(32)


def complete(
    pool: BlockPool, quantised_from: int, tokens: list[int], cache: Any = None, *, chunk: int = FROM
) -> tuple[CompletedGeneration, list[float]]:
    logprobs: list[float] = []
    batch = BlockPoolBatchEngine(MODEL, TOKENIZER, SPECS[quantised_from], pool, SchedulerConfig(prefill_chunk=chunk))
    batch.submit(
        "alice",
        tokens,
        cache,
        max_tokens=ANSWER,
        logprobs=1,
        on_token=lambda token: logprobs.append(token.logprob or 0.0),
    )
    (done,) = batch.step()
    return done, logprobs


def mlx_lms(tokens: list[int], cache: list[Any] | None = None) -> tuple[list[int], list[float]]:
    options = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0, "prefill_step_size": FROM}
    steps = list(generate_step(mx.array(tokens), MODEL, max_tokens=ANSWER, prompt_cache=cache, **options))
    return [token for token, _ in steps], [logprobs[token].item() for token, logprobs in steps]


def planes(cache: Sequence[QuantizedKVCache], count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of the first `count` tokens of each layer, and the quantisation steps of their groups."""
    for layer in cache:
        for quantised in (layer.keys, layer.values):
            packed, steps, biases = (array[..., :count, :] for array in quantised)
            yield np.array(mx.dequantize(packed, steps, biases, group_size=64, bits=8)), np.array(abs(steps))


@pytest.mark.parametrize("count", [1, 2, 50, FROM, FROM + 1, 300])
def test_same_chunks_give_mlx_lms_log_probabilities(pool: BlockPool, count: int) -> None:
    done, logprobs = complete(pool, FROM, TOKENS[:count])
    pool.free(done.blocks.block_ids)
    assert (list(done.tokens), logprobs) == mlx_lms(TOKENS[:count])
    assert not done.not_kept


@pytest.mark.parametrize("chunk", [FROM // 2, 100])
@pytest.mark.parametrize("count", [FROM, FROM + 1, 300])
def test_smaller_chunks_differ_by_one_step_at_most(pool: BlockPool, count: int, chunk: int) -> None:
    done, _ = complete(pool, FROM, TOKENS[:count], chunk=chunk)
    ours = kvcache.reconstruct(SPECS[FROM], done.blocks.blocks, count)
    pool.free(done.blocks.block_ids)
    theirs = make_prompt_cache(MODEL)
    tokens, _ = mlx_lms(TOKENS[:count], theirs)
    assert list(done.tokens) == tokens
    whole = min(FROM, count - 1)  # tokens whose values depend on no quantised value
    for (mine, steps), (expected, their_steps) in zip(planes(ours, whole), planes(theirs, whole), strict=True):
        assert (np.abs(mine - expected) <= 1.01 * np.maximum(steps, their_steps)).all()


def test_quantised_from_the_first_token_it_differs(pool: BlockPool) -> None:
    done, logprobs = complete(pool, 0, TOKENS[:300])
    _, expected = mlx_lms(TOKENS[:300])
    assert not np.allclose(logprobs, expected, atol=1e-4)
    pool.free(done.blocks.block_ids)


def test_a_context_quantised_from_a_length_is_restored(pool: BlockPool) -> None:
    """A second turn goes on from its blocks; those of the other kind it does not take."""
    first, _ = complete(pool, FROM, TOKENS[:270])
    prompt = [*first.blocks.tokens, *TOKENS[:20]]
    second, _ = complete(pool, FROM, prompt, first.blocks)
    assert second.tokens_reused == len(first.blocks)
    assert not second.not_kept
    with pytest.raises(ValueError, match="fingerprint"):
        complete(pool, 0, prompt, first.blocks)
    for done in (first, second):
        pool.free(done.blocks.block_ids)
