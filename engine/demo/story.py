"""A conversation of three turns about a handbook: on engine A, on engine B, and on A after a restart.

For comparison, a third engine, which is not stopped and has no store, answers the same conversation.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any
from urllib.request import Request, urlopen

from rich.console import Console
from rich.table import Table

from kvpage_server.system.terminal import table_of

# -- A question to a serving engine, and the measurements of its answer ------------------------------------------------

MAX_TOKENS = 24
ANSWER_SECONDS = 300.0  # timeout of a socket, and of a save

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer and its measurements."""

    text: str
    prompt_tokens: int
    tokens_reused: int  # of the prompt
    tier: str  # the tier that supplied them
    first_token: float  # seconds from the request to the first token of the answer, measured by the client
    why: str | None = None  # the reason if the store did not have the whole prompt


def ask_api(url: str, model: str, messages: Messages) -> Turn:
    """Return the likeliest next message of a conversation, of at most MAX_TOKENS tokens, and its measurements. It is
    received as a stream. `url` is the engine's, without /v1. Raises OSError if the engine cannot be reached, replies
    with an error, or ends before the answer is complete.
    """
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = time.perf_counter()
    text, first = "", 0.0
    kvpage: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    with urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode()), timeout=ANSWER_SECONDS) as reply:
        try:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                chunk: dict[str, Any] = json.loads(line[6:])
                if "error" in chunk:
                    raise OSError(chunk["error"]["message"])
                first = first or time.perf_counter() - asked
                text += chunk["choices"][0]["delta"].get("content", "") if chunk["choices"] else ""
                kvpage, usage = chunk.get("kvpage", kvpage), chunk["usage"] or usage
        except (HTTPException, ValueError) as error:
            raise OSError(f"the engine ended within its answer: {error!r}") from error
    if not usage or not kvpage:
        raise OSError("the engine ended before its answer was complete")
    return Turn(text, usage["prompt_tokens"], kvpage["tokens_reused"], kvpage["tier"], first, kvpage["why"])


def save(url: str) -> None:
    """Wait until the engine at `url` has written all contexts to its store. Raises OSError if it does not answer or
    needs more than ANSWER_SECONDS.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        with urlopen(f"{url}/metrics", timeout=ANSWER_SECONDS) as reply:
            if re.search(rb"^kvpage_engine_dirty_bytes\{.*\} 0\.0$", reply.read(), re.MULTILINE):
                return
        time.sleep(0.05)
    raise OSError("the context is not saved in time")


# -- The processes of the demonstration: a page server, and engines that share only that server ------------------------

START_SECONDS = 30.0  # timeout for the start of the store
STOP_SECONDS = 10.0
# OpenBLAS's threads wait for each other, so with several threads the times would depend on other load of the machine.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
MODEL = "smollm2"  # the model's name for clients
EXIT_WITH_PARENT = str(Path(__file__).with_name("exit_with_parent.py"))


class ProcessError(RuntimeError):
    """Error: a process of the demonstration has failed. The message has the last line of its stderr."""


@dataclass(frozen=True, slots=True)
class Process:
    """A Python module that runs in a process of its own."""

    name: str
    popen: subprocess.Popen[str]
    log: IO[str]  # its stderr

    @property
    def ended(self) -> bool:
        return self.popen.poll() is not None

    def failure(self) -> ProcessError:
        """Return the error for this process, with the last line of its stderr."""
        self.log.seek(0)
        lines = self.log.read().strip().splitlines() or ["it said nothing"]
        return ProcessError(f"{self.name}: {lines[-1]}")


@contextmanager
def _running(name: str, *command: str) -> Iterator[Process]:
    """Run Python with the arguments `command` in a process, and stop it at the end of the block. `name` is for error
    messages.

    The child has its own session, so Ctrl-C reaches only the parent, which then stops the child. If the parent is
    killed, the child's stdin ends, and the child exits (see `exit_with_parent`).
    """
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            env=ONE_THREAD | os.environ,
            start_new_session=True,
        ) as popen,
    ):
        try:
            yield Process(name, popen, log)
        finally:
            popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                popen.wait(STOP_SECONDS)
            popen.kill()


@dataclass(frozen=True, slots=True)
class Store:
    """A page server in a process of its own."""

    url: str
    page: str  # URL of its web page


@contextmanager
def running_store() -> Iterator[Store]:
    """Run an empty page server on free ports. Raises ProcessError if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, http = (sock.getsockname()[1] for sock in (free, other))
    options = ["--bind", "127.0.0.1", "--port", str(port), "--store", "memory", "--metrics-port", str(http)]
    token = secrets.token_urlsafe(24)
    with (
        TemporaryDirectory() as directory,
        _running(
            "the store", "-P", EXIT_WITH_PARENT, "kvpage_server.app", _with(token, directory), *options
        ) as process,
    ):
        deadline = time.monotonic() + START_SECONDS
        while not listens(port):
            if process.ended or time.monotonic() > deadline:
                raise process.failure()
            time.sleep(0.05)
        yield Store(f"redis://127.0.0.1:{port}", f"http://127.0.0.1:{http}/?token={token}")


