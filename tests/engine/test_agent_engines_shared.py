"""Engines in processes of their own share one memory: the text is the same on any engine, after any kill."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine_models import tiny_llama
from engine_process import EngineProcess, start_engines
from servers import RunningServer, free_port, start_server
from waiting import until

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

MODEL = tiny_llama()
TOKENS = np.random.default_rng(15).integers(0, 96, 4000).tolist()
SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with start_server() as server:
        yield server


@pytest.fixture(scope="module")
def engines(running: RunningServer) -> Iterator[list[EngineProcess]]:
    with start_engines(3, running.url) as engines:
        yield engines


def greedy(prompt: Sequence[int], count: int = 8) -> list[int]:
    return [token for token, _ in generate_step(mx.array(prompt), MODEL, max_tokens=count)]


def stored(server: RunningServer, pattern: str) -> int:
    with server.client() as client:
        return len(client.keys(pattern))


def test_a_conversation_on_changing_engines_is_uninterrupted(
    engines: list[EngineProcess],
) -> None:
    """Every turn adds a block: an engine's memory of an earlier turn is shorter than the server's."""
    history = TOKENS[:300]
    for turn in range(len(engines) + 1):
        prompt = [*history, *TOKENS[1000 + 300 * turn : 1260 + 300 * turn]]
        engine = engines[turn % len(engines)]
        answer = engine.complete("wanderer", prompt)
        engine.flush()
        assert answer["tokens"] == greedy(prompt)
        if turn:
            assert (answer["tier"], answer["reused"]) == ("page", len(history))
        history = [*prompt, *answer["tokens"]]


def test_engines_that_start_together_compute_a_prefix_once(running: RunningServer) -> None:
    """All at the same moment; the others wait for one, and find its blocks on the server.

    Engines that have computed nothing yet: one that knows its speed waits no longer than twice the time that it would
    need alone, and on a busy machine the other may need more.
    """
    prompts = [[*TOKENS[2000:3000], *TOKENS[i : i + 20]] for i in range(3)]
    with start_engines(3, running.url) as engines:
        numbers = [engine.ask(f"sharer-{i}", prompts[i]) for i, engine in enumerate(engines)]
        answers = [engine.answer(number) for engine, number in zip(engines, numbers, strict=True)]
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer["tokens"] == greedy(prompt)
    least, *others = sorted(answer["reused"] for answer in answers)
    assert least == 0
    assert {*others} <= {768, 1000}  # on a busy machine the last block, which is not full, may be written too late
    # on a slow machine one may be submitted when everything is stored
    assert any(answer["waited"] > 0 for answer in answers)


@pytest.mark.parametrize("moment", [0.002, *(pytest.param(i / 1000, marks=pytest.mark.soak) for i in range(0, 30, 3))])
def test_an_engine_killed_in_a_save_leaves_old_or_new_context(
    running: RunningServer, engines: list[EngineProcess], moment: float
) -> None:
    """Killed `moment` seconds after its answer; another engine finds the old context, or the written part of the new
    one: whole blocks, or all of it.
    """
    name = f"victim-{moment}"
    old = TOKENS[round(moment * 1000) :][:700]
    new = [*old, *TOKENS[1500:2500]]
    with start_engines(1, running.url) as (victim,):
        victim.complete(name, old)
        victim.flush()
        victim.complete(name, new)
        time.sleep(moment)
        victim.kill()
    prompt = [*new, 5]
    answer = engines[0].complete(name, prompt)
    assert answer["tokens"] == greedy(prompt)
    assert answer["reused"] in {700, 768, 1024, 1280, 1536, 1700}


@pytest.mark.parametrize("moment", [0.002, *(pytest.param(i / 1000, marks=pytest.mark.soak) for i in range(0, 30, 3))])
def test_an_engine_killed_while_publishing_changes_no_text(
    running: RunningServer, engines: list[EngineProcess], moment: float
) -> None:
    """Killed so many seconds after the second of two turns. Another engine finds a part of it, and says the same."""
    old = TOKENS[round(moment * 1000) + 40 :][:650]
    with start_engines(1, running.url) as (victim,):
        answered = victim.complete("anon-1", old)["tokens"]
        victim.flush()
        new = [*old, *answered, *TOKENS[1300:1700]]
        answered = victim.complete("anon-2", new)["tokens"]
        time.sleep(moment)
        victim.kill()
    prompt = [*new, *answered, 5]
    answer = engines[0].complete("anon-3", prompt)
    assert answer["tokens"] == greedy(prompt)
    assert 650 <= answer["reused"] < len(prompt)
    assert engines[1].complete("anon-4", prompt)["tokens"] == answer["tokens"]


def test_a_server_killed_during_an_answer_changes_no_text(tmp_path: Path) -> None:
    """Killed during alice's answer and bob's prompt; their contexts are written to the next server."""
    port = free_port()
    prompt = TOKENS[:300]
    with start_server(port=port, directory=tmp_path, killed=True) as server, start_engines(1, server.url) as (engine,):
        first = engine.ask("alice", prompt, max_tokens=40)
        engine.first_token(first)
        server.stop(signal.SIGKILL)
        second = engine.ask("bob", TOKENS[50:400], max_tokens=20)
        assert engine.answer(first)["tokens"] == greedy(prompt, 40)
        assert engine.answer(second)["tokens"] == greedy(TOKENS[50:400], 20)
        with start_server(port=port, directory=tmp_path, name="again") as server:
            history = [*prompt, *engine.answer(first)["tokens"], 5]
            assert engine.complete("alice", history)["tokens"] == greedy(history)
            until(lambda: stored(server, "manifest:*") >= 2)
            engine.stop()


def test_all_agents_resume_after_a_restart_of_everything(tmp_path: Path) -> None:
    """The engine is killed, the server is stopped and started from its disk: no known token is computed.

    Less than half of a prompt is a prefix of the one before: otherwise the rest of it would be computed if the server
    did not answer for half a second.
    """
    port = free_port()
    options = ("--store", "tiered")
    prompts = {f"agent-{i}": [*TOKENS[2000:2260], *TOKENS[i * 31 : i * 31 + 270 + i]] for i in range(5)}
    answered: dict[str, list[int]] = {}
    with start_server(*options, port=port, directory=tmp_path) as server, start_engines(1, server.url) as (engine,):
        numbers = {name: engine.ask(name, prompt) for name, prompt in prompts.items()}
        for name in prompts:
            answered[name] = engine.answer(numbers[name])["tokens"]
        engine.flush()
        engine.kill()
    with (
        start_server(*options, port=port, directory=tmp_path, name="again") as server,
        start_engines(1, server.url) as (engine,),
    ):
        for name, prompt in prompts.items():
            history = [*prompt, *answered[name], 7]
            answer = engine.complete(name, history)
            assert answered[name] == greedy(prompt)
            assert answer["tokens"] == greedy(history)
            assert (answer["tier"], answer["reused"]) == ("page", len(history) - 1)


@pytest.mark.soak
@pytest.mark.model
def test_the_real_model_continues_in_another_process(running: RunningServer) -> None:
    with start_engines(2, running.url, model=str(SMOLLM2)) as (one, other):
        prompt = [1, 9690, 198, 2683, *range(1000, 1280)]
        first = one.complete("real", prompt, max_tokens=8)
        one.flush()
        history = [*prompt, *first["tokens"], 198]
        moved = other.complete("real", history, max_tokens=8)
        assert moved["reused"] == len(history) - 1
        assert moved["tokens"] == one.complete("stranger@elsewhere", history, max_tokens=8)["tokens"]
