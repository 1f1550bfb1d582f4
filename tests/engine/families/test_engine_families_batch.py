"""The batch engine gives mlx-lm's answers with every family of models: alone bit by bit, with others within rounding.

mlx-lm's own run goes on with the cache it has from the first turn; the engine goes on with the blocks it made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from engine_bench import EngineBench
from engine_families import KINDS, QUANTIZED, STOCK, WITH_STATE, Family, Logits, family
from engine_models import letter_tokenizer, tiny
from family_matrix import ALONE, RAGGED, SECOND_TURN, covers
from reference_answers import MlxLm, ReferenceAnswer, recorder
from servers import RunningServer

# isort: split
import mlx.core as mx
import numpy as np
import pytest
import redis
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache

from engine.batch_engine import BlockPoolBatchEngine
from engine.chains import common_prefix
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, IncompatibleBlocksError
from engine.pool import BlockPool
from engine.scheduling.request import CompletedGeneration
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier
from engine.tiers.server.block_writer import Saved

BLOCK = 64
TOKENS = np.random.default_rng(0).integers(0, 96, 400).tolist()
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []  # answers are as long as they may be
PROMPTS = [TOKENS[:17], TOKENS[:200], TOKENS[50:140], TOKENS[100:230]]
NEW = TOKENS[300:318]  # of the second turn


class Bench(EngineBench):
    """A family's model, and a batch engine on it."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(family(kind, block_tokens=BLOCK), TOKENIZER, 64, **options)
        self._seen: dict[int, list[Logits]] = {}

    def submit(self, prompt: Sequence[int], known: AgentBlocks | None = None, count: int = 6) -> int:
        seen: list[Logits] = []
        uid = self.batch.submit("agent", prompt, known, max_tokens=count, sampler=recorder(seen))
        self._seen[uid] = seen
        return uid

    def answer(self, done: CompletedGeneration) -> ReferenceAnswer:
        return ReferenceAnswer(list(done.tokens), np.array(self._seen[done.uid][: len(done.tokens)]))

    def complete(self, prompt: Sequence[int], known: AgentBlocks | None = None, count: int = 6) -> CompletedGeneration:
        self.submit(prompt, known, count)
        (done,) = self.batch.step()
        assert done.not_kept is None
        return done


@pytest.fixture
def bench(kind: str) -> Iterator[Bench]:
    """With a pool that every test leaves as full as it found it."""
    bench = Bench(kind)
    yield bench
    assert bench.pool.available_blocks == 64


def same_bits(ours: ReferenceAnswer, theirs: ReferenceAnswer) -> bool:
    return ours.tokens == theirs.tokens and np.array_equal(ours.logprobs, theirs.logprobs)


def close(ours: ReferenceAnswer, theirs: ReferenceAnswer, kind: str = "") -> bool:
    """To rounding, which may move a quantised value by a step. Then the answers part where two tokens are as likely."""
    if kind not in QUANTIZED or STOCK:
        return ours.tokens == theirs.tokens and bool(np.abs(ours.logprobs - theirs.logprobs).max() < 1e-4)
    compared = slice(0, common_prefix(ours.tokens, theirs.tokens) + 1)
    return bool(np.abs(ours.logprobs[compared] - theirs.logprobs[compared]).max() < (0.5 if "q4" in kind else 0.05))


