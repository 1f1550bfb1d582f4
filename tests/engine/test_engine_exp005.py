"""EXP-005: the engine's text is mlx-lm's own, byte for byte, on the real model, fresh and resumed from the server.

With keys and values in float32, and quantised to 8 bits as mlx-lm does it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from servers import RunningServer

import engine  # noqa: F401 - picks the BLAS before mlx is imported

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import generate
from mlx_lm.models.cache import QuantizedKVCache

from engine import model
from engine.batch_engine import BlockPoolBatchEngine
from engine.generation.unbatched import Sampler
from engine.memory.blocks import AgentBlocks
from engine.pool import BlockPool
from engine.scheduling.request import CompletedGeneration
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
PROMPTS = ["The quick brown fox", "Write a story about a robot", "Explain quantum computing in detail"]
SOME, ALL, OF_8_BITS = 6, 100, 16  # tokens

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@cache
def smollm2() -> tuple[Any, Any]:
    return model.load(SMOLLM2)


def in_8_bits() -> list[QuantizedKVCache]:
    return [QuantizedKVCache(group_size=64, bits=8) for _ in smollm2()[0].layers]


@cache
def spec(bits: int | None) -> ModelCacheSpec:
    return ModelCacheSpec.probe(*smollm2(), model_id="smollm2", cache=in_8_bits() if bits else None)


class Engine:
    """One with a pool and a connection of its own."""

    def __init__(self, server: RunningServer, bits: int | None) -> None:
        self.pool = BlockPool(4)
        self.tier = PageTier(server.url, spec(bits), self.pool)
        self._batch = BlockPoolBatchEngine(*smollm2(), spec(bits), self.pool)

    def answer(self, prompt: str | tuple[int, ...], known: AgentBlocks | None, tokens: int) -> CompletedGeneration:
        self._batch.submit("exp-005", prompt, known, max_tokens=tokens)
        (done,) = self._batch.step()
        return done

    def close(self, *contexts: AgentBlocks) -> None:
        for context in contexts:
            self.pool.free(context.block_ids, "exp-005")
        self.pool.check_empty()
        self.tier.close()


def fresh_and_resumed(server: RunningServer, prompt: str, tokens: int, bits: int | None) -> tuple[str, str]:
    """The text of one engine, and that of it up to its half and of another from there on.

    The other gets the context from the server, and of the prompt and the first half it computes the last token alone.
    """
    first = Engine(server, bits)
    fresh = first.answer(prompt, None, tokens)
    assert first.tier.save(fresh.blocks)
    first.close(fresh.blocks)

    second = Engine(server, bits)
    half = len(fresh.tokens) // 2
    first_half = fresh.blocks.tokens[: fresh.prompt_tokens + half]
    context = second.tier.load("exp-005", first_half)
    assert context
    resumed = second.answer(first_half, context, tokens - half)
    assert resumed.tokens_reused == len(first_half) - 1
    second.close(context, resumed.blocks)
    return fresh.text, text_of((*fresh.tokens[:half], *resumed.tokens))


def text_of(tokens: tuple[int, ...]) -> str:
    detokenizer = smollm2()[1].detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.text)


def more(tokens: int) -> list[Any]:
    return [pytest.param(prompt, tokens, marks=pytest.mark.soak) for prompt in PROMPTS]


@pytest.mark.parametrize(("prompt", "tokens"), [(PROMPTS[0], SOME), *more(ALL)])
def test_the_text_is_mlx_lms_own_fresh_and_resumed(server: RunningServer, prompt: str, tokens: int) -> None:
    expected = generate(*smollm2(), prompt, max_tokens=tokens)
    assert fresh_and_resumed(server, prompt, tokens, None) == (expected, expected)


@pytest.mark.parametrize(("prompt", "tokens"), [(PROMPTS[0], SOME // 2), *more(OF_8_BITS)])
def test_8_bit_perplexity_equals_mlx_lms_8_bit_run(server: RunningServer, prompt: str, tokens: int) -> None:
    """Both of mlx-lm's: one that quantises from the first token on, and one that does so after the prompt."""
    expected = generate(*smollm2(), prompt, max_tokens=tokens, prompt_cache=in_8_bits())
    assert fresh_and_resumed(server, prompt, tokens, 8) == (expected, expected)
    later = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0}
    assert generate(*smollm2(), prompt, max_tokens=tokens, **later) == expected


def logprobs(spec: ModelCacheSpec, prompts: list[str], count: int) -> np.ndarray:
    """Return the log-probabilities before each of `count` given tokens after each prompt, all computed at once."""
    pool, seen = BlockPool(), [list[np.ndarray]() for _ in prompts]
    batch = BlockPoolBatchEngine(*smollm2(), spec, pool)

    def given(i: int) -> Sampler:
        def sample(row: mx.array) -> mx.array:
            seen[i].append(np.array(row[0]))
            return mx.array([1000 + len(seen[i])])

        return sample

    for i, prompt in enumerate(prompts):
        batch.submit(f"agent-{i}", prompt, max_tokens=count, sampler=given(i))
    for done in batch.step():
        pool.free(done.blocks.block_ids, done.agent_id)
    pool.check_empty()
    return np.stack([row[:count] for row in seen])


def test_a_batch_differs_by_less_than_quantising() -> None:
    """Rounding may move a value by a quantisation step, and later values depend on it."""
    in_turns = replace(spec(8), batches=False, resumes=False)
    assert spec(8).batches
    whole, alone, together = (logprobs(of, PROMPTS, 4) for of in (spec(None), in_turns, spec(8)))
    quantising = np.sqrt(np.square(alone - whole).mean())
    assert 0 < quantising < 0.2
    assert np.sqrt(np.square(together - alone).mean()) < quantising
