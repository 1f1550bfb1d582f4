"""Clients that send no agent id, compared with mlx_lm.server: the first token of known prompts, and after a restart.

All on the real small model, each server a process of its own, all with one thread of the same BLAS. The same prompts go
to both, one at a time. Texts are compared wherever both gave one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import redis

from benchmarks.findings import Finding, show, write
from benchmarks.ports import free_port

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2"
THEIR_SERVER = "import engine, mlx_lm.server; mlx_lm.server.main()"  # with the same BLAS as ours
ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
START_WITHIN = 120.0  # seconds
SETTLE = 3.0  # seconds before a kill, in which the engine writes its contexts
ANSWER = 16  # tokens
RESTARTED = 0.1  # target: share of the time of computing, at most
ELSEWHERE = 0.95  # target: share of the tokens before a turn that a second engine reuses, at least
REUSED = 0.97  # target: share of the tokens before a turn that are reused, at least
ADDED = 1.05  # target: times the duration of a turn without a store, at most
WORDS = "fog boat light keeper sea wind log tide rock oil lamp storm night ship harbour gull salt rope".split()  # noqa: SIM905
INTRO = "SmolLM2-135M in float32 over HTTP, without agent ids; seconds as a client sees them, medians"

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """One streamed answer, as the client has received it."""

    first: float  # seconds to the first text
    whole: float  # seconds to the end
    text: str
    prompt: int  # tokens
    total: int  # tokens, with the answer
    cached: int  # tokens of the prompt that were not computed


class Process:
    """A server on a port of its own, until it is killed."""

    def __init__(self, *command: str, directory: str) -> None:
        self.port = free_port()
        self._log = Path(directory, f"log-{self.port}")
        with self._log.open("wb") as out:
            words = [sys.executable, *command, "--port", str(self.port)]
            self._process = subprocess.Popen(words, stdout=out, stderr=out, env=ONE_THREAD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        """End the server with SIGKILL."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait(self, answers: Any) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + START_WITHIN
        while not answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not answer:\n{self._log.read_text(encoding='utf-8')}")
            time.sleep(0.2)


class Api(Process):
    """A server that streams chat completions."""

    def __init__(self, model: str, *command: str, directory: str) -> None:
        super().__init__(*command, directory=directory)
        self._model = model
        self.wait(self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self.ask([{"role": "user", "content": "Hello"}], max_tokens=2).text)
        except (OSError, RuntimeError, http.client.HTTPException):
            return False

    def ask(self, messages: Messages, max_tokens: int = ANSWER) -> Reply:
        """Return the likeliest answer to a conversation."""
        body = {"model": self._model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        asked = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.read().decode()}")
        lines = [(time.perf_counter(), line) for line in reply if line.startswith(b"data: {")]
        whole = time.perf_counter() - asked
        connection.close()
        texts, first, usage = [], 0.0, dict[str, Any]()
        for when, line in lines:  # parsed after the end of the stream, so that the client's work is not measured
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if text := chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first = first or when - asked
                texts.append(text)
        if not texts:
            raise RuntimeError("the answer is empty")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Reply(first, whole, "".join(texts), usage.get("prompt_tokens", 0), usage.get("total_tokens", 0), cached)


class Pages(Process):
    """A page server with its files in a directory, which still exists after it."""

    def __init__(self, directory: str) -> None:
        store = Path(directory, "pages")
        store.mkdir(exist_ok=True)
        super().__init__("-m", "kvpage_server.app", "--dir", str(store), directory=directory)
        self.wait(self._answers)

    def _answers(self) -> bool:
        with redis.Redis(port=self.port) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


def ours(directory: str, pages: Pages | None) -> Api:
    """Return `kvpage-engine serve`, not started yet."""
    store = ("--store", pages.url) if pages else ()
    return Api("smollm2", "-m", "kvpage.engine.cli", "serve", "--model", str(SMOLLM2), *store, directory=directory)


def theirs(directory: str) -> Api:
    """Return `mlx_lm.server`, not started yet."""
    command = ("-c", THEIR_SERVER, "--model", str(SMOLLM2), "--log-level", "ERROR")
    return Api("default_model", *command, directory=directory)


def sentence(seed: int, count: int) -> str:
    """Return a text of `count` random words, and a question."""
    rng = random.Random(seed)
    return f"{seed} {' '.join(rng.choice(WORDS) for _ in range(count))}. What is the capital of France?"


