"""The same prompt again, an edited last turn and a dropped answer, where layers carry a state: almost all is reused.

Every answer is compared with mlx-lm, which computes the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from engine_bench import EngineBench
from engine_families import WINDOWS, WITH_STATE, Logits, family
from engine_models import letter_tokenizer, tiny
from odd_models import Model
from reference_answers import MlxLm, ReferenceAnswer, recorder
from servers import RunningServer

# isort: split
import numpy as np
import pytest
import redis
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from engine.agent_engine import AgentEngine, Answer
from engine.batch_engine import NOT_WANTED
from engine.memory.blocks import AgentBlocks
from engine.pool import BlockPool
from engine.scheduling.request import CompletedGeneration
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore

BLOCK = 64
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []  # answers are as long as they may be
TOKENS = np.random.default_rng(5).integers(0, 96, 900).tolist()
PROMPT, LONG = TOKENS[:132], TOKENS[:300]  # one ends within the third block, one in the fifth
QUESTION, OTHER = TOKENS[400:412], TOKENS[500:515]
ODD = ["granitemoehybrid", "nemotron_h", "recurrent_gemma"]
_REFERENCES: dict[tuple[str, tuple[int, ...], int], ReferenceAnswer] = {}
Load = Callable[[EngineBench, AgentBlocks, Sequence[int]], AgentBlocks | None]


class QuantisedWindows:
    """A model with windows whose other layers are quantised to 8 bits."""

    def __init__(self) -> None:
        self.model = tiny("gemma3_text", head_dim=64)
        self.spec = ModelCacheSpec.probe(self.model, TOKENIZER, block_tokens=BLOCK, cache=self.empty())

    def empty(self) -> list[Any]:
        made = make_prompt_cache(self.model)
        return [QuantizedKVCache(64, 8) if type(layer) is KVCache else layer for layer in made]


class Bench(EngineBench):
    """An engine whose answers are compared with mlx-lm's."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind = kind
        of: Any = QuantisedWindows() if kind == "quantised" else Model(kind) if kind in ODD else None
        super().__init__(of or family(kind, block_tokens=BLOCK), TOKENIZER, 200, **options)

    def answer(
        self, prompt: Sequence[int], known: AgentBlocks | None = None
    ) -> tuple[CompletedGeneration, ReferenceAnswer]:
        """The answer to one prompt, with log-probabilities."""
        seen: list[Logits] = []
        self.batch.submit("agent", prompt, known, max_tokens=6, sampler=recorder(seen))
        (done,) = self.batch.step()
        assert done.not_kept is None
        return done, ReferenceAnswer(list(done.tokens), np.array(seen[:6]))

    def ask(
        self, *asked: tuple[Sequence[int], AgentBlocks | None], count: int = 6, **options: Any
    ) -> list[CompletedGeneration]:
        """The answers to prompts that are submitted together, each with a context, which must be mlx-lm's."""
        seen: list[list[Logits]] = [[] for _ in asked]
        uids = [
            self.batch.submit("agent", prompt, known, max_tokens=count, sampler=recorder(logits), **options)
            for (prompt, known), logits in zip(asked, seen, strict=True)
        ]
        done = {answer.uid: answer for answer in self.batch.step()}
        for uid, (prompt, _), logits in zip(uids, asked, seen, strict=True):
            assert done[uid].not_kept is None
            ours = ReferenceAnswer(list(done[uid].tokens), np.array(logits[: len(done[uid].tokens)]))
            assert_same(ours, self.reference(prompt, count))
        return [done[uid] for uid in uids]

    def reference(self, prompt: Sequence[int], count: int) -> ReferenceAnswer:
        """Return mlx-lm's answer, which is computed once for all tests of a model."""
        key = self.kind, tuple(prompt), count
        if key not in _REFERENCES:
            _REFERENCES[key] = MlxLm(self.of).answer(prompt, count)
        return _REFERENCES[key]


def assert_same(ours: ReferenceAnswer, theirs: ReferenceAnswer) -> None:
    assert ours.tokens == theirs.tokens
    assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-4


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """With a pool that every test leaves as full as it found it."""
    bench = Bench(request.param)
    yield bench
    bench.pool.check_empty()


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bench", kinds, indirect=True)