@pytest.mark.parametrize("kind", KINDS)
def test_alone_the_answer_equals_mlx_lms_bit_by_bit(bench: Bench, kind: str) -> None:
    """mlx-lm is given the prompt in the same chunks: where layers carry a state, they end at checkpoints."""
    done = bench.complete(TOKENS[:200], count=12)
    theirs = MlxLm(bench.of).answer(TOKENS[:200], 12, chunk=BLOCK if kind in WITH_STATE else 2048)
    with covers(kind, ALONE):
        assert same_bits(bench.answer(done), theirs)
        assert done.blocks.tokens == (*TOKENS[:200], *theirs.tokens)
    bench.free(done)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_gives_the_answers_of_single_prompts(bench: Bench, kind: str) -> None:
    """The first three are submitted together and end one after the other; the fourth is submitted when one has ended.
    Beside their second turns runs a first one.
    """
    theirs = [MlxLm(bench.of) for _ in PROMPTS]
    asked = {bench.submit(prompt, count=4 + i): i for i, prompt in enumerate(PROMPTS[:3])}
    first: dict[int, CompletedGeneration] = {}
    for done in bench.batch.step():
        if not first:
            asked[bench.submit(PROMPTS[3], count=7)] = 3
        first[asked[done.uid]] = done
    for i, done in first.items():
        with covers(kind, RAGGED):
            assert close(bench.answer(done), theirs[i].answer(PROMPTS[i], 4 + i), kind)

    asked = {bench.submit([*done.blocks.tokens, *NEW], done.blocks, 4): i for i, done in first.items()}
    newcomer = bench.submit(TOKENS[20:95], count=4)
    second = {done.uid: done for done in bench.batch.step()}
    for uid, i in asked.items():
        assert second[uid].tokens_reused == len(first[i].blocks)
        with covers(kind, SECOND_TURN):
            assert close(bench.answer(second[uid]), theirs[i].answer(NEW, 4), kind)
    assert close(bench.answer(second[newcomer]), MlxLm(bench.of).answer(TOKENS[20:95], 4), kind)
    bench.free(*first.values(), *second.values())


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_diverging_prompt_continues_from_the_last_checkpoint(bench: Bench, kind: str) -> None:
    first = bench.complete(TOKENS[:200], count=1)
    prompts = [TOKENS[:200], [*TOKENS[:140], *TOKENS[:30]], [*TOKENS[:63], *TOKENS[:30]]]
    others = [bench.complete(prompt, first.blocks, 3) for prompt in prompts]
    assert [done.tokens_reused for done in others] == [199, 128, 0]
    for done, prompt in zip(others, prompts, strict=True):
        assert close(bench.answer(done), MlxLm(bench.of).answer(prompt, 3))
    bench.free(first, *others)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_agents_share_a_beginning_through_the_server(
    bench: Bench, kind: str, server: RunningServer, client: redis.Redis
) -> None:
    tier = PageTier(server.url, bench.of.spec, bench.pool)
    first = bench.complete(TOKENS[:200], count=1)
    assert tier.save(first.blocks)
    bench.free(first)
    prompt = [*TOKENS[:150], *TOKENS[:20]]
    known = tier.load("another", prompt)
    assert known
    second = bench.complete(prompt, known, 3)
    assert second.tokens_reused == 128
    assert close(bench.answer(second), MlxLm(bench.of).answer(prompt, 3))
    bench.pool.free(known.block_ids)
    bench.free(second)
    tier.close()


@pytest.mark.parametrize(
    ("budget", "kept"), [(0, []), (1, [192]), (2, [64, 192]), (3, [64, 128, 192]), (99, [64, 128, 192])]
)
def test_checkpoints_stay_within_their_budget(budget: int, kept: list[int]) -> None:
    """The last is worth most; the others lie evenly before it."""
    state = family("lfm2", block_tokens=BLOCK).spec.state_nbytes(200)
    bench = Bench("lfm2", state_budget=budget * state + 1)
    done = bench.complete(TOKENS[:200], count=1)
    held = zip(done.blocks.blocks, done.blocks.ends, strict=True)
    assert [end for block, end in held if block.state] == [*kept, 201]


