"""Prompts join and leave between steps, and none of them holds up another for long; nor does a pool that is full."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from engine_bench import EngineBench
from engine_families import STOCK, family
from engine_models import letter_tokenizer

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from engine.memory.blocks import AgentBlocks
from engine.pool import PoolExhaustedError
from engine.scheduling.request import CompletedGeneration

TOKENS = np.random.default_rng(9).integers(0, 96, 4096).tolist()
CHUNK = 512
BLOCKS = 24
IN_ONE_BATCH, IN_TURNS = "llama", "llama4"
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []  # answers are as long as they may be


class Bench(EngineBench):
    """A batch engine, its model's inputs, and the number of tokens of each answer."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(family(kind), TOKENIZER, BLOCKS, **options)
        self.tokens: dict[str, int] = {}

    def submit(self, agent_id: str, prompt: Sequence[int], max_tokens: int, cache: AgentBlocks | None = None) -> int:
        self.tokens[agent_id] = 0

        def counting(logprobs: mx.array) -> mx.array:
            self.tokens[agent_id] += 1
            return mx.argmax(logprobs, axis=-1)

        return self.batch.submit(agent_id, prompt, cache, max_tokens=max_tokens, sampler=counting)

    def alone(self, prompt: Sequence[int], count: int) -> list[int]:
        steps = generate_step(mx.array(prompt), self.of.model, max_tokens=count, prompt_cache=self.of.empty())
        return [token for token, _ in steps]


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """With a pool that every test leaves as full as it found it."""
    kind, options = request.param
    bench = Bench(kind, **options)
    yield bench
    bench.pool.check_empty()


both_ways = pytest.mark.parametrize(
    "bench",
    [(IN_ONE_BATCH, {}), (IN_TURNS, {"state_budget": 0})],
    indirect=True,
    ids=["in one batch", "in turns"],
)
waiting = pytest.mark.parametrize("bench", [(IN_ONE_BATCH, {"wait_for_blocks": True})], indirect=True, ids=["waiting"])


@both_ways
def test_a_long_prompt_delays_other_answers_by_one_chunk_at_most(bench: Bench) -> None:
    bench.submit("quick", TOKENS[:20], max_tokens=30)
    while not bench.tokens["quick"]:
        bench.batch.step_once()
    bench.submit("long", TOKENS, max_tokens=1)
    chunks = []
    while not bench.tokens["long"]:
        bench.model.given.clear()
        before = bench.tokens["quick"]
        assert bench.batch.step_once() == []
        assert bench.tokens["quick"] == before + 1
        read = [tokens for _, tokens in bench.model.given if tokens > 1]
        assert len(read) <= 1
        chunks += read
    assert chunks == [CHUNK] * 7 + [CHUNK - 1]
    done = {done.agent_id: done for done in bench.batch.step()}
    assert list(done["quick"].tokens) == bench.alone(TOKENS[:20], 30)
    bench.free(*done.values())


@both_ways
def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(bench: Bench) -> None:
    bench.submit("long", TOKENS[:2000], max_tokens=1)
    bench.batch.step_once()
    bench.submit("short", TOKENS[:20], max_tokens=3)
    completed = list(bench.batch.step())
    assert [done.agent_id for done in completed] == ["short", "long"]
    bench.free(*completed)


@both_ways
def test_a_cancelled_answer_frees_its_own_blocks_only(bench: Bench) -> None:
    """One as it is answered, one as its prompt is read, one before that."""
    stays = bench.submit("stays", TOKENS[:30], max_tokens=12)
    answered = bench.submit("answered", TOKENS[:20], max_tokens=30)
    while not bench.tokens["answered"]:
        bench.batch.step_once()
    read = bench.submit("read", TOKENS[:2000], max_tokens=3)
    bench.batch.step_once()
    fresh = bench.submit("fresh", TOKENS[:20], max_tokens=3)
    for uid in (fresh, read, answered):
        bench.batch.cancel(uid)
    assert (bench.batch.pending, bench.pool.used_blocks) == (1, 1)
    (done,) = bench.batch.step()
    assert (done.uid, list(done.tokens)) == (stays, bench.alone(TOKENS[:30], 12))
    for gone in (stays, read, 99):
        with pytest.raises(KeyError, match=f"no request {gone} is pending"):
            bench.batch.cancel(gone)
    bench.free(done)


@both_ways
def test_a_full_pool_refuses_a_new_prompt_and_others_continue(bench: Bench) -> None:
    bench.submit("first", TOKENS[:300], max_tokens=8)
    bench.batch.step_once()
    with pytest.raises(PoolExhaustedError, match="23 blocks needed, 22 of 24 are free"):
        bench.submit("second", TOKENS[:300], max_tokens=5500)
    (done,) = bench.batch.step()
    assert list(done.tokens) == bench.alone(TOKENS[:300], 8)
    bench.free(done)