@of_kinds("llama", *WITH_STATE, *ODD)
def test_the_same_prompt_again_computes_its_last_token(bench: Bench) -> None:
    (short, long) = bench.ask((PROMPT, None), (LONG, None))
    again = bench.ask((PROMPT, short.blocks), (LONG, long.blocks))
    assert [done.tokens_reused for done in again] == [131, 299]
    (third,) = bench.ask((LONG, again[1].blocks))
    assert third.tokens_reused == 299
    bench.free(short, long, *again, third)


@of_kinds(*WITH_STATE, *ODD)
def test_an_edited_last_turn_reuses_the_turns_before(bench: Bench) -> None:
    (first,) = bench.ask((PROMPT, None))
    (second,) = bench.ask(([*first.blocks.tokens, *QUESTION], first.blocks))
    (edited,) = bench.ask(([*first.blocks.tokens, *OTHER], second.blocks))
    (again,) = bench.ask(([*first.blocks.tokens, *OTHER], edited.blocks))
    assert second.tokens_reused == edited.tokens_reused == len(first.blocks)
    assert again.tokens_reused >= len(first.blocks)
    bench.free(first, second, edited, again)


@of_kinds(*WITH_STATE, *ODD)
def test_a_dropped_answer_leaves_its_prompt_reused(bench: Bench) -> None:
    """Templates drop the thoughts of earlier answers."""
    (first,) = bench.ask((PROMPT, None))
    (second,) = bench.ask(([*PROMPT, *OTHER], first.blocks))
    assert second.tokens_reused == len(PROMPT)
    (third,) = bench.ask(([*PROMPT, *OTHER, *QUESTION], second.blocks))
    assert third.tokens_reused == len(PROMPT) + len(OTHER)
    bench.free(first, second, third)


@of_kinds(*WITH_STATE)
def test_a_prompt_is_reused_up_to_the_thought_it_opens(bench: Bench) -> None:
    """Some templates open a thought for the answer, and leave it out in later turns, where the line end before it may
    be a part of a longer token.
    """
    opens = TOKENS[800:803]
    (space,) = TOKENIZER.encode(" ")
    bench.batch._tokenizer = letter_tokenizer()
    vars(bench.batch._tokenizer).update(_think_start="<think>", _think_start_tokens=tuple(opens))
    (first,) = bench.ask(([*PROMPT, space, *opens, 1], None))
    (second,) = bench.ask(([*PROMPT, *OTHER, *LONG[200:280], space, *opens, 1], first.blocks))
    (third,) = bench.ask(([*PROMPT, *OTHER, *LONG[200:280], *QUESTION], second.blocks))
    assert second.tokens_reused == len(PROMPT)
    assert third.tokens_reused == len(PROMPT) + len(OTHER) + 80
    bench.free(first, second, third)


@of_kinds("llama", *WITH_STATE, *ODD)
def test_a_prompt_is_reused_up_to_its_boundaries(bench: Bench) -> None:
    """They are within blocks. A later turn of the first conversation keeps them."""
    (first,) = bench.ask((LONG, None), boundaries=[150, 287])
    (second,) = bench.ask(([*first.blocks.tokens, *QUESTION], first.blocks), boundaries=[150, 287])
    for done in (first, second):
        (other,) = bench.ask(([*LONG[:150], *OTHER], done.blocks))
        (edited,) = bench.ask(([*LONG[:287], *QUESTION], done.blocks))
        assert [other.tokens_reused, edited.tokens_reused] == [150, 287]
        bench.free(other, edited)
    bench.free(first, second)


@pytest.mark.parametrize("kind", ["gemma3_text", "mamba2"])
def test_boundaries_are_kept_beyond_the_budget_of_states(kind: str) -> None:
    bench = Bench(kind, state_budget=0)
    (first,) = bench.ask((LONG, None), boundaries=[150, 287])
    (other,) = bench.ask(([*LONG[:150], *OTHER], first.blocks))
    assert other.tokens_reused == 150
    bench.free(first, other)
    bench.pool.check_empty()


