"""Quantised after a first chunk, as mlx-lm does it, contexts are what mlx-lm's are, and come back to the bit."""

from __future__ import annotations

from typing import Any

from engine_families import TOKENIZER, TOKENS
from engine_models import tiny_llama
from pools import pool_of

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache

from engine.batch_engine import BlockPoolBatchEngine
from engine.pool import BlockPool
from engine.scheduling.config import SchedulerConfig
from engine.scheduling.request import CompletedGeneration
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
    pool: BlockPool, quantised_from: int, tokens: list[int], cache: Any = None
) -> tuple[CompletedGeneration, list[float]]:
    logprobs: list[float] = []
    batch = BlockPoolBatchEngine(MODEL, TOKENIZER, SPECS[quantised_from], pool, SchedulerConfig(prefill_chunk=64))
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


def mlx_lms(tokens: list[int]) -> tuple[list[int], list[float]]:
    options = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0, "prefill_step_size": FROM}
    steps = list(generate_step(mx.array(tokens), MODEL, max_tokens=ANSWER, **options))
    return [token for token, _ in steps], [logprobs[token].item() for token, logprobs in steps]


@pytest.mark.parametrize("count", [1, 2, 50, FROM, FROM + 1, 300])
def test_what_is_quantised_after_a_chunk_says_what_mlx_lm_says(pool: BlockPool, count: int) -> None:
    done, logprobs = complete(pool, FROM, TOKENS[:count])
    tokens, expected = mlx_lms(TOKENS[:count])
    assert list(done.tokens) == tokens
    assert np.allclose(logprobs, expected, atol=1e-4)
    assert not done.not_kept
    pool.free(done.blocks.block_ids)


def test_quantised_from_the_first_token_it_differs(pool: BlockPool) -> None:
    done, logprobs = complete(pool, 0, TOKENS[:300])
    _, expected = mlx_lms(TOKENS[:300])
    assert not np.allclose(logprobs, expected, atol=1e-4)
    pool.free(done.blocks.block_ids)


def test_a_context_that_was_quantised_so_comes_back(pool: BlockPool) -> None:
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
