"""Several answers to one prompt: the prompt is computed once, and each answer equals the answer alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine_bench import EngineBench
from engine_families import STOCK, Family, family
from engine_models import letter_tokenizer

# isort: split
import numpy as np
import pytest

from engine.agent_engine import AgentEngine, Answer
from engine.generation.sampling import Sampling
from engine.memory.blocks import AgentBlocks
from engine.pool import PoolExhaustedError
from engine.scheduling.request import CompletedGeneration

TOKENS = np.random.default_rng(9).integers(0, 96, 4096).tolist()
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []
CHOICES = [Sampling(), Sampling(1.0, seed=1), Sampling(1.0, seed=2), Sampling(presence_penalty=1.0)]
_ALONE: dict[tuple[Family, tuple[int, ...]], list[tuple[int, ...]]] = {}
FAMILIES = ["llama", "llama4", "gemma3_text", "mamba2", "qwen3_next", *(["llama q8/32"] if STOCK else [])]


@pytest.fixture(params=FAMILIES)
def bench(request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    bench = EngineBench(family(request.param), TOKENIZER, 64, wait_for_blocks=True)
    yield bench
    bench.pool.check_empty()


def submit(bench: EngineBench, prompt: Sequence[int], cache: AgentBlocks | None = None, **options: Any) -> list[int]:
    """Submit a prompt with an answer for each of CHOICES."""
    batch = bench.batch
    first = batch.submit("first", prompt, cache, max_tokens=12, sampler=CHOICES[0], forked=True, **options)
    forks = [batch.fork(first, f"fork-{i}", max_tokens=12, sampler=CHOICES[i]) for i in range(1, len(CHOICES))]
    return [first, *forks]


def run(bench: EngineBench) -> dict[int, CompletedGeneration]:
    return {done.uid: done for done in bench.batch.step()}


def alone(bench: EngineBench, prompt: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the answers that are computed alone, once for all tests."""
    key = bench.of, tuple(prompt)
    if key in _ALONE:
        return _ALONE[key]
    found = _ALONE[key] = []
    for choice in CHOICES:
        bench.batch.submit("alone", prompt, max_tokens=12, sampler=choice)
        (done,) = bench.batch.step()
        bench.free(done)
        found.append(done.tokens)
    return found


def computed(bench: EngineBench) -> int:
    return sum(rows * tokens for rows, tokens in bench.model.given)


@pytest.mark.parametrize("length", [1, 2, 90, 257, 600])
def test_answers_of_one_prompt_equal_answers_alone(bench: EngineBench, length: int) -> None:
    prompt = TOKENS[:length]
    expected = alone(bench, prompt)
    uids = submit(bench, prompt)
    done = run(bench)
    assert [done[uid].tokens for uid in uids] == expected
    bench.free(*done.values())


def test_the_prompt_is_computed_once_and_its_blocks_are_shared(bench: EngineBench) -> None:
    bench.model.given.clear()
    uids = submit(bench, TOKENS[:600])
    done = run(bench)
    assert computed(bench) < 600 + 2 * len(CHOICES) * 13
    assert [done[uid].tokens_reused for uid in uids[1:]] == [599] * 3
    if done[uids[0]].blocks.blocks:
        shared = {tuple(done[uid].blocks.block_ids[:2]) for uid in uids}
        assert len(shared) == 1
    bench.free(*done.values())


def test_every_answer_can_be_continued(bench: EngineBench) -> None:
    uids = submit(bench, TOKENS[:300])
    done = run(bench)
    for uid in uids:
        question = [*done[uid].blocks.tokens, 5, 6]
        if not done[uid].blocks.blocks:
            continue
        bench.batch.submit("next", question, done[uid].blocks, max_tokens=8)
        bench.batch.submit("new", question, max_tokens=8)
        continued, new = sorted(bench.batch.step(), key=lambda one: one.uid)
        assert continued.tokens == new.tokens
        assert continued.tokens_reused > 256
        bench.free(continued, new)
    bench.free(*done.values())


@pytest.mark.parametrize("behind", [0, 2])
def test_a_restored_prompt_with_several_answers_is_not_computed(bench: EngineBench, behind: int) -> None:
    bench.batch.submit("before", TOKENS[:300], max_tokens=4)
    (before,) = bench.batch.step()
    question = [*before.blocks.tokens, 5, 6][: len(before.blocks.tokens) + behind] or TOKENS[:300]
    expected = alone(bench, question)
    uids = submit(bench, question, before.blocks)
    done = run(bench)
    assert [done[uid].tokens for uid in uids] == expected
    bench.free(before, *done.values())


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_first_answer_leaves_the_others(bench: EngineBench, steps: int) -> None:
    expected = alone(bench, TOKENS[:600])
    uids = submit(bench, TOKENS[:600])
    done: list[CompletedGeneration] = []
    for _ in range(steps):
        done += bench.batch.step_once()
    bench.batch.cancel(uids[0])
    found = {one.uid: one for one in (*done, *bench.batch.step())}
    assert [found[uid].tokens for uid in uids[1:]] == expected[1:]
    bench.free(*found.values())


