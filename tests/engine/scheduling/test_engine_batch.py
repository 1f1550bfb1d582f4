"""The batch engine gives mlx-lm's answers, with a cache or without one, and loses no block in any case."""

from __future__ import annotations

from dataclasses import replace

from block_pages import page_bodies
from engine_models import END, letter_tokenizer, tiny_llama
from pools import pool_of

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import generate
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

from engine.batch_engine import BlockPoolBatchEngine
from engine.generation.tokens import EmptyPromptError, PromptTooLongError, UnknownTokenError
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, BlockError, IncompatibleBlocksError
from engine.pool import BlockPool, PoolExhaustedError
from engine.scheduling.request import CompletedGeneration
from engine.spec import ModelCacheSpec

MODEL = tiny_llama()
TOKENIZER = letter_tokenizer()
SPEC = ModelCacheSpec.probe(MODEL, TOKENIZER, model_id="tiny")
PROMPT = "".join(map(chr, np.random.default_rng(3).integers(32, 127, 600)))


pool = pool_of(32)


@pytest.fixture
def batch(pool: BlockPool) -> BlockPoolBatchEngine:
    return BlockPoolBatchEngine(MODEL, TOKENIZER, SPEC, pool)


def complete(
    batch: BlockPoolBatchEngine, prompt: str | list[int], cache: AgentBlocks | None = None, **options: object
) -> CompletedGeneration:
    batch.submit("alice", prompt, cache, **options)
    (done,) = batch.step()
    return done


def free(batch: BlockPoolBatchEngine, *held: CompletedGeneration) -> None:
    for done in held:
        batch.pool.free(done.blocks.block_ids)


def greedy(prompt: list[int], count: int) -> list[int]:
    return [token for token, _ in generate_step(mx.array(prompt), MODEL, max_tokens=count)]


def test_the_text_is_mlx_lms_own(batch: BlockPoolBatchEngine) -> None:
    done = complete(batch, PROMPT, max_tokens=40)
    assert done.text == generate(MODEL, TOKENIZER, PROMPT, max_tokens=40)
    assert (done.agent_id, done.finish_reason, done.prompt_tokens, done.tokens_reused) == ("alice", "length", 600, 0)
    assert len(done.tokens) == 40
    assert done.blocks.tokens == (*batch.encode(PROMPT), *done.tokens)
    assert 0 < done.time_to_first_token < 60
    free(batch, done)


def test_a_second_turn_computes_only_new_tokens(batch: BlockPoolBatchEngine) -> None:
    first = complete(batch, PROMPT, max_tokens=20)
    prompt = [*first.blocks.tokens, *batch.encode("and then?")]
    second = complete(batch, prompt, first.blocks, max_tokens=20)
    assert second.tokens_reused == len(first.blocks) == 620
    assert list(second.tokens) == greedy(prompt, 20)
    assert second.blocks.tokens == (*prompt, *second.tokens)
    free(batch, first, second)


def test_a_known_prompt_computes_its_last_token_alone(batch: BlockPoolBatchEngine) -> None:
    first = complete(batch, PROMPT, max_tokens=20)
    again = complete(batch, PROMPT, first.blocks, max_tokens=20)
    assert again.tokens_reused == 599
    assert (again.text, again.tokens) == (first.text, first.tokens)
    free(batch, first, again)


def test_a_diverging_prompt_reuses_the_common_prefix(batch: BlockPoolBatchEngine) -> None:
    first = complete(batch, PROMPT, max_tokens=20)
    prompt = batch.encode(PROMPT[:300] + "~" + PROMPT[301:])
    other = complete(batch, prompt, first.blocks, max_tokens=20)
    assert other.tokens_reused == 300
    assert list(other.tokens) == greedy(prompt, 20)
    free(batch, first, other)


