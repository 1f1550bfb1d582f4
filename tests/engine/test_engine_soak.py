"""Three engines and a store behind a proxy in bad weather; engines and store are killed, adapters switched.

Every answer is that of an engine that was never disturbed, nothing is raised, and nobody waits longer than may be.
`make soak` has it go on for half an hour, or for SOAK_SECONDS.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_models import ADAPTERS, adapt, adapted_llama
from engine_process import EngineProcess, start_process
from proxy import Weather, start_proxy
from servers import free_port, start_server

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

SECONDS = float(os.environ.get("SOAK_SECONDS", 1800))
ENGINES, AGENTS = 3, 8
RESTORE_WITHIN = 3.0  # seconds
SLACK = 2.0  # for a machine that is busy
ANSWER_WITHIN = 60.0
LONGEST = 900  # tokens of a history, which then begins anew
TOKENS = np.random.default_rng(30).integers(0, 96, 8000).tolist()
SYSTEM = TOKENS[:300]  # with which half of the agents begin


class Undisturbed:
    """Answers of an undisturbed model, with each of its adapters."""

    def __init__(self) -> None:
        self._model = adapted_llama()
        self._lock = threading.Lock()

    def says(self, adapter: int, prompt: list[int], count: int) -> list[int]:
        with self._lock:
            adapt(self._model, adapter)
            return [token for token, _ in generate_step(mx.array(prompt), self._model, max_tokens=count)]


@dataclass
class Soak:
    """Running and finished work so far."""

    url: str
    place: Path
    seconds: float
    reference: Undisturbed = field(default_factory=Undisturbed)
    histories: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by adapter and agent
    happened: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_restore: float = 0.0
    longest_answer: float = 0.0
    end: float = float("inf")

    def __post_init__(self) -> None:
        self.ready = threading.Barrier(ENGINES, self.begin, timeout=ANSWER_WITHIN)  # all engines take prompts

    def begin(self) -> None:
        self.end = time.monotonic() + self.seconds

    @property
    def over(self) -> bool:
        return bool(self.wrong) or time.monotonic() > self.end

    def prompt(self, rng: random.Random, adapter: int, agent: int) -> list[int]:
        """Return the agent's next prompt: its history, and new tokens."""
        history = self.histories.get((adapter, agent), [])
        if not history or len(history) > LONGEST:
            history = SYSTEM if agent % 2 else []
        start = rng.randrange(6000)
        return [*history, *TOKENS[start : start + rng.choice([5, 40, 300])]]


def live(soak: Soak, number: int) -> None:
    """One engine's life: prompts, alone or several together; it is killed and started again, and switched."""
    rng = random.Random(number)
    adapter = 0
    with ExitStack() as stack:
        errors = stack.enter_context((soak.place / f"errors-{number}").open("wb"))
        engine = start(soak, number, errors.fileno())
        soak.ready.wait()
        while not soak.over:
            draw = rng.random()
            if draw < 0.08:
                adapter = rng.randrange(len(ADAPTERS))
                engine.adapt(adapter)
                soak.happened["adapter"] += 1
            elif draw < 0.14:
                ask(soak, engine, rng, adapter)
                time.sleep(rng.random() * 0.2)
                engine.kill()
                engine.close()
                engine, adapter = start(soak, number, errors.fileno()), 0
                soak.happened["engine killed"] += 1
            else:
                asked = [ask(soak, engine, rng, adapter) for _ in range(rng.choice([1, 1, 3]))]
                for number_asked, agent, prompt, count in asked:
                    check(soak, engine, adapter, agent, prompt, count, number_asked)
        engine.stop()
        engine.close()


def start(soak: Soak, number: int, errors: int) -> EngineProcess:
    within = str(RESTORE_WITHIN)
    engine = start_process(soak.url, soak.place / f"cold-{number}", "adapted", errors, RESTORE_WITHIN=within)
    engine.wait_until_ready()
    return engine


