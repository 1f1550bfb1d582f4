"""EXP-005: the engine's text is mlx-lm's own, byte for byte, on the real model, fresh and resumed from the server."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from servers import RunningServer

import engine  # noqa: F401 - picks the BLAS before mlx is imported

# isort: split
import pytest
from mlx_lm import generate

from engine import model
from engine.batch_engine import BlockPoolBatchEngine
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2"
TOKENS = 100

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@cache
def smollm2() -> tuple[Any, Any, ModelCacheSpec]:
    loaded, tokenizer = model.load(SMOLLM2)
    return loaded, tokenizer, ModelCacheSpec.probe(loaded, tokenizer, model_id="smollm2")


@pytest.mark.parametrize(
    "prompt", ["The quick brown fox", "Write a story about a robot", "Explain quantum computing in detail"]
)
def test_the_text_is_mlx_lms_own_fresh_and_resumed(server: RunningServer, prompt: str) -> None:
    """Resumed: another engine with a pool of its own gets the context from the server, and of the prompt and the
    first half of the answer it computes the last token alone."""
    loaded, tokenizer, spec = smollm2()
    expected = generate(loaded, tokenizer, prompt, max_tokens=TOKENS)

    pool = BlockPool(4)
    batch = BlockPoolBatchEngine(loaded, tokenizer, spec, pool)
    batch.submit("exp-005", prompt, max_tokens=TOKENS)
    (fresh,) = batch.step()
    assert fresh.text == expected

    half = len(fresh.tokens) // 2
    first_half = fresh.blocks.tokens[: fresh.prompt_tokens + half]
    tier = PageTier(server.url, spec, pool)
    assert tier.save(fresh.blocks)
    pool.free(fresh.blocks.block_ids)
    assert pool.available_blocks == 4
    tier.close()

    pool = BlockPool(4)
    tier = PageTier(server.url, spec, pool)
    batch = BlockPoolBatchEngine(loaded, tokenizer, spec, pool)
    context = tier.load("exp-005", first_half)
    assert context
    batch.submit("exp-005", first_half, context, max_tokens=TOKENS - half)
    (resumed,) = batch.step()
    assert resumed.tokens_reused == len(first_half) - 1
    detokenizer = tokenizer.detokenizer
    for token in (*fresh.tokens[:half], *resumed.tokens):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == expected

    pool.free(context.block_ids)
    pool.free(resumed.blocks.block_ids)
    assert pool.available_blocks == 4
    tier.close()
