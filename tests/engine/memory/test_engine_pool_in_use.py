"""The pool as the engine uses it: after a failed extraction, a drain, a shutdown, and the names of holders."""

from __future__ import annotations

from collections.abc import Iterator

from block_pages import page_bodies
from engine_models import letter_tokenizer, tiny, tiny_llama

# isort: split
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from engine.batch_engine import BlockPoolBatchEngine
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks
from engine.pool import BlockPool, PoolExhaustedError
from engine.scheduling.request import EngineClosedError, SchedulerConfig
from engine.spec import ModelCacheSpec

MODEL = tiny_llama(head_dim=32)
TOKENIZER = letter_tokenizer()
SPEC = ModelCacheSpec.probe(MODEL, TOKENIZER, model_id="tiny")
QUANTISED = ModelCacheSpec.probe(MODEL, TOKENIZER, cache=[QuantizedKVCache(32, 8) for _ in range(4)])
PROMPT = np.random.default_rng(9).integers(0, 96, 600).tolist()


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    """A pool that every test leaves as full as it found it."""
    pool = BlockPool(32, total_bytes=32 * 256 * SPEC.token_nbytes)
    yield pool
    pool.check_empty()
    assert pool.used_bytes == 0


@pytest.fixture(params=["in one batch", "in turns"])
def batch(request: pytest.FixtureRequest, pool: BlockPool) -> BlockPoolBatchEngine:
    spec = SPEC if request.param == "in one batch" else QUANTISED
    return BlockPoolBatchEngine(MODEL, TOKENIZER, spec, pool)


def bits(context: AgentBlocks) -> list[bytes]:
    return [bytes(page) for block in context.blocks for page in page_bodies(block.layers)]


def test_an_agents_blocks_are_counted_under_its_name(batch: BlockPoolBatchEngine, pool: BlockPool) -> None:
    token = batch.spec.token_nbytes
    batch.submit("alice", PROMPT, max_tokens=20)
    assert pool.holdings()["alice"].nbytes == 620 * token
    (first,) = batch.step()
    assert (pool.holdings()["alice"].blocks, pool.holdings()["alice"].nbytes) == (3, len(first.blocks) * token)
    batch.submit("bob", [*first.blocks.tokens, 5], first.blocks, max_tokens=7)
    (second,) = batch.step()
    held = {name: (found.blocks, found.nbytes) for name, found in pool.holdings().items()}
    assert held == {"alice": (3, len(first.blocks) * token), "bob": (3, len(second.blocks) * token)}
    assert pool.used_blocks == 4
    pool.free(first.blocks.block_ids, "alice")
    assert list(pool.holdings()) == ["bob"]
    pool.free(second.blocks.block_ids, "bob")


def test_states_of_layers_count(pool: BlockPool) -> None:
    model = tiny("gemma3_text")
    spec = ModelCacheSpec.probe(model, TOKENIZER, block_tokens=64)
    batch = BlockPoolBatchEngine(model, TOKENIZER, spec, pool)
    batch.submit("alice", PROMPT[:200], max_tokens=5)
    assert pool.used_bytes >= 205 * spec.token_nbytes + 6 * spec.state_nbytes(200)
    (done,) = batch.step()
    assert pool.used_bytes == sum(block.nbytes for block in done.blocks.blocks)
    assert list(done.blocks.states) == [64, 128, 192, 199, 200, 205]
    assert pool.used_bytes == len(done.blocks) * spec.token_nbytes + 6 * spec.state_nbytes(200)
    pool.free(done.blocks.block_ids)


def test_an_answer_that_bytes_do_not_suffice_for_is_not_begun(batch: BlockPoolBatchEngine, pool: BlockPool) -> None:
    pool.reconfigure(total_bytes=620 * batch.spec.token_nbytes)
    with pytest.raises(PoolExhaustedError, match="bytes needed"):
        batch.submit("alice", PROMPT, max_tokens=21)
    batch.submit("alice", PROMPT, max_tokens=20)
    with pytest.raises(PoolExhaustedError, match="bytes needed"):
        batch.submit("bob", PROMPT[:1], max_tokens=1)
    (done,) = batch.step()
    pool.free(done.blocks.block_ids)


def test_a_shrinking_pool_lets_running_answers_complete(batch: BlockPoolBatchEngine, pool: BlockPool) -> None:
    batch.submit("alice", PROMPT, max_tokens=20)
    pool.reconfigure(1, 1)
    (done,) = batch.step()
    assert done.not_kept is None
    with pytest.raises(PoolExhaustedError):
        batch.submit("bob", PROMPT[:1], max_tokens=1)
    pool.free(done.blocks.block_ids)


