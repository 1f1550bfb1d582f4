"""An error in one answer ends that answer alone; an error of all is passed to all, and the next prompt is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from engine_bench import EngineBench
from engine_families import Family, family
from engine_models import letter_tokenizer
from servers import RunningServer

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from engine.agent_engine import AgentEngine, Answer
from engine.batch_engine import BlockPoolBatchEngine
from engine.generation.sampling import SamplerError
from engine.generation.tokens import UnknownTokenError
from engine.memory.blocks import BlockError, check_agent_id
from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.server import fetch
from engine.tiers.store import AgentCacheStore

TOKENS = np.random.default_rng(9).integers(0, 96, 4096).tolist()
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []
Sampler = Callable[[mx.array], Any]


@pytest.fixture(params=["llama", "llama4"], ids=["in one batch", "in turns"])
def bench(request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    bench = EngineBench(family(request.param), TOKENIZER, 32)
    yield bench
    bench.pool.check_empty()


def raises(logprobs: mx.array) -> mx.array:
    raise LookupError("no such token")


def generate(bench: EngineBench, prompt: Sequence[int], count: int = 12) -> tuple[int, ...]:
    bench.batch.submit("reference", prompt, max_tokens=count)
    (done,) = bench.batch.step()
    bench.free(done)
    return done.tokens


def after(count: int, then: Sampler) -> Sampler:
    drawn = 0

    def sample(logprobs: mx.array) -> Any:
        nonlocal drawn
        drawn += 1
        return then(logprobs) if drawn > count else mx.argmax(logprobs, axis=-1)

    return sample


@cache
def undisturbed(of: Family) -> tuple[tuple[int, ...], ...]:
    """Return the answers to a long prompt and to a short one."""
    bench = EngineBench(of, TOKENIZER, 32)
    return generate(bench, TOKENS[:300]), generate(bench, TOKENS[50:90])


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (raises, LookupError, "no such token"),
        (lambda _: None, SamplerError, "got None"),
        (lambda _: 5, SamplerError, "got 5"),
        (lambda logprobs: logprobs, SamplerError, "whole numbers"),
        (lambda _: mx.array([1.0]), SamplerError, "whole numbers"),
        (lambda _: mx.array([1, 2]), SamplerError, "whole numbers"),
        (lambda _: mx.array([97]), SamplerError, "gave the token 97"),
        (lambda _: mx.array([-1]), SamplerError, "gave the token -1"),
        (lambda _: mx.array([10**9]), SamplerError, "gave the token 1000000000"),
    ],
)
def test_a_sampler_that_fails_ends_its_own_answer_alone(
    bench: EngineBench, sampler: Sampler, error: type[Exception], message: str, count: int
) -> None:
    """At its first token or at a later one, during an answer that continues and before one that is submitted later."""
    alone, later = undisturbed(bench.of)
    failing = bench.batch.submit("bob", TOKENS[:40], max_tokens=8, sampler=after(count, sampler))
    well = bench.batch.submit("alice", TOKENS[:300], max_tokens=12)
    done = {answer.uid: answer for answer in bench.batch.step()}
    assert done[well].tokens == alone
    failed = done[failing]
    assert (failed.finish_reason, type(failed.error), len(failed.tokens)) == ("error", error, count)
    assert message in str(failed.error)
    assert len(failed.blocks) == 0
    assert generate(bench, TOKENS[50:90]) == later
    bench.free(done[well])


def test_a_failing_sampler_after_a_restore_ends_its_answer_alone(
    bench: EngineBench,
) -> None:
    bench.batch.submit("alice", TOKENS[:300], max_tokens=4)
    (first,) = bench.batch.step()
    question = [*first.blocks.tokens, 5, 6]
    right = generate(bench, question)
    bench.batch.submit("alice", question, first.blocks, max_tokens=4, sampler=raises)
    (failed,) = bench.batch.step()
    assert (failed.finish_reason, failed.tokens) == ("error", ())
    bench.batch.submit("alice", question, first.blocks, max_tokens=12)
    (done,) = bench.batch.step()
    assert done.tokens == right
    bench.free(first, done)


@pytest.mark.parametrize("method", ["add_token", "finalize"])
def test_a_tokenizer_error_ends_its_answer_alone(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Tokenizers do so with models that have more tokens."""
    alone = generate(bench, TOKENS[:300])
    failing = bench.batch.submit("bob", TOKENS[:40], max_tokens=8)
    detokenizer = bench.batch._running[next(iter(bench.batch._running))].text._detokenizer

    def fail(*_: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(type(detokenizer), method, _only_for(detokenizer, fail, getattr(type(detokenizer), method)))
    well = bench.batch.submit("alice", TOKENS[:300], max_tokens=12)
    done = {answer.uid: answer for answer in bench.batch.step()}
    assert done[well].tokens == alone
    assert (done[failing].finish_reason, type(done[failing].error)) == ("error", IndexError)
    bench.free(done[well])


def _only_for(one: object, fail: Callable[..., None], otherwise: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *args: fail() if self is one else otherwise(self, *args)


def test_a_model_error_ends_the_step_and_later_answers_are_right(bench: EngineBench) -> None:
    """The case of a device without memory: the state of the batch is unknown."""
    right = generate(bench, TOKENS[:300])
    uids = {bench.batch.submit(name, TOKENS[:300], max_tokens=12) for name in ("alice", "bob")}
    bench.batch.step_once()
    model = bench.model.model

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("[metal::malloc] Attempting to allocate 906 bytes")

    bench.model.model = fail
    failed = bench.batch.step_once() or bench.batch.step_once()
    bench.model.model = model
    assert {answer.uid for answer in failed} == uids
    assert all(isinstance(answer.error, RuntimeError) for answer in failed)
    assert bench.batch.pending == 0
    assert generate(bench, TOKENS[:300]) == right


def test_the_driver_gets_the_error_and_others_continue() -> None:
    """Over HTTP it is driven like this."""
    of = family("llama")
    pool = BlockPool(32)
    engine = AgentEngine(BlockPoolBatchEngine(of.model, TOKENIZER, of.spec, pool), AgentCacheStore(of.spec, pool))
    answers: list[Answer] = []
    errors: list[Exception] = []
    received = {"on_done": answers.append, "on_error": errors.append}
    engine.submit("bob", TOKENS[:40], max_tokens=8, sampler=after(2, raises), **received)
    engine.submit("alice", TOKENS[:300], max_tokens=8, **received)
    engine.drain()
    assert [answer.agent_id for answer in answers] == ["alice"]
    assert [str(error) for error in errors] == ["no such token"]


def test_an_error_in_a_fetch_fails_its_prompt_alone(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that no outage explains, such as one of MLX, which otherwise would look like an absent context."""
    of = family("llama")
    pool = BlockPool(32)
    answers: list[Answer] = []
    errors: list[Exception] = []

    def ask(store: AgentCacheStore) -> None:
        engine = AgentEngine(BlockPoolBatchEngine(of.model, TOKENIZER, of.spec, pool), store)
        engine.submit("alice", TOKENS[:600], max_tokens=2, on_done=answers.append, on_error=errors.append)
        engine.drain()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    first, second = (AgentCacheStore(of.spec, pool, pages=PageTier(server.url, of.spec, pool)) for _ in range(2))
    ask(first)
    first.close()
    with monkeypatch.context() as failing:
        failing.setattr(fetch, "_verified", fail)
        ask(second)
        with pytest.raises(RuntimeError, match="out of memory"):
            second.load("bob", TOKENS[:600])
    assert (len(answers), [str(error) for error in errors]) == (1, ["out of memory"])
    assert [record.message for record in caplog.records] == [
        f"the context of {name} could not be fetched" for name in ("alice", "bob")
    ]
    ask(second)
    assert [answer.reuse.tier for answer in answers] == ["none", "page"]
    second.close()
    pool.check_empty()


# -- invalid prompts and agents ----------------------------------------------------------------------------------------

NO_TOKENS = [
    ([1.7, 2.2], "token ids are whole numbers, got 1.7"),
    ([1, True], "token ids are whole numbers, got True"),
    ([1, None], "token ids are whole numbers, got None"),
    (["1"], "token ids are whole numbers, got '1'"),
    ([[1, 2]], r"token ids are whole numbers, got \[1, 2\]"),
    (np.array([1.0]), "token ids are whole numbers, got 1.0"),
    (np.array([True]), "token ids are whole numbers, got True"),
    ([1, -1], "got -1"),
    ([2**64], "got 18446744073709551616"),
    (b"abc", "a prompt in tokens is a sequence of their ids, got bytes"),
    (bytearray(b"abc"), "got bytearray"),
    ({1: 2}, "got dict"),
    (7, "got int"),
]


@pytest.mark.parametrize(("tokens", "message"), NO_TOKENS, ids=lambda given: repr(given)[:20])
def test_an_invalid_token_is_refused_everywhere(tokens: Any, message: str) -> None:
    of = family("llama")
    pool = BlockPool(8)
    batch = BlockPoolBatchEngine(of.model, TOKENIZER, of.spec, pool)
    pages = PageTier("redis://127.0.0.1:1", of.spec, pool)
    store = AgentCacheStore(of.spec, pool, pages=pages)
    engine = AgentEngine(batch)
    for refuse in (
        lambda: batch.submit("alice", tokens),
        lambda: pages.load("alice", tokens),
        lambda: store.load("alice", tokens),
    ):
        with pytest.raises(UnknownTokenError, match=message):
            refuse()
    errors: list[Exception] = []
    engine.submit("alice", tokens, max_tokens=1, on_done=print, on_error=errors.append)
    engine.drain()
    assert [type(error) for error in errors] == [UnknownTokenError]
    store.close()
    pool.check_empty()


@pytest.mark.parametrize("whole", [np.array([3, 4], np.uint16), mx.array([3, 4]), (3, 4), [np.int64(3), np.int32(4)]])
def test_tokens_of_an_array_are_tokens(bench: EngineBench, whole: Any) -> None:
    assert generate(bench, whole) == generate(bench, [3, 4])


@pytest.mark.parametrize("agent_id", [None, 7, b"x", ["alice"], 1.5, "", "a:b", ".hidden", "x" * 129])
def test_an_invalid_agent_id_is_refused_everywhere(agent_id: Any) -> None:
    of = family("llama")
    pool = BlockPool(8)
    pages = PageTier("redis://127.0.0.1:1", of.spec, pool)
    store = AgentCacheStore(of.spec, pool, pages=pages)
    calls: list[Callable[[], object]] = [
        lambda: check_agent_id(agent_id),
        lambda: BlockPoolBatchEngine(of.model, TOKENIZER, of.spec, pool).submit(agent_id, [1]),
        *(lambda method=method: getattr(pages, method)(agent_id) for method in ("load", "delete", "has", "tokens_of")),
        *(lambda method=method: getattr(store, method)(agent_id) for method in ("load", "delete", "agent", "pin")),
        *(lambda of=of: of.fork(agent_id, "alice") for of in (pages, store)),
        *(lambda of=of: of.fork("alice", agent_id) for of in (pages, store)),
    ]
    for call in calls:
        with pytest.raises(BlockError, match="an agent id is 1 to 128 of"):
            call()
    store.close()