def test_a_cache_that_has_nothing_in_common_is_no_harm(batch: BlockPoolBatchEngine) -> None:
    first = complete(batch, PROMPT, max_tokens=2)
    other = complete(batch, "~" + PROMPT[1:], first.blocks, max_tokens=20)
    assert other.tokens_reused == 0
    assert list(other.tokens) == greedy(batch.encode("~" + PROMPT[1:]), 20)
    free(batch, first, other)


def test_full_blocks_are_shared_and_not_copied(batch: BlockPoolBatchEngine) -> None:
    first = complete(batch, PROMPT, max_tokens=20)
    second = complete(batch, list(first.blocks.tokens), first.blocks, max_tokens=20)
    assert second.blocks.blocks[:2] == first.blocks.blocks[:2]
    assert second.blocks.block_ids[2] != first.blocks.block_ids[2]
    assert batch.pool.available_blocks == 32 - 4
    free(batch, first)
    assert batch.pool.available_blocks == 32 - 3
    free(batch, second)


def test_the_callers_blocks_are_unchanged_and_may_be_freed(batch: BlockPoolBatchEngine) -> None:
    first = complete(batch, PROMPT, max_tokens=20)
    before = [bytes(page) for block in first.blocks.blocks for page in page_bodies(block.layers)]
    batch.submit("alice", list(first.blocks.tokens), first.blocks, max_tokens=20)
    free(batch, first)
    (second,) = batch.step()
    assert list(second.tokens) == greedy(list(first.blocks.tokens), 20)
    assert [bytes(page) for block in first.blocks.blocks for page in page_bodies(block.layers)] == before
    assert len(first.blocks) == 620
    free(batch, second)


def test_agents_in_one_batch_get_the_answers_of_single_ones(batch: BlockPoolBatchEngine) -> None:
    prompts = [batch.encode(PROMPT[:n]) for n in (17, 600, 256, 90)]
    uids = [batch.submit(f"agent-{i}", prompt, max_tokens=10 + i) for i, prompt in enumerate(prompts)]
    assert batch.pending == 4
    done = {d.uid: d for d in batch.step()}
    assert batch.pending == 0
    for i, (uid, prompt) in enumerate(zip(uids, prompts, strict=True)):
        assert done[uid].agent_id == f"agent-{i}"
        assert list(done[uid].tokens) == greedy(prompt, 10 + i)
        assert done[uid].blocks.tokens == (*prompt, *done[uid].tokens)
    free(batch, *done.values())


def test_a_prompt_submitted_between_completions_joins_the_batch(batch: BlockPoolBatchEngine) -> None:
    short = batch.submit("short", PROMPT[:20], max_tokens=3)
    batch.submit("long", PROMPT[:30], max_tokens=12)
    completed = []
    for done in batch.step():
        completed.append(done)
        if done.uid == short:
            batch.submit("late", PROMPT[:40], max_tokens=3)
    assert [done.agent_id for done in completed] == ["short", "late", "long"]
    assert list(completed[1].tokens) == greedy(batch.encode(PROMPT[:40]), 3)
    free(batch, *completed)


def test_leaving_the_completions_early_loses_none(batch: BlockPoolBatchEngine) -> None:
    """All three end in the same step; the first is taken, the others wait for the next call."""
    for i in range(3):
        batch.submit(f"agent-{i}", PROMPT[:20], max_tokens=2)
    first = next(iter(batch.step()))
    assert batch.pending == 0
    others = list(batch.step())
    assert sorted(done.agent_id for done in (first, *others)) == ["agent-0", "agent-1", "agent-2"]
    free(batch, first, *others)


def test_tokens_may_be_an_array(batch: BlockPoolBatchEngine) -> None:
    done = complete(batch, mx.array(batch.encode(PROMPT)), max_tokens=3)
    assert list(done.tokens) == greedy(batch.encode(PROMPT), 3)
    assert {type(token) for token in done.blocks.tokens} == {int}
    free(batch, done)