@of_kinds("llama", *WITH_STATE, *ODD)
def test_a_context_ends_with_the_tokens_to_keep(bench: Bench) -> None:
    (first,) = bench.ask((LONG, None), boundaries=[150], kept_tokens=150)
    assert first.blocks.tokens == tuple(LONG[:150])
    (again,) = bench.ask((LONG, first.blocks), boundaries=[150], kept_tokens=150)
    assert again.tokens_reused == 150
    assert len(again.blocks) == 150
    bench.batch.submit("agent", LONG, first.blocks, max_tokens=2, kept_tokens=0)
    (nothing,) = bench.batch.step()
    assert (nothing.tokens_reused, len(nothing.blocks), nothing.not_kept) == (0, 0, NOT_WANTED)
    bench.free(first, again)


@of_kinds("gemma3_text", "qwen3_next", "jamba")
def test_an_answer_of_one_token_keeps_its_states(bench: Bench) -> None:
    (first,) = bench.ask((PROMPT, None), count=1)
    (second,) = bench.ask(([*first.blocks.tokens, *QUESTION], first.blocks), count=1)
    (third,) = bench.ask(([*second.blocks.tokens, *QUESTION], second.blocks), count=1)
    assert (second.tokens_reused, third.tokens_reused) == (len(first.blocks), len(second.blocks))
    bench.free(first, second, third)


@of_kinds("quantised")
def test_quantised_layers_and_windows_continue_exactly(bench: Bench) -> None:
    """mlx-lm computes the same tokens in the same chunks, or their values are quantised differently."""
    first, ours = bench.answer(PROMPT)
    theirs = MlxLm(bench.of)
    assert_same(ours, theirs.answer(PROMPT, 6, chunk=BLOCK))
    edited = deepcopy(theirs)
    second, ours = bench.answer([*first.blocks.tokens, *QUESTION], first.blocks)
    assert_same(ours, theirs.answer(QUESTION, 6))
    third, ours = bench.answer([*first.blocks.tokens, *OTHER], second.blocks)
    assert_same(ours, edited.answer(OTHER, 6))
    again, ours = bench.answer(PROMPT, third.blocks)
    assert_same(ours, MlxLm(bench.of).answer(PROMPT, 6, chunk=BLOCK))
    assert [done.tokens_reused for done in (second, third, again)] == [138, 138, 131]
    bench.free(first, second, third, again)


def from_server(url: str) -> Load:
    """Saves a context to a page server, and loads it into another pool, as another engine does."""

    def load(bench: EngineBench, context: AgentBlocks, prompt: Sequence[int]) -> AgentBlocks | None:
        for tier, end in (
            (PageTier(url, bench.of.spec, BlockPool(1)), False),
            (PageTier(url, bench.of.spec, bench.pool), True),
        ):
            try:
                if end:
                    return tier.load("agent", prompt)
                assert tier.save(context)
            finally:
                tier.close()
        return None

    return load


def from_file(directory: Path) -> Load:
    def load(bench: EngineBench, context: AgentBlocks, prompt: Sequence[int]) -> AgentBlocks | None:
        cold = SafetensorsCacheAdapter(bench.of.spec, bench.pool, directory)
        assert cold.save(context)
        return cold.load("agent", prompt)

    return load


@pytest.fixture(params=["server", "file"])
def load(request: pytest.FixtureRequest, server: RunningServer, client: redis.Redis, tmp_path: Path) -> Load:
    """Writes a context, and loads it for a prompt."""
    return from_server(server.url) if request.param == "server" else from_file(tmp_path)


