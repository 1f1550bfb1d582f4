"""The API compared with its engine and with mlx_lm.server: the first token, and tokens a second.

All on the real small model, each server a process of its own. The same conversations go to both: a system prompt from
the handbook and two turns, and a third after both servers were restarted. Texts are compared wherever both gave one.
After the restart, mlx_lm.server with a store (`kvpage-engine mlx-lm`) gets another third question of as many tokens,
because it would restore a question that was stored. It is asked before or after the other two, in turns.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

# As the servers have it, for the engine in this process. Run it as a separate process: libraries that were loaded
# before keep their number of threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
from benchmarks.findings import Finding, show, write
from benchmarks.ports import free_port
from benchmarks.servers import start_kvpage
from engine.commands.talk import ask
from engine.startup import Engine, Options

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2"
SOONER = 20.0  # target: for a returning agent, mlx_lm.server takes so many times as long
ADDED_MS, ADDED_SHARE = (
    5.0,
    0.03,
)  # targets: milliseconds added to the first token, and share added to the others, at most
WITH_STORE = 1.1  # target: after a restart, mlx-lm with a store takes at most so many times as long as ours
START_WITHIN = 120.0  # seconds
TURNS = ("How long did the longest fog last?", "What is the name of the boat?", "Who keeps the log?")
OTHER_QUESTION = "Who opens the log?"  # in place of the third one
SETTLE = 1.0  # seconds after the answer of mlx-lm with a store, in which it is written
ANSWER = 8  # tokens
TEMPLATE = 16  # more tokens than the chat template has before the first message
INTRO = "SmolLM2-135M in float32 over HTTP, each server a process; seconds and ratios as a client sees them, medians"
THEIR_SERVER = "import engine, mlx_lm.server; mlx_lm.server.main()"  # with the same BLAS as ours

# Threads of OpenBLAS wait for one another at every multiplication: on a busy machine they would measure other load.
ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """One streamed answer, as the client has received it."""

    first: float  # seconds to the first text
    text: str
    gaps: Sequence[float]  # seconds between two texts
    kvpage: dict[str, Any]  # our statistics; {} from other servers


@dataclass(frozen=True)
class Api:
    """A server that streams chat completions."""

    port: int
    model: str

    def ask(self, messages: Messages, *, agent: str | None = None, max_tokens: int = ANSWER) -> Reply:
        """Return the likeliest answer to a conversation."""
        body: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": max_tokens}
        body |= {"temperature": 0, "stream": True, **({"agent_id": agent} if agent else {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        asked = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.read().decode()}")
        lines = [(time.perf_counter(), line) for line in reply if line.startswith(b"data: {")]
        connection.close()
        texts, times, kvpage = [], [asked], {}
        for when, line in lines:  # read after the end, so that the client's work is not measured
            chunk = json.loads(line[6:])
            kvpage = chunk.get("kvpage", kvpage)
            if text := chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                times.append(when)
                texts.append(text)
        gaps = [after - before for before, after in pairwise(times[1:])]
        return Reply(times[1] - asked, "".join(texts), gaps, kvpage)


@contextmanager
def _serving(model: str, *command: str) -> Iterator[Api]:
    """Start a server, with a port as its last argument, and wait until it answers. End it after the block."""
    port = free_port()
    with TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)], stdout=log, stderr=log, env=ONE_THREAD
        )
        try:
            api = Api(port, model)
            deadline = time.monotonic() + START_WITHIN
            while not _answers(api):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{command} does not answer:\n{log.read()}")
                time.sleep(0.2)
            yield api
        finally:
            process.terminate()
            process.wait()


def _answers(api: Api) -> bool:
    try:
        return bool(api.ask([{"role": "user", "content": "Hello"}], max_tokens=2).text)
    except (OSError, RuntimeError, http.client.HTTPException):
        return False


@contextmanager
def ours(store: str) -> Iterator[Api]:
    """Run `kvpage-engine serve` during the block."""
    with _serving("smollm2", "-m", "kvpage.engine.cli", "serve", "--model", str(SMOLLM2), "--store", store) as api:
        yield api


@contextmanager
def theirs() -> Iterator[Api]:
    """Run `mlx_lm.server` during the block."""
    with _serving("default_model", "-c", THEIR_SERVER, "--model", str(SMOLLM2), "--log-level", "ERROR") as api:
        yield api


@contextmanager
def theirs_with(store: str) -> Iterator[Api]:
    """Run `mlx_lm.server` with a store behind its prompt cache during the block."""
    command = "-m", "kvpage.engine.cli", "mlx-lm", "--store", store, "server"
    with _serving("default_model", *command, "--model", str(SMOLLM2), "--log-level", "ERROR") as api:
        yield api


@dataclass
class Conversation:
    """The same conversation with both servers. `seconds` has the times to the first token by turn, ours and theirs."""

    name: str
    opening: str

    def __post_init__(self) -> None:
        self.messages: Messages = [{"role": "system", "content": self.opening}]
        self.seconds: list[tuple[float, float]] = []
        self.tiers: list[str] = []

    def turn(self, we: Api, they: Api) -> None:
        """Send the next question to both servers."""
        self.messages.append({"role": "user", "content": TURNS[len(self.seconds)]})
        if len(self.seconds) % 2:  # the server that is asked first warms the machine up, so they take turns
            other, mine = they.ask(self.messages), we.ask(self.messages, agent=self.name)
        else:
            mine, other = we.ask(self.messages, agent=self.name), they.ask(self.messages)
        if mine.text != other.text:
            raise AssertionError(f"we said {mine.text!r}, mlx_lm.server {other.text!r}")
        self.messages.append({"role": "assistant", "content": mine.text})
        self.seconds.append((mine.first, other.first))
        self.tiers.append(mine.kvpage["tier"] if mine.kvpage["tokens_reused"] >= TEMPLATE else "none")


def against_theirs(store: str, words: int, rounds: int) -> list[Finding]:
    """Return the findings of two turns of each conversation with both servers, and of a third after a restart of
    both.
    """
    book = files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8").split() * 2
    conversations = [Conversation(f"keeper-{i}", f"Copy {i}. {' '.join(book[:words])}") for i in range(rounds)]
    with ours(store) as we, theirs() as they:
        for conversation in conversations:
            conversation.turn(we, they)
            conversation.turn(we, they)
    with_store = []  # seconds to the first token of the other question
    with ours(store) as we, theirs() as they, theirs_with(store) as stored:
        for number, conversation in enumerate(conversations):
            other = [*conversation.messages, {"role": "user", "content": OTHER_QUESTION}]
            if number % 2:
                conversation.turn(we, they)
            reply = stored.ask(other)
            time.sleep(SETTLE)
            if number % 2 == 0:
                conversation.turn(we, they)
            with_store.append(reply.first)
            if reply.text != (expected := we.ask(other).text):
                raise AssertionError(f"mlx-lm with the store said {reply.text!r}, we {expected!r}")
    for conversation in conversations:
        if conversation.tiers != ["none", "hot", "page"]:
            raise AssertionError(f"the turns came from {conversation.tiers}")
    cold, warm, restarted = zip(*(conversation.seconds for conversation in conversations), strict=True)
    what = f"a prompt of {words:,} words"
    later = f"{what}, turn 3 after a restart"
    by_store = f"{later}, mlx-lm with the store"
    return [
        _beside(by_store, "ours", with_store, [mine for mine, _ in restarted], at_most=WITH_STORE),
        _beside(by_store, "mlx_lm.server, turn 2", with_store, [other for _, other in warm]),
        _times(f"{what}, cold", "mlx_lm.server", [(other, mine) for mine, other in cold]),
        _times(f"{what}, turn 2", "mlx_lm.server", [(other, mine) for mine, other in warm], 1.0),
        _times(later, "mlx_lm.server", [(other, mine) for mine, other in restarted], SOONER),
        _times(
            later,
            "ours, cold",
            [(first, mine) for (first, _), (mine, _) in zip(cold, restarted, strict=True)],
            SOONER,
        ),
    ]


def overhead(store: str, tokens: int, rounds: int) -> list[Finding]:
    """Measure the cost of HTTP: for the first token, from the engine's own figure; for the others, compared with an
    engine in this process.
    """
    question: Messages = [{"role": "user", "content": "Tell me about the sea."}]
    inside = Engine.open(Options(str(SMOLLM2)))
    prompt = inside.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    first, pairs = [], []
    with ours(store) as api:
        for turn in range(-1, rounds):  # turn -1 is a warm-up
            reply = api.ask(question, agent="sailor", max_tokens=tokens)
            times = _times_of(inside, prompt, tokens)
            if turn >= 0:
                first.append(1000 * reply.first - reply.kvpage["first_token_ms"])
                pairs.append((sum(reply.gaps) / len(reply.gaps), (times[-1] - times[0]) / (len(times) - 1)))
    inside.close()
    added = median(over / within - 1 for over, within in pairs)
    speeds = [1 / median(seconds) for seconds in zip(*pairs, strict=True)]
    return [
        Finding(
            "the first token", "the engine alone", "ms added", f"{median(first):.1f}", median(first), at_most=ADDED_MS
        ),
        Finding(
            f"{tokens} tokens",
            "the engine alone",
            "time added",
            "{:.1f} / {:.1f} tokens/s".format(*speeds),
            added,
            at_most=ADDED_SHARE,
        ),
    ]


def _times_of(inside: Engine, prompt: Sequence[int], tokens: int) -> list[float]:
    """Return the seconds of each token of an answer by the engine `inside`."""
    times: list[float] = []
    ask(inside, "sailor", prompt, max_tokens=tokens, on_token=lambda _: times.append(time.perf_counter()))
    return times


def _beside(
    work: str, against: str, firsts: Sequence[float], others: Sequence[float], at_most: float | None = None
) -> Finding:
    """Return the ratio of the times of each conversation to the other ones, as a finding."""
    measured = f"{median(firsts):.3f} / {median(others):.3f}"
    ratio = median(first / other for first, other in zip(firsts, others, strict=True))
    return Finding(work, against, "seconds to the first token", measured, ratio, at_most=at_most)


def _times(work: str, against: str, pairs: Sequence[tuple[float, float]], at_least: float | None = None) -> Finding:
    """Return the ratio of the two times of each pair, as a finding."""
    measured = "{1:.3f} / {0:.3f}".format(*(median(seconds) for seconds in zip(*pairs, strict=True)))
    sooner = median(slow / quick for slow, quick in pairs)
    return Finding(work, against, "seconds to the first token", measured, sooner, at_least=at_least)


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/http_api.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks http_api")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    with ExitStack() as stack:
        store = stack.enter_context(start_kvpage()).url
        findings = overhead(store, 8, 2) if quick else overhead(store, 64, 9)
        findings += against_theirs(store, *((200, 1) if quick else (1600, 3)))
    show(findings, INTRO)
    if not quick:
        write(findings, "http_api", {"load": os.getloadavg()}, intro=INTRO)


if __name__ == "__main__":
    main()