def asked_again(directory: str, prompts: int, length: int) -> list[Finding]:
    """Return the findings of prompts with different beginnings, each sent twice, and again after a kill of all
    servers.
    """
    asked: list[Messages] = [[{"role": "user", "content": sentence(i, length)}] for i in range(prompts)]
    rounds: list[list[tuple[Reply, Reply]]] = []
    for again in (False, True):
        with Pages(directory) as pages, ours(directory, pages) as we, theirs(directory) as they:
            for _ in range(1 if again else 2):
                pairs = []
                for i, messages in enumerate(asked):
                    if i % 2:
                        other, mine = they.ask(messages), we.ask(messages)
                    else:
                        mine, other = we.ask(messages), they.ask(messages)
                    if mine.text != other.text:
                        raise AssertionError(f"we said {mine.text!r}, mlx_lm.server {other.text!r}")
                    pairs.append((mine, other))
                rounds.append(pairs)
            time.sleep(SETTLE)
    computed, hit, restarted = rounds
    what = f"{prompts} prompts of {computed[0][0].prompt:,} tokens"
    missing = [mine.prompt - 1 - mine.cached for mine, _ in (*hit, *restarted)]
    if any(missing):
        raise AssertionError(f"of prompts that were asked again, {missing} tokens were computed")
    return [
        _seconds(f"{what}, computed", "mlx_lm.server", [(mine.first, other.first) for mine, other in computed]),
        _seconds(f"{what}, asked again", "mlx_lm.server", [(mine.first, other.first) for mine, other in hit], 1.0),
        _seconds(
            f"{what}, after kill -9 of all servers",
            "ours, computed",
            [(mine.first, first.first) for (mine, _), (first, _) in zip(restarted, computed, strict=True)],
            RESTARTED,
        ),
        _seconds(
            f"{what}, after kill -9 of all servers",
            "mlx_lm.server",
            [(mine.first, other.first) for mine, other in restarted],
        ),
    ]


def growing(directory: str, conversations: int, turns: int, more: int) -> list[Finding]:
    """Conversations that grow by some words each turn. The first engine answers all turns. Another one, which is
    started for each turn but the first, answers the same from the store."""
    talks: list[Messages] = [[] for _ in range(conversations)]
    before = [0] * conversations  # tokens of the last prompt and its answer
    here: list[tuple[int, int]] = []  # reused tokens, and tokens before the turn
    elsewhere: list[tuple[int, int]] = []
    with Pages(directory) as pages, ours(directory, pages) as we, theirs(directory) as they:
        for turn in range(turns):
            for i, messages in enumerate(talks):
                messages.append({"role": "user", "content": sentence(100 * i + turn, more)})
            if turn in (1, turns - 1):
                time.sleep(SETTLE)
                with ours(directory, pages) as other:
                    elsewhere += [(other.ask(talks[i]).cached, before[i]) for i in range(conversations)]
            for i, messages in enumerate(talks):
                mine, their = we.ask(messages), they.ask(messages)
                if mine.text != their.text:
                    raise AssertionError(f"we said {mine.text!r}, mlx_lm.server {their.text!r}")
                if turn:
                    here.append((min(mine.cached, before[i]), before[i]))  # the other engine has answered this as well
                before[i] = mine.total
                messages.append({"role": "assistant", "content": mine.text})
    what = f"{conversations} conversations of {turns} turns of {more} words"
    return [
        _share(what, "the tokens before a turn", here, REUSED),
        _share(f"{what}, on a second engine", "the tokens before a turn", elsewhere, ELSEWHERE),
    ]


def saving(directory: str, length: int, rounds: int) -> Finding:
    """Return the finding of the duration of a turn with a store, compared with a turn without one."""
    pairs = []
    with Pages(directory) as pages, ours(directory, pages) as with_store, ours(directory, None) as alone:
        for i in range(-1, rounds):
            messages: Messages = [{"role": "user", "content": sentence(1000 + i, length)}]
            order = (with_store, alone) if i % 2 else (alone, with_store)
            times = {api: api.ask(messages, max_tokens=32).whole for api in order}
            if i >= 0:
                pairs.append((times[with_store], times[alone]))
            time.sleep(0.5)
    return _seconds(f"a turn of {length} words with a store", "without one", pairs, ADDED)


def _share(work: str, against: str, pairs: Sequence[tuple[int, int]], at_least: float) -> Finding:
    """Return the sum of the first numbers as a share of the sum of the second ones, as a finding."""
    reused, reusable = (sum(counts) for counts in zip(*pairs, strict=True))
    return Finding(work, against, "tokens", f"{reused:,} / {reusable:,}", reused / reusable, at_least=at_least)


def _seconds(work: str, against: str, pairs: Sequence[tuple[float, float]], at_most: float | None = None) -> Finding:
    """Return the ratio of the two times of each pair, as a finding."""
    measured = "{:.3f} / {:.3f}".format(*(median(seconds) for seconds in zip(*pairs, strict=True)))
    ratio = median(mine / other for mine, other in pairs)
    return Finding(work, against, "seconds", measured, ratio, at_most=at_most)


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/without_ids.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks without_ids")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    with ExitStack() as stack:
        places = [stack.enter_context(TemporaryDirectory()) for _ in range(3)]
        findings = asked_again(places[0], *((2, 200) if quick else (8, 1460)))
        findings += growing(places[1], *((1, 3, 60) if quick else (2, 8, 120)))
        findings.append(saving(places[2], 200, 2 if quick else 15))
    show(findings, INTRO)
    if not quick:
        write(findings, "without_ids", {"load": os.getloadavg()}, intro=INTRO)


if __name__ == "__main__":
    main()
