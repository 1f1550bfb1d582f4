"""A restored context is continued in one pass over the model, with the result of two passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine_bench import EngineBench
from engine_families import family
from engine_models import letter_tokenizer

# isort: split
import numpy as np
import pytest

from engine.generation.unbatched import SHORT_TOKENS
from engine.memory.blocks import AgentBlocks
from engine.scheduling.request import Token

TOKENS = np.random.default_rng(9).integers(0, 96, 4096).tolist()
KNOWN, QUESTION = 300, 11
TOKENIZER = letter_tokenizer()


class Bench(EngineBench):
    """A batch engine that has answered the first turn of a conversation, in blocks that are the bench's."""

    def __init__(self, eos: list[int]) -> None:
        TOKENIZER.eos_token_ids = eos
        super().__init__(family("llama"), TOKENIZER, 64)
        self.known = self.answer("alice", TOKENS[:KNOWN], max_tokens=1).blocks
        self.prompt = TOKENS[: KNOWN + QUESTION]
        self.model.given.clear()

    def answer(self, agent: str, prompt: list[int], cache: AgentBlocks | None = None, **options: Any) -> Any:
        self.batch.submit(agent, prompt, cache, **options)
        (done,) = self.batch.step()
        return done


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench([])
    yield bench
    bench.pool.free(bench.known.block_ids, "alice")
    bench.pool.check_empty()


def test_a_short_question_takes_one_pass_to_its_first_token(bench: Bench) -> None:
    passes: list[int] = []
    received: list[Token] = []

    def receive(token: Token) -> None:
        received.append(token)
        passes.append(len(bench.model.given))

    done = bench.answer("alice", bench.prompt, bench.known, max_tokens=8, on_token=receive, logprobs=2)
    assert done.tokens_reused == KNOWN
    assert bench.model.given[0] == (1, QUESTION)
    assert passes[0] == 1
    computed = bench.answer("bob", bench.prompt, max_tokens=8, on_token=received.append, logprobs=2)
    assert done.tokens == computed.tokens
    np.testing.assert_allclose([t.logprob for t in received[:8]], [t.logprob for t in received[8:]], atol=1e-4)
    bench.free(done, computed)


def test_longer_and_combined_prompts_use_the_batch(bench: Bench) -> None:
    long = TOKENS[: KNOWN + SHORT_TOKENS + 1]
    done = bench.answer("alice", long, bench.known, max_tokens=4)
    assert [tokens for _, tokens in bench.model.given[:2]] == [SHORT_TOKENS, 1]
    alone = [bench.answer("alice", [*bench.prompt, last], bench.known, max_tokens=6) for last in (1, 2, 3)]
    bench.model.given.clear()
    for last in (1, 2, 3):
        bench.batch.submit("alice", [*bench.prompt, last], bench.known, max_tokens=6)
    together = sorted(bench.batch.step(), key=lambda one: one.uid)
    assert [tokens for _, tokens in bench.model.given[:2]] == [QUESTION, 1]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    bench.free(done, *alone, *together)


def test_an_answer_of_one_token_leaves_a_context_that_holds_it(bench: Bench) -> None:
    done = bench.answer("alice", bench.prompt, bench.known, max_tokens=1)
    assert (done.finish_reason, len(done.tokens)) == ("length", 1)
    assert done.blocks.tokens == (*bench.prompt, *done.tokens)
    went_on = bench.answer("alice", [*done.blocks.tokens, 5], done.blocks, max_tokens=3)
    computed = bench.answer("bob", [*done.blocks.tokens, 5], max_tokens=3)
    assert went_on.tokens_reused == len(done.blocks)
    assert went_on.tokens == computed.tokens
    bench.free(done, went_on, computed)


def test_the_end_of_text_may_be_the_first_token(bench: Bench) -> None:
    first = bench.answer("alice", bench.prompt, bench.known, max_tokens=1)
    silent = Bench([first.tokens[0]])
    done = silent.answer("alice", silent.prompt, silent.known, max_tokens=5)
    assert (done.finish_reason, done.tokens, done.text) == ("stop", (), "")
    assert done.blocks.tokens == (*silent.prompt, first.tokens[0])
    bench.free(first)
    silent.free(done)
    silent.pool.free(silent.known.block_ids, "alice")
    silent.pool.check_empty()
    TOKENIZER.eos_token_ids = []


def test_a_cancelled_prompt_frees_its_memory(bench: Bench) -> None:
    uid = bench.batch.submit("alice", bench.prompt, bench.known, max_tokens=5)
    bench.batch.cancel(uid)
    assert not bench.batch.pending
    uids: list[int] = []

    def drop(token: Token) -> None:
        bench.batch.cancel(uids[0])

    uids.append(bench.batch.submit("alice", bench.prompt, bench.known, max_tokens=5, on_token=drop))
    assert list(bench.batch.step()) == []
    done = bench.answer("alice", bench.prompt, bench.known, max_tokens=2)
    assert len(done.tokens) == 2
    bench.free(done)