def test_the_end_of_text_ends_the_answer_and_stays_in_context(pool: BlockPool) -> None:
    tokenizer = letter_tokenizer()
    tokens = greedy(tokenizer.encode(PROMPT), 20)
    at = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i)
    tokenizer.eos_token_ids = [tokens[at]]
    done = complete(BlockPoolBatchEngine(MODEL, tokenizer, SPEC, pool), PROMPT, max_tokens=20)
    assert done.finish_reason == "stop"
    assert list(done.tokens) == tokens[:at]
    assert done.blocks.tokens[600:] == tuple(tokens[: at + 1])
    assert done.text == tokenizer.decode(tokens[:at])
    pool.free(done.blocks.block_ids)


def test_a_stop_string_ends_the_text_before_it(batch: BlockPoolBatchEngine) -> None:
    whole = complete(batch, PROMPT, max_tokens=30)
    word = whole.text[4:6]
    done = complete(batch, PROMPT, max_tokens=30, stop=["never said", word])
    assert done.finish_reason == "stop"
    assert done.text == whole.text[: whole.text.index(word)]
    assert done.tokens == whole.tokens[: len(done.tokens)]
    assert len(done.tokens) < 30
    assert done.blocks.tokens == (*batch.encode(PROMPT), *done.tokens)
    again = complete(batch, [*done.blocks.tokens], done.blocks, max_tokens=5)
    assert again.tokens == whole.tokens[len(done.tokens) :][:5]
    free(batch, whole, done, again)


def test_a_stop_string_in_one_answer_does_not_stop_the_others(batch: BlockPoolBatchEngine) -> None:
    alone = complete(batch, PROMPT, max_tokens=30)
    stopped = batch.submit("a", PROMPT, max_tokens=30, stop=alone.text[4:6])
    batch.submit("b", PROMPT, max_tokens=30)
    done = {d.uid == stopped: d for d in batch.step()}
    assert done[True].finish_reason == "stop"
    assert done[False].text == alone.text
    free(batch, alone, *done.values())


def test_a_sampler_of_its_own_for_every_request(batch: BlockPoolBatchEngine) -> None:
    mx.random.seed(11)
    batch.submit("hot", PROMPT, max_tokens=30, sampler=make_sampler(temp=5.0))
    batch.submit("cold", PROMPT, max_tokens=30)
    done = {d.agent_id: d for d in batch.step()}
    assert list(done["cold"].tokens) == greedy(batch.encode(PROMPT), 30)
    assert done["hot"].tokens != done["cold"].tokens
    free(batch, *done.values())


def test_an_answer_ends_where_the_context_does(pool: BlockPool) -> None:
    model = tiny_llama(max_position_embeddings=610)
    batch = BlockPoolBatchEngine(model, TOKENIZER, ModelCacheSpec.probe(model, TOKENIZER), pool)
    done = complete(batch, PROMPT, max_tokens=100)
    assert (len(done.tokens), len(done.blocks), done.finish_reason) == (10, 610, "length")
    free(batch, done)
    with pytest.raises(PromptTooLongError, match="610 tokens leaves no room in a context of 610"):
        batch.submit("alice", list(done.blocks.tokens))


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(batch: BlockPoolBatchEngine, prompt: str | list[int]) -> None:
    with pytest.raises(EmptyPromptError, match="at least one token"):
        batch.submit("alice", prompt)
    assert batch.pending == 0


@pytest.mark.parametrize("token", [-1, 97, 10**12])
def test_a_token_the_model_does_not_know_is_refused(batch: BlockPoolBatchEngine, token: int) -> None:
    with pytest.raises(UnknownTokenError, match=f"token ids are 0 to 96, got {token}"):
        batch.submit("alice", [1, 2, token])


