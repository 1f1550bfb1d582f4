"""The engine for other code gives mlx-lm's answers, restores contexts, waits only in turn, and leaks nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine_models import letter_tokenizer, tiny_llama

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from proxy import start_proxy
from servers import RunningServer, start_server

from engine.agent_engine import AgentEngine, Answer
from engine.batch_engine import BlockPoolBatchEngine
from engine.generation.tokens import EmptyPromptError, PromptTooLongError, UnknownTokenError
from engine.memory.blocks import BlockError
from engine.pool import BlockPool, PoolExhaustedError
from engine.scheduling.model_runner import ModelWatch
from engine.scheduling.request import EngineClosedError, Token
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore, CacheConfig

MODEL = tiny_llama()
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []
SPEC = ModelCacheSpec.probe(MODEL, TOKENIZER, model_id="tiny")
TOKENS = np.random.default_rng(5).integers(0, 96, 4000).tolist()
SYSTEM = TOKENS[:600]  # two full blocks and a part of one
WITHIN = 60.0  # seconds


class Watched:
    """A model, and how many tokens of prompts it was given."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if tokens.shape[1] > 1:
            self.read += tokens.size
        logits: mx.array = MODEL(tokens, cache=cache)
        return logits


class Bench:
    """An engine with a store, and the results of its prompts."""

    def __init__(
        self,
        url: str | None = None,
        directory: Path | None = None,
        *,
        blocks: int = 64,
        deadline: float = 5.0,
        **limits: Any,
    ) -> None:
        self.model = Watched()
        self.pool = BlockPool(blocks)
        pages = PageTier(url, SPEC, self.pool, deadline=deadline) if url else None
        cold = SafetensorsCacheAdapter(SPEC, self.pool, directory) if directory else None
        self.store = AgentCacheStore(SPEC, self.pool, pages=pages, cold=cold, config=CacheConfig(**limits))
        batch = BlockPoolBatchEngine(self.model, TOKENIZER, SPEC, self.pool)
        batch._watch = ModelWatch(MODEL, SPEC)  # the constructor's one warns that `Watched` is another model
        self.engine = AgentEngine(batch, self.store)
        self.tokens: dict[int, list[Token]] = {}
        self.answers: dict[int, Answer] = {}
        self.errors: dict[int, Exception] = {}

    def submit(self, agent_id: str, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> int:
        received: list[Token] = []
        uid: int | None = None

        def done(answer: Answer) -> None:
            assert answer.uid == uid
            self.answers[answer.uid] = answer

        def failed(error: Exception) -> None:
            assert uid is not None
            self.errors[uid] = error

        receivers = {"on_token": received.append, "on_done": done, "on_error": failed}
        uid = self.engine.submit(agent_id, tokens, max_tokens=max_tokens, **(receivers | options))
        self.tokens[uid] = received
        return uid

    def run(self) -> None:
        deadline = time.monotonic() + WITHIN
        while self.engine.step(timeout=0.1):
            assert time.monotonic() < deadline

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + WITHIN
        while not condition():
            self.engine.step(timeout=0.01)
            assert time.monotonic() < deadline

    def ask(self, agent_id: str, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Answer:
        uid = self.submit(agent_id, tokens, max_tokens, **options)
        self.run()
        assert not self.errors
        return self.answers[uid]

    def close(self) -> None:
        self.engine.shutdown()
        self.store.close()
        self.pool.check_empty()


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with start_server() as server:
        yield server


@pytest.fixture
def url(running: RunningServer) -> str:
    with running.client() as client:
        client.flushall()
    return running.url


@pytest.fixture
def bench(url: str) -> Iterator[Bench]:
    """It leaves its pool as full as it found it."""
    bench = Bench(url)
    yield bench
    bench.close()


def greedy(prompt: Sequence[int], count: int = 8) -> list[int]:
    return [token for token, _ in generate_step(mx.array(prompt), MODEL, max_tokens=count)]


def test_a_submitted_prompt_is_answered_by_its_receivers(bench: Bench) -> None:
    uids = [bench.submit(f"agent-{i}", TOKENS[i : i + 300 + i]) for i in range(3)]
    assert bench.engine.pending == 3
    assert not bench.answers
    bench.run()
    for i, uid in enumerate(uids):
        answer = bench.answers[uid]
        assert (answer.agent_id, answer.finish_reason, answer.prompt_tokens) == (f"agent-{i}", "length", 300 + i)
        assert list(answer.tokens) == greedy(TOKENS[i : i + 300 + i])
        assert [token.token for token in bench.tokens[uid]] == list(answer.tokens)
        assert "".join(token.text for token in bench.tokens[uid]) == answer.text
        assert {token.uid for token in bench.tokens[uid]} == {uid}
        assert (answer.reuse.tier, answer.reuse.tokens, answer.reuse.why) == ("none", 0, "absent")
        assert 0 < answer.reuse.restore_seconds < answer.reuse.time_to_first_token < WITHIN
    assert (bench.engine.pending, bench.engine.step()) == (0, False)


def test_without_a_store_it_answers_as_well() -> None:
    pool = BlockPool(8)
    engine = AgentEngine(BlockPoolBatchEngine(MODEL, TOKENIZER, SPEC, pool))
    answers: list[Answer] = []
    engine.submit("alice", SYSTEM, max_tokens=8, on_done=answers.append, on_error=pytest.fail)
    engine.drain()
    assert list(answers[0].tokens) == greedy(SYSTEM)
    pool.check_empty()


def test_each_tier_gives_an_agent_its_context_back(running: RunningServer, url: str, tmp_path: Path) -> None:
    first = Bench(url, tmp_path)
    one = first.ask("alice", SYSTEM)
    prompt = [*SYSTEM, *one.tokens, *TOKENS[700:720]]
    expected = greedy(prompt)
    known = len(SYSTEM) + len(one.tokens)
    hot = first.ask("alice", prompt)
    first.close()
    page = Bench(url, None)
    cold = Bench(None, tmp_path)
    answers = {"hot": hot, "page": page.ask("alice", prompt), "cold": cold.ask("alice", prompt)}
    for tier, answer in answers.items():
        assert (answer.reuse.tier, list(answer.tokens)) == (tier, expected)
        assert answer.reuse.tokens == (known if tier == "hot" else len(prompt) - 1)
    page.close()
    cold.close()


def test_others_continue_while_a_context_is_loading(running: RunningServer, url: str) -> None:
    """The server delays one agent's context; another agent, which needs nothing of it, is answered meanwhile."""
    with start_proxy(running.port) as proxy:
        bench = Bench(proxy.url, deadline=3.0)
        known = bench.ask("bob", SYSTEM)
        bench.store.flush_dirty()
        proxy.stall_after = 0
        slow = bench.submit("alice", TOKENS[1000:1600])
        quick = bench.submit("bob", [*SYSTEM, *known.tokens][:607], max_tokens=4)
        bench.until(lambda: quick in bench.answers)
        assert slow not in bench.answers
        assert bench.answers[quick].reuse.tier == "hot"
        bench.until(lambda: slow in bench.answers)  # the deadline passes, and it is computed
        assert list(bench.answers[slow].tokens) == greedy(TOKENS[1000:1600])
        assert bench.answers[slow].reuse.why == "slow"
        assert bench.answers[slow].reuse.waited_seconds == 0, "a server that does not answer is not asked for a claim"
        bench.close()


BAD: list[tuple[type[Exception], str, str, list[int], dict[str, Any]]] = [
    (EmptyPromptError, "at least one token", "alice", [], {}),
    (PromptTooLongError, "leaves no room", "alice", [1] * 4096, {}),
    (UnknownTokenError, "token ids are 0 to 96", "alice", [1, 97], {}),
    (BlockError, "an agent id is", "../alice", [1], {}),
    (ValueError, "max_tokens must be at least 1", "alice", [1], {"max_tokens": 0}),
    (ValueError, "a stop string must not be empty", "alice", [1], {"stop": [""]}),
    (ValueError, "logprobs must be 0 to 97", "alice", [1], {"logprobs": 98}),
    (PoolExhaustedError, "5 blocks needed, the pool has 4 in all", "alice", [1], {"max_tokens": 1024}),
]


def test_an_unanswerable_prompt_gets_the_reason_without_harm() -> None:
    bench = Bench(blocks=4)
    well = bench.submit("bob", SYSTEM)
    uids = [bench.submit(agent_id, tokens, **options) for _, _, agent_id, tokens, options in BAD]
    assert not bench.errors
    bench.run()
    for uid, (kind, message, *_) in zip(uids, BAD, strict=True):
        assert type(bench.errors[uid]) is kind, bench.errors
        assert message in str(bench.errors[uid])
    assert list(bench.answers[well].tokens) == greedy(SYSTEM)
    assert bench.answers.keys() == {well}
    bench.close()


def test_a_prompt_without_space_waits_and_memory_is_evicted(url: str) -> None:
    """Five agents of three blocks each in a pool of seven, and then all of them once more."""
    bench = Bench(url, blocks=7)
    answered: dict[str, list[int]] = {}
    for turn in range(2):
        prompts = {f"agent-{i}": TOKENS[i * 7 : i * 7 + 510] for i in range(5)}
        if turn:
            prompts = {name: [*prompt, *answered[name], 5] for name, prompt in prompts.items()}
        uids = {bench.submit(name, prompt, max_tokens=9): name for name, prompt in prompts.items()}
        bench.run()
        assert not bench.errors
        for uid, name in uids.items():
            assert list(bench.answers[uid].tokens) == greedy(prompts[name], 9)
            answered[name] = list(bench.answers[uid].tokens)
    bench.close()


def test_a_prompt_that_does_not_fit_beside_a_pin_ends_it(url: str) -> None:
    bench = Bench(url, blocks=7)
    bench.ask("alice", TOKENS[:510])
    assert bench.store.pin("alice")
    assert list(bench.ask("carol", TOKENS[:1290]).tokens) == greedy(TOKENS[:1290])
    assert not bench.store.pinned()
    bench.close()


def test_a_cancelled_prompt_frees_everything_at_once(running: RunningServer, url: str) -> None:
    with start_proxy(running.port) as proxy:
        bench = Bench(proxy.url, blocks=12)
        stays = bench.submit("stays", TOKENS[:20], max_tokens=40)
        bench.until(lambda: bench.tokens[stays])
        used = bench.pool.used_blocks

        def cancel(*uids: int) -> None:
            for uid in uids:
                bench.engine.cancel(uid)
                with pytest.raises(KeyError):
                    bench.engine.cancel(uid)
            assert bench.pool.used_blocks == used

        cancel(bench.submit("submitted", SYSTEM))
        proxy.stall_after = 0
        loading = bench.submit("loading", SYSTEM)
        bench.engine.step()
        cancel(loading)
        proxy.stall_after = None
        running_ = bench.submit("running", SYSTEM, max_tokens=1000)
        bench.until(lambda: bench.tokens[running_])
        no_room = bench.submit("no-room", TOKENS[1000:2000], max_tokens=1000)
        for _ in range(10):
            bench.engine.step(0.01)
        bench.engine.cancel(no_room)
        bench.engine.cancel(running_)
        bench.run()
        assert list(bench.answers[stays].tokens) == greedy(TOKENS[:20], 40)
        assert bench.answers.keys() == {stays}
        assert not bench.errors
        bench.close()


def test_agents_that_start_together_compute_a_prefix_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes its own part: the end of the last block, unless another one has computed it, and the tokens behind
    it.
    """
    monkeypatch.setattr("engine.agent_engine.PATIENCE_FACTOR", 1000)  # a busy machine computes slower than before
    prompts = {f"agent-{i}": [*SYSTEM, *TOKENS[1000 + i : 1020 + i]] for i in range(4)}
    uids = {bench.submit(name, prompt): prompt for name, prompt in prompts.items()}
    bench.run()
    for uid, prompt in uids.items():
        assert list(bench.answers[uid].tokens) == greedy(prompt)
    assert bench.model.read <= 512 + 4 * (88 + 20 - 1)
    reused = sorted(answer.reuse.tokens for answer in bench.answers.values())
    assert reused[0] == 0
    assert set(reused[1:]) <= {512, 600}
    assert [answer.reuse.tier for answer in bench.answers.values()].count("none") == 1


def test_a_waiter_computes_the_prefix_after_a_cancellation(bench: Bench) -> None:
    first = bench.submit("first", SYSTEM, max_tokens=8)
    second = bench.submit("second", [*SYSTEM, 7], max_tokens=8)
    third = bench.submit("third", [*SYSTEM, 8], max_tokens=8)
    for _ in range(3):
        bench.engine.step(0.01)
    bench.engine.cancel(first)
    bench.engine.cancel(third)
    bench.run()
    assert list(bench.answers[second].tokens) == greedy([*SYSTEM, 7])
    assert bench.answers.keys() == {second}


def test_an_unkept_context_is_shared_but_not_stored(bench: Bench) -> None:
    """All its tokens can be reused, those of the answer too. Its agent is unknown."""
    answer = bench.ask("anon-1", TOKENS[:500], max_tokens=20, keep=False)
    again = bench.ask("anon-2", [*TOKENS[:500], *answer.tokens, 5], keep=False)
    assert (again.reuse.tier, again.reuse.tokens, again.reuse.why) == ("prefix", 520, None)
    assert list(again.tokens) == greedy([*TOKENS[:500], *answer.tokens, 5])
    assert bench.store.agents() == []


def test_a_receiver_that_fails_ends_its_own_answer_alone(bench: Bench) -> None:
    def fail(_: object) -> None:
        raise LookupError("nobody is there")

    uids = {
        receiver: bench.submit(receiver, TOKENS[i * 10 : i * 10 + 50], **{receiver: fail})
        for i, receiver in enumerate(("on_token", "on_done"))
    }
    well = bench.submit("well", TOKENS[:60])
    bench.run()
    assert str(bench.errors[uids["on_token"]]) == "nobody is there"
    assert list(bench.answers[well].tokens) == greedy(TOKENS[:60])
    assert bench.answers.keys() == {well}


def test_a_receiver_may_ask_for_more_and_drop_others() -> None:
    """Two are complete in one step: the first drops the second, and one that hasn't begun, and asks for another."""
    pool = BlockPool(8)
    engine = AgentEngine(BlockPoolBatchEngine(MODEL, TOKENIZER, SPEC, pool))
    answers: list[Answer] = []
    uids: list[int] = []

    def submit(start: int, on_done: Callable[[Answer], None] = answers.append) -> None:
        uids.append(engine.submit("a", TOKENS[start : start + 50], max_tokens=4, on_done=on_done, on_error=pytest.fail))

    def done(answer: Answer) -> None:
        answers.append(answer)
        submit(30)
        submit(40)
        for uid in uids[1:3]:
            engine.cancel(uid)

    submit(0, done)
    submit(10)
    while engine.step():
        pass
    assert [answer.uid for answer in answers] == [uids[0], uids[3]]
    assert list(answers[1].tokens) == greedy(TOKENS[40:90], 4)
    pool.check_empty()


def test_a_block_from_elsewhere_ends_the_wait(bench: Bench) -> None:
    threading.Timer(0.2, bench.engine.wake).start()
    started = time.monotonic()
    assert not bench.engine.step(timeout=WITHIN)
    assert time.monotonic() - started < WITHIN / 2


def test_nothing_is_waited_for_after_the_last_answer(bench: Bench) -> None:
    uid = bench.submit("alice", SYSTEM)
    started = time.monotonic()
    while bench.engine.step(timeout=WITHIN):
        pass
    assert uid in bench.answers
    assert time.monotonic() - started < WITHIN / 2


def test_an_engine_that_was_drained_takes_nothing_more(bench: Bench) -> None:
    uid = bench.submit("alice", SYSTEM)
    bench.engine.drain()
    assert list(bench.answers[uid].tokens) == greedy(SYSTEM)
    late = bench.submit("bob", SYSTEM)
    bench.engine.step()
    assert isinstance(bench.errors[late], EngineClosedError)


def test_a_shut_down_engine_notifies_waiting_prompts(bench: Bench) -> None:
    uids = [bench.submit(f"agent-{i}", SYSTEM) for i in range(3)]
    bench.engine.step()
    bench.engine.shutdown()
    assert {uid: type(error) for uid, error in bench.errors.items()} == dict.fromkeys(uids, EngineClosedError)
    assert (bench.engine.pending, bench.engine.step()) == (0, False)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
def test_random_agents_and_cancellations_give_mlx_lms_answers(seed: int, url: str, tmp_path: Path) -> None:
    """Agents that start, continue, share prefixes, wait for memory and are cancelled at random, in a small pool."""
    chance = random.Random(seed)
    bench = Bench(url, tmp_path, blocks=14, max_hot_agents=3)
    histories: dict[str, list[int]] = {}
    asked: dict[int, tuple[str, list[int], int]] = {}
    left, deadline = 15, time.monotonic() + WITHIN
    while left > 0:  # several answers may be complete in the same step
        assert time.monotonic() < deadline
        what = chance.random()
        if what < 0.4 and len(asked) < 6:
            name = f"agent-{chance.randrange(6)}"
            busy = name in {other for other, _, _ in asked.values()}
            start = chance.randrange(3000)
            beginning = histories.get(name, []) if chance.random() < 0.8 else []
            prompt = [*(beginning or SYSTEM[: chance.choice([0, 300, 600])]), *TOKENS[start : start + 20]]
            if not busy and len(prompt) < 1000:
                count = chance.randint(1, 8)
                asked[bench.submit(name, prompt, count)] = (name, prompt, count)
        elif what < 0.45 and asked:
            uid = chance.choice(list(asked))
            del asked[uid]
            bench.engine.cancel(uid)
        bench.engine.step(0.005)
        for uid in [uid for uid in asked if uid in bench.answers]:
            name, prompt, count = asked.pop(uid)
            assert list(bench.answers[uid].tokens) == greedy(prompt, count)
            histories[name] = [*prompt, *bench.answers[uid].tokens]
            left -= 1
    assert not bench.errors
    bench.close()