@of_kinds(*WITH_STATE, *ODD)
def test_stored_states_within_blocks_are_loaded(bench: Bench, load: Load) -> None:
    (first,) = bench.ask((PROMPT, None))
    (second,) = bench.ask(([*first.blocks.tokens, *QUESTION], first.blocks))
    (long,) = bench.ask((LONG, None), count=40)  # its last token but one is in a block that the answer fills
    (marked,) = bench.ask((LONG, None), boundaries=[150])
    cases = [
        (first, PROMPT, len(PROMPT) - 1),
        (first, [*PROMPT, *OTHER], len(PROMPT) - 1),
        (second, [*first.blocks.tokens, *OTHER], len(first.blocks)),
        (long, LONG, len(LONG) - 1),
        (long, [*long.blocks.tokens, *QUESTION], len(long.blocks)),
        (marked, [*LONG[:150], *OTHER], 150),
    ]
    for done, prompt, reused in cases:
        known = load(bench, done.blocks, prompt)
        assert known
        (answer,) = bench.ask((prompt, known))
        assert answer.tokens_reused == reused
        bench.pool.free(known.block_ids)
        bench.free(answer)
    bench.free(first, second, long, marked)


def test_the_server_deletes_states_that_no_manifest_names(server: RunningServer, client: redis.Redis) -> None:
    bench = Bench("qwen3_next")
    tier = PageTier(server.url, bench.of.spec, bench.pool)
    (first,) = bench.ask((PROMPT, None))
    (other,) = bench.ask((TOKENS[600:700], None))
    assert tier.save(first.blocks)
    assert len(client.keys("state:*")) == 4  # two checkpoints, before the last token of the prompt, the answer's end
    assert tier.fork("agent", "fork")
    assert tier.save(other.blocks)
    assert len(client.keys("state:*")) == 4 + 3
    assert tier.delete("fork")
    assert len(client.keys("state:*")) == 3
    assert tier.delete("agent")
    assert {*client.keys("*")} == {b"refs:deleted:agent", b"refs:deleted:fork"}
    tier.close()
    bench.free(first, other)


@pytest.mark.parametrize("kind", ["gemma3_text", "mamba2"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_states_of_a_long_conversation_stay_within_bounds(kind: str, budget: int) -> None:
    """Besides the budget: one of each prompt, of which a full block keeps at most one, and the last."""
    state = family(kind, block_tokens=BLOCK).spec.state_nbytes(400)
    bench = Bench(kind, state_budget=budget * state)
    known, tokens = None, list(TOKENS[:20])
    for turn in range(20):
        (done,) = bench.ask((tokens, known.blocks if known else None))
        if known:
            assert done.tokens_reused == len(known.blocks)
            bench.free(known)
        known, tokens = done, [*done.blocks.tokens, *TOKENS[20 * turn : 20 * turn + 10]]
        blocks = done.blocks.blocks
        held = sum(block.nbytes for block in blocks)
        assert held == bench.pool.used_bytes
        assert held - len(done.blocks) * bench.of.spec.token_nbytes <= (budget + 1 + len(blocks)) * state
    assert known
    bench.free(known)
    bench.pool.check_empty()


@of_kinds(*WINDOWS)
def test_blocks_with_a_state_of_another_place_are_refused(bench: Bench) -> None:
    (done,) = bench.ask((PROMPT[:40], None))
    (block,) = done.blocks.blocks
    for wrong in (block.with_state(20, block.inner[39]), block.with_state(99, block.inner[39])):
        context = AgentBlocks("agent", done.blocks.tokens, (wrong,), bench.of.spec.fingerprint)
        with pytest.raises(ValueError, match="state after"):
            bench.batch.submit("agent", PROMPT, context)
    bench.free(done)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_agents_are_answered_from_memory_when_they_ask_again(kind: str) -> None:
    bench = Bench(kind)
    store = AgentCacheStore(bench.of.spec, bench.pool)
    agents = AgentEngine(bench.batch, store)
    answers: list[Answer] = []
    for prompt in (PROMPT, PROMPT, [*PROMPT, *OTHER]):
        agents.submit("alice", prompt, max_tokens=6, on_done=answers.append, on_error=pytest.fail)
        while agents.step(timeout=1.0):
            pass
    assert [(answer.reuse.tier, answer.reuse.tokens) for answer in answers] == [("none", 0), ("hot", 131), ("hot", 132)]
    assert [answer.reuse.why for answer in answers[1:]] == [None, None]
    agents.shutdown()
    store.close()
    bench.pool.check_empty()