def _with(token: str, directory: str) -> str:
    """Write a configuration file with the web token to `directory`, which is private, and return its path. The token is
    no argument, because every user of the machine can read the arguments of a process.
    """
    file = Path(directory, "store.conf")
    file.write_text(f"web-token {token}\ndir {directory}\n", encoding="utf-8")
    return str(file)


def listens(port: int) -> bool:
    """Return whether a process accepts connections on `port` of this machine."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@dataclass(frozen=True)
class EngineProcess:
    """An engine in a process of its own."""

    process: Process
    model: str  # its name in requests

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    @cached_property
    def url(self) -> str:
        """URL of the engine. The first access waits until the engine serves. Raises ProcessError if the process ends
        before that.
        """
        stdout = self.process.popen.stdout
        assert stdout
        _, served, url = stdout.readline().partition(" is served on ")
        if not served:
            raise self.process.failure()
        return url.strip()

    def answer(self, messages: Messages) -> Turn:
        """Send a conversation, and return the answer. Raises ProcessError."""
        url = self.url
        with self._failing():
            return ask_api(url, self.model, messages)

    def save(self) -> None:
        """Wait until the engine's contexts are in the store, so that another engine can continue. Raises
        ProcessError.
        """
        url = self.url
        with self._failing():
            save(url)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            failure = ProcessError(f"{self.process.name}: {error}")
            raise (self.process.failure() if self.process.ended else failure) from error


@contextmanager
def running_engine(name: str, model: str, store: str | None = None) -> Iterator[EngineProcess]:
    """Run an engine in a process until the end of the block. It keeps its contexts in the page server `store`, or only
    in memory. `model` is a directory.
    """
    options = ["--model", model, "--port", "0", "--name", MODEL, *(["--store", store] if store else [])]
    with _running(name, "-P", EXIT_WITH_PARENT, "kvpage.engine.cli", "serve", *options) as process:
        yield EngineProcess(process, MODEL)


QUESTIONS = (
    "How long did the longest fog on record last?",
    "What are the words that every keeper says?",
    "What is the name of the supply boat?",
)
ENGINES = ("A", "B", "A, restarted")  # the engine that answers each question
REUSED = 0.95  # promised share of reused tokens in the second and third prompt
SOONER = 10.0  # promised ratio: time to first token of the first turn, divided by that of the last turn


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measurements of both conversations."""

    moved: tuple[Turn, ...]  # turns of the conversation that moves between engines
    uninterrupted: tuple[Turn, ...]  # turns of the same conversation at one engine

    @property
    def reused(self) -> float:
        """Smallest share of a later prompt that was not computed."""
        return min(map(share_reused, self.moved[1:]))

    @property
    def sooner(self) -> float:
        """Ratio of the first turn's time to first token to the last turn's, which has a longer prompt."""
        return self.moved[0].first_token / self.moved[-1].first_token

    @property
    def seconds_saved(self) -> float:
        """Seconds of prefill that the later turns saved, at the first turn's rate: it computes its whole prompt."""
        first, *later = self.moved
        rate = first.prompt_tokens / first.first_token
        return sum(turn.prompt_tokens / rate - turn.first_token for turn in later)

    @property
    def same_text(self) -> bool:
        """Whether all answers equal those of the uninterrupted conversation."""
        return [turn.text for turn in self.moved] == [turn.text for turn in self.uninterrupted]

    def promises(self) -> dict[str, bool]:
        """Return a sentence for each result, and whether the result reaches its promised value."""
        reasons = ", ".join(turn.why for turn in self.moved[1:] if turn.why)
        suffix = f"; the store: {reasons}" if reasons and self.reused < REUSED else ""
        return {
            f"{self.reused:.1%} of what each engine was told was not computed again (promised: {REUSED:.0%}{suffix})": (
                self.reused >= REUSED
            ),
            f"the text is {'' if self.same_text else 'not '}that of the uninterrupted conversation": self.same_text,
            f"the restarted engine's first token came {self.sooner:.1f} times sooner than the first turn's "
            f"(promised: {SOONER:.0f})": self.sooner >= SOONER,
        }