def test_other_bad_requests_are_refused_and_leave_nothing_behind(batch: BlockPoolBatchEngine) -> None:
    first = complete(batch, PROMPT[:20], max_tokens=1)
    model = tiny_llama(seed=8)
    other = BlockPoolBatchEngine(model, TOKENIZER, ModelCacheSpec.probe(model, TOKENIZER, model_id="8"), batch.pool)
    with pytest.raises(IncompatibleBlocksError, match="the model '8' has"):
        other.submit("alice", PROMPT, first.blocks)
    with pytest.raises(BlockError, match="an agent id is"):
        batch.submit("../alice", PROMPT)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        batch.submit("alice", PROMPT, max_tokens=0)
    with pytest.raises(ValueError, match="a stop string must not be empty"):
        batch.submit("alice", PROMPT, stop=[""])
    assert batch.pending == other.pending == 0
    free(batch, first)


def test_a_context_of_another_model_is_refused_without_harm(
    batch: BlockPoolBatchEngine,
) -> None:
    first = complete(batch, PROMPT, max_tokens=20)
    whole, *_, tail = first.blocks.blocks
    keys, values = tail.layers[3]
    prompt = [*first.blocks.tokens, 5]
    available = batch.pool.available_blocks

    def refused(error: type[BlockError], message: str, **changes: object) -> None:
        with pytest.raises(error, match=message):
            batch.submit("alice", prompt, replace(first.blocks, **changes))

    def last(layers: tuple[tuple[mx.array, ...], ...]) -> dict[str, object]:
        return {"blocks": (*first.blocks.blocks[:-1], replace(tail, layers=layers))}

    refused(IncompatibleBlocksError, "have the fingerprint 0000000000000001, the model 'tiny' has", fingerprint=1)
    refused(IncompatibleBlocksError, "a block of 'tiny' has 4 layers, got 3", **last(tail.layers[:3]))
    for layer in ((keys, values[..., :8]), (keys.astype(mx.float16), values), (keys[:, 1:], values), (keys,)):
        refused(IncompatibleBlocksError, "layer 3 of a block must hold", **last((*tail.layers[:3], layer)))
    refused(IncompatibleBlocksError, "all blocks but the last hold 256", blocks=first.blocks.blocks[::-1])
    refused(BlockError, "619 tokens are named, the blocks hold 620", tokens=first.blocks.tokens[:-1])
    refused(BlockError, "620 tokens are named, the blocks hold 512", blocks=(whole, whole))
    refused(BlockError, "an agent id is", agent_id="../../etc/passwd")
    assert (batch.pending, batch.pool.available_blocks) == (0, available)
    second = complete(batch, prompt, first.blocks, max_tokens=5)
    assert (second.tokens_reused, list(second.tokens)) == (620, greedy(prompt, 5))
    free(batch, first, second)


def test_a_context_that_was_freed_is_no_context(batch: BlockPoolBatchEngine) -> None:
    first = complete(batch, PROMPT, max_tokens=1)
    free(batch, first)
    with pytest.raises(ValueError, match=r"blocks \[.*\] are not allocated"):
        batch.submit("alice", list(first.blocks.tokens), first.blocks)
    assert (batch.pending, batch.pool.used_blocks) == (0, 0)