@waiting
def test_a_waiting_prompt_is_admitted_in_turn_for_free_blocks(bench: Bench) -> None:
    """The second needs more than is left; the third, for whom there would be room, doesn't overtake it."""
    held = bench.pool.allocate(BLOCKS - 4)
    bench.submit("first", TOKENS[:300], max_tokens=8)
    bench.submit("second", TOKENS[:780], max_tokens=20)
    bench.submit("third", TOKENS[:20], max_tokens=4)
    assert (bench.batch.pending, bench.pool.available_blocks) == (3, 2)
    (first,) = bench.batch.step()
    assert (first.agent_id, bench.batch.pending) == ("first", 2)
    assert list(bench.batch.step()) == []  # the receiver still holds the blocks of the first
    bench.free(first)
    bench.batch.step_once()
    assert (bench.tokens["second"], bench.pool.available_blocks) == (0, 0)
    bench.pool.free(held)
    completed = {done.agent_id: done for done in bench.batch.step()}
    assert list(completed["second"].tokens) == bench.alone(TOKENS[:780], 20)
    assert list(completed["third"].tokens) == bench.alone(TOKENS[:20], 4)
    bench.free(*completed.values())


@waiting
def test_a_waiting_prompt_keeps_shared_blocks_its_caller_freed(bench: Bench) -> None:
    bench.submit("agent", TOKENS[:300], max_tokens=4)
    (first,) = bench.batch.step()
    held = bench.pool.allocate(BLOCKS - 2)
    bench.submit("agent", [*first.blocks.tokens, 5], max_tokens=4, cache=first.blocks)
    bench.free(first)
    assert (bench.batch.pending, bench.pool.used_blocks) == (1, BLOCKS - 1)
    (second,) = bench.batch.step()
    assert list(second.tokens) == bench.alone([*first.blocks.tokens, 5], 4)
    bench.free(second)
    bench.pool.free(held)


@waiting
def test_a_waiting_prompt_can_be_cancelled(bench: Bench) -> None:
    held = bench.pool.allocate(BLOCKS)
    bench.batch.cancel(bench.submit("agent", TOKENS[:300], max_tokens=4))
    assert bench.batch.pending == 0
    assert list(bench.batch.step()) == []
    bench.pool.free(held)


@waiting
def test_a_prompt_too_large_for_the_pool_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(PoolExhaustedError, match="25 blocks needed, the pool has 24 in all"):
        bench.submit("agent", TOKENS[:300], max_tokens=6000)
    assert bench.batch.pending == 0


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 8))]
QUANTISED = ["llama q4/64", "gemma3_text q8/32"] if STOCK else []
KINDS = [
    IN_ONE_BATCH,
    IN_TURNS,
    *QUANTISED,
    *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("gemma3_text", "lfm2")),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_prompts_and_cancellations_give_mlx_lms_answers(kind: str, seed: int) -> None:
    """Prompts that start, continue earlier answers, wait and are cancelled at random."""
    chance = random.Random(seed)
    bench = Bench(kind, wait_for_blocks=True, prefill_chunk=64)
    asked: dict[int, tuple[list[int], int]] = {}
    contexts: list[CompletedGeneration] = []
    answered = 0
    while answered < 25:
        what = chance.random()
        if what < 0.3 and bench.batch.pending < 8:
            known = chance.choice(contexts).blocks if contexts and chance.random() < 0.5 else None
            start = chance.randrange(3000)
            prompt = [*(known.tokens if known else ()), *TOKENS[start : start + chance.choice([1, 20, 150])]]
            count = chance.randint(1, 8)
            asked[bench.submit(f"agent-{start}", prompt, count, known)] = (prompt, count)
        elif what < 0.35 and asked:
            uid = chance.choice(list(asked))
            del asked[uid]
            bench.batch.cancel(uid)
        for done in bench.batch.step_once():
            prompt, count = asked.pop(done.uid)
            assert list(done.tokens) == bench.alone(prompt, count)
            assert (done.blocks.tokens, done.not_kept) == ((*prompt, *done.tokens), None)
            contexts.append(done)
            answered += 1
        if len(contexts) > 4 or bench.pool.available_blocks == 0:
            bench.free(*contexts)
            contexts.clear()
    for uid in asked:
        bench.batch.cancel(uid)
    bench.free(*contexts)
    assert bench.batch.pending == 0
    bench.pool.check_empty()


def test_a_chunk_has_a_token_at_least() -> None:
    with pytest.raises(ValueError, match="prefill_chunk must be at least 1, got 0"):
        Bench(IN_ONE_BATCH, prefill_chunk=0)