def share_reused(turn: Turn) -> float:
    """Return the share of the prompt's tokens that were not computed, from 0 to 1."""
    return turn.tokens_reused / turn.prompt_tokens


def run(model: str, console: Console) -> Outcome:
    """Run both conversations, and print the progress on `console`. Raises ProcessError."""
    handbook = Path(__file__).with_name("handbook.txt").read_text(encoding="utf-8")
    opening = [{"role": "system", "content": f"Answer from this handbook.\n\n{handbook}"}]
    with ExitStack() as stack:
        store = stack.enter_context(running_store())
        say(console, "The store", f"listens on {store.url} and is empty. {store.page} shows what it has.")
        messages = list(opening)
        with running_engine("engine A", model, store.url) as a:
            b = stack.enter_context(running_engine("engine B", model, store.url))
            say(console, "Engine A", f"is process {a.pid}. It reads a handbook of {len(handbook.split()):,} words.")
            first = ask(a, messages, QUESTIONS[0], console)
            a.save()
            say(console, "Engine B", f"is process {b.pid} and goes on.")
            second = ask(b, messages, QUESTIONS[1], console)
            b.save()
        say(console, "Engine A", "is stopped, and started again.")
        with running_engine("engine A", model, store.url) as again:
            say(console, "Engine A", f"is process {again.pid} and goes on.")
            third = ask(again, messages, QUESTIONS[2], console)
    with running_engine("engine C", model) as c:
        say(console, "Engine C", f"is process {c.pid} and has the whole conversation, without a store.")
        uninterrupted = tuple(ask(c, opening, question, console) for question in QUESTIONS)
    return Outcome((first, second, third), uninterrupted)


def say(console: Console, who: str, what: str) -> None:
    console.print(f"[bold]{who}[/] {what}", highlight=False, soft_wrap=True)


def ask(engine: EngineProcess, messages: list[dict[str, str]], question: str, console: Console) -> Turn:
    """Ask a question, print and return the answer, and append both to `messages`."""
    messages.append({"role": "user", "content": question})
    with console.status(question):
        turn = engine.answer(messages)
    messages.append({"role": "assistant", "content": turn.text})
    for line in (question, " ".join(turn.text.split())):
        console.print(f"    {line}", style="dim", markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    return turn


def table(outcome: Outcome) -> Table:
    shown = table_of("turn", "engine", "found in", "prompt", "reused", "", "first token", "text", numbers_from=3)
    moved = zip(ENGINES, outcome.moved, strict=True)
    alone = (("C, alone", turn) for turn in outcome.uninterrupted)
    for number, (where, turn) in [*enumerate(moved, start=1), *enumerate(alone, start=1)]:
        same = turn.text == outcome.uninterrupted[number - 1].text
        shown.add_row(
            str(number),
            where,
            turn.tier,
            f"{turn.prompt_tokens:,}",
            f"{turn.tokens_reused:,}",
            f"{share_reused(turn):.1%}",
            f"{turn.first_token:.2f} s",
            "same" if same else "differs",
        )
    return shown


def show(outcome: Outcome, console: Console) -> None:
    """Print the table, and whether each promise was kept."""
    console.print("", table(outcome), "", highlight=False)
    for promise, kept in outcome.promises().items():
        console.print("kept   " if kept else "[bold red]MISSED [/]", promise, highlight=False, soft_wrap=True)
    tokens, seconds = sum(turn.tokens_reused for turn in outcome.moved[1:]), outcome.seconds_saved
    saved = f"Reuse saved {tokens:,} tokens of prefill in two turns: {seconds:.1f} s of this machine."
    console.print(f"{saved} `kvpage savings` shows this for running engines.", highlight=False, soft_wrap=True)