def test_an_unstorable_context_is_reported_and_the_old_one_stays(
    batch: BlockPoolBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = complete(batch, PROMPT, max_tokens=20)
    prompt = list(first.blocks.tokens)
    available = batch.pool.available_blocks

    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 906 bytes.")

    with monkeypatch.context() as broken:
        broken.setattr(kvcache, "extract", out_of_memory)
        lost = complete(batch, prompt, first.blocks, max_tokens=5)
    assert lost.not_kept == "[malloc] Unable to allocate 906 bytes."
    assert (list(lost.tokens), len(lost.blocks)) == (greedy(prompt, 5), 0)
    assert batch.pool.available_blocks == available
    again = complete(batch, prompt, first.blocks, max_tokens=5)
    assert (again.tokens, again.tokens_reused, again.not_kept) == (lost.tokens, 619, None)
    free(batch, first, lost, again)


def test_the_pool_knows_holders_and_sizes_of_blocks(batch: BlockPoolBatchEngine) -> None:
    """During an answer its whole reservation counts; afterwards the size of its blocks."""
    batch.submit("alice", PROMPT, max_tokens=100)
    assert batch.pool.holdings()["alice"].nbytes == 700 * SPEC.token_nbytes
    (done,) = batch.step()
    held = batch.pool.holdings()["alice"]
    assert (held.blocks, held.nbytes) == (3, len(done.blocks) * SPEC.token_nbytes)
    free(batch, done)
    small = BlockPoolBatchEngine(MODEL, TOKENIZER, SPEC, BlockPool(total_bytes=699 * SPEC.token_nbytes))
    with pytest.raises(PoolExhaustedError, match="bytes needed"):
        small.submit("alice", PROMPT, max_tokens=100)


def test_an_early_end_needs_no_more_memory_than_reserved(batch: BlockPoolBatchEngine) -> None:
    """Two of four blocks are made, and both are full: each takes more than a fourth of the reservation."""
    text = complete(batch, PROMPT[:500], max_tokens=30)
    pool = BlockPool(total_bytes=800 * SPEC.token_nbytes)
    tight = BlockPoolBatchEngine(MODEL, TOKENIZER, SPEC, pool)
    done = complete(tight, PROMPT[:500], max_tokens=300, stop=text.text[4:10])
    assert (done.not_kept, len(done.blocks.blocks)) == (None, 2)
    assert pool.used_bytes == len(done.blocks) * SPEC.token_nbytes
    pool.free(done.blocks.block_ids)
    free(batch, text)


def test_an_unstorable_answer_is_not_started(batch: BlockPoolBatchEngine) -> None:
    """The pool is asked before anything is queued, and the agent's cache survives the refusal."""
    first = complete(batch, PROMPT, max_tokens=20)
    others = batch.pool.allocate(27)
    with pytest.raises(PoolExhaustedError, match="3 blocks needed, 2 of 32 are free"):
        batch.submit("bob", PROMPT, max_tokens=20)
    with pytest.raises(PoolExhaustedError, match="3 blocks needed, 2 of 32 are free"):
        batch.submit("alice", list(first.blocks.tokens), first.blocks, max_tokens=600)
    assert (batch.pending, batch.pool.available_blocks) == (0, 2)
    batch.pool.free(others)
    second = complete(batch, list(first.blocks.tokens), first.blocks, max_tokens=5)
    assert list(second.tokens) == greedy(list(first.blocks.tokens), 5)
    free(batch, first, second)


def test_blocks_that_an_answer_did_not_need_go_back_to_the_pool(batch: BlockPoolBatchEngine) -> None:
    text = complete(batch, PROMPT, max_tokens=30)
    batch.submit("alice", PROMPT, max_tokens=2000, stop=[text.text[4:6]])
    assert batch.pool.available_blocks == 32 - 3 - 11
    (done,) = batch.step()
    assert batch.pool.available_blocks == 32 - 3 - 3
    free(batch, text, done)


def test_a_conversation_of_ten_turns_leaks_no_block(batch: BlockPoolBatchEngine) -> None:
    turn = complete(batch, PROMPT, max_tokens=30)
    for i in range(10):
        prompt = [*turn.blocks.tokens, *batch.encode(f"turn {i}")]
        following = complete(batch, prompt, turn.blocks, max_tokens=30)
        free(batch, turn)
        turn = following
    assert len(turn.blocks) > 900
    assert batch.pool.available_blocks == 32 - SPEC.blocks_for(len(turn.blocks))
    free(batch, turn)


def test_text_never_contains_the_end_marker(batch: BlockPoolBatchEngine) -> None:
    done = complete(batch, PROMPT, max_tokens=10)
    assert END not in done.text
    free(batch, done)