def ask(soak: Soak, engine: EngineProcess, rng: random.Random, adapter: int) -> tuple[int, int, list[int], int]:
    agent, count = rng.randrange(AGENTS), rng.choice([1, 4, 12])
    prompt = soak.prompt(rng, adapter, agent)
    return engine.ask(f"agent-{agent}", prompt, count), agent, prompt, count


def check(
    soak: Soak, engine: EngineProcess, adapter: int, agent: int, prompt: list[int], count: int, number: int
) -> None:
    begun = time.monotonic()
    answer: dict[str, Any] = engine.answer(number)
    soak.longest_answer = max(soak.longest_answer, time.monotonic() - begun)
    soak.longest_restore = max(soak.longest_restore, answer["restored"])
    soak.happened["answers"] += 1
    soak.happened[f"from {answer['tier']}"] += 1
    soak.happened[f"why {answer['why']}"] += 1
    right = soak.reference.says(adapter, prompt, count)
    if answer["tokens"] != right:
        soak.wrong.append(f"agent {agent}, adapter {adapter}, {len(prompt)} tokens: {answer}, right is {right}")
    soak.histories[adapter, agent] = [*prompt, *right]


@contextmanager
def store(directory: Path, soak_over: threading.Event, happened: Counter[str]) -> Iterator[int]:
    """Run a store on disk that is killed periodically and restarted; yield its port."""
    port, up = free_port(), threading.Event()

    def run() -> None:
        rng = random.Random(99)
        while not soak_over.is_set():
            with start_server("--store", "tiered", port=port, directory=directory, name="store", killed=True) as server:
                up.set()
                soak_over.wait(rng.uniform(5, 20))
                server.stop(signal.SIGKILL)
            happened["store killed"] += 1
            soak_over.wait(rng.uniform(0, 2))

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        try:
            assert up.wait(30)
            yield port
        finally:
            soak_over.set()
        running.result()


def change(weathers: list[Weather], over: threading.Event) -> None:
    rng = random.Random(7)
    while not over.wait(rng.uniform(2, 6)):
        often = rng.choice([0, 2, 10, 60])
        for weather in weathers:
            weather.flips, weather.cuts, weather.truncations, weather.delays = often, often // 3, often // 3, 2 * often


@pytest.mark.parametrize(
    "seconds", [5.0, pytest.param(SECONDS, marks=[pytest.mark.soak, pytest.mark.timeout(SECONDS + 300)])]
)
def test_every_answer_of_the_soak_is_right_and_in_time(tmp_path: Path, seconds: float) -> None:
    over = threading.Event()
    happened: Counter[str] = Counter()
    (tmp_path / "store").mkdir()
    with store(tmp_path / "store", over, happened) as port, start_proxy(port) as proxy:
        proxy.weather = Weather(random=random.Random(1), longest=0.2)
        soak = Soak(proxy.url, tmp_path, seconds, happened=happened)
        with ThreadPoolExecutor(ENGINES + 1) as threads:
            weather = threads.submit(change, [proxy.weather], over)
            lives = [threads.submit(live, soak, number) for number in range(ENGINES)]
            try:
                for one in lives:
                    one.result()
            finally:
                soak.end = 0
                over.set()
            weather.result()
    print(
        f"\n{dict(happened)}; weather {dict(proxy.weather.happened)}; the longest restore took "
        f"{soak.longest_restore:.2f} s, the longest answer {soak.longest_answer:.2f} s"
    )
    assert not soak.wrong, soak.wrong[0]
    for number in range(ENGINES):
        errors = (tmp_path / f"errors-{number}").read_text(encoding="utf-8")
        assert "Traceback" not in errors, errors
    assert soak.longest_restore < RESTORE_WITHIN + SLACK
    assert soak.longest_answer < ANSWER_WITHIN
    assert happened["answers"] > seconds / 10
    assert happened["from page"] + happened["from cold"] + happened["from hot"] + happened["from prefix"]
    for what in ("store killed", "engine killed", "adapter"):
        assert happened[what] or seconds < 100
