"""The batch engine says what mlx-lm says with every family of models, from a cache or without, alone or with others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from engine_models import FAMILIES, letter_tokenizer, tiny
from servers import RunningServer

# isort: split
import mlx.core as mx
import numpy as np
import pytest
import redis
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from engine.batch_engine import BlockPoolBatchEngine, CompletedGeneration
from engine.blocks import AgentBlocks
from engine.caches import UnsupportedCacheError
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

BLOCK = 64
TOKENS = np.random.default_rng(0).integers(0, 96, 400).tolist()
TOKENIZER = letter_tokenizer()
WITH_STATE = ["gemma3_text", "gpt_oss", "cohere2", "lfm2", "qwen3_next", "mamba2"]


@dataclass
class Bench:
    """A family's model, and a batch engine on it."""

    model: Any
    batch: BlockPoolBatchEngine

    def said(self, prompt: Sequence[int], count: int) -> list[int]:
        """mlx-lm's own tokens, up to the end of the text."""
        tokens = (token for token, _ in generate_step(mx.array(prompt), self.model, max_tokens=count))
        return list(takewhile(lambda token: token not in TOKENIZER.eos_token_ids, tokens))

    def complete(self, prompt: Sequence[int], known: AgentBlocks | None = None, count: int = 12) -> CompletedGeneration:
        self.batch.submit("agent", prompt, known, max_tokens=count)
        (done,) = self.batch.step()
        assert list(done.tokens) == self.said(prompt, count)
        return done


@cache
def model_of(family: str) -> tuple[Any, ModelCacheSpec]:
    model = tiny(family)
    return model, ModelCacheSpec.probe(model, TOKENIZER, model_id=family, block_tokens=BLOCK)


@pytest.fixture(params=list(FAMILIES))
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """With a pool that every test leaves as full as it found it."""
    model, spec = model_of(request.param)
    pool = BlockPool(64)
    yield Bench(model, BlockPoolBatchEngine(model, TOKENIZER, spec, pool))
    assert pool.available_blocks == 64


def free(bench: Bench, *held: CompletedGeneration) -> None:
    for done in held:
        bench.batch.pool.free(done.blocks.block_ids)


def test_a_second_turn_computes_only_what_is_new(bench: Bench) -> None:
    first = bench.complete(TOKENS[:200])
    second = bench.complete([*first.blocks.tokens, *TOKENS[200:230]], first.blocks)
    assert second.tokens_reused == len(first.blocks)
    free(bench, first, second)


def test_agents_of_one_ragged_batch_say_what_each_says_alone(bench: Bench) -> None:
    """Three are new, one goes on from its first turn; one ends before the others and one joins later."""
    first = bench.complete(TOKENS[:150])
    prompts = [TOKENS[:17], TOKENS[:200], TOKENS[50:140], [*first.blocks.tokens, *TOKENS[200:230]]]
    caches = [None, None, None, first.blocks]
    uids = {
        bench.batch.submit(f"agent-{i}", prompt, known, max_tokens=5 + i): (prompt, 5 + i)
        for i, (prompt, known) in enumerate(zip(prompts, caches, strict=True))
    }
    completed = []
    for done in bench.batch.step():
        if not completed:
            uids[bench.batch.submit("late", TOKENS[:70], max_tokens=6)] = (TOKENS[:70], 6)
        completed.append(done)
        assert list(done.tokens) == bench.said(*uids[done.uid])
    assert len(completed) == 5
    late = next(done for done in completed if done.agent_id == "late")
    turn = bench.complete([*late.blocks.tokens, 5, 6], late.blocks, 5)
    assert turn.tokens_reused == len(late.blocks)
    free(bench, first, *completed, turn)


@pytest.mark.parametrize("bench", WITH_STATE, indirect=True)
def test_a_prompt_that_departs_goes_on_from_the_last_checkpoint_before(bench: Bench) -> None:
    first = bench.complete(TOKENS[:200])
    again = bench.complete(TOKENS[:200], first.blocks)
    other = bench.complete([*TOKENS[:140], *TOKENS[:30]], first.blocks)
    short = bench.complete([*TOKENS[:63], *TOKENS[:30]], first.blocks)
    assert [done.tokens_reused for done in (again, other, short)] == [192, 128, 0]
    free(bench, first, again, other, short)


@pytest.mark.parametrize("bench", WITH_STATE, indirect=True)
def test_agents_share_a_beginning_through_the_server(bench: Bench, server: RunningServer, client: redis.Redis) -> None:
    tier = PageTier(server.url, bench.batch.spec, bench.batch.pool)
    first = bench.complete(TOKENS[:200])
    assert tier.save(first.blocks)
    free(bench, first)
    prompt = [*TOKENS[:150], *TOKENS[:20]]
    known = tier.load("another", prompt)
    assert known
    second = bench.complete(prompt, known)
    assert second.tokens_reused == 128
    bench.batch.pool.free(known.block_ids)
    free(bench, second)
    tier.close()


@pytest.mark.parametrize(
    ("budget", "kept"), [(0, []), (1, [192]), (2, [64, 192]), (3, [64, 128, 192]), (99, [64, 128, 192])]
)
def test_checkpoints_stay_within_their_budget(budget: int, kept: list[int]) -> None:
    """The last is worth most; the others lie evenly before it."""
    model, spec = model_of("lfm2")
    batch = BlockPoolBatchEngine(model, TOKENIZER, spec, BlockPool(9), state_budget=budget * spec.state_nbytes(200) + 1)
    batch.submit("agent", TOKENS[:200], max_tokens=1)
    (done,) = batch.step()
    held = zip(done.blocks.blocks, done.blocks.ends, strict=True)
    assert [end for block, end in held if block.state] == [*kept, 201]


def test_a_kind_of_cache_that_cannot_be_batched_is_refused_by_name() -> None:
    model = tiny("llama", head_dim=64)
    quantized = [QuantizedKVCache() for _ in make_prompt_cache(model)]
    spec = ModelCacheSpec.probe(model, TOKENIZER, cache=quantized)
    with pytest.raises(UnsupportedCacheError, match="mlx-lm batches no QuantizedKVCache"):
        BlockPoolBatchEngine(model, TOKENIZER, spec, BlockPool(9))