def test_the_old_cache_survives_a_failed_extraction(
    batch: BlockPoolBatchEngine, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out, as MLX says it, while one of two contexts is made into blocks."""
    batch.submit("alice", PROMPT, max_tokens=5)
    (first,) = batch.step()
    before = bits(first.blocks)
    extract, calls = kvcache.extract, []

    def failing_once(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("[malloc] Unable to allocate 16777216 bytes.")
        return extract(*args, **kwargs)

    monkeypatch.setattr(kvcache, "extract", failing_once)
    following = [*first.blocks.tokens, 5, 6]
    batch.submit("alice", following, first.blocks, max_tokens=5)
    batch.submit("bob", PROMPT[:100], max_tokens=5)
    done = {answer.agent_id: answer for answer in batch.step()}
    (failed,) = (answer for answer in done.values() if answer.not_kept)
    (kept,) = (answer for answer in done.values() if not answer.not_kept)
    assert "Unable to allocate" in failed.not_kept
    assert len(failed.tokens) == len(kept.tokens) == 5
    assert bits(first.blocks) == before
    pool.free(kept.blocks.block_ids, kept.agent_id)
    assert list(pool.holdings()) == ["alice"]
    assert pool.holdings()["alice"].blocks == len(first.blocks.blocks)

    batch.submit("alice", following, first.blocks, max_tokens=5)
    (again,) = batch.step()
    assert again.tokens_reused == len(first.blocks)
    if failed.agent_id == "alice":
        assert again.tokens == failed.tokens
    pool.free([*first.blocks.block_ids, *again.blocks.block_ids], "alice")


def test_a_drained_engine_finishes_and_accepts_no_more(batch: BlockPoolBatchEngine, pool: BlockPool) -> None:
    for agent in ("alice", "bob"):
        batch.submit(agent, PROMPT[:50], max_tokens=10)
    batch.step_once()
    draining = batch.drain()
    with pytest.raises(EngineClosedError, match="takes no more prompts"):
        batch.submit("carol", PROMPT[:50])
    done = list(draining)
    assert sorted(answer.agent_id for answer in done) == ["alice", "bob"]
    assert [len(answer.tokens) for answer in done] == [10, 10]
    assert batch.pending == 0
    for answer in done:
        pool.free(answer.blocks.block_ids, answer.agent_id)


def test_draining_finishes_waiting_prompts_too(pool: BlockPool) -> None:
    batch = BlockPoolBatchEngine(MODEL, TOKENIZER, SPEC, pool, SchedulerConfig(wait_for_blocks=True))
    pool.reconfigure(3)
    for agent in ("alice", "bob"):
        batch.submit(agent, PROMPT, max_tokens=10)
    finished = []
    for answer in batch.drain():
        finished.append(answer.agent_id)
        pool.free(answer.blocks.block_ids, answer.agent_id)
    assert finished == ["alice", "bob"]


def test_a_shut_down_engine_gives_every_block_back_at_once(batch: BlockPoolBatchEngine, pool: BlockPool) -> None:
    batch.submit("alice", PROMPT, max_tokens=2)
    (kept,) = batch.step()
    batch.submit("alice", [*kept.blocks.tokens, 1], kept.blocks, max_tokens=30)
    batch.submit("bob", PROMPT, max_tokens=30)
    batch.step_once()
    batch.shutdown()
    batch.shutdown()
    assert batch.pending == 0
    assert list(pool.holdings()) == ["alice"]
    assert list(batch.step()) == []
    with pytest.raises(EngineClosedError):
        batch.submit("carol", PROMPT)
    pool.free(kept.blocks.block_ids, "alice")


def test_answers_completed_before_a_shutdown_are_available(batch: BlockPoolBatchEngine, pool: BlockPool) -> None:
    for agent in ("alice", "bob"):
        batch.submit(agent, PROMPT[:20], max_tokens=2)
    first = next(batch.step())
    batch.shutdown()
    for answer in (first, *batch.step()):
        assert len(answer.tokens) == 2
        pool.free(answer.blocks.block_ids, answer.agent_id)


def test_shared_blocks_that_leave_no_room_are_not_used() -> None:
    """Each window may keep a state at any position, so a shared block can be larger than a computed one."""
    model = tiny("gemma3_text")
    spec = ModelCacheSpec.probe(model, TOKENIZER)
    pool = BlockPool()
    batch = BlockPoolBatchEngine(model, TOKENIZER, spec, pool, SchedulerConfig(wait_for_blocks=True))
    batch.submit("alice", PROMPT[:300], boundaries=range(10, 250, 10), max_tokens=1)
    (first,) = batch.step()
    (expected,) = (batch.submit("bob", PROMPT[:300], max_tokens=4), *batch.step())[1:]
    pool.free(expected.blocks.block_ids, "bob")
    pool.reconfigure(total_bytes=304 * spec.token_nbytes + 8 * spec.state_nbytes(304))
    batch.submit("bob", PROMPT[:300], first.blocks, max_tokens=4)
    pool.free(first.blocks.block_ids, "alice")
    (second,) = batch.step()
    assert (second.tokens, second.tokens_reused) == (expected.tokens, 0)
    pool.free(second.blocks.block_ids, "bob")
    pool.check_empty()