def test_a_cancelled_fork_leaves_the_others(bench: EngineBench) -> None:
    expected = alone(bench, TOKENS[:600])
    for steps in (0, 1, 6):
        uids = submit(bench, TOKENS[:600])
        done: list[CompletedGeneration] = []
        for _ in range(steps):
            done += bench.batch.step_once()
        assert bench.batch.pending == len(CHOICES)
        bench.batch.cancel(uids[2])
        found = {one.uid: one for one in (*done, *bench.batch.step())}
        assert [found[uid].tokens for uid in uids if uid != uids[2]] == [*expected[:2], expected[3]]
        bench.free(*found.values())


def test_a_failed_first_answer_leaves_the_others(bench: EngineBench) -> None:
    def fails(_: object) -> None:
        raise LookupError

    expected = alone(bench, TOKENS[:300])
    uids = submit(bench, TOKENS[:300], on_prompt=fails)
    done = run(bench)
    assert type(done[uids[0]].error) is LookupError or done[uids[0]].tokens == expected[0]
    assert [done[uid].tokens for uid in uids[1:]] == expected[1:]
    bench.free(*(one for one in done.values() if one.blocks.blocks))


def test_forks_wait_for_blocks_of_a_small_pool() -> None:
    bench = EngineBench(family("llama"), TOKENIZER, 4, wait_for_blocks=True)
    expected = alone(bench, TOKENS[:600])
    uids = submit(bench, TOKENS[:600])
    found: dict[int, CompletedGeneration] = {}
    while bench.batch.pending:
        for done in bench.batch.step():
            found[done.uid] = done
            bench.free(done)
    assert [found[uid].tokens for uid in uids] == expected
    bench.pool.check_empty()
    impatient = EngineBench(family("llama"), TOKENIZER, 4)
    first = impatient.batch.submit("first", TOKENS[:600], max_tokens=12, forked=True)
    impatient.batch.fork(first, "second", max_tokens=12)
    with pytest.raises(PoolExhaustedError):
        impatient.batch.fork(first, "third", max_tokens=12)
    impatient.batch.shutdown()
    impatient.pool.check_empty()


def test_a_prompt_does_not_wait_for_blocks_of_its_forks() -> None:
    bench = EngineBench(family("llama"), TOKENIZER, 4, wait_for_blocks=True)
    expected = alone(bench, TOKENS[:600])
    held = bench.pool.allocate(2, "holder")
    uids = submit(bench, TOKENS[:600])
    bench.pool.free(held, "holder")
    found: dict[int, CompletedGeneration] = {}
    for _ in range(400):
        for done in bench.batch.step_once():
            found[done.uid] = done
            bench.free(done)
    assert [found[uid].tokens for uid in uids] == expected
    bench.pool.check_empty()


def test_a_shutdown_frees_waiting_forks(bench: EngineBench) -> None:
    submit(bench, TOKENS[:600])
    bench.batch.shutdown()
    assert bench.batch.pending == 0


def test_a_late_fork_computes_its_prompt_itself(bench: EngineBench) -> None:
    expected = alone(bench, TOKENS[:300])
    first = bench.batch.submit("first", TOKENS[:300], max_tokens=12, forked=True)
    for _ in range(6):
        assert bench.batch.step_once() == []
    late = bench.batch.fork(first, "late", max_tokens=12, sampler=CHOICES[1])
    done = run(bench)
    assert (done[first].tokens, done[late].tokens) == (expected[0], expected[1])
    bench.free(*done.values())
    with pytest.raises(KeyError):
        bench.batch.fork(first, "never", max_tokens=12)


def test_agents_with_a_leader_compute_its_prompt_once() -> None:
    bench = EngineBench(family("llama"), TOKENIZER, 64)
    expected = alone(bench, TOKENS[:600])
    engine, found = AgentEngine(bench.batch), dict[int, Answer]()

    def ask(i: int, leader: int | None) -> int:
        def done(answer: Answer) -> None:
            found[answer.uid] = answer

        def failed(error: Exception) -> None:
            raise error

        options: dict[str, Any] = {"sampler": CHOICES[i], "leader": leader, "on_done": done, "on_error": failed}
        return engine.submit(f"agent-{i}", TOKENS[:600], max_tokens=12, **options)

    bench.model.given.clear()
    first = ask(0, None)
    uids = [first, *(ask(i, first) for i in range(1, 4))]
    while engine.step():
        pass
    assert [found[uid].tokens for uid in uids] == expected
    assert computed(bench) < 700
    assert [found[uid].reuse.tier for uid in uids] == ["none", "prefix", "prefix", "prefix"]
    first = ask(0, None)
    uids = [first, *(ask(i, first) for i in range(1, 4))]
    engine.cancel(first)
    while engine.step():
        pass
    assert [found[uid].tokens for uid in uids[1:]] == expected[1:]
    bench.pool.check_empty()