@pytest.mark.parametrize("kind", ["llama", "mamba2", "jamba", "rwkv7"])
def test_a_model_uses_one_batch_only_if_its_batches_are_right(kind: str) -> None:
    """Padding enters the states of some layers. They run in one batch here, to verify that."""
    bench = Bench(kind)
    forced = replace(bench.of.spec, batches=True)
    bench.batch = BlockPoolBatchEngine(bench.of.model, TOKENIZER, forced, bench.pool)
    asked = {bench.submit(prompt): prompt for prompt in PROMPTS}
    right = [close(bench.answer(done), MlxLm(bench.of).answer(asked[done.uid], 6)) for done in bench.batch.step()]
    assert all(right) == bench.of.spec.batches


def unknown(family: str) -> tuple[Any, str]:
    """A model that keeps a kind of cache without a codec, and how the kind is refused."""
    model = tiny(family)
    if family == "llama":
        model.make_cache = lambda: [KVCache(), ConcatenateKVCache()]
        return model, "layer 1 keeps a ConcatenateKVCache; supported: KVCache, "
    model.make_cache = lambda: [CacheList(ArraysCache(2), ConcatenateKVCache()) for _ in model.layers]
    return model, "layer 0 keeps a ConcatenateKVCache; supported: KVCache, "


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_an_unknown_kind_is_named_and_served_without_reuse(family: str) -> None:
    model, refusal = unknown(family)
    spec = ModelCacheSpec.probe(model, TOKENIZER, block_tokens=BLOCK)
    assert spec.refusal
    assert spec.refusal.startswith(refusal)
    pool = BlockPool(1)  # nothing is kept, so one that is too small does no harm
    batch = BlockPoolBatchEngine(model, TOKENIZER, spec, pool)
    context = None
    for prompt in (TOKENS[:100], TOKENS[:200]):
        uids = {batch.submit("agent", tokens, context, max_tokens=4): tokens for tokens in (prompt, TOKENS[:9])}
        for done in batch.step():
            steps = generate_step(mx.array(uids[done.uid]), model, max_tokens=4)
            assert list(done.tokens) == [token for token, _ in steps]
            assert done.not_kept == spec.refusal
            assert (done.tokens_reused, len(done.blocks), pool.available_blocks) == (0, 0, 1)
            context = done.blocks


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("llama q8/64", {"kind": "llama q4/64"}),
        ("llama q8/64", {"kind": "llama q8/32"}),
        ("gemma3_text", {"kind": "gemma3_text", "sliding_window": 32}),
        ("llama4", {"kind": "llama", "num_hidden_layers": 1}),
        ("falcon_h1", {"kind": "falcon_h1", "num_hidden_layers": 1}),
    ],
    ids=["other bits", "another group", "another window", "another family", "a layer missing"],
)
def test_blocks_of_other_caches_are_refused(ours: str, theirs: dict[str, Any]) -> None:
    bench = Bench(ours)
    other = Family(**theirs, block_tokens=BLOCK)
    cache = other.empty()
    other.run(TOKENS[:100], cache)
    blocks = kvcache.extract(other.spec, cache, bench.pool.allocate(2), 100)
    context = AgentBlocks("agent", tuple(TOKENS[:100]), blocks, other.spec.fingerprint)
    for wrong in (context, replace(context, fingerprint=bench.of.spec.fingerprint)):
        with pytest.raises(IncompatibleBlocksError):
            bench.submit(TOKENS[:120], wrong)
    assert (bench.batch.pending, bench.pool.used_blocks) == (0, 2)
    bench.pool.free(context.block_ids)


def test_a_context_that_was_not_kept_changes_nothing_stored(server: RunningServer, client: redis.Redis) -> None:
    bench = Bench("llama")
    tier = PageTier(server.url, bench.of.spec, bench.pool)
    done = bench.complete(TOKENS[:100])
    assert tier.save(done.blocks)
    assert tier.save(AgentBlocks("agent", (), (), bench.of.spec.fingerprint)) == Saved(0, 0, 0)
    loaded = tier.load("agent")
    assert loaded
    assert loaded.tokens == done.blocks.tokens
    assert bench.pool.used_bytes == 2 * len(loaded) * bench.of.spec.token_nbytes
    tier.close()
