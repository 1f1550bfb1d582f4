"""Prompts without an agent's name reuse the beginning that any earlier context has in common with them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from engine_families import TOKENIZER, Family, family
from servers import RunningServer
from waiting import PATIENCE

# isort: split
from engine.agent_engine import AgentEngine, Answer
from engine.batch_engine import BlockPoolBatchEngine
from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore, CacheConfig

BLOCK = 64
ANSWER = 6  # tokens


class Unnamed:
    """An engine of one of the tiny models, which is asked without names."""

    def __init__(self, of: Family, pool: BlockPool, config: CacheConfig, url: str | None) -> None:
        self.pool = pool
        pages = PageTier(url, of.spec, pool, deadline=PATIENCE) if url else None
        self.store = AgentCacheStore(of.spec, pool, pages=pages, config=config)
        self._engine = AgentEngine(BlockPoolBatchEngine(of.model, TOKENIZER, of.spec, pool), self.store)
        self._asked = 0

    def ask(self, *prompts: Sequence[int]) -> list[Answer]:
        """The answers to prompts that are computed in one batch."""
        answers: dict[int, Answer] = {}
        errors: list[Exception] = []

        def done(answer: Answer) -> None:
            answers[answer.uid] = answer

        uids = []
        for prompt in prompts:
            self._asked += 1
            uids.append(
                self._engine.submit(
                    f"anon-{self._asked}", prompt, max_tokens=ANSWER, keep=False, on_done=done, on_error=errors.append
                )
            )
        while self._engine.step(timeout=0.1):
            pass
        assert not errors
        return [answers[uid] for uid in uids]

    def close(self) -> None:
        self._engine.shutdown()
        self.store.close()
        self.pool.check_empty()


@contextmanager
def unnamed(kind: str, url: str | None = None, **config: Any) -> Iterator[Unnamed]:
    engine = Unnamed(family(kind, block_tokens=BLOCK), BlockPool(), CacheConfig(**config), url)
    yield engine
    engine.close()


def some(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(96) for _ in range(rng.randint(least, most))]


KINDS = ["llama", "llama q8/64", "gemma3_text", "qwen3_next", "falcon_h1"]


@pytest.mark.parametrize(("conversations", "turns"), [(3, 6), pytest.param(8, 20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
def test_conversations_compute_only_new_tokens(kind: str, conversations: int, turns: int) -> None:
    """Each turn adds 30 to 200 tokens. All that precedes them is reused, but for a token where an answer ended early,
    and the text is that of a new engine."""
    rng = random.Random(3)
    contexts: list[list[int]] = [[] for _ in range(conversations)]
    reusable = reused = 0
    with unnamed(kind) as engine:
        for _ in range(turns):
            prompts = [context + some(rng, 30, 200) for context in contexts]
            answers = engine.ask(*prompts)
            reusable += sum(map(len, contexts))
            reused += sum(answer.reuse.tokens for answer in answers)
            assert all(answer.reuse.why is None for answer, context in zip(answers, contexts, strict=True) if context)
            contexts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    assert 0.995 * reusable <= reused <= reusable
    with unnamed(kind) as other:
        assert [answer.tokens for answer in other.ask(*prompts)] == [answer.tokens for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_asked_again_computes_only_its_last_token(kind: str) -> None:
    rng = random.Random(4)
    prompts = [some(rng, count, count) for count in (5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)]
    with unnamed(kind) as engine:
        first = engine.ask(*prompts)
        again = engine.ask(*prompts)
        assert [answer.reuse.tokens for answer in first] == [0] * len(prompts)
        assert [answer.reuse.tokens for answer in again] == [len(prompt) - 1 for prompt in prompts]
        assert [answer.tokens for answer in again] == [answer.tokens for answer in first]


def test_a_turn_that_was_edited_reuses_all_before_the_edit() -> None:
    rng = random.Random(5)
    prompt = some(rng, 150, 150)
    with unnamed("llama") as engine:
        (answer,) = engine.ask(prompt)
        edited = [*prompt[:101], (prompt[101] + 1) % 96, *prompt[102:]]
        assert engine.ask(edited)[0].reuse.tokens == 101
        assert engine.ask([*prompt, *answer.tokens, 7])[0].reuse.tokens == 150 + ANSWER, "the other branch is kept"


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_one_time_prompts_do_not_evict_reused_contexts(kind: str) -> None:
    """Memory stays within its budget. A conversation that went on, and a system prompt that was shared, survive more
    one-time prompts than fit. After four times as many as fit, the conversation's oldest blocks are still there."""
    rng = random.Random(6)
    of = family(kind, block_tokens=BLOCK)
    budget = 60 * (BLOCK * of.spec.token_nbytes + of.spec.state_nbytes(BLOCK))
    system, talk, before = some(rng, 128, 128), some(rng, 100, 100), list[int]()
    with unnamed(kind, prefix_bytes=budget) as engine:
        for flood in (0, 1, 1, 1, 10):
            for _ in range(flood):
                engine.ask(*(some(rng, 20, 90) for _ in range(16)))
                assert engine.store.metrics().prefix_bytes <= budget
            shared, answer = engine.ask([*system, *some(rng, 5, 9)], talk)
            if flood:
                assert shared.reuse.tokens >= 128
                assert answer.reuse.tokens == len(before) if flood == 1 else answer.reuse.tokens >= 128
            before = [*talk, *answer.tokens]
            talk = [*before, *some(rng, 30, 40)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_engine_reuses_as_much_as_the_first(kind: str, server: RunningServer, client: redis.Redis) -> None:
    """Each turn is answered by a new engine on the same page server. It reuses at least 95 % of the tokens before the
    turn, and the texts are those of one engine that keeps everything in memory."""
    rng = random.Random(7)
    contexts: list[list[int]] = [[] for _ in range(3)]
    reusable = reused = 0
    with unnamed(kind) as uninterrupted:
        for _ in range(5):
            prompts = [context + some(rng, 30, 200) for context in contexts]
            with unnamed(kind, server.url, keep="all") as engine:
                engine.store.prefilled(1000, 10)  # computing is slow, so all that is stored is fetched
                answers = engine.ask(*prompts)
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in uninterrupted.ask(*prompts)]
            reusable += sum(map(len, contexts))
            reused += sum(answer.reuse.tokens for answer in answers)
            contexts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    assert 0.95 * reusable <= reused <= reusable
    assert {answer.reuse.tier for answer in answers} == {"page"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_asked_again_after_a_restart_computes_little(
    kind: str, server: RunningServer, client: redis.Redis
) -> None:
    rng = random.Random(8)
    prompts = [some(rng, count, count) for count in (20, BLOCK - 1, 2 * BLOCK + 7, 3 * BLOCK)]
    answered = []
    for _ in range(2):
        with unnamed(kind, server.url, keep="all") as engine:
            engine.store.prefilled(1000, 10)
            answers = engine.ask(*prompts)
            answered.append([answer.tokens for answer in answers])
    assert answered[0] == answered[1]
    assert [answer.reuse.tokens for answer in answers] == [len(prompt) - 1 for prompt in prompts]


def test_one_time_prompts_with_a_common_beginning_store_it_once(server: RunningServer, client: redis.Redis) -> None:
    """Computing them takes little, so their ends are not stored."""
    rng = random.Random(9)
    system = some(rng, 150, 150)
    with unnamed("llama", server.url) as engine:
        engine.store.prefilled(10_000_000, 1)
        for _ in range(10):
            engine.ask(*([*system, *some(rng, 5, 40)] for _ in range(4)))
        metrics = engine.store.metrics()
        assert metrics.unnamed_left > 40
        assert metrics.unnamed_written <= 4
    with unnamed("llama", server.url) as engine:
        assert engine.ask([*system, *some(rng, 5, 40)])[0].reuse.tokens >= 150
